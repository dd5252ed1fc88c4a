"""Large batches of split layers with the CPU in the place of the device."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from lancebill.backends.cpu import native
from lancebill.backends.cpu.host_call import HostCall
from lancebill.split import batch_maps, large_batches, streamed
from lancebill.split.ways import Rates

RATES = Rates(copy_gbs=50, cpu_gbs=150, cpu_gflops=5000, pack_gbs=200)
needs_kernels = pytest.mark.skipif(native.library() is None, reason="the CPU kernels are not built")


class OrderedLane:
    """Copies at once, and knows which buffers may be filled and read."""

    def __init__(self) -> None:
        self.busy: set[int] = set()
        self.ready: set[int] = set()
        self.copied = 0
        self.lock = threading.Lock()

    @contextmanager
    def batch(self) -> Iterator[None]:
        with self.lock:
            self.busy.clear()  # by work of the last batch, which has ended
            yield

    def copy(self, target: Tensor, place: int, source: Tensor, first: int, count: int) -> None:
        rows = source[first : first + count]
        self.copied += rows.nbytes
        target[place : place + count].copy_(rows)

    def begin(self, buffer: int) -> None:
        assert buffer not in self.busy, "the buffer is still read"
        self.ready.discard(buffer)

    def filled(self, buffer: int) -> None:
        self.ready.add(buffer)
        self.busy.add(buffer)

    def use(self, buffer: int) -> None:
        assert buffer in self.ready

    def release(self, buffer: int) -> None:
        self.busy.discard(buffer)


class InstantQueue:
    """Makes each step at once."""

    capturing = False

    def __init__(self, device: torch.device) -> None:
        self.key = "instant"

    def fork(self) -> None:
        pass

    def mapped(self, memory: Tensor) -> Tensor:
        return memory

    def gather(self, target: Tensor, sources: Sequence[Tensor]) -> None:
        target.copy_(torch.cat([source.reshape(-1).view(torch.uint8) for source in sources]))

    def fetched(self, memory: Tensor) -> Tensor:
        return memory.clone()

    def take_rows(self, target: Tensor, source: Tensor, numbers: Tensor) -> None:
        torch.index_select(source, 0, numbers, out=target)

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def call(self, call: HostCall) -> None:
        call.run()

    def allocate(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.uint8)

    def wait(self) -> None:
        pass

    def join(self) -> None:
        pass

    def mark(self) -> InstantQueue:
        return self

    def synchronize(self) -> None:
        pass


def without_gpu(monkeypatch: pytest.MonkeyPatch, lane: OrderedLane, rates: Rates) -> None:
    """The CPU in the place of the device, and one expert in a wave."""
    for name, value in {
        "SideStream": InstantQueue, "lane_of": lambda device: lane,
        "pin_in_place": lambda tensor: True, "measure_rates": lambda *given: rates, "_RATES": {}, "_STAGES": {},
    }.items():  # fmt: skip
        monkeypatch.setattr(large_batches, name, value)
    monkeypatch.setattr(batch_maps, "MailboxQueue", InstantQueue)
    monkeypatch.setattr(streamed, "WAVE_BYTES", 1)
