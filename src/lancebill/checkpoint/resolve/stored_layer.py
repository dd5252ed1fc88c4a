"""Value types of a manifest: a layer, its experts' projections, and where each part is stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from lancebill.checkpoint.resolve.naming import NameForm, layer_name
from lancebill.formats.base import Module, Part, Scheme
from lancebill.formats.stored import Stored
from lancebill.numbers.spec import QuantSpec


@dataclass(frozen=True)
class StoredPart:
    """One stored tensor that holds one part of a projection.

    `axes` is the one of the part's alternatives that the tensor has; `expert` is the index along a stacked axis;
    `reversed` means that the matrix is stored transposed.
    """

    tensor: str
    part: Part
    axes: str
    dtype: str
    expert: int | None
    reversed: bool
    rows_per_expert: int = 0  # flat stacking: rows of the first axis per expert

    @property
    def suffix(self) -> str:
        """The suffix of the part that this tensor's name ends with."""
        return max((s for s in self.part.suffix if self.tensor.endswith(s)), key=len)


@dataclass(frozen=True)
class Projection:
    """One projection of one expert: an [n, k] matrix and where its parts are.

    A fused tensor has `stored_n` rows; this projection has rows first, first + step, ...
    """

    layer: int
    expert: int
    name: str
    module: str
    scheme: Scheme
    n: int
    k: int
    sources: Mapping[str, StoredPart]
    stored_n: int
    first: int = 0
    step: int = 1
    mixture: str | None = None  # where the layer has several

    @property
    def where(self) -> str:
        return f"{self.where_layer}, expert {self.expert}, {self.name}"

    @property
    def where_layer(self) -> str:
        return layer_name(self.layer, self.mixture)

    def stored_like(self, other: Projection) -> bool:
        """Whether another expert's projection differs only in the names of its tensors."""
        return self._form == other._form

    @cached_property
    def _form(self) -> tuple[object, ...]:
        kinds = {role: (s.axes, s.dtype, s.reversed) for role, s in self.sources.items()}
        return (self.n, self.k, self.stored_n, self.first, self.step), kinds, self.scheme

    @cached_property
    def fused(self) -> Projection:
        """All stored rows as one matrix."""
        return replace(self, n=self.stored_n, first=0, step=1)

    def as_module(self, tensors: Mapping[str, Stored]) -> Module:
        """This projection as the `Module` that formats take: a name, and headers by suffix."""
        return Module(self.module, {source.suffix: tensors[source.tensor] for source in self.sources.values()})


@dataclass(frozen=True)
class StoredLayer:
    """The routed experts of one layer."""

    index: int
    prefix: str
    form: NameForm
    experts: int
    hidden: int
    intermediate: int
    projections: Mapping[tuple[int, str], Projection]  # (expert, gate | up | down)
    mixture: str | None = None  # where the layer has several

    @property
    def where(self) -> str:
        return layer_name(self.index, self.mixture)

    @property
    def gated(self) -> bool:
        return self.form.gated

    def sample(self, name: str) -> Projection:
        """One expert's projection; all experts of a layer share its scheme."""
        return next(p for (_, projection), p in self.projections.items() if projection == name)

    def spec(self, name: str) -> QuantSpec:
        """The spec that all experts of this layer share for gate and up, or for down."""
        return self.sample(name).scheme.spec
