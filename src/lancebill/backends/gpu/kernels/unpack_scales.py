"""PTX that turns words of scales and zero points into factors in registers, for 16-bit activations."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from lancebill.backends.gpu.kernels import weight_form as f
from lancebill.backends.gpu.kernels.weight_form import WeightForm

PAIR_TYPE = {f.BF16: "bf16x2", f.F16: "f16x2"}
_ONE_EXPONENT = {f.BF16: (127, 7), f.F16: (15, 10)}  # exponent field of 1.0, lowest bit of the field
# Subnormal 16-bit numbers, and normal ones of the lowest exponent, are integers in units of 2**-133 (bf16) or
# 2**-24 (fp16): a byte, or a masked nibble of it, in the low half of a register's half already is a number. A scale
# that includes the inverse unit makes it right: with one fused multiply-add (code - 8) * scale is rounded once.
# Integers: rows r use the low nibble, rows r + 8 the high nibble, whose unit is 2**4 larger.
BYTE_UNIT = {f.BF16: 133, f.F16: 24}

Which = tuple[int, int, int]  # a factor: its n3, k4 and k5


def power(exponent: int, activations: str) -> str:
    """2**exponent in both halves of a register."""
    one, low = _ONE_EXPONENT[activations]
    return pair_of((one + exponent) << low)


def pair_of(bits: int) -> str:
    """16 bits in both halves of a register."""
    return f"0x{bits << 16 | bits:08x}"


def factors(
    form: WeightForm, metas: list[str], k5s: tuple[int, ...]
) -> tuple[list[str], dict[tuple[int, int, int], str]]:
    """Statements that compute the factor of each (n3, k4, k5), and the register that has it in both halves.

    Two factors are computed at once, one in each half of a register. Spreading one over both halves is free, because
    the multiplication can read either half twice.
    """
    lines: list[str] = []
    where: dict[tuple[int, int, int], str] = {}
    if not metas:
        return lines, where
    for number, (pair, statements, low, high) in enumerate(_factor_pairs(form, metas, k5s)):
        lines += statements
        missing = code_shift(form) - row_shift(form) - scale_shift(form)
        if form.code in f.CODEBOOKS and missing:
            unit = power(missing, form.activations)
            lines += [f"mul.rn.{PAIR_TYPE[form.activations]} {r}, {r}, {unit};" for r in (pair, f"e{number}")]
        lines += spread(pair, _name(low), _name(high))
        if form.code in f.CODEBOOKS:
            lines.append(f"mul.rn.{PAIR_TYPE[form.activations]} s, {pair}, {power(-8, form.activations)};")
            lines += spread("s", low_byte(_name(low)), low_byte(_name(high)))
        if form.subnormal:
            lines.append(f"mul.rn.{PAIR_TYPE[form.activations]} e{number}, {pair}, {_minus_middle(form)};")
        if form.subnormal or form.two_part_scale:
            lines += spread(f"e{number}", companion(_name(low)), companion(_name(high)))
    for n3, k4, k5 in itertools.product(range(2), range(2), k5s):
        # A factor covers 16, 32 or at least 64 columns.
        fine = (n3, k4, k5) if form.scale == f.E4M3_G16 else (n3, 0, k5 if form.fine else 0)
        where[n3, k4, k5] = _name(fine)
    return lines, where


def _name(which: Which) -> str:
    return "m{}{}{}".format(*which)


def companion(factor: str) -> str:
    """The register of a factor's companion: minus the middle code times it, or the rest of a scale that the factor's
    type cannot hold."""
    return f"a{factor}"


def low_byte(factor: str) -> str:
    """The register of the factor of a table's low bytes."""
    return f"b{factor}"


def _minus_middle(form: WeightForm) -> str:
    """Minus half the number of codes, in the units of both nibbles; rows r in the low half."""
    middle = 1 << form.bits - 1
    return f"{0x80008000 | middle << 20 | middle:#010x}"


def spread(pair: str, low: str, high: str) -> list[str]:
    """Copy each half of a register to both halves of a register."""
    return [f"mov.b32 {{h0, h1}}, {pair};", f"mov.b32 {low}, {{h0, h0}};", f"mov.b32 {high}, {{h1, h1}};"]


def _factor_pairs(
    form: WeightForm, metas: list[str], k5s: tuple[int, ...]
) -> Iterator[tuple[str, list[str], Which, Which]]:
    """Pairs of factors: (register, statements that compute it, the factors in its low and high half)."""
    if form.scale == f.E8M0_G32:
        # `scale_rotation` put the exponents of rows r in position; those of rows r + 8 are a byte away.
        one, low = _ONE_EXPONENT[form.activations]
        mask = pair_of((2 * one + 1) << low)
        yield "p0", [f"and.b32 p0, {metas[0]}, {mask};"], (0, 0, 0), (0, 0, 1)
        rotated = f"shf.l.wrap.b32 p1, {metas[0]}, {metas[0]}, 8;"
        yield "p1", [rotated, f"and.b32 p1, p1, {mask};"], (1, 0, 1), (1, 0, 0)
    elif form.scale == f.E4M3_G16:
        for k5, k4 in itertools.product(k5s, range(2)):
            pair = f"p{2 * k5 + k4}"
            pick = f"prmt.b32 {pair}, {metas[k5]}, 0, 0x{2 * k4 + 1}4{2 * k4}4;"
            yield pair, [pick, *_e4m3_factors(pair, form.activations)], (0, k4, k5), (1, k4, k5)
    else:
        for part in range(2 if form.fine else 1):
            pair, statements = _group_factors(form, metas, part)
            yield pair, statements, (0, 0, part), (1, 0, part)


