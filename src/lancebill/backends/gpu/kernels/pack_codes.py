"""Moves codes from rows, as checkpoints store them, straight into fragment order. One read and one write of the codes.

`fragment_order.pack_codes` defines the order; this kernel follows the table of moves that is derived from the same bit
positions. A program packs one unit and one slice: 256 threads of fragments, two halves of 128. Each thread gathers the
bytes of its two rows, r and r + 8, and writes its words four at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def _byte_count(moves, word):
    return len(moves[word])


@triton.constexpr_function
def _n3(moves, word, i):
    return moves[word][i][0]


@triton.constexpr_function
def _byte(moves, word, i):
    return moves[word][i][1]


@triton.constexpr_function
def _part_count(moves, word, i):
    return len(moves[word][i][2])


@triton.constexpr_function
def _mask(moves, word, i, j):
    return moves[word][i][2][j][0]


@triton.constexpr_function
def _left(moves, word, i, j):
    return max(moves[word][i][2][j][1], 0)


@triton.constexpr_function
def _right(moves, word, i, j):
    return max(-moves[word][i][2][j][1], 0)


@triton.jit
def _gather_word(low, high, low_valid, high_valid, first, row_bytes, MOVES: tl.constexpr, WORD: tl.constexpr):
    """One word of each thread. `low`, `high`: its rows r and r + 8; `first`: the thread's first byte in the row.

    Each byte of a row has parts: the bits under a mask, and how far they move.
    """
    word = tl.zeros([256], tl.int32)
    for i in tl.static_range(_byte_count(MOVES, WORD)):
        at = first + _byte(MOVES, WORD, i)
        if _n3(MOVES, WORD, i) == 0:
            byte = tl.load(low + at, mask=low_valid & (at < row_bytes), other=0).to(tl.int32)
        else:
            byte = tl.load(high + at, mask=high_valid & (at < row_bytes), other=0).to(tl.int32)
        for j in tl.static_range(_part_count(MOVES, WORD, i)):
            word |= ((byte & _mask(MOVES, WORD, i, j)) << _left(MOVES, WORD, i, j)) >> _right(MOVES, WORD, i, j)
    return word


@triton.jit
def pack_codes(
    codes, out, rows, row_bytes, units, slices, GATED: tl.constexpr, SLICE_BYTES: tl.constexpr,
    LANE_BYTES: tl.constexpr, WORDS: tl.constexpr, MOVES: tl.constexpr,
):  # fmt: skip
    """Codes [experts, rows, row_bytes], dense, to words; `units` and `slices` of one expert, padding included."""
    place = tl.program_id(0)
    piece = place % slices
    unit = place // slices % units
    expert = (place // slices // units).to(tl.int64)
    t = tl.arange(0, 256)
    half, thread = t // 128, t % 128
    row = thread // 32 * 16 + thread // 4 % 8  # n5 n4, n2 n1 n0
    if GATED:
        inside, end = unit * 64 + row, rows // 2
        start = half * end
    else:
        inside, end = unit * 128 + half * 64 + row, rows
        start = half * 0
    low = codes + (expert * rows + start + inside) * row_bytes
    high = low + 8 * row_bytes.to(tl.int64)
    first = piece * SLICE_BYTES + thread % 4 * LANE_BYTES
    low_valid, high_valid = inside < end, inside + 8 < end
    if WORDS < 4:  # two words of each slice, then the third of each slice, which is next to that of the other half
        two = out + (place - piece).to(tl.int64) * (256 * WORDS) + piece * 512 + half * 256 + thread * 2
        w0 = _gather_word(low, high, low_valid, high_valid, first, row_bytes, MOVES, 0)
        w1 = _gather_word(low, high, low_valid, high_valid, first, row_bytes, MOVES, 1)
        tl.store(two[:, None] + tl.arange(0, 2)[None, :], tl.join(w0, w1))
        if WORDS == 3:
            third = out + (place - piece).to(tl.int64) * 768 + slices * 512 + piece * 256 + thread * 2 + half
            tl.store(third, _gather_word(low, high, low_valid, high_valid, first, row_bytes, MOVES, 2))
    words = out + place.to(tl.int64) * (256 * WORDS) + half * (128 * WORDS) + thread * 4
    for four in tl.static_range(WORDS // 4):
        w0 = _gather_word(low, high, low_valid, high_valid, first, row_bytes, MOVES, 4 * four)
        w1 = _gather_word(low, high, low_valid, high_valid, first, row_bytes, MOVES, 4 * four + 1)
        w2 = _gather_word(low, high, low_valid, high_valid, first, row_bytes, MOVES, 4 * four + 2)
        w3 = _gather_word(low, high, low_valid, high_valid, first, row_bytes, MOVES, 4 * four + 3)
        joined = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(256, 4)  # [thread, w0 w1 w2 w3]
        tl.store(words[:, None] + four * 512 + tl.arange(0, 4)[None, :], joined)
