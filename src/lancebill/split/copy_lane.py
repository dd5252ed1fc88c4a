"""Copies from host memory on a stream of their own, beside a GPU's other work."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lancebill.jit import driver
from lancebill.split.streamed import BUFFERS

_pinned: dict[int, bool] = {}  # by address, whether copies read the memory in place


class CudaLane:
    """The copy stream of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)
        self._number = self.stream.cuda_stream
        self._pieces: list[tuple[int, int, int]] = []  # of the wave that is being queued
        self._filled = [torch.cuda.Event() for _ in range(BUFFERS)]
        self._released = [torch.cuda.Event() for _ in range(BUFFERS)]
        self._one_at_a_time, self._ended = threading.Lock(), torch.cuda.Event()

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
        row = source.stride(0) * source.element_size()
        self._pieces.append((target.data_ptr() + place * row, source.data_ptr() + first * row, count * row))

    def begin(self, buffer: int) -> None:
        self._pieces.clear()
        self.stream.wait_event(self._released[buffer])

    def filled(self, buffer: int) -> None:
        driver.copy_together(self._pieces, self._number)
        self._filled[buffer].record(self.stream)

    def use(self, buffer: int) -> None:
        torch.cuda.current_stream(self.device).wait_event(self._filled[buffer])

    def release(self, buffer: int) -> None:
        self._released[buffer].record(torch.cuda.current_stream(self.device))


def pin_in_place(tensor: Tensor) -> bool:
    """Let a GPU copy from this memory directly. False: it cannot, and copies go through buffers of the driver."""
    address, size = tensor.data_ptr(), tensor.nbytes
    if size == 0:
        return True
    if address not in _pinned:
        _pinned[address] = tensor.is_pinned()
        if not _pinned[address]:
            _pinned[address] = driver.pin(address, size)
            weakref.finalize(tensor, _unpin, address).atexit = False
    return _pinned[address]


def _unpin(address: int) -> None:
    if _pinned.pop(address):
        driver.unpin(address)
