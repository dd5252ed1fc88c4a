"""Memory that a thread reads into again and again.

The C library keeps freed blocks of this size. If each read allocated its own buffer, a loaded model would hold one
largest slice per thread in fragmented heap memory.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from lancebill.checkpoint.read.slices import reading_into
from lancebill.checkpoint.read.system_memory import system_memory

_ALIGNED = 256


class Scratch(threading.local):
    """A buffer for each thread that uses it, until it ends. Pages that nothing was read into take no memory."""

    def __init__(self, size: int) -> None:
        self._size, self._used = size, 0
        self._buffer: Tensor | None = None

    @contextmanager
    def used(self) -> Iterator[None]:
        """Inside, what this thread reads from files goes to its buffer, and what does not fit to new memory."""
        self.clear()
        with reading_into(self._allocate):
            yield

    def clear(self) -> None:
        """What was read is no longer needed: the next reads may be written over it."""
        self._used = 0

    def _allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        start, size = self._used, torch.Size(shape).numel() * dtype.itemsize
        if not size or start + size > self._size:
            return torch.empty(shape, dtype=dtype, device="cpu")
        if self._buffer is None:
            self._buffer = system_memory(self._size)
        self._used = -(-(start + size) // _ALIGNED) * _ALIGNED
        return self._buffer[start : start + size].view(dtype).view(tuple(shape))
