"""Numbers that belong to blocks of a matrix, and how they meet its elements.

A level of a spec has one number for each block of (rows, columns). The functions here bring such
numbers to the elements they cover, or gather elements into them, without ever repeating a number
in memory where a broadcast does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from lancebill.errors import WrongShape
from lancebill.numbers.spec import ALL, Block, blocks_along

# Elements of fp32 temporaries at a time: few megabytes on a CPU, enough to keep a GPU busy.
_CPU_CHUNK, _GPU_CHUNK = 1 << 20, 1 << 24


def row_chunks(n: int, k: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Row ranges small enough that fp32 copies of them cost nothing."""
    step = max(1, (_CPU_CHUNK if device.type == "cpu" else _GPU_CHUNK) // max(1, k))
    for low in range(0, n, step):
        yield low, min(n, low + step)


def finest(blocks: Iterable[Block]) -> Block:
    """The largest block that tiles all of `blocks`; ALL where none of them is cut."""
    rows, columns = zip((ALL, ALL), *blocks)
    return math.gcd(*rows), math.gcd(*columns)  # ALL is 0, and gcd(0, side) = side


def spread(tensor: Tensor, old: Block, new: Block, n: int, k: int) -> Tensor:
    """One number per `old` block to one per `new` block, where each new block lies inside an old."""
    for axis, size in ((0, n), (1, k)):
        if old[axis] == new[axis]:
            continue
        if new[axis] == ALL or (old[axis] != ALL and old[axis] % new[axis]):
            raise WrongShape("blocks can only be refined", expected=f"a divisor of {old[axis]}", got=new[axis])
        start = torch.arange(blocks_along(size, new[axis]), device=tensor.device) * new[axis]
        index = start // old[axis] if old[axis] != ALL else torch.zeros_like(start)
        tensor = tensor.index_select(axis, index)
    return tensor


def expand(tensor: Tensor, block: Block, n: int, k: int) -> Tensor:
    """One number per block to what broadcasts against [n, k]."""
    return spread(tensor, block, (block[0] and 1, block[1] and 1), n, k)


def rows_of(tensor: Tensor, side: int, low: int, high: int) -> Tensor:
    """What rows [low, high) see of numbers whose blocks have `side` rows: a row each, or one for all."""
    if side == ALL:
        return tensor
    if side == 1:
        return tensor[low:high]
    return tensor.index_select(0, torch.arange(low, high, device=tensor.device) // side)


def pieces(matrix: Tensor, numbers: Tensor, side: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of `matrix` whose last axis is a block of `side` columns, with numbers that broadcast over them.

    Whole blocks are one view, a partial last block is another.
    """
    k = matrix.shape[1]
    if side == ALL or side >= k:
        yield matrix, numbers
        return
    whole = k // side * side
    yield matrix[:, :whole].unflatten(1, (-1, side)), numbers[:, : whole // side].unsqueeze(-1)
    if whole < k:
        yield matrix[:, whole:], numbers[:, -1:]


def combine(op: Callable[..., Tensor], matrix: Tensor, numbers: Tensor, side: int, out: Tensor | None = None) -> Tensor:
    """op(element, number of its block), into `out` (which may be `matrix`) or a new tensor."""
    out = torch.empty_like(matrix) if out is None else out
    for (elements, own), (target, _) in zip(pieces(matrix, numbers, side), pieces(out, numbers, side)):
        op(elements, own, out=target)
    return out


def gather(op: Callable[..., Tensor], tensor: Tensor, axis: int, side: int) -> Tensor:
    """One number for each `side` entries along `axis` (the last may be fewer), by `op` (amax, mean ...)."""
    size = tensor.shape[axis]
    if side == 1:
        return tensor
    if side == ALL or side >= size:
        return op(tensor, axis, keepdim=True)
    whole = size // side * side
    found = op(tensor.narrow(axis, 0, whole).unflatten(axis, (-1, side)), axis + 1)
    if whole == size:
        return found
    return torch.cat([found, op(tensor.narrow(axis, whole, size - whole), axis, keepdim=True)], axis)
