"""Copies from host memory on a stream of their own, beside a GPU's other work."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lancebill.jit import driver
from lancebill.jit.address import address_on
from lancebill.native.address import host_address
from lancebill.split.streamed import BUFFERS

_pinned: dict[int, bool] = {}  # address -> whether copies read the memory in place
_locking = threading.Lock()  # the driver pins pages only once: a second thread would get an error
_LANES: list[CudaLane] = []  # all lanes of this process


class CudaLane:
    """The copy stream of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)
        self._number = self.stream.cuda_stream
        self._reads_locked = driver.reads_locked_pages(device.index or 0)
        self._together, self._each = list[tuple[int, int, int]](), list[tuple[int, int, int]]()  # of the wave now
        self._filled = [torch.cuda.Event() for _ in range(BUFFERS)]
        self._released = [torch.cuda.Event() for _ in range(BUFFERS)]
        self._one_at_a_time, self._ended = threading.Lock(), torch.cuda.Event()
        _LANES.append(self)

    @contextmanager
    def batch(self) -> Iterator[None]:
        """The buffers belong to one batch: one of another stream must have ended before."""
        with self._one_at_a_time:
            self._ended.synchronize()  # so no buffer is read any more
            try:
                yield
            finally:
                self._ended.record(torch.cuda.current_stream(self.device))

    def copy(self, target: Tensor, place: int, source: Tensor, first: int, count: int) -> None:
        """By addresses: slices of tensors would take the host longer than the copy."""
        row, address = source.stride(0) * source.element_size(), host_address(source)
        pieces = self._together if self._reads_locked and _pinned.get(address) else self._each
        pieces.append((address_on(target, self.device) + place * row, address + first * row, count * row))

    def begin(self, buffer: int) -> None:
        self._together.clear()
        self._each.clear()
        self.stream.wait_event(self._released[buffer])

    def filled(self, buffer: int) -> None:
        driver.copy_together(self._together, self._number)
        driver.copy_each(self._each, self._number)
        self._filled[buffer].record(self.stream)

    def use(self, buffer: int) -> None:
        torch.cuda.current_stream(self.device).wait_event(self._filled[buffer])

    def release(self, buffer: int) -> None:
        self._released[buffer].record(torch.cuda.current_stream(self.device))


def pin_in_place(tensor: Tensor) -> bool:
    """Let a GPU copy from this memory directly. False: it cannot, and copies go through buffers of the driver."""
    address, size = host_address(tensor), tensor.nbytes
    if size == 0:
        return True
    if address not in _pinned:
        with _locking:
            _pin(tensor, address, size)
    return _pinned[address]


def _pin(tensor: Tensor, address: int, size: int) -> None:
    if address in _pinned:  # by another thread, meanwhile
        return
    is_pinned = tensor.is_pinned()
    locks = not is_pinned and driver.pin(address, size)
    _pinned[address] = is_pinned or locks
    # The memory, because a parameter outlives it if it gets other data.
    weakref.finalize(tensor.untyped_storage(), _forget, address, locks).atexit = False


def _forget(address: int, locked: bool) -> None:
    """Right before the memory is freed. Copies may be pending; and perhaps another thread captures a graph."""
    del _pinned[address]
    with driver.uncaptured():
        for lane in _LANES:
            lane.stream.synchronize()
        if locked:
            driver.unpin(address)
