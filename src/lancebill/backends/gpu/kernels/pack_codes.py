"""Moves codes from rows, as checkpoints store them, straight into fragment order. One read and one write of the codes.

`fragment_order.pack_codes` defines the order; this kernel follows the table of moves that is derived from the same bit
positions. Codes are read in 32-bit words, at any strides: rows may lie one after the other, alternate between gate and
up, or be the columns of a transposed matrix. Four lanes need parts of the same words of a row. Each takes its part of
every word first; the moves then say where its bits go. READ is

    vectors    four words of a row at once, where they are neighbours
    words      one word of a row at a time
    columns    words of eight rows of a column: even rows in the low half, odd rows in the high half (AWQ)

A program packs some slices of one unit: 256 threads of fragments, two halves of 128. Each thread has two rows, r and
r + 8, and writes its words four at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def _count(moves, word):
    return len(moves[word])


@triton.constexpr_function
def _high_row(moves, word, i):
    return moves[word][i][0] == 1


@triton.constexpr_function
def _source(moves, word, i):
    return moves[word][i][1]


@triton.constexpr_function
def _mask(moves, word, i):
    return moves[word][i][2]


@triton.constexpr_function
def _left(moves, word, i):
    return max(moves[word][i][3], 0)


@triton.constexpr_function
def _right(moves, word, i):
    return max(-moves[word][i][3], 0)


@triton.jit
def _gather_word(low, high, MOVES: tl.constexpr, WORD: tl.constexpr):
    """One packed word of each thread, from the parts of its rows' words."""
    word = tl.zeros([256], tl.uint32)
    for i in tl.static_range(_count(MOVES, WORD)):
        if _high_row(MOVES, WORD, i):
            bits = high[_source(MOVES, WORD, i)] & _mask(MOVES, WORD, i)
        else:
            bits = low[_source(MOVES, WORD, i)] & _mask(MOVES, WORD, i)
        word |= (bits << _left(MOVES, WORD, i)) >> _right(MOVES, WORD, i)
    return word.to(tl.int32, bitcast=True)


@triton.jit
def _four_words(row, first, valid, row_words):
    """Four neighbouring words of each thread's row, in one read of 16 bytes."""
    at = tl.multiple_of(row + first, 16)[:, None] + tl.arange(0, 4)[None, :]
    words = tl.load(at, mask=(valid & (first < row_words))[:, None], other=0).to(tl.uint32, bitcast=True)
    even, odd = tl.split(words.reshape(256, 2, 2))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return w0, w1, w2, w3


@triton.jit
def _one_word(row, word, word_stride, valid, row_words):
    at = row + word.to(tl.int64) * word_stride
    return tl.load(at, mask=valid & (word < row_words), other=0).to(tl.uint32, bitcast=True)


@triton.jit
def _column_codes(row, column, nibble, stride, valid, columns, COUNT: tl.constexpr):
    """4-bit codes of neighbouring columns as a word; `nibble`: how far to the left each row's code is."""
    word = tl.zeros([256], tl.uint32)
    for j in tl.static_range(COUNT):
        word |= ((_one_word(row, column + j, stride, valid, columns) >> nibble) & 15) << (4 * j)
    return word


