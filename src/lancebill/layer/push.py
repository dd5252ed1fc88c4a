"""Filling or refitting a layer tensor by tensor, for engines that own the files.

Tensors come in any order, for one expert or for all, local or not. Each expert is packed by the code that loads from
files, reading from the pushed tensors instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from torch import Tensor

from lancebill.checkpoint.load.load_experts import expert_rows, load_expert
from lancebill.checkpoint.read.config import config_of_model
from lancebill.checkpoint.resolve import manifest as manifests
from lancebill.checkpoint.resolve import naming as names
from lancebill.checkpoint.resolve.naming import DOWN, GATE, UP, Naming, ParsedName
from lancebill.errors import CheckpointProblems, MissingTensor, WrongDtype, WrongShape
from lancebill.formats.stored import DTYPE_NAMES, Config, Stored
from lancebill.layer.parts import LayerParts, assemble
from lancebill.layer.recipe import LoadOptions, Losses, Recipe
from lancebill.layer.report import LoadReport
from lancebill.moe.layout import Layout, Packed


@dataclass(frozen=True)
class Pushed:
    """One tensor that was pushed and belongs to the experts of this layer."""

    name: str
    expert: int | None  # None: it holds all experts
    header: Stored


class TensorFilter:
    """Tells the tensors of one layer from all others, by the naming table."""

    def __init__(self, naming: Naming, index: int) -> None:
        self.naming, self.index = naming, index
        self.router_roles = naming.router.names(index)  # role by tensor name

    def parse(self, name: str) -> ParsedName | None:
        for form in self.naming.forms:
            parsed = names.parse_name(form, name)
            if parsed is not None and parsed.layer == self.index:
                return parsed
        return None

    def accept(self, name: str, tensor: Tensor) -> Pushed | None:
        """The tensor as one of this layer's experts; None if it is not."""
        parsed = self.parse(name)
        if parsed is None:
            return None
        if tensor.dtype not in DTYPE_NAMES:
            raise WrongDtype("no checkpoint holds this dtype", where=name, got=tensor.dtype)
        return Pushed(name, parsed.expert, Stored(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)))


class ExpertCollector:
    """Collects pushed tensors and packs an expert into its rows as soon as the last of its tensors has come.

    `incomplete` holds the experts that are not, or not wholly, written.
    """

    def __init__(self, recipe: Recipe, incomplete: Iterable[int] = ()) -> None:
        self.recipe = recipe
        self.filter = TensorFilter(recipe.manifest.naming, recipe.plan.layer.index)
        self.incomplete = set(incomplete)
        self.pending: dict[str, Tensor] = {}
        self.headers: dict[str, Stored] = {}
        self._losses, self._seconds = Losses(), 0.0
        self._layout: Layout | None = None  # one for the whole load: it counts what it could not store exactly

    @property
    def settled(self) -> bool:
        """Whether no expert is half written, so that the layer may compute."""
        return not self.pending and not self.incomplete

    def push(self, name: str, tensor: Tensor, packed: Mapping[str, Packed], layout: Layout) -> bool:
        """Take the tensor if it belongs to this layer's experts; packs what is complete."""
        pushed = self.filter.accept(name, tensor)
        if pushed is None:
            return False
        self._check_planned(pushed)
        self.headers[name] = pushed.header
        if pushed.expert is None or pushed.expert in self.recipe.plan.experts:
            self.pending[name] = tensor
            self._flush(pushed.expert, packed, layout)
        return True

    def finish(self, packed: Mapping[str, Packed], layout: Layout) -> LoadReport | None:
        """Pack what is left; raises everything that never came (it may still be pushed). None: nothing was written."""
        self._plan_new_experts()
        for expert in sorted(e for e in self.recipe.plan.experts if self._names_of(e) & self.pending.keys()):
            self._write(expert, packed, layout)
        if self.incomplete:
            raise CheckpointProblems(self._missing(), where=f"layer {self.filter.index}")
        self.pending.clear()
        if not self._seconds:
            return None
        notes = () if self._layout is None else self._layout.notes()
        report = self.recipe.report(packed, self._seconds, self._losses.held, notes)
        self._losses, self._seconds, self._layout = Losses(), 0.0, None
        return report

    def hold(self, experts: tuple[int, ...]) -> None:
        """The layer's slots now hold `experts`, complete: weights were moved between ranks."""
        self.incomplete.clear()
        self.recipe = replace(self.recipe, plan=replace(self.recipe.plan, experts=experts))

    def _check_planned(self, pushed: Pushed) -> None:
        """A refit must bring the shapes and dtypes the plan was made for: other slices would be other numbers."""
        planned = self.recipe.manifest.tensors.get(pushed.name)
        if planned is None or planned == pushed.header:
            return
        wrong = WrongShape if planned.dtype == pushed.header.dtype else WrongDtype
        expected, got = (f"{list(stored.shape)} of {stored.dtype}" for stored in (planned, pushed.header))
        raise wrong(
            "a pushed tensor is not what the layer was planned for", where=pushed.name, expected=expected, got=got
        )

    def _plan_new_experts(self) -> None:
        """Plan experts that were moved to this rank: their headers were unknown when the plan was made."""
        plan = self.recipe.plan
        planned = plan.layer.projections
        parsed = (self.filter.parse(name) for name in self.pending)
        new = {p.expert for p in parsed if p is not None and p.expert is not None} - {e for e, _ in planned}
        if new:
            manifest = manifests.build(
                self.recipe.manifest.config, self.headers, self.recipe.manifest.naming, experts=new
            )
            manifest.check(where=f"layer {self.filter.index}")
            grown = replace(plan.layer, projections={**planned, **manifest.layers[self.filter.index].projections})
            self.recipe = replace(self.recipe, plan=replace(plan, layer=grown))

    def _names_of(self, expert: int) -> set[str]:
        planned = self.recipe.plan.layer.projections
        projections = [planned[expert, name] for name in (GATE, UP, DOWN) if (expert, name) in planned]
        return {source.tensor for projection in projections for source in projection.sources.values()}

    def _flush(self, expert: int | None, packed: Mapping[str, Packed], layout: Layout) -> None:
        """Pack `expert` (None: all) if nothing of it is missing, and release its tensors."""
        sharing = set(self.recipe.plan.experts) if expert is None else {expert}
        for candidate in sharing:
            if self._names_of(candidate):
                self._write(candidate, packed, layout)
        if not self.incomplete & sharing:
            for candidate in sharing:
                for name in self._names_of(candidate):
                    self.pending.pop(name, None)

    def _write(self, expert: int, packed: Mapping[str, Packed], layout: Layout) -> None:
        """Pack one expert into every slot that holds it; marks it incomplete while tensors are missing."""
        if not self._names_of(expert) <= self.pending.keys():
            self.incomplete.add(expert)
            return
        plan, start = self.recipe.plan, time.perf_counter()
        weights = load_expert(self._read, plan, expert, self._losses.add)
        if self._layout is None or self._layout != layout:  # they differ if the layer was moved during the refit
            self._layout = layout
        for slot, logical in enumerate(plan.experts):
            if logical == expert:
                weights.pack(plan, self._layout, expert_rows(packed, slot))
        self.incomplete.discard(expert)
        self._seconds += time.perf_counter() - start

    def _read(self, name: str, index: tuple[int | slice, ...]) -> Tensor:
        tensor = self.pending[name]
        return (tensor[index] if index else tensor).cpu().contiguous()

    def _missing(self) -> list[MissingTensor]:
        problems = []
        for (expert, name), projection in sorted(self.recipe.plan.layer.projections.items()):
            if expert not in self.incomplete:
                continue
            for role, source in projection.sources.items():
                if source.tensor not in self.pending:
                    problems.append(
                        MissingTensor(
                            f"'{role}' was never pushed",
                            where=f"layer {self.filter.index}, expert {expert}, {name}",
                            expected=source.tensor,
                        )
                    )
        return problems