def scale_rotation(form: WeightForm) -> int:
    """How far a word of e8m0 scales is rotated when packed, so that its first byte is in the exponent field."""
    if form.scale != f.E8M0_G32 or form.activations == f.E4M3:
        return 0
    return _ONE_EXPONENT[form.activations][1]


def _e4m3_factors(pair: str, activations: str) -> list[str]:
    """Scale bytes in the upper bytes of both halves to factors; `row_shift` has the rest of the exponent."""
    down = 4 if activations == f.BF16 else 1
    lines = [
        f"and.b32 t, {pair}, 0x7f007f00;",
        f"shr.u32 t, t, {down};",
        f"lop3.b32 {pair}, {pair}, 0x80008000, t, 0xea;",
    ]
    if activations == f.F16:
        return [*lines, f"mul.rn.f16x2 {pair}, {pair}, {power(15, f.F16)};"]
    return lines + [f"mul.rn.bf16x2 {pair}, {pair}, {power(113, f.BF16)};"] * 2


def _group_factors(form: WeightForm, metas: list[str], part: int) -> tuple[str, list[str]]:
    """A group's scales for rows r and r + 8 in the activations' type, and the rounding remainders in `e<part>`."""
    pair, remainder = f"p{part}", f"e{part}"
    if form.scale == form.activations:
        return metas[part], []
    if form.scale == f.BF16_GROUP:  # fp16 activations. bf16 is the upper half of fp32
        lines = [f"shl.b32 t, {metas[part]}, 16;", f"and.b32 u, {metas[part]}, 0xffff0000;"]
        return pair, [*lines, "mov.b32 x, t;", "mov.b32 y, u;", f"cvt.rn.f16x2.f32 {pair}, y, x;"]
    if form.scale == f.F32_GROUP:
        lines = [f"mov.b32 x, {metas[2 * part]};", f"mov.b32 y, {metas[2 * part + 1]};"]
    else:
        lines = [f"mov.b32 {{h0, h1}}, {metas[part]};", "cvt.f32.f16 x, h0;", "cvt.f32.f16 y, h1;"]
    if form.activations == f.BF16:
        lines += ["mov.b32 t, x;", "mov.b32 u, y;", f"prmt.b32 {pair}, t, u, 0x7632;"]
        lines += ["and.b32 t, t, 0xffff0000;", "and.b32 u, u, 0xffff0000;", "mov.b32 v, t;", "mov.b32 w, u;"]
    else:
        lines += [f"cvt.rn.f16x2.f32 {pair}, y, x;", f"mov.b32 {{h0, h1}}, {pair};"]
        lines += ["cvt.f32.f16 v, h0;", "cvt.f32.f16 w, h1;"]
    rounded = f"cvt.rn.{PAIR_TYPE[form.activations]}.f32 {remainder}, y, x;"
    return pair, [*lines, "sub.rn.f32 x, x, v;", "sub.rn.f32 y, y, w;", rounded]


def code_shift(form: WeightForm) -> int:
    """The power of two by which unpacked codes are too small."""
    if form.code in f.CODEBOOKS:
        return BYTE_UNIT[form.activations] - 8 + f.CODEBOOKS[form.code]
    shifts = {f.E2M1_CODE: {f.BF16: 126, f.F16: 14}, f.E4M3_CODE: {f.BF16: 120, f.F16: 8}}
    return shifts.get(form.code, {}).get(form.activations, 0)


def row_shift(form: WeightForm) -> int:
    """The part of `code_shift` that goes to the row's factor, because a group's factor cannot hold it."""
    if form.scale == f.E4M3_G16:
        return {f.BF16: 20, f.F16: 7}[form.activations]
    return f.CODEBOOKS.get(form.code, 0)


def scale_shift(form: WeightForm) -> int:
    """The part of `code_shift` that stored scales include. fp16 has no room for the unit of bf16."""
    if (form.scale, form.activations) == (f.F16_GROUP, f.BF16):
        return 0
    return code_shift(form) - row_shift(form)


def zero_points(
    form: WeightForm, metas: list[str], k5s: tuple[int, ...]
) -> tuple[list[str], dict[tuple[int, int], str]]:
    """Zero points in both halves of a register; they are stored with the code's magic number added."""
    lines: list[str] = []
    where: dict[tuple[int, int], str] = {}
    for part, meta in enumerate(metas):
        lines += spread(meta, f"z0{part}", f"z1{part}")
    if form.zero:
        where = {(n3, k5): f"z{n3}{k5 if form.fine else 0}" for n3 in range(2) for k5 in k5s}
    return lines, where
