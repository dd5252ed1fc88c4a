"""Scratch memory and counters of a call: who owns them, and how long they live.

Eager calls on one stream run one after the other, so all layers share one workspace for each device and stream.

A captured call allocates its scratch memory with `torch.empty`, which takes it from the capture's own pool, and frees
it when its launches are recorded. That is enough: the pool keeps the addresses valid as long as the graph, gives them
only to later allocations of the same stream and capture, which run after this call in every replay, and to graphs that
share the pool, which may not be replayed at the same time anyway. So layers share memory, two graphs with pools of
their own can be replayed at once, and no tensor of ours lives in a pool whose owner counts the tensors in it.

Counters must be zero before a graph's first replay; the kernels reset them to zero after use. Memory that is freed
would not stay zero, and a memset in the graph would cost time in every replay. So each capture gets counters of its own
(parallel branches too: a key is a capture and a stream), allocated and zeroed outside of it. The layers that were
captured keep them alive.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Lock
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from lancebill.backends.limited_dict import LimitedDict
from lancebill.jit import driver

_ALIGN = 256
_MOST_CAPTURES = 64  # at the same time
FIRST, SECOND, COUNTERS = 0, 1 << 15, 1 << 16  # counters of the first GEMM's tiles and of the second's
Sizes = dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class Workspace:
    """Memory for one call at a time."""

    memory: Tensor  # bytes
    counters: Tensor | None  # int32, all zero between calls; None for a captured call that counts nothing
    owned: bool = True  # by someone else than the call: programs bound to it may keep it
    lock: Lock = field(default_factory=Lock)  # held while a call queues its launches, which must not mix
    # By capture, of reserved memory: the stream whose calls use it. Branches of a graph run at the same time.
    branches: LimitedDict[int, int] = field(default_factory=lambda: LimitedDict(_MOST_CAPTURES))

    @property
    def addresses(self) -> list[int]:
        return [self.memory.data_ptr(), 0 if self.counters is None else self.counters.data_ptr()]

    def serves(self, stream: int) -> bool:
        """Whether calls of this stream may use reserved memory in the capture under way: those of the first one."""
        capture = driver.capture_id(stream)
        if capture not in self.branches:
            self.branches[capture] = stream
        return self.branches[capture] == stream


class Workspaces:
    """The workspaces of eager calls, by device and stream, and the counters of captures."""

    def __init__(self) -> None:
        self.eager: dict[tuple[int, int], Workspace] = {}
        self.counters: WeakValueDictionary[tuple[int, int, int], Tensor] = WeakValueDictionary()

    def of_stream(self, device: torch.device, stream: int, size: int) -> Workspace:
        """For eager calls. One that was outgrown lives until each layer's next call on this stream, which drops the
        programs that are bound to it; those of other streams and devices stay."""
        key = (device.index or 0, stream)
        held = self.eager.get(key)
        if held is None or held.memory.numel() < size:
            if held is not None:  # by half at least: it is made seldom, and all programs are bound again
                size = max(size, held.memory.numel() * 3 // 2)
            memory = outside_pools(device, stream, lambda: torch.empty(size, dtype=torch.uint8, device=device))
            if held is None:
                held = Workspace(memory, outside_pools(device, stream, lambda: _zeros(device)))
            else:
                held = Workspace(memory, held.counters, lock=held.lock)
            self.eager[key] = held
        return held

    def of_capture(self, device: torch.device, stream: int, size: int, *, counting: bool) -> Workspace:
        """For one call that is being captured. The caller keeps the counters alive as long as the graph."""
        counters = self._counters(device, stream) if counting else None
        return Workspace(torch.empty(size, dtype=torch.uint8, device=device), counters, owned=False)

    def _counters(self, device: torch.device, stream: int) -> Tensor:
        key = driver.capture_id(stream), device.index or 0, stream
        found = self.counters.get(key)
        if found is None:
            found = self.counters[key] = outside_pools(device, None, lambda: _zeros(device))
        return found


WORKSPACES = Workspaces()


def reserve_workspace(device: torch.device, size: int) -> Workspace:
    """A workspace that belongs to the caller."""
    memory = outside_pools(device, None, lambda: torch.empty(size, dtype=torch.uint8, device=device))
    return Workspace(memory, outside_pools(device, None, lambda: _zeros(device)))


def outside_pools(device: torch.device, stream: int | None, make: Callable[[], Tensor]) -> Tensor:
    """A tensor outside of the memory pools of captures and of torch.compile's CUDA graphs, which warm up in theirs.

    Those pools take the allocations of a stream or of a thread. So it is made by another thread, on `stream` or, with
    None, on a stream of our own; then we wait until it is written. We never wait for a stream of the caller.
    """
    if device.type != "cuda":
        return make()

    def work() -> Tensor:
        driver.use_context(device.index or 0)  # a new thread has none
        with driver.uncaptured(), torch.cuda.device(device):
            handle = driver.own_stream(device.index or 0) if stream is None else stream
            # Not `ExternalStream`: of handle 0, the default stream, it makes another stream of torch's.
            side = torch.cuda.get_stream_from_external(handle, device)
            with torch.cuda.stream(side):
                made = make()
            if stream is None:
                side.synchronize()
            return made

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()


def _zeros(device: torch.device) -> Tensor:
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


def pieces(sizes: Sizes) -> tuple[dict[str, int], int]:
    """Offsets of named tensors in one buffer, and its size."""
    offsets, at = {}, 0
    for name, (shape, dtype) in sizes.items():
        offsets[name] = at
        count = dtype.itemsize
        for side in shape:
            count *= side
        at += -(-count // _ALIGN) * _ALIGN
    return offsets, at


def views(held: Tensor, sizes: Sizes) -> dict[str, Tensor]:
    """The named tensors inside a buffer."""
    offsets, _ = pieces(sizes)
    out = {}
    for name, (shape, dtype) in sizes.items():
        count = dtype.itemsize
        for side in shape:
            count *= side
        out[name] = held[offsets[name] : offsets[name] + count].view(dtype).view(shape)
    return out
