"""A plan bound to one layer's weights and one stream's scratch memory: launches ready to go.

Everything but the caller's tensors and the number of tokens is laid out once. A call stores a few
pointers and hands each launch to the driver: no allocation, no synchronisation, no shape logic.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from colibri.backends.hopper import workspace
from colibri.backends.hopper.plan import HopperPlan, scratch
from colibri.backends.hopper.steps import CALL, COUNTERS, SCRATCH, Ref, Step, steps
from colibri.jit.driver import Launch
from colibri.jit.load import Matrix, prepare, set_map
from colibri.jit.load import Value as Bound
from colibri.layout import Packed


class Program:
    """Launches of one (plan, weights, stream)."""

    def __init__(self, plan: HopperPlan, weights: Mapping[str, Packed], device: torch.device, stream: int) -> None:
        assert plan.rule is not None
        self.plan, self.overlap = plan, plan.rule.overlap
        self.device = device.index or 0
        sizes = scratch(plan)
        self.memory = workspace.buffer(device, stream, workspace.pieces(sizes)[1])
        tensors: dict[str, Mapping[str, Tensor]] = {
            SCRATCH: workspace.views(self.memory, sizes),
            COUNTERS: {"all": workspace.counters(device, stream)},
            **weights,
        }
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count
        self.pointers: dict[str, list[ctypes.c_uint64]] = {"x": [], "ids": [], "weights": [], "out": []}
        self.resizers: list[Callable[[int], None]] = []
        self.tokens = -1
        self.mapped: list[tuple[Launch, str]] = []  # launches that read x through a tensor map
        self.mapped_at = (0, 0)
        self.launches = [self._bind(step, tensors) for step in steps(plan)]

    def run(self, x: Tensor, ids: Tensor, weights: Tensor, out: Tensor, stream: int) -> None:
        """Launch for this call's tensors."""
        tokens = ids.shape[0]
        if tokens != self.tokens:
            for resize in self.resizers:
                resize(tokens)
            self.tokens = tokens
        for name, tensor in (("x", x), ("ids", ids), ("weights", weights), ("out", out)):
            pointer = tensor.data_ptr()
            for slot in self.pointers[name]:
                slot.value = pointer
        if self.mapped and self.mapped_at != (x.data_ptr(), tokens):
            self.mapped_at = (x.data_ptr(), tokens)
            for launch, name in self.mapped:
                set_map(launch, name, Matrix(x, tuple(x.shape)))
        for launch in self.launches:
            launch(stream)

    def _bind(self, step: Step, tensors: Mapping[str, Mapping[str, Tensor]]) -> Launch:
        """Names to addresses. Every launch may start before its predecessor ends, whoever launched that: kernels
        wait for it themselves before they touch what it wrote.

        Addresses alone are kept: a program does not keep a layer's weights alive.
        """
        values: dict[str, Bound] = {}
        for name, value in step.values.items():
            if isinstance(value, Ref):
                values[name] = _address(value, tensors)
            else:
                values[name] = 0 if callable(value) else value
        launch = prepare(step.source, self.device, values, dependent=self.overlap)
        for name, value in step.values.items():
            if isinstance(value, Ref) and value.owner == CALL and value.mapped is not None:
                self.mapped.append((launch, name))
            elif isinstance(value, Ref) and value.owner == CALL:
                self.pointers[value.name].append(launch.pointer_slot(name))
            elif callable(value):
                self.resizers.append(_follow(launch.integer_slot(name), value))
        self.resizers.append(self._grid(launch, step))
        return launch

    def _grid(self, launch: Launch, step: Step) -> Callable[[int], None]:
        resident = self.processors * step.persistent

        def resize(tokens: int) -> None:
            x, y = step.grid(tokens)
            launch.grid(min(x, resident) if resident else x, y)

        return resize


def _address(ref: Ref, tensors: Mapping[str, Mapping[str, Tensor]]) -> Bound:
    """A pointer, or the matrix behind a tensor map; 0 for what the caller brings."""
    if ref.owner == CALL:
        return 0
    tensor = tensors[ref.owner][ref.name]
    if ref.mapped is None:
        return tensor.data_ptr() + ref.offset
    count = tensor.numel()
    return Matrix(tensor, (count // ref.mapped, ref.mapped) if ref.mapped else (count,))


def _follow(slot: ctypes.c_int32, value: Callable[[int], int]) -> Callable[[int], None]:
    def resize(tokens: int) -> None:
        slot.value = value(tokens)

    return resize