@triton.jit
def _row_parts(
    row, valid, first, lane, nibble, word_stride, row_words, BITS: tl.constexpr, BYTE_INPUTS: tl.constexpr,
    READ: tl.constexpr,
):  # fmt: skip
    """What each thread needs of a slice of its row: four or eight words, with its own codes in the lowest bits."""
    VECTORS: tl.constexpr = READ == "vectors"
    parts = ()
    if READ == "columns":
        if BYTE_INPUTS:
            for i in tl.static_range(4):
                column = (first + lane * 4 + i) * 8
                parts = parts + (_column_codes(row, column, nibble, word_stride, valid, row_words, 8),)
        else:
            for i in tl.static_range(8):
                column = (first + i) * 8 + lane * 2
                parts = parts + (_column_codes(row, column, nibble, word_stride, valid, row_words, 2),)
    elif BYTE_INPUTS:  # 32 neighbouring columns of a lane
        if VECTORS:
            for i in tl.static_range(BITS // 4):
                w0, w1, w2, w3 = _four_words(row, first + lane * BITS + 4 * i, valid, row_words)
                parts = parts + (w0, w1, w2, w3)
        else:
            for i in tl.static_range(BITS):
                parts = parts + (_one_word(row, first + lane * BITS + i, word_stride, valid, row_words),)
    elif BITS == 4:  # a byte of each word, which has eight columns
        right = (lane * 8).to(tl.uint32)
        if VECTORS:
            for i in tl.static_range(2):
                w0, w1, w2, w3 = _four_words(row, first + 4 * i, valid, row_words)
                parts = parts + (w0 >> right, w1 >> right, w2 >> right, w3 >> right)
        else:
            for i in tl.static_range(8):
                parts = parts + (_one_word(row, first + i, word_stride, valid, row_words) >> right,)
    else:  # half a word of every two, which have four columns each
        right = (lane % 2 * 16).to(tl.uint32)
        if VECTORS:
            for i in tl.static_range(4):
                w0, w1, w2, w3 = _four_words(row, first + 4 * i, valid, row_words)
                parts = parts + (tl.where(lane < 2, w0, w1) >> right, tl.where(lane < 2, w2, w3) >> right)
        else:
            for i in tl.static_range(8):
                word = first + lane // 2 + 2 * i
                parts = parts + (_one_word(row, word, word_stride, valid, row_words) >> right,)
    return parts


@triton.jit
def pack_codes(
    codes, places, out, rows, row_words, expert_stride, part_stride, row_stride, word_stride, units, slices, apart,
    GATED: tl.constexpr, BITS: tl.constexpr, BYTE_INPUTS: tl.constexpr, SLICES: tl.constexpr, READ: tl.constexpr,
    WORDS: tl.constexpr, MOVES: tl.constexpr,
):  # fmt: skip
    """Words [experts, parts, rows, row_words] at any strides to packed words; `columns`: [experts, parts, rows / 8, K].

    Gated matrices have two parts, gate and up. `rows` of a part; `units` and `slices` of one expert, padding included.
    Parts that are `apart` have strides of 0, and their distance from `codes` in `places`, int64 [experts, parts].
    """
    runs = tl.cdiv(slices, SLICES)
    unit = tl.program_id(0) // runs
    expert = (unit // units).to(tl.int64)
    t = tl.arange(0, 256)
    half, thread = t // 128, t % 128
    lane = thread % 4
    row = thread // 32 * 16 + thread // 4 % 8  # n5 n4, n2 n1 n0
    if GATED:
        inside, part, every = unit % units * 64 + row, half, expert * 2
    else:
        inside, part, every = unit % units * 128 + half * 64 + row, half * 0, expert
    place = tl.load(places + every + part, mask=(part >= 0) & (apart != 0), other=0)
    source = codes + expert * expert_stride + part.to(tl.int64) * part_stride + place
    among_eight = row % 8
    nibble = (among_eight // 2 * 4 + among_eight % 2 * 16).to(tl.uint32)
    if READ == "columns":
        low_row = source + (inside // 8).to(tl.int64) * row_stride
        high_row = low_row + row_stride.to(tl.int64)
    else:
        low_row = source + inside.to(tl.int64) * row_stride
        high_row = low_row + 8 * row_stride.to(tl.int64)
    own = out + unit.to(tl.int64) * slices * (256 * WORDS)
    start = tl.program_id(0) % runs * SLICES
    for piece in range(start, tl.minimum(start + SLICES, slices)):
        first = piece * (4 * BITS if BYTE_INPUTS else 2 * BITS)
        low = _row_parts(low_row, inside < rows, first, lane, nibble, word_stride, row_words, BITS, BYTE_INPUTS, READ)
        high = _row_parts(
            high_row, inside + 8 < rows, first, lane, nibble, word_stride, row_words, BITS, BYTE_INPUTS, READ
        )
        if WORDS < 4:  # two words of each slice, then the third of each slice, which is next to that of the other half
            two = own + piece * 512 + half * 256 + thread * 2
            pair = tl.join(_gather_word(low, high, MOVES, 0), _gather_word(low, high, MOVES, 1))
            tl.store(two[:, None] + tl.arange(0, 2)[None, :], pair)
            if WORDS == 3:
                third = own + slices * 512 + piece * 256 + thread * 2 + half
                tl.store(third, _gather_word(low, high, MOVES, 2))
        words = own + piece * (256 * WORDS) + half * (128 * WORDS) + thread * 4
        for four in tl.static_range(WORDS // 4):
            w0, w1 = _gather_word(low, high, MOVES, 4 * four), _gather_word(low, high, MOVES, 4 * four + 1)
            w2, w3 = _gather_word(low, high, MOVES, 4 * four + 2), _gather_word(low, high, MOVES, 4 * four + 3)
            joined = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(256, 4)  # [thread, w0 w1 w2 w3]
            tl.store(words[:, None] + four * 512 + tl.arange(0, 4)[None, :], joined)
