"""Rows of packed experts that engines move between ranks, and what a layer must know after they were moved."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lancebill.backends import oracle
from lancebill.errors import LaunchError
from lancebill.layer.collect import ExpertCollector
from lancebill.layer.packed_module import PackedModule
from lancebill.moe.layout import Packed

INPUT_SCALES = ("input_scale",)  # engines keep one for all experts, so their load balancing does not move them


class MovableExperts(PackedModule):
    """A packed module whose rows are experts."""

    expert_map: Tensor | None
    refit: ExpertCollector | None
    is_split: bool  # some experts are in host memory

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

    def _refuse_split(self) -> None:
        if self.is_split:
            raise LaunchError(
                "this layer is split between a GPU and host memory: its slots cannot be used one by one",
                hint="load it without gpu_experts and gpu_memory",
            )
