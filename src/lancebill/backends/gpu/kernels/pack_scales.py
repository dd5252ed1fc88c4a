"""Puts scales, zero points, row factors and biases where the GPU kernels read them: one launch for many experts.

`layout.FragmentLayout` defines the result in torch. A program does one unit of 128 rows. It first finds the largest
scale of each row, from which follows the power of two that moves from the row's scales to its factor, and then writes
the words of each pair of rows, r and r + 8.

Powers of two are exact in fp64, and results are rounded to fp32 and then to the scales' type, as torch does it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _power_of_two(exponent):
    return ((exponent.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def _exponent(values):
    """The exponent of frexp for numbers that are not negative."""
    bits = values.to(tl.float64).to(tl.int64, bitcast=True)
    return tl.where(values == 0, 0, (bits >> 52).to(tl.int32) - 1022)


@triton.jit
def _as_float(bits, KIND: tl.constexpr):
    """Scales of a group as fp32."""
    if KIND == "bf16":
        return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif KIND == "fp16":
        return bits.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return bits.to(tl.float32, bitcast=True)


@triton.jit
def _rounded(values, KIND: tl.constexpr):
    """fp64 numbers as bits of the scales' type, in the low bits of a word."""
    single = values.to(tl.float32)
    bits = single.to(tl.int32, bitcast=True)
    if KIND == "bf16":
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF
    elif KIND == "fp16":
        return single.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    else:
        return bits


@triton.jit
def _tile(source, row, valid, at, count):
    """Numbers of these rows at these groups; zeros outside the matrix."""
    return tl.load(source + row[:, None] * count + at[None, :], mask=valid[:, None] & (at < count)[None, :], other=0)


@triton.jit
def _largest(source, row, valid, groups, KIND: tl.constexpr, CHUNK: tl.constexpr):
    """The largest exponent byte, or the exponent of the largest magnitude, of each row."""
    at = tl.arange(0, CHUNK)
    if KIND == "e8m0":
        largest = tl.zeros([64], tl.int32)
        for start in range(0, groups, CHUNK):
            largest = tl.maximum(largest, tl.max(_tile(source, row, valid, start + at, groups).to(tl.int32), 1))
        return largest
    else:
        magnitude = tl.zeros([64], tl.float32)
        for start in range(0, groups, CHUNK):
            values = _as_float(_tile(source, row, valid, start + at, groups), KIND)
            magnitude = tl.maximum(magnitude, tl.max(tl.abs(values), 1))
        return _exponent(magnitude)


@triton.jit
def _base(largest, SHIFT: tl.constexpr, CLAMP: tl.constexpr):
    """Per row, the power of two that moves from its scales to its factor."""
    base = largest + SHIFT
    return tl.maximum(base, 0) if CLAMP else base


@triton.jit
def _exponent_byte(bytes_, base, inside, BOTTOM: tl.constexpr, OFFSET: tl.constexpr):
    """e8m0 exponents relative to the row's base, and whether one is too small to be applied exactly."""
    relative = bytes_.to(tl.int32) - 127 - base[:, None]
    short = inside & (relative < BOTTOM)
    return tl.where(inside, relative + OFFSET, 0) & 0xFF, tl.max(tl.max(short.to(tl.int32), 1), 0)