class _Planned:
    """A layer whose headers are known: buffers are allocated, experts are packed as they become complete."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.packed = recipe, recipe.allocate()
        self.collector = ExpertCollector(recipe, recipe.plan.experts)
        self.layout = recipe.choice.backend.layout(recipe.choice.problem)
        self.router_roles = self.collector.filter.router_roles

    def push(self, name: str, tensor: Tensor) -> bool:
        return self.collector.push(name, tensor, self.packed, self.layout)

    def planned(self) -> _Planned:
        return self

    def finish(self, router: Mapping[str, Tensor]) -> LayerParts:
        report = self.collector.finish(self.packed, self.layout)
        return assemble(self.collector.recipe, self.packed, router, report)


class _Unplanned:
    """A layer whose headers are not known: tensors are held, and planned from their own headers at the end."""

    def __init__(self, config: Config, index: int, options: LoadOptions) -> None:
        self.config, self.options = config, options
        self.filter = TensorFilter(options.naming or names.find_family(config.model), index)
        self.router_roles = self.filter.router_roles
        self.tensors: dict[str, Tensor] = {}
        self.headers: dict[str, Stored] = {}
        count = names.expert_sizes(config.model).experts
        self.local = None if count is None else frozenset(options.placement.experts(count))

    def push(self, name: str, tensor: Tensor) -> bool:
        pushed = self.filter.accept(name, tensor)
        if pushed is None:
            return False
        self.headers[name] = pushed.header
        if pushed.expert is None or self.local is None or pushed.expert in self.local:
            self.tensors[name] = tensor
        return True

    def planned(self) -> _Planned:
        index = self.filter.index
        manifest = manifests.build(self.config, self.headers, self.filter.naming, experts=self.local)
        manifest.check(where=f"layer {index}")
        planned = _Planned(Recipe.make(manifest, index, self.options))
        for name, tensor in self.tensors.items():
            planned.push(name, tensor)
        return planned


Made = TypeVar("Made")


class PushedLayer(Generic[Made]):
    """A layer that does not exist yet: it takes tensors, and `finish` makes the layer.

    With `tensors` (names and headers of the checkpoint) an expert is packed and its tensors are released as soon as
    the last of them comes; without, at `finish`.
    """

    def __init__(
        self,
        make: Callable[[LayerParts], Made],
        config: Mapping[str, Any] | Config,
        index: int,
        options: LoadOptions,
        tensors: Mapping[str, Stored] | None = None,
    ) -> None:
        self._make, self._router = make, dict[str, Tensor]()
        self._stage: _Planned | _Unplanned
        model = config if isinstance(config, Config) else config_of_model(config)
        if tensors is None:
            self._stage = _Unplanned(model, index, options)
        else:
            manifest = manifests.build(model, tensors, options.naming, layers=(index,))
            manifest.check(where=model.source)
            self._stage = _Planned(Recipe.make(manifest, index, options))

    def load_weights(self, pairs: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Push checkpoint tensors in any order; returns the names that belong to this layer.

        Tensors are held, not copied, until all tensors of their expert have come: do not overwrite them before.
        """
        taken = set()
        for name, tensor in pairs:
            role = self._stage.router_roles.get(name)
            if role is not None:
                self._router[role] = tensor
            if self._stage.push(name, tensor) or role is not None:
                taken.add(name)
        return taken

    def finish(self) -> Made:
        """Make the layer, once; raises naming whatever never came, which may still be pushed."""
        self._stage = planned = self._stage.planned()
        return self._make(planned.finish(self._router))
