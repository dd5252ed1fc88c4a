"""Rows of packed experts that are moved: by engines between ranks, or between host memory and the device.

A layer must know where its experts are when it is pushed tensors, copied, saved or loaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lancebill.backends import oracle
from lancebill.errors import LaunchError
from lancebill.layer.collect import ExpertCollector
from lancebill.layer.packed_module import PackedModule
from lancebill.moe.layout import Packed
from lancebill.split.moves import OFF, Moves

INPUT_SCALES = ("input_scale",)  # engines keep one for all experts, so their load balancing does not move them


class MovableExperts(PackedModule):
    """A packed module whose rows are experts."""

    expert_map: Tensor | None
    refit: ExpertCollector | None
    is_split: bool  # some experts are in host memory
    is_moving: bool  # and others may take their places on the device
    moves: Moves | None

    def let_move(self, moves: str) -> None:
        """Let experts move in this way from the first call on."""
        self.is_moving = moves != OFF
        self.moves = Moves(self) if self.is_moving else None
        if self.is_moving:
            self.register_load_state_dict_post_hook(_refill)  # type: ignore[no-untyped-call]

    @property
    def settled(self) -> bool:
        """Whether no refit is under way."""
        return self.refit is None or self.refit.settled

    def __getstate__(self) -> dict[str, Any]:
        """A copy is made of experts that stand still. It moves its own."""
        if self.moves is not None:
            self.moves.halt()
        return {**super().__getstate__(), "moves": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.moves = Moves(self) if self.is_moving else None

    def _save_to_state_dict(self, *given: Any) -> None:
        if self.moves is not None:
            self.moves.halt()
        super()._save_to_state_dict(*given)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MovableExperts:
        if self.moves is not None:
            self.moves.halt()
        super()._apply(fn, recurse)
        return self

    @contextmanager
    def standing_still(self, whole: MovableExperts | None, settled: bool) -> Iterator[None]:
        """Nothing moves inside, and a refit knows which experts are here. `whole` has all experts."""
        if self.moves is None or whole is None:
            yield
            return
        with self.moves.still() as held:
            if settled and self.refit is not None and held.experts:
                logical = whole.held_experts
                self.refit.hold(tuple(logical[max(0, slot)] for slot in held.experts))  # an empty place may have any
            yield

    def expert_weights(self) -> list[Tensor]:
        """[E_local, -1] views of the tensors of each expert, for engines that move experts between ranks."""
        return self._rows(input_scales=False)

    def expert_inputs(self) -> list[Tensor]:
        """[E_local, -1] views of what `expert_weights` leaves out: an expert's input scales.

        Engines keep one input scale for all experts. Here each expert has its own, so it must move with the expert.
        """
        return self._rows(input_scales=True)

    def _rows(self, *, input_scales: bool) -> list[Tensor]:
        self._refuse_split()
        chosen = [
            tensor
            for tensors in self.packed.values()
            for name, tensor in tensors.items()
            if (name in INPUT_SCALES) == input_scales
        ]
        return [tensor.view(tensor.shape[0], math.prod(tensor.shape[1:])) for tensor in chosen]

    @property
    def held_experts(self) -> tuple[int, ...]:
        """The logical expert in each slot."""
        self._refuse_split()
        return self._require_refit().recipe.plan.experts

    def hold(self, experts: Sequence[int]) -> None:
        """Record which logical experts the slots hold after weights were moved, for later pushes."""
        self._refuse_split()
        if self.refit is not None:
            self.refit.hold(tuple(experts))

    def rehome(self, weights: Mapping[str, Packed], experts: Sequence[int], expert_map: Sequence[int]) -> None:
        """Replace the buffers by others of the same layout, for another number of experts on this rank.

        `experts` are the logical ones by slot, `expert_map` the slot of every physical id. The
        backend stays: all ranks must keep one layout.
        """
        problem = replace(self.problem, experts=len(experts), global_experts=len(expert_map))
        before = self.choice
        kept = oracle.select(problem, before.device, before.backend.name)
        self.adopt(replace(kept, requested=before.requested), weights)
        self.expert_map = torch.tensor(expert_map, dtype=torch.int32, device=before.device.torch)
        self.hold(experts)

    def layout_signature(self) -> tuple[object, ...]:
        """What all ranks must agree on before experts may be moved between them."""
        shapes = {m: {n: (tuple(t.shape[1:]), str(t.dtype)) for n, t in ts.items()} for m, ts in self.packed.items()}
        return self.choice.backend.name, tuple((m, tuple(sorted(ts.items()))) for m, ts in sorted(shapes.items()))

    def _require_refit(self) -> ExpertCollector:
        if self.refit is None:
            raise LaunchError(
                "this layer was made without a checkpoint's config, so tensors cannot be pushed into it",
                hint="use from_checkpoint or from_config",
            )
        return self.refit

    def refill(self) -> None:
        """Copy the experts that are on the device from host memory again, which has all of them."""
        if self.moves is not None and self.executor is not None:  # which tells `moves` what it works on
            self.moves.refill()

    def _refuse_split(self) -> None:
        if self.is_split:
            raise LaunchError(
                "this layer is split between a GPU and host memory: its slots cannot be used one by one",
                hint="load it without gpu_experts and gpu_memory",
            )


def _refill(layer: MovableExperts, keys: object) -> None:
    """The state was saved while other experts were on the device."""
    layer.refill()
