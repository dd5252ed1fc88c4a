"""A layer to time: all of it on its device, or some of its experts in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from lancebill.backends import oracle
from lancebill.bench.workload import Weights
from lancebill.layer.parts import LayerParts
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.moe.layout import Packed
from lancebill.split.moves import OFF
from lancebill.split.split import Split, part_map


def make_layer(choice: oracle.Choice, weights: Weights, on_device: int | None, moves: str = OFF) -> RoutedExperts:
    """A layer of these weights, with the first `on_device` experts on the device (None: all) to begin with."""
    problem = choice.problem
    split = Split.by_number(problem.experts, problem.experts if on_device is None else on_device)
    if not split.host:
        return RoutedExperts(LayerParts(choice, weights.packed(choice.backend.layout(problem))))
    own = _part(choice, split.device, weights.packed(choice.backend.layout(problem), split.device))
    cpu = oracle.select(problem, "cpu")
    in_host = split.host if moves == OFF else tuple(range(problem.experts))
    held = weights.packed(cpu.backend.layout(problem), in_host)  # packed where the weights are made
    copied = {matrix: {name: tensor.to("cpu") for name, tensor in tensors.items()} for matrix, tensors in held.items()}
    return RoutedExperts(replace(own, host=_part(cpu, in_host, copied), moves=moves))


def _part(choice: oracle.Choice, slots: Sequence[int], packed: dict[str, Packed]) -> LayerParts:
    problem = choice.problem
    places = torch.tensor(part_map(range(problem.experts), slots), dtype=torch.int32, device=choice.device.torch)
    return LayerParts(replace(choice, problem=replace(problem, experts=len(slots))), packed, expert_map=places)
