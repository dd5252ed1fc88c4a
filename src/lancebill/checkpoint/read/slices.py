"""Read a slice of a tensor: only the bytes it needs, except that gaps smaller than a page are read through."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from lancebill.checkpoint.read.file_bytes import read_exactly
from lancebill.checkpoint.read.tensor_info import TensorInfo
from lancebill.errors import WrongShape
from lancebill.formats.stored import TORCH_DTYPES

PAGE = 4096  # the kernel reads whole pages: skipping a smaller gap saves nothing
CHUNK = 4 << 20  # bytes of scratch for a read that includes gaps

Index = tuple[int | slice, ...]
Allocate = Callable[[Sequence[int], torch.dtype], Tensor]  # a contiguous tensor
Reader = Callable[[str, Index], Tensor]  # (tensor name, index) -> tensor[index]; `Checkpoint.read` is one


def _new_tensor(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cpu")


class _Memory(threading.local):
    """Where this thread's reads go."""

    allocate: Allocate = staticmethod(_new_tensor)


_memory = _Memory()


@contextmanager
def reading_into(allocate: Allocate) -> Iterator[Allocate]:
    """Inside, what this thread reads from files goes to memory of `allocate`. Yields where it went before."""
    before, _memory.allocate = _memory.allocate, allocate
    try:
        yield before
    finally:
        _memory.allocate = before


def read_slice(descriptor: int, info: TensorInfo, index: Index = ()) -> Tensor:
    """`tensor[index]` as a new contiguous tensor. `index` holds ints and slices of step one."""
    dtype = TORCH_DTYPES[info.dtype]
    if not index:  # most reads of a load
        whole = _memory.allocate(info.shape, dtype)
        read_exactly(descriptor, whole, info.start, info.file)
        return whole
    spans, shape = _spans(info, index)
    out = _memory.allocate(shape, dtype)
    if out.numel() == 0:
        return out
    offset, counts, strides = _runs(info, spans, dtype.itemsize)
    if len(counts) == 1:
        read_exactly(descriptor, out, info.start + offset, info.file)
    else:
        _read(descriptor, out.view(-1).view(torch.uint8).view(counts), info.start + offset, strides, info.file)
    return out


def _spans(info: TensorInfo, index: Index) -> tuple[list[tuple[int, int]], list[int]]:
    """[start, stop) along every axis, and the resulting shape (an int drops its axis)."""
    axes = (*index, *[slice(None)] * (len(info.shape) - len(index)))
    inside = (0 <= at < size if isinstance(at, int) else at.step in (None, 1) for size, at in zip(info.shape, axes))
    if len(axes) != len(info.shape) or not all(inside):
        where = f"{info.file.name}: {info.name}"
        raise WrongShape(
            "the index does not fit the tensor", where=where, expected=f"a slice of shape {list(info.shape)}", got=index
        )
    spans, shape = [], []
    for size, at in zip(info.shape, axes):
        if isinstance(at, int):
            spans.append((at, at + 1))
        else:
            start, stop, _ = at.indices(size)
            stop = max(start, stop)
            spans.append((start, stop))
            shape.append(stop - start)
    return spans, shape


def _runs(info: TensorInfo, spans: list[tuple[int, int]], item: int) -> tuple[int, list[int], list[int]]:
    """Offset of the first byte, then the counts and byte strides of nested runs; the last run is contiguous.

    Axes inside the innermost sliced axis are read whole, so they belong to the contiguous run.
    """
    inner = [math.prod(info.shape[axis + 1 :]) * item for axis in range(len(spans))]
    offset = sum(start * stride for (start, _), stride in zip(spans, inner))
    sliced = [axis for axis, (start, stop) in enumerate(spans) if stop - start != info.shape[axis]]
    last = sliced[-1] if sliced else 0
    counts = [stop - start for start, stop in spans[:last]]
    run = (spans[last][1] - spans[last][0]) * inner[last] if spans else item
    return offset, [*counts, run], [*inner[:last], 1]


def _read(descriptor: int, out: Tensor, offset: int, strides: list[int], path: Path) -> None:
    """Fill `out` (bytes), whose axes have these byte strides in the file.

    Outer axes have the larger gaps. So when the gap of an axis is too small to skip, those inside it are too.
    """
    if out.dim() == 1:
        read_exactly(descriptor, out, offset, path)
        return
    step = strides[0]
    reach = 1 + sum((count - 1) * stride for count, stride in zip(out.shape[1:], strides[1:]))
    if len(out) == 1 or step - reach >= PAGE:
        for i in range(len(out)):
            _read(descriptor, out[i], offset + i * step, strides[1:], path)
        return
    rows = max(1, CHUNK // step)
    scratch = torch.empty((min(rows, len(out)) - 1) * step + reach, dtype=torch.uint8, device="cpu")
    for first in range(0, len(out), rows):
        part = out[first : first + rows]
        used = scratch[: (len(part) - 1) * step + reach]
        read_exactly(descriptor, used, offset + first * step, path)
        part.copy_(used.as_strided(part.shape, strides))
