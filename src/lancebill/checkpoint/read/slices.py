"""Reading a part of a tensor: the bytes it needs, and whole pages where runs lie closer than that."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from lancebill.checkpoint.read.file_bytes import fill
from lancebill.checkpoint.read.tensor_info import TensorInfo
from lancebill.errors import WrongShape
from lancebill.formats.stored import TORCH_DTYPES

PAGE = 4096  # the kernel fetches whole pages: skipping less than one saves nothing
CHUNK = 4 << 20  # bytes of scratch when runs are cut out of a larger read

Index = tuple[int | slice, ...]


def read_slice(descriptor: int, info: TensorInfo, index: Index = ()) -> Tensor:
    """`tensor[index]` as a fresh contiguous tensor. `index` has ints and slices of step one."""
    dtype = TORCH_DTYPES[info.dtype]
    spans, shape = _spans(info, index)
    out = torch.empty(shape, dtype=dtype)
    if out.numel() == 0:
        return out
    offset, counts, strides = _runs(info, spans, dtype.itemsize)
    _read(descriptor, out.view(-1).view(torch.uint8).view(counts), info.start + offset, strides, info.file)
    return out


def _spans(info: TensorInfo, index: Index) -> tuple[list[tuple[int, int]], list[int]]:
    """[start, stop) along every axis, and the shape that is left (an int drops its axis)."""
    axes = (*index, *[slice(None)] * (len(info.shape) - len(index)))
    inside = (0 <= at < size if isinstance(at, int) else at.step in (None, 1) for size, at in zip(info.shape, axes))
    if len(axes) != len(info.shape) or not all(inside):
        where = f"{info.file.name}: {info.name}"
        raise WrongShape("no such part of a tensor", where=where, expected=f"a part of {list(info.shape)}", got=index)
    spans, left = [], []
    for size, at in zip(info.shape, axes):
        if isinstance(at, int):
            spans.append((at, at + 1))
        else:
            start, stop, _ = at.indices(size)
            stop = max(start, stop)
            spans.append((start, stop))
            left.append(stop - start)
    return spans, left


def _runs(info: TensorInfo, spans: list[tuple[int, int]], item: int) -> tuple[int, list[int], list[int]]:
    """Offset of the first byte, and counts and byte strides of nested runs; the last is contiguous.

    Axes inside the innermost cut are taken whole, so they are part of the run.
    """
    inner = [math.prod(info.shape[axis + 1 :]) * item for axis in range(len(spans))]
    offset = sum(start * stride for (start, _), stride in zip(spans, inner))
    cut = [axis for axis, (start, stop) in enumerate(spans) if stop - start != info.shape[axis]]
    last = cut[-1] if cut else 0
    counts = [stop - start for start, stop in spans[:last]]
    run = (spans[last][1] - spans[last][0]) * inner[last] if spans else item
    return offset, [*counts, run], [*inner[:last], 1]


def _read(descriptor: int, out: Tensor, offset: int, strides: list[int], path: Path) -> None:
    """Fill `out` (bytes) whose axes lie `strides` apart in the file.

    Gaps only grow outwards, so once an axis has none worth skipping, neither have those inside it.
    """
    if out.dim() == 1:
        fill(descriptor, out, offset, path)
        return
    step = strides[0]
    reach = 1 + sum((count - 1) * stride for count, stride in zip(out.shape[1:], strides[1:]))
    if len(out) == 1 or step - reach >= PAGE:
        for i in range(len(out)):
            _read(descriptor, out[i], offset + i * step, strides[1:], path)
        return
    rows = max(1, CHUNK // step)
    scratch = torch.empty((min(rows, len(out)) - 1) * step + reach, dtype=torch.uint8)
    for first in range(0, len(out), rows):
        part = out[first : first + rows]
        used = scratch[: (len(part) - 1) * step + reach]
        fill(descriptor, used, offset + first * step, path)
        part.copy_(used.as_strided(part.shape, strides))
