"""Memory that comes from the system and goes back to it as a whole.

The C library keeps much freed memory, especially if one thread allocates it and another frees it, and after a large
free it serves large requests from its heaps. This memory bypasses the C library.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

LEAST = 1 << 20  # bytes; whole pages of smaller tensors would be wasted


def system_memory(size: int) -> Tensor:
    """Bytes, zero at first. Pages that are not written take no memory; they are huge ones, if the system has them, as
    many small ones would take longer to get than the heap's, which are there already."""
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def large_from_system(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A new tensor; if it is large, in memory of its own."""
    size = torch.Size(shape).numel() * dtype.itemsize
    if size < LEAST:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return system_memory(size).view(dtype).view(tuple(shape))
