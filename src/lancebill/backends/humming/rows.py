"""What humming-kernels leaves to its caller, in plain Triton: grouping slots by expert, summing rows.

A slot is token * top_k + choice. The slots of an expert get contiguous places in slot order, so equal inputs give equal
places. With `align` > 1 each expert's places start at a multiple of it; the padding places hold `total`, the number of
slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK, CHUNKS, AT_ONCE = 512, 32, 64


@dataclass(frozen=True)
class Grouped:
    """Slots grouped by expert. `slots[place]` and `places[slot]` are inverse; -1 is a slot without a place."""

    slots: Tensor
    places: Tensor  # [M, k] int32
    edges: Tensor  # [E + 1] int32: each expert's first place, and the number of places
    owners: Tensor  # the expert of each block of `align` places


def group_slots(ids: Tensor, experts: int, align: int = 1) -> Grouped:
    """Group local ids [M, k] (int32, -1: no local expert) by expert, without a host synchronisation."""
    total, device = ids.numel(), ids.device
    capacity = -(-(total + min(total, experts) * (align - 1)) // align) * align
    width, chunks = triton.next_power_of_2(experts), -(-total // CHUNK)
    slots, owners, edges, counted = (
        torch.empty(size, dtype=torch.int32, device=device)
        for size in (capacity, capacity // align, experts + 1, chunks * width)
    )
    places = torch.empty_like(ids)
    _count[(chunks,)](ids, counted, total, CHUNK, width, num_warps=4)
    _place[(chunks + 1,)](
        ids, counted, slots, places, edges, owners, total, experts, align, CHUNKS, CHUNK, AT_ONCE, width, num_warps=4
    )
    return Grouped(slots, places, edges, owners)


def weighted_sum(rows: Tensor, places: Tensor, weights: Tensor, out: Tensor, *, in_order: bool) -> Tensor:
    """out[t] = sum over j, in order, of weights[t, j] * rows[places[t, j]], in fp32. Skips places of -1.

    `in_order`: rows are in slot order, and only the sign of `places` matters (ids work too).
    """
    tokens, top_k = places.shape
    hidden = rows.shape[1]
    block = min(triton.next_power_of_2(hidden), 1024 if tokens <= 64 else 4096)
    grid = (tokens, triton.cdiv(hidden, block))
    warps = 4 if block <= 1024 else 8
    _weighted_sum[grid](rows, places, weights, out, hidden, block, top_k, in_order, num_warps=warps)
    return out


@triton.jit
def _count(ids, counted, total, CHUNK: tl.constexpr, E: tl.constexpr):
    """Count each expert's slots in one chunk of slots."""
    b = tl.program_id(0)
    o = b * CHUNK + tl.arange(0, CHUNK)
    v = tl.load(ids + o, mask=o < total, other=-1)
    tl.store(counted + b * E + tl.arange(0, E), tl.histogram(tl.maximum(v, 0), E, mask=v >= 0))


@triton.jit
def _place(
    ids, counted, slots, places, edges, owners, total, experts, align, CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
    P: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Assign places to one chunk of slots from all counts. The last program writes edges, owners and padding."""
    b = tl.program_id(0)
    chunks = tl.num_programs(0) - 1
    e = tl.arange(0, E)
    count = tl.zeros([E], tl.int32)
    earlier = tl.zeros([E], tl.int32)
    for c0 in range(0, chunks, CHUNKS):
        c = c0 + tl.arange(0, CHUNKS)
        h = tl.load(counted + c[:, None] * E + e[None, :], mask=(c < chunks)[:, None], other=0)
        count += tl.sum(h, 0)
        earlier += tl.sum(tl.where((c < b)[:, None], h, 0), 0)
    blocks = (count + align - 1) // align
    first = tl.cumsum(blocks, 0) - blocks
    start = first * align
    if b == chunks:
        tl.store(edges + e, start, mask=e < experts)
        tl.store(edges + experts, tl.sum(blocks, 0) * align)
        for i in range(tl.max(blocks, 0)):
            tl.store(owners + first + i, e, mask=i < blocks)
        for i in range(align - 1):
            tl.store(slots + start + count + i, total, mask=count + i < blocks * align)
    else:
        base = start + earlier
        for s0 in range(b * CHUNK, tl.minimum(b * CHUNK + CHUNK, total), P):
            s, t = s0 + tl.arange(0, P), s0 + tl.arange(0, P)
            mine = tl.load(ids + s, mask=s < total, other=-1)
            other = tl.load(ids + t, mask=t < total, other=-1)
            before = tl.sum(((mine[:, None] == other[None, :]) & (t[None, :] < s[:, None])).to(tl.int32), 1)
            placed = mine >= 0
            place = tl.where(placed, before + tl.gather(base, tl.maximum(mine, 0), 0), -1)
            tl.store(slots + place, s, mask=placed)
            tl.store(places + s, place, mask=s < total)
            base += tl.histogram(tl.maximum(mine, 0), E, mask=placed)


@triton.jit
def _weighted_sum(
    rows, places, weights, out, hidden, BLOCK: tl.constexpr, TOP_K: tl.constexpr, IN_ORDER: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < hidden
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(TOP_K):
        slot = token * TOP_K + choice
        place = tl.load(places + slot).to(tl.int64)
        if IN_ORDER:
            place = tl.where(place >= 0, slot, -1)
        row = tl.load(rows + place * hidden + c, mask=inside & (place >= 0), other=0.0).to(tl.float32)
        total += row * tl.load(weights + slot)
    tl.store(out + token * hidden + c, total.to(out.dtype.element_ty), mask=inside)
