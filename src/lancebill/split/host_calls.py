"""The CPU's part of a call on a GPU: rows go to host memory, CUDA calls the CPU kernels, sums come back.

All of it is queued (`gpu_queues.py` has the ways). No Python runs between the steps, and the whole may be captured in
a graph.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from lancebill.backends.base import Executor
from lancebill.backends.cpu.executor import CpuExecutor
from lancebill.backends.cpu.host_call import HostCall, HostShape
from lancebill.errors import LaunchError, UnsupportedProblem
from lancebill.moe.dispatch import Indexed
from lancebill.split.cpu_rows import MOST_ROWS, CpuRows, CpuSums
from lancebill.split.host_threads import HostThreads

MOST_CALLS = 64  # kept for eager calls, one for each number of tokens
_THREADS: list[HostThreads] = []  # the pool of this process, once it is chosen
# Pinned memory by queue. Calls of a queue run one at a time, so all layers share it. The calls keep it alive.
_BUFFERS: WeakValueDictionary[Hashable, Tensor] = WeakValueDictionary()
_GIVEN_UP: list[MappedCall] = []  # whose owner is done with them, but which the library may still make


class Queue(Protocol):
    """Steps that run one after the other, at some time."""

    key: Hashable  # identifies the queue: a stream, or a stream in a capture
    capturing: bool  # the steps are recorded, and may run many times

    def fork(self) -> None:
        """Let what is queued here next wait for all that the caller has queued.

        A new queue does. Memory that the caller allocated later may be in use until then, by another thread's work.
        """

    def mapped(self, memory: Tensor) -> Tensor:
        """Host memory of `allocate` as a tensor that steps can read and write where it is."""

    def gather(self, target: Tensor, sources: Sequence[Tensor]) -> None:
        """Write the bytes of the sources, one after the other, into mapped memory."""

    def fetched(self, memory: Tensor) -> Tensor:
        """A copy of mapped memory, for steps that read it more than once."""

    def take_rows(self, target: Tensor, source: Tensor, numbers: Tensor) -> None:
        """Write the rows with these numbers into mapped memory."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy from or to mapped memory."""

    def call(self, call: HostCall) -> None: ...

    def allocate(self, size: int) -> Tensor:
        """Bytes in host memory that the queue can copy from and to."""

    def wait(self) -> None:
        """Until all that was queued has run."""

    def join(self) -> None:
        """Let what the caller queues next wait for all that was queued here."""


def use_host_threads(threads: HostThreads) -> None:
    """Compute experts in host memory with these threads from now on. Calls that were captured keep their number."""
    _THREADS[:] = [threads]


def host_threads() -> HostThreads:
    """The threads that compute experts in host memory."""
    if not _THREADS:
        use_host_threads(HostThreads.choose())
    return _THREADS[0]


@dataclass(frozen=True, eq=False)
class MappedCall:
    """A host call and the memory of its rows, as the queue's device sees it."""

    call: HostCall
    given: Tensor
    out: Tensor

    @cached_property
    def x(self) -> Tensor:
        """The first part of what is given."""
        rows = self.call.x
        return self.given[: rows.nbytes].view(rows.dtype).view(rows.shape)


@dataclass(frozen=True, eq=False)
class RowsCall:
    """A call that is prepared before it is known which rows of x it gets."""

    queue: Queue
    mapped: MappedCall
    x: Tensor

    def send(self, rows: CpuRows) -> CpuSums:
        """Queue the call. Its sums are there when the queue has come so far."""
        count, mapped, queue = len(rows.ids), self.mapped, self.queue
        if count > len(mapped.x):  # experts are divided so that this does not happen
            raise LaunchError("the CPU's rows do not fit one call", expected=f"at most {len(mapped.x)}", got=count)
        sums = self.x.new_empty((count, self.x.shape[1]), dtype=torch.float32)
        queue.fork()
        mapped.call.take(rows.ids, rows.weights)
        numbers = None if rows.numbers is None else queue.fetched(rows.numbers)
        if numbers is None:
            queue.copy(mapped.x[:count], self.x)
        else:
            queue.take_rows(mapped.x[:count], self.x, numbers)
        queue.call(mapped.call)
        queue.copy(sums, mapped.out[:count])
        return CpuSums(sums, numbers)

    def computed_us(self) -> float:
        """Microseconds in which the CPU has computed this call so far, whenever it was sent."""
        nanoseconds: int = self.mapped.call.call.nanoseconds
        return nanoseconds / 1e3

    def wait(self) -> None:
        """Until the sums are there. Raises if the CPU has failed."""
        self.queue.wait()
        self.mapped.call.check()


