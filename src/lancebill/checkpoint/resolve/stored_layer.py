"""What a manifest is made of: a layer's experts, their projections, and where each part is stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lancebill.checkpoint.resolve.naming import NameForm
from lancebill.formats.base import Module, Part, Scheme
from lancebill.formats.stored import Stored
from lancebill.numbers.spec import QuantSpec


@dataclass(frozen=True)
class StoredPart:
    """One stored tensor that holds one part of a projection.

    `axes` is the alternative the tensor has; `expert` its index along a stacked
    dimension; `reversed` says that the matrix axes are stored the other way round.
    """

    tensor: str
    part: Part
    axes: str
    dtype: str
    expert: int | None
    reversed: bool
    rows_per_expert: int = 0  # flat stacking: first-axis entries of one expert

    @property
    def suffix(self) -> str:
        """The spelling of the part that this tensor's name ends in."""
        return max((s for s in self.part.suffix if self.tensor.endswith(s)), key=len)


@dataclass(frozen=True)
class Projection:
    """One projection of one expert: an [n, k] matrix and where its parts are.

    A fused tensor has `stored_n` rows, of which this projection owns first, first + step, ...
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

    @property
    def where(self) -> str:
        return f"layer {self.layer}, expert {self.expert}, {self.name}"

    def as_module(self, tensors: Mapping[str, Stored]) -> Module:
        """This projection as formats see it: a name, and the headers below it by suffix."""
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

    @property
    def gated(self) -> bool:
        return self.form.gated

    def sample(self, name: str) -> Projection:
        """One expert's projection; all experts of a layer share its scheme."""
        return next(p for (_, projection), p in self.projections.items() if projection == name)

    def spec(self, name: str) -> QuantSpec:
        """The spec all experts of this layer share for gate (= up) or down."""
        return self.sample(name).scheme.spec
