"""The CPU's part of a call on a GPU: rows go to host memory, CUDA calls the CPU kernels, sums come back.

All of it is queued on a stream of its own (`side_stream.py`). No Python runs between the steps, and the whole may be
captured in a graph.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from lancebill.backends.base import Executor
from lancebill.backends.cpu.executor import CpuExecutor
from lancebill.backends.cpu.host_call import HostCall, HostShape
from lancebill.errors import LaunchError, UnsupportedProblem
from lancebill.moe.dispatch import Indexed
from lancebill.split.host_threads import HostThreads

MOST_ROWS = 1024  # of one host call: more are computed piece by piece, in the same buffers
MOST_CALLS = 64  # kept for eager calls, one for each number of tokens
_THREADS: list[HostThreads] = []  # of this process, once they are chosen
_BUFFERS: dict[int, Tensor] = {}  # pinned memory of eager calls by queue: what it holds runs one after the other


class Queue(Protocol):
    """Steps that run one after the other, at some time."""

    number: int  # no other queue has it
    capturing: bool  # the steps are recorded, and may run many times

    def copy(self, target: Tensor, source: Tensor) -> None: ...

    def call(self, function: int, argument: int) -> None: ...

    def allocate(self, size: int) -> Tensor:
        """Bytes in host memory that the queue can copy from and to."""

    def wait(self) -> None:
        """Until all that was queued has run."""


def use_host_threads(threads: HostThreads) -> None:
    """Compute experts in host memory with these threads from now on. Calls that were captured keep their number."""
    _THREADS[:] = [threads]


class HostCalls:
    """The host calls of one split layer. They must not be freed while they may still be made."""

    def __init__(self) -> None:
        self.eager: dict[tuple[HostShape, int, int], tuple[list[int], HostCall]] = {}
        self.captured: list[HostCall] = []  # a graph does not say when it ends
        self._placed: HostThreads | None = None
        self._last: Queue | None = None  # that eager calls were put into

    def __del__(self) -> None:
        if self._last is not None:
            self._last.wait()

    def queue(
        self, queue: Queue, host: Executor, expert_map: Tensor, x: Tensor, dispatch: Indexed, sums: Tensor
    ) -> None:
        """Queue the CPU's part of a call: x, ids and weights are dense; `sums` [M, H] in fp32 gets the result."""
        if not isinstance(host, CpuExecutor):
            raise UnsupportedProblem(
                "beside a GPU, experts in host memory need the CPU kernels",
                got=f"backend '{host.backend.name}'",
                hint="python -m lancebill.backends.cpu.native",
            )
        self.check()
        for first in range(0, x.shape[0], MOST_ROWS):
            rows = slice(first, first + MOST_ROWS)
            given = x[rows], dispatch.ids[rows], dispatch.weights[rows]
            shape = HostShape(len(given[0]), x.dtype, given[1].dtype, given[2].dtype, self._threads(host).count)
            call = self._call(queue, host, expert_map, shape)
            for target, source in zip((call.x, call.ids, call.weights), given):
                queue.copy(target, source)
            queue.call(call.function, call.argument)
            queue.copy(sums[rows], call.out)

    def check(self) -> None:
        """Raise if a call has failed since the last check."""
        for call in [*(call for _, call in self.eager.values()), *self.captured]:
            try:
                call.check()
            except LaunchError as error:
                raise error.within("an earlier call of a split layer") from error

    def _call(self, queue: Queue, host: CpuExecutor, expert_map: Tensor, shape: HostShape) -> HostCall:
        if queue.capturing:
            call = host.host_call(shape, expert_map, queue.allocate)
            self.captured.append(call)
            return call
        self._last = queue
        addresses, held = [*host.tensors.addresses(), expert_map.data_ptr()], _BUFFERS.get(queue.number)
        found = None if held is None else self.eager.get((shape, queue.number, held.data_ptr()))
        if found is not None and found[0] == addresses:
            return found[1]
        if found is not None or len(self.eager) >= MOST_CALLS:
            queue.wait()  # calls that are dropped here may be waiting there
            self.check()
            self.eager.clear()
        call = host.host_call(shape, expert_map, lambda size: _shared(queue, size))
        self.eager[shape, queue.number, call.memory.data_ptr()] = addresses, call
        return call

    def _threads(self, host: CpuExecutor) -> HostThreads:
        if not _THREADS:
            use_host_threads(HostThreads.choose())
        if self._placed != _THREADS[0]:
            self._placed = _THREADS[0]
            host.native.place_threads(self._placed.cpus, self._placed.spin_us)
        return self._placed


def _shared(queue: Queue, size: int) -> Tensor:
    """The buffers of eager calls in this queue. Larger ones replace them if need be: calls that exist keep theirs."""
    held = _BUFFERS.get(queue.number)
    if held is None or held.numel() < size:
        held = _BUFFERS[queue.number] = queue.allocate(1 << (size - 1).bit_length())
    return held
