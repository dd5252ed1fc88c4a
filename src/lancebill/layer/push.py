"""Filling a layer tensor by tensor: for engines that own the files, and for weight refits.

Tensors come in any order, for one expert or for all, local or not. Each expert is packed by the
same code that loads from files, reading from what was pushed instead.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lancebill.checkpoint.load.load_experts import expert_rows, load_expert
from lancebill.checkpoint.read.config import config_of_model
from lancebill.checkpoint.resolve import manifest as manifests
from lancebill.checkpoint.resolve import naming as names
from lancebill.checkpoint.resolve.naming import DOWN, GATE, UP, Claim
from lancebill.errors import CheckpointProblems, MissingTensor, WrongDtype, WrongShape
from lancebill.formats.stored import DTYPE_NAMES, Config, Stored
from lancebill.layer.recipe import LoadOptions, Losses, Recipe
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.moe.layout import Layout
from lancebill.moe.problem import parse_device


def from_config(
    config: Mapping[str, Any], layer: int, *, tensors: Mapping[str, Stored] | None = None, **options: Any
) -> RoutedExperts:
    """A layer to push into. `config` is the model's config.json as a dict.

    With `tensors` (names and headers of the checkpoint) an expert is packed and its tensors let go
    as soon as the last of them comes; without, at `finish()`. Options as in `from_checkpoint`.
    """
    wanted, model = LoadOptions(**options), config_of_model(config)
    made = RoutedExperts()
    recipe = None
    if tensors is not None:
        manifest = manifests.build(model, tensors, wanted.naming, layers=(layer,))
        manifest.check(where=model.source)
        recipe = Recipe.make(manifest, layer, wanted)
        recipe.fill(made, recipe.allocate(), None)
    made.pusher = Pusher(made, model, layer, wanted, recipe, empty=True)
    return made


class Pusher:
    """What has come, what is awaited, and which experts are packed."""

    def __init__(
        self,
        layer: RoutedExperts,
        config: Config,
        index: int,
        options: LoadOptions,
        recipe: Recipe | None,
        *,
        empty: bool = False,
    ) -> None:
        self.layer, self.config, self.index, self.options = layer, config, index, options
        self.naming = options.naming or names.find(config.model)
        self.router_names = self.naming.router.names(index)
        self.recipe = recipe
        self.pending: dict[str, Tensor] = {}
        self.headers: dict[str, Stored] = {}
        self.losses, self.seconds = Losses(), 0.0
        self.layout: Layout | None = None  # of this load: it counts what it could not hold as stored
        self.stale: set[int] = set(recipe.plan.experts) if recipe and empty else set()  # not (wholly) written

    @property
    def settled(self) -> bool:
        """Nothing is half done: forward may run."""
        return not self.pending and not self.stale and self.recipe is not None

    def push(self, pairs: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Take this layer's tensors from `pairs`; gives the names taken."""
        taken = set()
        for name, tensor in pairs:
            role = self.router_names.get(name)
            if role is not None:
                self.layer.take_router(role, tensor.to(self._device))
                taken.add(name)
            claim = self._claim(name)
            if claim is None:
                continue
            taken.add(name)
            if tensor.dtype not in DTYPE_NAMES:
                raise WrongDtype("no checkpoint holds this dtype", where=name, got=tensor.dtype)
            header = Stored(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))
            self._check_planned(name, header)
            self.headers[name] = header
            if self._is_local(claim.expert):
                self.pending[name] = tensor
                self._flush(claim.expert)
        return taken

    def finish(self) -> None:
        """Pack what is left; raise everything that never came (which may still be pushed)."""
        if self.recipe is None:
            self._make_recipe()
        self._meet_newcomers()
        for expert in sorted(self._touched()):
            self._write(expert)
        if self.stale:
            raise CheckpointProblems(self._never_written(), where=f"layer {self.index}")
        self.pending.clear()
        if self.recipe is not None and self.seconds:
            notes = () if self.layout is None else self.layout.notes()
            self.layer.report = self.recipe.report(self.layer.packed, self.seconds, self.losses.held, notes)
            self.losses, self.seconds, self.layout = Losses(), 0.0, None

    def hold(self, experts: tuple[int, ...]) -> None:
        """The layer's slots now hold `experts`, whole: weights were moved between ranks."""
        self.stale.clear()
        if self.recipe is not None:
            self.recipe = replace(self.recipe, plan=replace(self.recipe.plan, experts=experts))

    @property
    def _device(self) -> torch.device:
        """Where the layer is, or is going to be."""
        held = next(self.layer.parameters(), None)
        return parse_device(self.options.device).torch if held is None else held.device

    def _check_planned(self, name: str, header: Stored) -> None:
        """A refit brings what the plan was made for: its slices of anything else would be other numbers."""
        planned = None if self.recipe is None else self.recipe.manifest.tensors.get(name)
        if planned is None or planned == header:
            return
        wrong = WrongShape if planned.dtype == header.dtype else WrongDtype
        expected, got = (f"{list(stored.shape)} of {stored.dtype}" for stored in (planned, header))
        raise wrong("a pushed tensor is not what the layer was planned for", where=name, expected=expected, got=got)

    def _claim(self, name: str) -> Claim | None:
        for form in self.naming.forms:
            claim = names.claim(form, name)
            if claim is not None and claim.layer == self.index:
                return claim
        return None

    def _is_local(self, expert: int | None) -> bool:
        if expert is None:
            return True
        if self.recipe is not None:
            return expert in self.recipe.plan.experts
        count = names.sizes(self.config.model).experts
        return count is None or expert in self.options.placement.experts(count)

    def _make_recipe(self) -> None:
        """The headers are known only now: build the manifest from what was pushed."""
        count = names.sizes(self.config.model).experts
        local = None if count is None else frozenset(self.options.placement.experts(count))
        manifest = manifests.build(self.config, self.headers, self.naming, experts=local)
        manifest.check(where=f"layer {self.index}")
        self.recipe = Recipe.make(manifest, self.index, self.options)
        self.stale = set(self.recipe.plan.experts)
        self.recipe.fill(self.layer, self.recipe.allocate(), None)

    def _meet_newcomers(self) -> None:
        """Experts moved here whose headers were not known when the plan was made: now they came."""
        assert self.recipe is not None
        plan = self.recipe.plan
        known = plan.layer.projections
        claims = (self._claim(name) for name in self.pending)
        new = {c.expert for c in claims if c is not None and c.expert is not None} - {e for e, _ in known}
        if new:
            manifest = manifests.build(self.config, self.headers, self.naming, experts=new)
            manifest.check(where=f"layer {self.index}")
            grown = replace(plan.layer, projections={**known, **manifest.layers[self.index].projections})
            self.recipe = replace(self.recipe, plan=replace(plan, layer=grown))

    def _names_of(self, expert: int) -> set[str]:
        assert self.recipe is not None
        held = self.recipe.plan.layer.projections
        found = [held[expert, name] for name in (GATE, UP, DOWN) if (expert, name) in held]
        return {source.tensor for projection in found for source in projection.sources.values()}

    def _touched(self) -> set[int]:
        """Local experts of which something has come and is not packed yet."""
        assert self.recipe is not None
        return {e for e in self.recipe.plan.experts if self._names_of(e) & self.pending.keys()}

    def _flush(self, expert: int | None) -> None:
        """Pack `expert` (None: all) if nothing of it is missing, and let its tensors go."""
        if self.recipe is None:
            return
        sharing = set(self.recipe.plan.experts) if expert is None else {expert}
        for candidate in sharing:
            if self._names_of(candidate):
                self._write(candidate)
        if not self.stale & sharing:
            for candidate in sharing:
                for name in self._names_of(candidate):
                    self.pending.pop(name, None)

    def _write(self, expert: int) -> None:
        """Pack one expert into every slot that holds it; a refit that is incomplete marks it stale."""
        assert self.recipe is not None
        if not self._names_of(expert) <= self.pending.keys():
            self.stale.add(expert)
            return
        plan, start = self.recipe.plan, time.perf_counter()
        weights = load_expert(self._read, plan, expert, self.losses.add)
        self.layout = layout = self.layout or self.layer.layout
        packed = self.layer.packed
        for slot, logical in enumerate(plan.experts):
            if logical == expert:
                weights.pack(plan, layout, expert_rows(packed, slot))
        self.stale.discard(expert)
        self.seconds += time.perf_counter() - start

    def _read(self, name: str, index: tuple[int | slice, ...]) -> Tensor:
        tensor = self.pending[name]
        return (tensor[index] if index else tensor).cpu().contiguous()

    def _never_written(self) -> list[MissingTensor]:
        assert self.recipe is not None
        problems = []
        for (expert, name), projection in sorted(self.recipe.plan.layer.projections.items()):
            if expert not in self.stale:
                continue
            for role, source in projection.sources.items():
                if source.tensor not in self.pending:
                    problems.append(
                        MissingTensor(
                            f"'{role}' was never pushed",
                            where=f"layer {self.index}, expert {expert}, {name}",
                            expected=source.tensor,
                        )
                    )
        return problems
