"""Per-block numbers of a matrix: applying them to elements, and reducing elements to them.

A level of a spec has one number per block of (rows, columns). These functions broadcast the numbers
over the elements of their blocks instead of materialising repeated copies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from lancebill.errors import WrongShape
from lancebill.numbers.spec import ALL, Block, blocks_along

# Elements of an fp32 temporary: a few megabytes on a CPU, enough to keep a GPU busy.
_CPU_CHUNK, _GPU_CHUNK = 1 << 20, 1 << 24


def row_chunks(n: int, k: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Row ranges small enough that an fp32 copy of one needs little memory."""
    step = max(1, (_CPU_CHUNK if device.type == "cpu" else _GPU_CHUNK) // max(1, k))
    for low in range(0, n, step):
        yield low, min(n, low + step)


def finest(blocks: Iterable[Block]) -> Block:
    """The largest block that tiles all of `blocks`; ALL along an axis that none of them divides."""
    rows, columns = zip((ALL, ALL), *blocks)
    return math.gcd(*rows), math.gcd(*columns)  # ALL is 0, and gcd(0, side) = side


def spread(tensor: Tensor, old: Block, new: Block, n: int, k: int) -> Tensor:
    """One number per `old` block to one per `new` block; each new block must be inside an old one."""
    for axis, size in ((-2, n), (-1, k)):
        if old[axis] == new[axis]:
            continue
        if new[axis] == ALL or (old[axis] != ALL and old[axis] % new[axis]):
            raise WrongShape("blocks can only be refined", expected=f"a divisor of {old[axis]}", got=new[axis])
        start = torch.arange(blocks_along(size, new[axis]), device=tensor.device) * new[axis]
        index = start // old[axis] if old[axis] != ALL else torch.zeros_like(start)
        tensor = tensor.index_select(axis, index)
    return tensor


def expand(tensor: Tensor, block: Block, n: int, k: int) -> Tensor:
    """One number per block to a tensor that broadcasts against [n, k]."""
    return spread(tensor, block, (block[0] and 1, block[1] and 1), n, k)


def rows_of(tensor: Tensor, side: int, low: int, high: int) -> Tensor:
    """The numbers of rows [low, high), for blocks of `side` rows: one row per row, or one row for all."""
    if side == ALL:
        return tensor
    if side == 1:
        return tensor[low:high]
    return tensor.index_select(0, torch.arange(low, high, device=tensor.device) // side)


def block_views(matrix: Tensor, numbers: Tensor, side: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of `matrix` whose last axis is one block of `side` columns, with numbers that broadcast over it.

    One view covers all whole blocks, a second one a partial last block.
    """
    k = matrix.shape[1]
    if side == ALL or side >= k:
        yield matrix, numbers
        return
    whole = k // side * side
    yield matrix[:, :whole].unflatten(1, (-1, side)), numbers[:, : whole // side].unsqueeze(-1)
    if whole < k:
        yield matrix[:, whole:], numbers[:, -1:]


def apply_per_block(
    op: Callable[..., Tensor], matrix: Tensor, numbers: Tensor, side: int, out: Tensor | None = None
) -> Tensor:
    """op(element, number of its block), into `out` (which may be `matrix`) or a new tensor."""
    out = torch.empty_like(matrix) if out is None else out
    for (elements, factors), (target, _) in zip(block_views(matrix, numbers, side), block_views(out, numbers, side)):
        op(elements, factors, out=target)
    return out


def reduce_blocks(op: Callable[..., Tensor], tensor: Tensor, axis: int, side: int) -> Tensor:
    """Reduce each `side` entries along `axis` (the last block may be partial) with `op` (amax, mean ...)."""
    size = tensor.shape[axis]
    if side == 1:
        return tensor
    if side == ALL or side >= size:
        return op(tensor, axis, keepdim=True)
    whole = size // side * side
    reduced = op(tensor.narrow(axis, 0, whole).unflatten(axis, (-1, side)), axis + 1)
    if whole == size:
        return reduced
    return torch.cat([reduced, op(tensor.narrow(axis, whole, size - whole), axis, keepdim=True)], axis)
