"""A call of a layer in host memory that CUDA makes: buffers at fixed addresses, and the structs that point to them.

The host function takes no lock of Python and may be captured in a graph. Everything it reads belongs to the `HostCall`,
which must live as long as the call can still be made.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lancebill.backends.call_signature import RoutingLayout
from lancebill.backends.cpu.call import FLOAT, LayerStructs, indexed_work, with_layout
from lancebill.backends.cpu.native import Library, abi
from lancebill.backends.cpu.plan import CpuPlan
from lancebill.native.address import host_address

_ALIGN = 256
_GIVEN = 3  # pieces that the caller writes: x, ids, weights
Allocate = Callable[[int], Tensor]  # bytes to a uint8 tensor of at least as many


class GpuRequests(Protocol):
    """The requests of one queue of a GPU."""

    @property
    def answered(self) -> bool:
        """Whether all calls were made that were asked for so far."""

    def check(self) -> None:
        """Raise if a call has failed since the last check."""


@dataclass(frozen=True)
class HostShape:
    """What decides the size of a host call's buffers."""

    tokens: int
    x: torch.dtype
    ids: torch.dtype
    weights: torch.dtype
    threads: int


class HostCall:
    """The rows of one call: write `x`, `ids` and `weights` (together: `given`), let CUDA make the call, read `out`."""

    def __init__(
        self,
        native: Library,
        plan: CpuPlan,
        structs: LayerStructs,
        shape: HostShape,
        expert_map: Tensor,
        allocate: Allocate,
        keep: tuple[Tensor, ...],
    ) -> None:
        """`keep` are the tensors that `structs` point to."""
        self.native, self.structs, self.expert_map, self.keep = native, structs, expert_map, keep
        self.mailbox: GpuRequests | None = None  # by which a GPU asks for this call, if it does
        work = indexed_work(plan, shape.tokens, shape.x)
        work.threads, work.out_type = shape.threads, FLOAT[torch.float32]
        work.expert_map = host_address(expert_map)
        rows, routed = (shape.tokens, plan.problem.hidden), (shape.tokens, plan.problem.top_k)
        ids, weights = (expert_map.new_empty(routed, dtype=dtype) for dtype in (shape.ids, shape.weights))
        work = with_layout(work, RoutingLayout.of(ids, weights, expert_map.numel()))
        pieces: list[tuple[tuple[int, ...], torch.dtype]]
        pieces = [(rows, shape.x), (routed, shape.ids), (routed, shape.weights), (rows, torch.float32)]
        pieces.append(((self._scratch_bytes(work),), torch.uint8))
        sizes = [math.prod(size) * dtype.itemsize for size, dtype in pieces]
        self.memory = allocate(sum(sizes) + 3 * _ALIGN)
        first = start = -host_address(self.memory) % _ALIGN
        views = []
        for i, ((size, dtype), used) in enumerate(zip(pieces, sizes)):
            # What is given is one piece of memory; the result and the scratch memory have cache lines of their own.
            start = start if i < _GIVEN else _round_up(start - first) + first
            views.append(self.memory[start : start + used].view(dtype).view(size))
            start += used
        self.given = self.memory[first : first + sum(sizes[:_GIVEN])]  # x, ids and weights, one after the other
        self.x, self.ids, self.weights, self.out, scratch = views
        work.x, work.out, work.scratch = host_address(self.x), host_address(self.out), host_address(scratch)
        work.ids, work.weights = host_address(self.ids), host_address(self.weights)
        self.work = work
        self.call = abi.CallStruct(ctypes.addressof(structs.layer), ctypes.addressof(work))

    def _scratch_bytes(self, work: abi.WorkStruct) -> int:
        """Scratch bytes; they do not depend on the rows, but the library checks that there are some."""
        probe = abi.WorkStruct.from_buffer_copy(work)
        probe.x = probe.out = probe.ids = ctypes.addressof(probe)
        return self.native.scratch_bytes(self.structs.layer, probe)

    def take(self, ids: Tensor, weights: Tensor) -> None:
        """From now on, compute only so many rows of `x`, with ids and weights that are elsewhere."""
        self.taken = ids, weights  # kept: the call may be made when nobody else has them any more
        self.work.tokens, self.work.ids, self.work.weights = len(ids), host_address(ids), host_address(weights)

    @property
    def function(self) -> int:
        """The address of the host function."""
        return self.native.host_function

    @property
    def argument(self) -> int:
        return ctypes.addressof(self.call)

    @property
    def may_be_made(self) -> bool:
        """Whether a GPU has asked for the call, or for another in its mailbox, and has perhaps not waited for it."""
        return self.mailbox is not None and not self.mailbox.answered

    def run(self) -> None:
        """Make the call now, as CUDA would."""
        self.native.calls.lancebill_host_call(self.argument)

    def check(self) -> None:
        """Raise if a call has failed since the last check."""
        if self.mailbox is not None:
            self.mailbox.check()
        status, self.call.status = self.call.status, 0
        if status:
            self.native.raise_status(status)


def _round_up(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
