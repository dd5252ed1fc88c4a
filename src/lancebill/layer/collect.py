"""Collecting pushed tensors of a layer whose buffers exist: experts are packed when the last of their tensors has come.

Used for the first load and for every refit. Experts take the way of a load from files, reading from the pushed tensors
instead, on the device of the layer.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lancebill.checkpoint.load.load_layer import load_layer
from lancebill.checkpoint.load.staging import source_of
from lancebill.checkpoint.read.slices import Index, Reader
from lancebill.checkpoint.resolve import naming as names
from lancebill.checkpoint.resolve.manifest import LayerIndex
from lancebill.checkpoint.resolve.naming import DOWN, GATE, UP, Claim
from lancebill.errors import (
    CheckpointProblems,
    DuplicateTensor,
    LancebillError,
    MissingTensor,
    UnexpectedTensor,
    WrongDtype,
    WrongShape,
)
from lancebill.formats.stored import DTYPE_NAMES, Stored
from lancebill.layer.arrivals import Arrivals
from lancebill.layer.check_tensors import check_stored
from lancebill.layer.recipe import Losses, Recipe
from lancebill.layer.report import LoadReport
from lancebill.moe.layout import W13, Layout, Packed

# Packing many experts at once is faster, above all on a GPU. So complete experts wait until this many bytes are held.
BATCH_BYTES = 128 << 20


def header_of(name: str, tensor: Tensor) -> Stored:
    """The header that a checkpoint would have for this tensor."""
    check_stored(name, tensor)
    if tensor.dtype not in DTYPE_NAMES:
        raise WrongDtype("no checkpoint holds this dtype", where=name, got=tensor.dtype)
    return Stored(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))


def reader_of(tensors: Mapping[str, Tensor], device: torch.device) -> Reader:
    """Reads slices of tensors in memory for a layer on `device`. What is there already is not copied."""

    def read(name: str, index: Index) -> Tensor:
        tensor = tensors[name][index] if index else tensors[name]
        return tensor if tensor.device.type == "cpu" else tensor.to(device)

    return read


def check_expert(claim: Claim, name: str, count: int | None) -> None:
    """Raise if the layer has `count` experts, and this is a tensor of another."""
    if claim.expert is not None and count is not None and claim.expert >= count:
        raise UnexpectedTensor("the layer has no such expert", where=name, expected=f"experts 0 to {count - 1}")


def raise_missing(missing: Sequence[MissingTensor], layer: int) -> None:
    """Raise one error that names all of them, if there are any."""
    if missing:
        raise CheckpointProblems(missing, where=f"layer {layer}")


def raise_together(errors: Sequence[LancebillError], layer: int) -> None:
    """Raise the error, or one error that names all of them, if there is any."""
    if len(errors) > 1:
        raise CheckpointProblems(errors, where=f"layer {layer}")  # type: ignore[arg-type]
    if errors:
        raise errors[0]


def forget_refused(*parts: ExpertCollector) -> None:
    """Experts that one part of a split layer refused are pushed again, so the other part must forget them."""
    refused = {expert for part in parts for expert in part.refused}
    for part in parts if refused else ():
        part.forget(refused)
        part.refused = ()


@dataclass(frozen=True)
class _Use:
    """What a tensor is for: a role of a projection."""

    projection: str
    role: str


class ExpertCollector:
    """Collects pushed tensors and packs complete experts into their rows; `incomplete` lists the missing ones.

    Each tensor may be pushed once between the first push and `finish`.
    """

    def __init__(self, recipe: Recipe, incomplete: Iterable[int] = (), arrivals: Arrivals | None = None) -> None:
        self.recipe = recipe
        self.arrivals = Arrivals() if arrivals is None else arrivals
        self.incomplete = set(incomplete)
        self.pending: dict[str, Tensor] = {}
        self._held = 0  # bytes of the pending tensors
        self.refused: Collection[int] = ()  # experts that could not be packed with the last tensor
        self._complete: dict[int, None] = {}  # complete experts that are not packed yet, in order of arrival
        self._torn: set[int] = set()  # experts whose rows may be half written: packing them failed
        self._taken: set[str] = set()  # everything since the last `finish`
        self._headers: dict[str, Stored] = {}  # of experts that are not planned yet
        self._uses: dict[int, dict[str, _Use]] = {}  # what each expert needs, by tensor name
        self._losses, self._seconds = Losses(), 0.0
        self._layout: Layout | None = None  # one for the whole load: it counts what it could not store exactly

    @property
    def settled(self) -> bool:
        """Whether no expert is half written, so that the layer may compute."""
        return not self.pending and not self.incomplete

    def push(self, claim: Claim, name: str, tensor: Tensor, packed: Mapping[str, Packed], layout: Layout) -> None:
        """Take a tensor of this layer's experts, and pack what is complete."""
        self.refused = ()
        header = header_of(name, tensor)
        self._check(claim, name, header)
        experts = self.recipe.plan.experts
        if not experts or (claim.expert is not None and claim.expert not in experts):
            return  # belongs to another rank, or to the other part of a split layer
        self._taken.add(name)
        if name not in self.recipe.manifest.tensors:
            self._headers[name] = header
        self.pending[name] = tensor
        self.arrivals.note(tensor)
        self._held += tensor.nbytes
        for expert in experts if claim.expert is None else (claim.expert,):
            if self._needs(expert).keys() <= self.pending.keys():
                self._complete[expert] = None
                self.incomplete.discard(expert)
            else:
                self.incomplete.add(expert)
        if self._complete and (not self.incomplete or self._held >= BATCH_BYTES):
            self._pack(packed, layout)

    def finish(self, packed: Mapping[str, Packed], layout: Layout) -> LoadReport | None:
        """End the load; raises everything that never came (it may still be pushed). None: nothing was written."""
        self._pack(packed, layout)
        raise_missing(self.missing(), self.recipe.plan.layer.index)
        self.pending.clear()  # of experts that were moved away
        self._taken.clear()
        self._held = 0
        if not self._seconds:
            return None
        notes = () if self._layout is None else self._layout.notes()
        report = self.recipe.report(packed, self._seconds, self._losses.held, notes)
        self._losses, self._seconds, self._layout = Losses(), 0.0, None
        return report

    def drop(self) -> None:
        """Forget what was pushed since the last `finish` and is not packed. All of it may be pushed again.

        Afterwards each expert has either its old or its new weights. Experts that could not be packed stay incomplete.
        """
        for collected in (self.pending, self._complete, self._taken, self._headers):
            collected.clear()
        self.incomplete = set(self._torn)
        self._held = 0

    def missing(self) -> list[MissingTensor]:
        """Every tensor that an incomplete expert still needs."""
        index = self.recipe.plan.layer.index
        return [
            MissingTensor(
                f"'{use.role}' was never pushed",
                where=f"layer {index}, expert {expert}, {use.projection}",
                expected=name,
            )
            for expert in sorted(self.incomplete)
            for name, use in sorted(self._needs(expert).items())
            if name not in self.pending
        ]

    def hold(self, experts: tuple[int, ...]) -> None:
        """The layer's slots now hold `experts`, complete: weights were moved between ranks."""
        self.incomplete.clear()
        self._torn.clear()
        self.recipe = replace(self.recipe, plan=replace(self.recipe.plan, experts=experts))

    def _check(self, claim: Claim, name: str, header: Stored) -> None:
        """Raise for a tensor that was pushed before, or that the layer was not planned for."""
        if name in self._taken:
            raise DuplicateTensor("this tensor was pushed before", where=name, hint="finish() ends a load or a refit")
        check_expert(claim, name, self.recipe.plan.layer.experts)
        planned = self.recipe.manifest.tensors.get(name)
        if planned is not None and planned != header:  # other slices would be other numbers
            wrong = WrongShape if planned.dtype == header.dtype else WrongDtype
            expected, got = (f"{list(stored.shape)} of {stored.dtype}" for stored in (planned, header))
            what = "a pushed tensor is not what the layer was planned for"
            raise wrong(what, where=name, expected=expected, got=got)
        if planned is None and (not self.recipe.partial or self._is_planned(claim.expert)):
            what = "its expert was packed without this tensor" if self.recipe.partial else "not in the checkpoint"
            hint = "give the headers of the checkpoint (tensors=)" if self.recipe.partial else None
            raise UnexpectedTensor(what, where=name, hint=hint)

    def _is_planned(self, expert: int | None) -> bool:
        return expert is None or (expert, DOWN) in self.recipe.plan.layer.projections

    def _needs(self, expert: int) -> dict[str, _Use]:
        """The tensors of an expert. One that is not planned yet needs the same as those that are."""
        if expert not in self._uses:
            layer = self.recipe.plan.layer
            model = expert if self._is_planned(expert) else layer.sample(DOWN).expert
            uses = {
                source.tensor: _Use(name, role)
                for name in (GATE, UP, DOWN)
                if (model, name) in layer.projections
                for role, source in layer.projections[model, name].sources.items()
            }
            self._uses[expert] = {self._renamed(tensor, expert): use for tensor, use in uses.items()}
        return self._uses[expert]

    def _renamed(self, tensor: str, expert: int) -> str:
        """The name of the same tensor of another expert."""
        form = self.recipe.plan.layer.form
        parsed = names.parse_name(form, tensor)
        if parsed is None or parsed.expert in (None, expert):
            return tensor
        return form.module(parsed.prefix, parsed.layer, expert, parsed.projection) + parsed.suffix

    def _pack(self, packed: Mapping[str, Packed], layout: Layout) -> None:
        """Pack the complete experts and release their tensors. Those with an error may be pushed again."""
        experts = tuple(self._complete)
        held = {name for expert in experts for name in self._needs(expert)}
        refused = set(experts)  # also by an interrupt or a lack of memory: their rows may be half written
        try:
            errors = self._errors(experts, packed, layout)
            refused = set(errors)
        finally:
            self._complete.clear()
            self._release(held)
            self._torn = (self._torn - set(experts)) | refused
            self.forget(refused)
            self.refused = refused
        raise_together(list(errors.values()), self.recipe.plan.layer.index)

    def forget(self, experts: Collection[int]) -> None:
        """Drop the tensors of these experts, so that all of them may be pushed again."""
        mine = set(experts) & set(self.recipe.plan.experts)
        if not mine:
            return
        own = {name for expert in mine for name in self._needs(expert)}
        own |= {name for name in self._headers if self._owner(name) in mine}
        self.incomplete |= mine
        self._taken -= own
        self._release(own)
        for name in own:
            self._headers.pop(name, None)
        for expert in [expert for expert in self._complete if self._needs(expert).keys() & own]:
            del self._complete[expert]  # stacked tensors are of all experts
            self.incomplete.add(expert)

    def _release(self, held: Iterable[str]) -> None:
        for name in held:
            tensor = self.pending.pop(name, None)
            self._held -= 0 if tensor is None else tensor.nbytes

    def _errors(
        self, experts: tuple[int, ...], packed: Mapping[str, Packed], layout: Layout
    ) -> dict[int, LancebillError]:
        """Pack experts together, and after an error one by one: what is wrong with one is not the others' fault."""
        losses = dict(self._losses.held)
        try:
            self._plan([expert for expert in experts if not self._is_planned(expert)])
            self._write(experts, packed, layout)
            return {}
        except LancebillError as error:
            self._losses.held = losses
            if len(experts) == 1:
                where = f"layer {self.recipe.plan.layer.index}, expert {experts[0]}"
                return {experts[0]: error if error.where else error.within(where)}
        return {bad: error for each in experts for bad, error in self._errors((each,), packed, layout).items()}

    def _plan(self, experts: Collection[int]) -> None:
        """Add experts with headers that arrived after planning, and check them against a planned expert."""
        if not experts:
            return
        recipe, layer = self.recipe, self.recipe.plan.layer
        new = {name: header for name, header in self._headers.items() if self._owner(name) in experts}
        model = layer.sample(DOWN).expert
        known = {name: recipe.manifest.tensors[name] for name in self._needs(model)}
        index = LayerIndex(recipe.manifest.config, known | new, recipe.manifest.naming, recipe.manifest.format)
        manifest = index.manifest(experts={model, *experts})
        manifest.check(where=f"layer {layer.index}")
        grown = replace(layer, projections={**layer.projections, **manifest.layers[layer.index].projections})
        self.recipe = replace(
            recipe,
            plan=replace(recipe.plan, layer=grown),
            manifest=replace(recipe.manifest, tensors={**recipe.manifest.tensors, **new}),
        )
        for name in new:
            del self._headers[name]

    def _owner(self, name: str) -> int | None:
        claim = self.recipe.manifest.naming.claim(name)
        return None if claim is None else claim.expert

    def _write(self, experts: Collection[int], packed: Mapping[str, Packed], layout: Layout) -> None:
        """Pack experts into every slot that holds them."""
        if not experts:
            return
        recipe, start = self.recipe, time.perf_counter()
        if self._layout is None or self._layout != layout:  # they differ if the layer was moved during the refit
            self._layout = layout
        slots = [slot for slot, expert in enumerate(recipe.plan.experts) if expert in experts]
        device = next(iter(packed[W13].values())).device
        self.arrivals.wait(self.pending.values())
        load_layer(
            reader_of(self.pending, device),
            recipe.plan,
            self._layout,
            out=packed,
            slots=slots,
            losses=self._losses.add,
            progress=recipe.advance,
            source=source_of(self.pending.values(), device),
        )
        self._seconds += time.perf_counter() - start
