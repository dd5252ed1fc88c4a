"""Brings 4-bit codes from the order of the CPU kernels back into rows, on a GPU: one read and one write.

A strip is two blocks of 16 rows. Its words lie [k / 4, 16 rows]: four columns of a row of the first block in the low
nibbles of the bytes, and of the second block in the high ones. `layout._unpack_nibbles` defines the same in torch.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _four_columns(nibbles):
    """The low nibbles of four bytes in the low half of a word."""
    pairs = (nibbles | (nibbles >> 4)) & 0x00FF00FF
    return (pairs | (pairs >> 8)) & 0xFFFF


@triton.jit
def unpack_nibbles(
    codes, out, strips, strip_words, rows, part_rows, row_words, GATED: tl.constexpr, WORDS: tl.constexpr
):  # fmt: skip
    """Strips of all experts to words of eight columns, [experts, rows, row_words].

    The blocks of a strip are 16 rows of gate and the same of up, which begin at `part_rows`, or 32 rows that follow
    each other. A program takes WORDS words of each row of a strip.
    """
    runs = tl.cdiv(row_words, WORDS)
    strip = (tl.program_id(0) // runs).to(tl.int64)
    expert, inside = strip // strips, (strip % strips).to(tl.int32)
    row = tl.arange(0, 16)
    word = tl.program_id(0) % runs * WORDS + tl.arange(0, WORDS)
    exists = (word < row_words)[:, None]
    at = codes + strip * strip_words + word[:, None] * 32 + row[None, :]
    even = tl.load(at, mask=exists, other=0).to(tl.uint32, bitcast=True)
    odd = tl.load(at + 16, mask=exists, other=0).to(tl.uint32, bitcast=True)
    low = _four_columns(even & 0x0F0F0F0F) | (_four_columns(odd & 0x0F0F0F0F) << 16)
    high = _four_columns((even >> 4) & 0x0F0F0F0F) | (_four_columns((odd >> 4) & 0x0F0F0F0F) << 16)
    if GATED:
        first = inside * 16 + row
        second, most = first + part_rows, part_rows
        both = first < most
        low_valid, high_valid = both, both
    else:
        first = inside * 32 + row
        second = first + 16
        low_valid, high_valid = first < rows, second < rows
    own = out + expert * rows * row_words
    target = own + first[None, :] * row_words + word[:, None]
    tl.store(target, low.to(tl.int32, bitcast=True), mask=exists & low_valid[None, :])
    target = own + second[None, :] * row_words + word[:, None]
    tl.store(target, high.to(tl.int32, bitcast=True), mask=exists & high_valid[None, :])