@triton.jit
def _write_bytes(
    source, out, low, high, low_valid, high_valid, low_base, high_base, groups, padded_groups,
    EXPONENTS: tl.constexpr, BOTTOM: tl.constexpr, OFFSET: tl.constexpr, LEFT: tl.constexpr, WORDS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Words of four bytes: rows r and r + 8 of two neighbouring groups, rotated to the left."""
    pair = tl.arange(0, 64)
    unusual = tl.full((), 0, tl.int32)
    for start in range(0, padded_groups // 2, CHUNK):
        at = start + tl.arange(0, CHUNK)
        word = tl.zeros([64, CHUNK], tl.uint32)
        for i in tl.static_range(4):
            row, valid, base = (low, low_valid, low_base) if i % 2 == 0 else (high, high_valid, high_base)
            group = 2 * at + i // 2
            byte = _tile(source, row, valid, group, groups).to(tl.int32)
            if EXPONENTS:
                inside = valid[:, None] & (group < groups)[None, :]
                byte, short = _exponent_byte(byte, base, inside, BOTTOM, OFFSET)
                unusual = tl.maximum(unusual, short)
            word |= byte.to(tl.uint32) << (8 * i)
        if LEFT:
            word = (word << LEFT) | (word >> (32 - LEFT))
        block, part = at // WORDS, at % WORDS
        place = (block[None, :] * 64 + pair[:, None]) * WORDS + part[None, :]
        tl.store(out + place, word.to(tl.int32, bitcast=True), mask=(2 * at < padded_groups)[None, :])
    return unusual


@triton.jit
def _write_groups(
    source, zeros, out, low, high, low_valid, high_valid, low_base, high_base, groups, padded_groups,
    KIND: tl.constexpr, PROMOTED: tl.constexpr, ZERO: tl.constexpr, MAGIC: tl.constexpr, LOW_UNIT: tl.constexpr,
    HIGH_UNIT: tl.constexpr, PARTS: tl.constexpr, WORDS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One scale for each row and group, then one zero point: 16-bit numbers of two rows share a word."""
    pair = tl.arange(0, 64)
    for start in range(0, padded_groups, CHUNK):
        at = start + tl.arange(0, CHUNK)
        exists = (at < padded_groups)[None, :]
        block, part = at // PARTS, at % PARTS
        place = out + (block[None, :] * 64 + pair[:, None]) * WORDS
        if KIND != "none":
            first = _as_float(_tile(source, low, low_valid, at, groups), KIND)
            second = _as_float(_tile(source, high, high_valid, at, groups), KIND)
            if PROMOTED:
                first, second = first.to(tl.int32, bitcast=True), second.to(tl.int32, bitcast=True)
                if ZERO:
                    first |= _tile(zeros, low, low_valid, at, groups).to(tl.int32)
                    second |= _tile(zeros, high, high_valid, at, groups).to(tl.int32)
            else:
                low_power, high_power = _power_of_two(-low_base)[:, None], _power_of_two(-high_base)[:, None]
                low_unit, high_unit = (
                    _power_of_two(tl.full((), LOW_UNIT, tl.int32)),
                    _power_of_two(tl.full((), HIGH_UNIT, tl.int32)),
                )
                first = _rounded(first.to(tl.float64) * low_power * low_unit, KIND)
                second = _rounded(second.to(tl.float64) * high_power * high_unit, KIND)
            if PROMOTED or KIND == "fp32":
                tl.store(place + 2 * part[None, :], first, mask=exists)
                tl.store(place + 2 * part[None, :] + 1, second, mask=exists)
            else:
                tl.store(place + part[None, :], first | (second << 16), mask=exists)
        if ZERO and not PROMOTED:
            first = _tile(zeros, low, low_valid, at, groups).to(tl.int32) + MAGIC
            second = _tile(zeros, high, high_valid, at, groups).to(tl.int32) + MAGIC
            real = (at < groups)[None, :]
            first = tl.where(low_valid[:, None] & real, first, 0) & 0xFFFF
            second = tl.where(high_valid[:, None] & real, second, 0)
            tl.store(place + (WORDS - PARTS) + part[None, :], first | (second << 16), mask=exists)


@triton.jit
def pack_scales(
    scales, zeros, outer, bias, out, factors, bias_out, unusual, rows, block_rows, scale_rows, groups, padded_groups,
    units, GATED: tl.constexpr, KIND: tl.constexpr, PROMOTED: tl.constexpr, ZERO: tl.constexpr, OUTER: tl.constexpr,
    BIAS: tl.constexpr, ROW_SHIFT: tl.constexpr, BASED: tl.constexpr, BASE_SHIFT: tl.constexpr, CLAMP: tl.constexpr,
    BOTTOM: tl.constexpr, OFFSET: tl.constexpr, LEFT: tl.constexpr, MAGIC: tl.constexpr, LOW_UNIT: tl.constexpr,
    HIGH_UNIT: tl.constexpr, PARTS: tl.constexpr, WORDS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Scales and zero points [experts, scale_rows, groups], outer factors and biases fp32 [experts, all rows].

    `rows` of gate, of up, or of an ungated matrix; `block_rows` of them share a row of scales.
    """
    place = tl.program_id(0)
    expert, unit = (place // units).to(tl.int64), place % units
    pair = tl.arange(0, 64)
    half = pair // 32
    row = pair // 8 % 4 * 16 + pair % 8  # n5 n4, n2 n1 n0
    inside = unit * 64 + row if GATED else unit * 128 + half * 64 + row
    start = half * rows if GATED else half * 0
    low_valid, high_valid = inside < rows, inside + 8 < rows
    low, high = (start + inside) // block_rows, (start + inside + 8) // block_rows
    source = scales + expert * scale_rows * groups
    low_base, high_base = tl.zeros([64], tl.int32), tl.zeros([64], tl.int32)
    if BASED:
        low_base = _base(_largest(source, low, low_valid, groups, KIND, CHUNK), BASE_SHIFT, CLAMP)
        high_base = _base(_largest(source, high, high_valid, groups, KIND, CHUNK), BASE_SHIFT, CLAMP)
    every = rows * 2 if GATED else rows
    for i in tl.static_range(2):
        valid, base = (low_valid, low_base) if i == 0 else (high_valid, high_base)
        own = expert * every + start + inside + 8 * i
        target = place.to(tl.int64) * 128 + half * 64 + row + 8 * i
        factor = tl.full([64], 1.0, tl.float32)
        if OUTER:
            factor = tl.load(outer + own, mask=valid, other=0)
        factor = factor * _power_of_two(tl.full((), ROW_SHIFT, tl.int32)).to(tl.float32)
        if BASED:
            factor = factor * _power_of_two(base).to(tl.float32)
        tl.store(factors + target, tl.where(valid, factor, 0.0).to(tl.int32, bitcast=True))
        if BIAS:
            tl.store(bias_out + target, tl.load(bias + own, mask=valid, other=0))
    words = out + place.to(tl.int64) * 64 * WORDS * (padded_groups // PARTS)
    if KIND == "e8m0" or KIND == "e4m3":
        found = _write_bytes(
            source, words, low, high, low_valid, high_valid, low_base, high_base, groups, padded_groups,
            KIND == "e8m0", BOTTOM, OFFSET, LEFT, WORDS, CHUNK,
        )  # fmt: skip
        if KIND == "e8m0":
            tl.store(unusual + place, found)
    elif WORDS:
        _write_groups(
            source, zeros + expert * scale_rows * groups, words, low, high, low_valid, high_valid, low_base, high_base,
            groups, padded_groups, KIND, PROMOTED, ZERO, MAGIC, LOW_UNIT, HIGH_UNIT, PARTS, WORDS, CHUNK,
        )  # fmt: skip
