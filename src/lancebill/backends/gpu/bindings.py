"""The launches of a plan, bound to one layer's weights and to one workspace.

Every argument that no call changes is written once. What the caller gives (addresses, and integers that say how to
read ids and weights) goes into one array that all launches read; functions that follow the number of tokens (grids,
counts) are collected in `resizers`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import Lock

import torch
from torch import Tensor

from lancebill.backends.call_signature import RoutingLayout
from lancebill.backends.gpu.plan import GemmPlan, GpuPlan, scratch
from lancebill.backends.gpu.step import CALL, COUNTERS, SCRATCH, Ref, Step, Value
from lancebill.backends.gpu.workspace import Workspace, outside_pools, views
from lancebill.jit.address import address_on
from lancebill.jit.driver import Launch, use_context
from lancebill.jit.load import MappedMatrix, prepare_launch
from lancebill.jit.load import Value as Bound
from lancebill.moe.layout import Packed
from lancebill.moe.problem import INDEXED

Resize = Callable[[int], None]
# The index of each of the caller's values in that array: addresses, then the fields of `RoutingLayout`. All have 64
# bits; of an integer the driver reads the lower half.
_PLACES = {"x": 0, "out": 1, "ids": 2, "edges": 2, "weights": 3, "expert_map": 4}
_PLACES |= {name: 5 + i for i, name in enumerate(RoutingLayout._fields)}
# Pre-scales of 1, by experts and columns: for all layers, and never freed, because captured graphs read them.
_ONES: dict[tuple[int, int, torch.device], Tensor] = {}


@dataclass(frozen=True)
class Bindings:
    """Launches whose arguments are complete, except for what the caller gives and the number of tokens."""

    plan: GpuPlan
    steps: tuple[Step, ...]
    device: torch.device
    stream: int
    lock: Lock  # of the workspace
    launches: tuple[Launch, ...]
    caller: ctypes.Array[ctypes.c_uint64]  # what the caller gives
    mapped: tuple[tuple[Launch, str], ...]  # launches that read x through a tensor map, and the argument's name
    resizers: tuple[Resize, ...]
    with_caller: frozenset[int]  # indices of launches that take something of the caller as an argument
    workspace: Workspace | None  # kept alive here, unless it belongs to one captured call

    @property
    def index(self) -> int:
        """The number of the GPU."""
        return self.device.index or 0

    @classmethod
    def bind(
        cls,
        plan: GpuPlan,
        steps: tuple[Step, ...],
        weights: Mapping[str, Packed],
        device: torch.device,
        stream: int,
        workspace: Workspace,
    ) -> Bindings:
        """Keeps addresses of the weights, not the tensors: a program does not keep a layer's weights alive."""
        if device.type == "cuda":
            use_context(device.index)
        sizes = scratch(plan)
        packed = {name: _with_pre_scale(plan.gemm(name), own) for name, own in weights.items()}
        tensors: dict[str, Mapping[str, Tensor]] = {
            SCRATCH: views(workspace.memory, sizes),
            COUNTERS: {} if workspace.counters is None else {"all": workspace.counters},
            **packed,
        }
        binder = _Binder(plan, device, stream, tensors)
        return cls(
            plan,
            steps,
            device,
            stream,
            workspace.lock,
            tuple(binder.bind(step) for step in steps),
            binder.caller,
            tuple(binder.mapped),
            tuple(binder.resizers),
            frozenset(i for i, step in enumerate(steps) if any(map(_is_from_caller, step.values.values()))),
            workspace if workspace.owned else None,
        )


class _Binder:
    """Binds steps one by one and collects what they share: the caller's values, tensor maps, resize functions."""

    def __init__(
        self, plan: GpuPlan, device: torch.device, stream: int, tensors: Mapping[str, Mapping[str, Tensor]]
    ) -> None:
        assert plan.rule is not None
        self.device, self.stream, self.tensors, self.overlap = device, stream, tensors, plan.rule.overlap
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count
        self.caller = (ctypes.c_uint64 * (5 + len(RoutingLayout._fields) if plan.work == INDEXED else 3))()
        self.mapped: list[tuple[Launch, str]] = []
        self.resizers: list[Resize] = []

    def bind(self, step: Step) -> Launch:
        """One launch. With `overlap` it may start before the previous kernel on the stream ends; each kernel waits
        before it reads what its predecessor wrote."""
        values: dict[str, Bound] = {}
        for name, value in step.values.items():
            if isinstance(value, Ref):
                values[name] = self._address(value)
            else:
                values[name] = 0 if callable(value) else value
        launch = prepare_launch(step.source, self.device.index or 0, self.stream, values, dependent=self.overlap)
        for name, value in step.values.items():
            if isinstance(value, Ref) and value.owner == CALL and value.mapped is not None:
                self.mapped.append((launch, name))
            elif isinstance(value, Ref) and value.owner == CALL:
                launch.share(name, ctypes.c_uint64.from_buffer(self.caller, 8 * _PLACES[value.name]))
            elif callable(value):
                self.resizers.append(_set_integer(launch.integer_slot(name), value))
        self.resizers.append(self._set_grid(launch, step))
        return launch

    def _address(self, ref: Ref) -> Bound:
        """A pointer, or the matrix behind a tensor map; 0 for what the caller gives."""
        if ref.owner == CALL:
            return 0
        tensor = self.tensors[ref.owner][ref.name]
        address, count = address_on(tensor, self.device, f"{ref.owner}.{ref.name}"), tensor.numel()
        if ref.mapped is None:
            return address + ref.offset
        return MappedMatrix(address, (count // ref.mapped, ref.mapped) if ref.mapped else (count,))

    def _set_grid(self, launch: Launch, step: Step) -> Resize:
        resident = self.processors * step.persistent

        def resize(tokens: int) -> None:
            x, y = step.grid(tokens)
            launch.grid(min(x, resident) if resident else x, y)

        return resize


def _is_from_caller(value: Value) -> bool:
    return isinstance(value, Ref) and value.owner == CALL


def _with_pre_scale(gemm: GemmPlan, packed: Packed) -> Packed:
    """The kernels apply pre-scales to both matrices or to none: a matrix without one gets ones."""
    if not gemm.scaled or "pre_scale" in packed:
        return packed
    codes = packed["codes"]
    k = gemm.slices * gemm.form.slice_columns  # padded: at least as long as the input row
    return {**packed, "pre_scale": _ones(codes.shape[0], k, codes.device)}


def _ones(experts: int, columns: int, device: torch.device) -> Tensor:
    key = experts, columns, device
    found = _ONES.get(key)
    if found is None:
        made = outside_pools(device, None, lambda: torch.ones(experts, columns, dtype=torch.float32, device=device))
        found = _ONES.setdefault(key, made)
    return found


def _set_integer(slot: ctypes.c_int32, value: Callable[[int], int]) -> Resize:
    def resize(tokens: int) -> None:
        slot.value = value(tokens)

    return resize
