"""A row of tokens as the input of an expert's GEMM: order, factors and 8-bit numbers (plain Triton)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def column_at(place):
    """The column at a place of a quantised row. Within a slice, the bits of the place are k4 k3 k2 k6 k5 k1 k0."""
    return (place & -128) | (place & 3) | ((place & 12) << 3) | ((place & 112) >> 2)


@triton.jit
def _place_of(column):
    """The inverse of `column_at`."""
    return (column & -128) | (column & 3) | ((column & 96) >> 3) | ((column & 28) << 2)


@triton.jit
def stored_columns(width, W: tl.constexpr, QUANTISED: tl.constexpr, ROTATION: tl.constexpr):
    """(column, place, length) of a stored row. Quantised rows are permuted within slices and padded to whole slices.

    Places are in order, so that stores are wide; columns are in order where a rotation needs them so.
    """
    place = tl.arange(0, W)
    if QUANTISED and ROTATION > 0:
        return place, _place_of(place), (width + 127) // 128 * 128
    elif QUANTISED:
        k = (place & -128) + column_at(place & 127)  # a sum: on a call's result the hints would be lost
        k = tl.max_contiguous(tl.multiple_of(k, 4), 4)
        return k, place, (width + 127) // 128 * 128
    else:
        return place, place, width


@triton.jit
def _rotate(row, W: tl.constexpr, ROTATION: tl.constexpr):
    """Every ROTATION columns of a row [W] times Sylvester's Hadamard matrix, over its norm: see numbers/rotation.py."""
    for stage in tl.static_range(ROTATION.bit_length() - 1):
        pairs = tl.reshape(row, (W >> (stage + 1), 2, 1 << stage))
        first, second = tl.split(tl.permute(pairs, (0, 2, 1)))
        pairs = tl.permute(tl.join(first + second, first - second), (0, 2, 1))
        row = tl.reshape(pairs, (W,))
    return row * (ROTATION**-0.5)


@triton.jit
def divide(x, by):
    """x / by, to be rounded to 8 bits: a reciprocal and one correction take a third of the time of divisions.

    The reciprocal is correctly rounded. The corrected quotient is the nearest number, or its neighbour if x / by is
    within 2**-45 of the middle between both. No such quotient is next to a tie of e4m3 or of int8 (a test tries all
    that could be), so the rounded result is that of a division. Valid for |x| <= 448 * by. Zeros lose their sign.
    """
    factor = tl.where(by < 2.0**-60, 2.0**96, 1.0)  # so that no residual underflows
    by *= factor
    return _corrected_quotient(x, factor, -by, tl.div_rn(1.0, by))


@triton.jit
def _corrected_quotient(x, factor, minus_by, reciprocal):
    """x * factor / by. In PTX number by number: the compiler would hold intermediate results of the whole row."""
    return tl.inline_asm_elementwise(
        "{ .reg .f32 a, q, r; mul.rn.f32 a, $1, $2; mul.rn.f32 q, a, $4; "
        "fma.rn.f32 r, q, $3, a; fma.rn.f32 $0, r, $4, q; }",
        "=f,f,f,f,f", [x, factor, minus_by, reciprocal], dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _largest(row):
    """The largest magnitude of a row; NaN if any number is not finite. Bits of magnitudes are ordered as integers."""
    bits = tl.max(row.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
    largest = bits.to(tl.float32, bitcast=True)
    return tl.where(bits < 0x7F800000, largest, float("nan"))


@triton.jit
def _to_int8(row):
    """The nearest integers, ties to even, within int8: 1.5 * 2**23 moves an integer to the lowest bits."""
    row = tl.minimum(tl.maximum(row, -128.0), 127.0)
    return (row + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def _to_e4m3(row):
    """The nearest e4m3 numbers, ties to even. For sm_89, Triton's own conversion truncates to fp16 first: what is just
    above a tie would become one."""
    return tl.inline_asm_elementwise("cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;", "=h,f,f", [row], dtype=tl.float8e4nv,
                                     is_pure=True, pack=2)  # fmt: skip


@triton.jit
def _quantise(row, given, e, TYPE: tl.constexpr, STATIC: tl.constexpr):
    """The codes of a row divided by its scale, and the scale: the expert's from the checkpoint if STATIC, or computed
    from the row.

    The largest e4m3 number is 448. int8 has no NaN: a row that is not finite gets a scale of NaN.
    """
    if tl.int8 == TYPE:
        largest = _largest(row)
        if STATIC:
            scale = tl.load(given + e)
            row = tl.div_rn(row, scale)
            scale = tl.where(largest == largest, scale, largest)
        else:
            scale = tl.div_rn(largest, 127.0)
            scale = tl.where(scale == 0, 1.0, scale)
            row = divide(row, scale)
        row = _to_int8(row)
    else:
        if STATIC:
            scale = tl.load(given + e)
            row = tl.div_rn(row, scale)
        else:
            scale = tl.div_rn(tl.max(tl.abs(row), 0), 448.0)
            scale = tl.where(scale > 0, scale, 1.0)
            row = divide(row, scale)
        row = _to_e4m3(row)
    return row, scale


@triton.jit
def prepare_row(source, e, weight, perm, pre_scale, given, k, inside, width, TYPE: tl.constexpr,
                QUANTISED: tl.constexpr, WEIGHTED: tl.constexpr, ORDERED: tl.constexpr, SCALED: tl.constexpr,
                STATIC: tl.constexpr, ROTATION: tl.constexpr):  # fmt: skip
    """A row as the input of expert e, and its scale.

    ORDERED: permute columns to the order of the expert's weights (act-order). SCALED: multiply by the expert's vector.
    WEIGHTED: multiply by the routing weight. ROTATION: rotate blocks of so many columns, which are in natural order.
    QUANTISED: divide by a scale, for TYPE (e4m3 or int8). The row is rounded once, at the end.
    """
    where = k
    if ORDERED:
        where = tl.load(perm + e.to(tl.int64) * width + k, mask=inside, other=0)
    row = tl.load(source + where, mask=inside, other=0.0)
    if WEIGHTED:
        row = row.to(tl.float32) * weight
    if SCALED:
        row = row.to(tl.float32) * tl.load(pre_scale + e.to(tl.int64) * width + where, mask=inside, other=0.0)
    if ROTATION > 0:
        row = _rotate(row.to(tl.float32), row.shape[0], ROTATION)
    scale = 1.0
    if QUANTISED:
        row, scale = _quantise(row.to(tl.float32), given, e, TYPE, STATIC)
    return row, scale
