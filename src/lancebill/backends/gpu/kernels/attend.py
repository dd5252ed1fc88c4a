"""Attention of one new token to the tokens before it, in three launches instead of about twenty (plain Triton).

`rotate_and_store` normalises the heads of queries and keys, rotates them, and stores keys and values in the cache.
`attend_part` reads the cache: a program has one head of keys, all heads of queries that share it, and one piece of the
columns. `attend_whole` joins the pieces in a fixed order. Numbers are rounded where transformers rounds them.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _normalised(row, scale, weight, NORMED: tl.constexpr):
    """A part of a head, times the weights of its norm."""
    if NORMED:
        kind: tl.constexpr = weight.dtype
        return ((row * scale).to(kind).to(tl.float32) * weight.to(tl.float32)).to(kind).to(tl.float32)
    return row


@triton.jit
def rotate_and_store(q, k, v, q_weight, k_weight, cos, sin, position, rotated, keys, values, q_heads, k_heads,
                     angle_stride, batch_stride, eps, CAPACITY, D: tl.constexpr,
                     NORMED: tl.constexpr):  # fmt: skip
    """One head of one sequence. The first `q_heads` programs of a sequence have queries, then come keys, then values.

    A cache is [batch, heads, CAPACITY, D]; `batch_stride` is that of its first dimension.
    """
    b = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, D)
    other = (d + D // 2) % D  # what a column is rotated with
    place = tl.load(position) * D
    if head >= q_heads + k_heads:
        h = head - q_heads - k_heads
        value = tl.load(v + (b * k_heads + h) * D + d)
        tl.store(values + b * batch_stride + h.to(tl.int64) * CAPACITY * D + place + d, value)
    else:
        is_query = head < q_heads
        if is_query:
            row = q + (b * q_heads + head) * D
            weight = q_weight
        else:
            row = k + (b * k_heads + head - q_heads) * D
            weight = k_weight
        mine, partner = tl.load(row + d).to(tl.float32), tl.load(row + other).to(tl.float32)
        kind: tl.constexpr = rotated.dtype.element_ty
        scale = 1.0
        if NORMED:
            scale = tl.rsqrt(tl.sum(mine * mine, 0) / D + eps)
            mine = _normalised(mine, scale, tl.load(weight + d), NORMED)
            partner = _normalised(partner, scale, tl.load(weight + other), NORMED)
        angle = b * angle_stride + d
        partner = tl.where(d < D // 2, -partner, partner)
        first = (mine * tl.load(cos + angle).to(tl.float32)).to(kind).to(tl.float32)
        second = (partner * tl.load(sin + angle).to(tl.float32)).to(kind).to(tl.float32)
        result = (first + second).to(kind)
        if is_query:
            tl.store(rotated + (b * q_heads + head) * D + d, result)
        else:
            h = head - q_heads
            tl.store(keys + b * batch_stride + h.to(tl.int64) * CAPACITY * D + place + d, result)


@triton.jit
def attend_part(q, keys, values, mask, position, sums, stats, q_heads, k_heads, batch_stride, mask_stride, columns,
                scale, CAPACITY, D: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Columns [piece * columns, (piece + 1) * columns) of one head of keys, as far as there are tokens.

    Stores the weighted sum of values, the largest score and the sum of weights. GROUP: queries of a head, padded.
    """
    b = (tl.program_id(0) // k_heads).to(tl.int64)
    head = tl.program_id(0) % k_heads
    piece = tl.program_id(1)
    group = q_heads // k_heads
    g = tl.arange(0, GROUP)
    d = tl.arange(0, D)
    n = tl.arange(0, BLOCK)
    query = b * q_heads + head * group + g
    query_tile = tl.load(q + query[:, None] * D + d[None, :], mask=(g < group)[:, None], other=0.0)
    start = piece * columns
    end = tl.minimum(start + columns, tl.load(position).to(tl.int32) + 1)
    own = b * batch_stride + head.to(tl.int64) * CAPACITY * D
    largest = tl.full([GROUP], float("-inf"), tl.float32)
    weights = tl.zeros([GROUP], tl.float32)
    total = tl.zeros([GROUP, D], tl.float32)
    for first in range(start, end, BLOCK):
        column = first + n
        seen = column < end
        at = own + column[:, None] * D + d[None, :]
        key = tl.load(keys + at, mask=seen[:, None], other=0.0)
        shown = tl.load(mask + b * mask_stride + column, mask=seen, other=0) != 0
        scores = tl.dot(query_tile, tl.trans(key)) * scale
        scores = tl.where(shown[None, :], scores, float("-inf"))
        above = tl.maximum(largest, tl.max(scores, 1))
        finite = tl.where(above == float("-inf"), 0.0, above)
        shares = tl.exp(scores - finite[:, None])
        kept = tl.exp(largest - finite)
        value = tl.load(values + at, mask=seen[:, None], other=0.0)
        weights = weights * kept + tl.sum(shares, 1)
        total = total * kept[:, None] + tl.dot(shares.to(value.dtype), value)
        largest = above
    place = query * tl.num_programs(1) + piece
    tl.store(sums + place[:, None] * D + d[None, :], total, mask=(g < group)[:, None])
    tl.store(stats + 2 * place, largest, mask=g < group)
    tl.store(stats + 2 * place + 1, weights, mask=g < group)


@triton.jit
def attend_whole(sums, stats, out, pieces, D: tl.constexpr, PIECES: tl.constexpr):
    """One query: its pieces, each by its share of all weights."""
    query = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, D)
    p = tl.arange(0, PIECES)
    place = query * pieces + p
    largest = tl.load(stats + 2 * place, mask=p < pieces, other=float("-inf"))
    weights = tl.load(stats + 2 * place + 1, mask=p < pieces, other=0.0)
    shares = tl.exp(largest - tl.max(largest, 0))
    parts = tl.load(sums + place[:, None] * D + d[None, :], mask=(p < pieces)[:, None], other=0.0)
    total = tl.sum(parts * shares[:, None], 0) / tl.sum(weights * shares, 0)
    tl.store(out + query * D + d, total.to(out.dtype.element_ty))