class HostCalls:
    """The host calls of one split layer. They must not be freed while they may still be made."""

    def __init__(self) -> None:
        # By shape, queue, memory, and whether it takes rows of a large batch.
        self.eager: dict[tuple[HostShape, Hashable, int, bool], tuple[list[int], MappedCall]] = {}
        self.captured: list[MappedCall] = []  # a graph does not say when it ends
        self._placed: HostThreads | None = None
        self._queues: dict[Hashable, Queue] = {}  # that eager calls were put into

    def __del__(self) -> None:
        self._wait()

    def queue(self, queue: Queue, host: Executor, expert_map: Tensor, x: Tensor, dispatch: Indexed) -> Tensor:
        """Queue the CPU's part of a call; x, ids and weights are dense. Returns its sums [M, H] in fp32.

        They are there when the queue has come so far, and until the next call.
        """
        if not isinstance(host, CpuExecutor):
            raise UnsupportedProblem(
                "beside a GPU, experts in host memory need the CPU kernels",
                got=f"backend '{host.backend.name}'",
                hint="`lancebill env` says why they are missing",
            )
        self.check()
        given = x, dispatch.ids, dispatch.weights
        if x.shape[0] <= MOST_ROWS:
            return self._step(queue, host, expert_map, given).out
        sums = torch.empty_like(x, dtype=torch.float32)
        queue.fork()
        for pieces in zip(*(tensor.split(MOST_ROWS) for tensor in (*given, sums))):
            queue.copy(pieces[3], self._step(queue, host, expert_map, pieces[:3]).out)
        return sums

    def prepare_rows(self, queue: Queue, host: CpuExecutor, expert_map: Tensor, x: Tensor) -> RowsCall:
        """A call for rows of x that are known later, with ids and weights in host memory."""
        most = min(MOST_ROWS, 1 << (len(x) - 1).bit_length())  # few different numbers: each has a call of its own
        shape = HostShape(most, x.dtype, torch.int32, torch.float32, self._threads(host).count)
        return RowsCall(queue, self._call(queue, host, expert_map, shape, some_rows=True), x)

    def _step(self, queue: Queue, host: CpuExecutor, expert_map: Tensor, given: Sequence[Tensor]) -> MappedCall:
        dtypes = [tensor.dtype for tensor in given]
        shape = HostShape(given[0].shape[0], dtypes[0], dtypes[1], dtypes[2], self._threads(host).count)
        mapped = self._call(queue, host, expert_map, shape)
        queue.gather(mapped.given, given)
        queue.call(mapped.call)
        return mapped

    def check(self) -> None:
        """Raise if a call has failed since the last check."""
        for mapped in self._all():
            try:
                mapped.call.check()
            except LaunchError as error:
                raise error.within("an earlier call of a split layer") from error

    def _call(
        self, queue: Queue, host: CpuExecutor, expert_map: Tensor, shape: HostShape, some_rows: bool = False
    ) -> MappedCall:
        if queue.capturing:
            self.captured.append(self._make(queue, host, expert_map, shape))
            return self.captured[-1]
        addresses, held = [*host.tensors.addresses(), expert_map.data_ptr()], _BUFFERS.get(queue.key)
        found = None if held is None else self.eager.get((shape, queue.key, held.data_ptr(), some_rows))
        if found is not None and found[0] == addresses:
            self._queues[queue.key] = queue
            return found[1]
        if found is not None or len(self.eager) >= MOST_CALLS or self._keep_other_weights(addresses):
            self._wait()
            self.check()
            self.eager.clear()
        self._queues[queue.key] = queue  # only now: waiting forgets the queues
        made = self._make(queue, host, expert_map, shape)
        self.eager[shape, queue.key, made.call.memory.data_ptr(), some_rows] = addresses, made
        return made

    def _keep_other_weights(self, addresses: list[int]) -> bool:
        """Whether calls keep weights in memory that were replaced. The last address is that of a map."""
        return any(held[:-1] != addresses[:-1] for held, _ in list(self.eager.values()))

    def _make(self, queue: Queue, host: CpuExecutor, expert_map: Tensor, shape: HostShape) -> MappedCall:
        call = host.host_call(shape, expert_map, lambda size: _shared(queue, size))
        return MappedCall(call, queue.mapped(call.given), queue.mapped(call.out))

    def _wait(self) -> None:
        """Until no eager call is waiting to be made. Those that a GPU gave up are kept until they were made."""
        for queue in self._queues.values():
            queue.wait()
        self._queues.clear()
        _GIVEN_UP[:] = [made for made in (*_GIVEN_UP, *self._all()) if made.call.may_be_made]

    def _all(self) -> list[MappedCall]:
        return [*(made for _, made in self.eager.values()), *self.captured]

    def _threads(self, host: CpuExecutor) -> HostThreads:
        if self._placed != host_threads():
            self._placed = host_threads()
            host.native.place_threads(self._placed.cpus, self._placed.spin_us)
        return self._placed


def _shared(queue: Queue, size: int) -> Tensor:
    """The buffers of this queue. Larger ones replace them if need be: calls that exist keep theirs."""
    held = _BUFFERS.get(queue.key)
    if held is None or held.numel() < size:
        held = _BUFFERS[queue.key] = queue.allocate(1 << (size - 1).bit_length())
    return held
