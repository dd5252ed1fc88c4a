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
from colibri.backends.hopper.plan import HopperPlan, Product, scratch
from colibri.backends.hopper.refs import CALL, COUNTERS, SCRATCH, Ref, Step
from colibri.backends.hopper.steps import steps
from colibri.jit.driver import Launch, launched, launcher
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
        packed = {name: _with_factors(plan.product(name), held) for name, held in weights.items()}
        self.factors = [held["pre_scale"] for name, held in packed.items() if held is not weights[name]]
        tensors: dict[str, Mapping[str, Tensor]] = {
            SCRATCH: workspace.views(self.memory, sizes),
            COUNTERS: {"all": workspace.counters(device, stream)},
            **packed,
        }
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count
        self.pointers: dict[str, list[ctypes.c_uint64]] = {}  # where the caller's tensors go, by name
        self.resizers: list[Callable[[int], None]] = []
        self.tokens = -1
        self.mapped: list[tuple[Launch, str]] = []  # launches that read x through a tensor map
        self.mapped_at = (0, 0)
        self.launches = [self._bind(step, stream, tensors) for step in steps(plan)]
        self.arguments = [launch.arguments for launch in self.launches]
        self.go = launcher()

    def run(self, tokens: int, call: Mapping[str, int]) -> None:
        """Launch for this call's tensors, by their addresses: "x", "out", and "ids" and "weights" or "edges"."""
        if tokens != self.tokens:
            for resize in self.resizers:
                resize(tokens)
            self.tokens = tokens
        for name, slots in self.pointers.items():
            pointer = call[name]
            for slot in slots:
                slot.value = pointer
        if self.mapped and self.mapped_at != (call["x"], tokens):
            self.mapped_at = (call["x"], tokens)
            for launch, name in self.mapped:
                set_map(launch, name, Matrix(call["x"], (tokens, self.plan.problem.hidden)))
        go = self.go
        for arguments in self.arguments:
            code = go(*arguments)
            if code:
                launched(code)

    def _bind(self, step: Step, stream: int, tensors: Mapping[str, Mapping[str, Tensor]]) -> Launch:
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
        launch = prepare(step.source, self.device, stream, values, dependent=self.overlap)
        for name, value in step.values.items():
            if isinstance(value, Ref) and value.owner == CALL and value.mapped is not None:
                self.mapped.append((launch, name))
            elif isinstance(value, Ref) and value.owner == CALL:
                self.pointers.setdefault(value.name, []).append(launch.pointer_slot(name))
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


def _with_factors(product: Product, packed: Packed) -> Packed:
    """Where only the other matrix has stored factors of its input, this one's are ones."""
    if not product.scaled or "pre_scale" in packed:
        return packed
    codes = packed["codes"]
    k = product.slices * product.form.slice_columns  # padded: no narrower than the input
    return {**packed, "pre_scale": torch.ones(codes.shape[0], k, device=codes.device)}


def _address(ref: Ref, tensors: Mapping[str, Mapping[str, Tensor]]) -> Bound:
    """A pointer, or the matrix behind a tensor map; 0 for what the caller brings."""
    if ref.owner == CALL:
        return 0
    tensor = tensors[ref.owner][ref.name]
    if ref.mapped is None:
        return tensor.data_ptr() + ref.offset
    count = tensor.numel()
    return Matrix(tensor.data_ptr(), (count // ref.mapped, ref.mapped) if ref.mapped else (count,))


def _follow(slot: ctypes.c_int32, value: Callable[[int], int]) -> Callable[[int], None]:
    def resize(tokens: int) -> None:
        slot.value = value(tokens)

    return resize
