"""Generators of the inline PTX that turns packed codes into numbers, one for each code and each scale.

A thread of a warpgroup holds the A fragment of wgmma for one half of a unit (64 features). With 16-bit activations that
is 16 registers for the 64 columns of a slice. The bits of the feature n and of the column k within the slice select a
register and its half:

    n5 n4: warp    n2 n1 n0: lane / 4    n3: row r or r + 8      (features of the half)
    k2 k1: lane % 4    k0: half of the register    k5 k4: wgmma's k16 step    k3: its upper 8 columns

Every generator returns the statements that fill the register of one (n3, k3, k4, k5); k0 selects its half. `places`
gives the bit positions that the packer uses to match. Tests run the statements in an emulator on packed words and
compare with the canonical numbers.

Numbers come out as `value * 2**-shift`, where the shift is a constant of the form: the cheapest placement of exponent
bits is off by a power of two. The row's factor (`row_shift`) or the group's factor corrects it, so it costs no
instruction.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from lancebill.backends.gpu.kernels import weight_form as f
from lancebill.backends.gpu.kernels.unpack_ptx_fp8 import Bits, fp8_statements
from lancebill.backends.gpu.kernels.weight_form import WeightForm

# Two words hold the codes of the eight bf16 registers of one k5. A mask takes the sign at bit 15 and the exponent and
# mantissa at bits 8, 7, 6 of each half. Three rotations of each word give six registers; the bits that no rotation
# uses, merged from both words, give the other two. 16 operations for 16 codes.
_E2M1_MASK = 0x81C081C0
_E2M1_BITS = ((3, 15), (2, 8), (1, 7), (0, 6))
_ROTATIONS, _MERGED_ROTATIONS, _MERGED_FROM_0 = (0, 4, 10), (6, 12), 0x06030603

_PAIR_TYPE = {f.BF16: "bf16x2", f.F16: "f16x2"}
INT4_MAGIC = {f.BF16: 0x4300, f.F16: 0x6400}  # 128 and 1024: OR-ing a small integer into the mantissa adds it
# Subnormal 16-bit numbers, and normal ones of the lowest exponent, are integers in units of 2**-133 (bf16) or
# 2**-24 (fp16): a masked nibble in the low byte already is a number. One fused multiply-add with a scale that includes
# the inverse unit gives (code - 8) * scale, rounded once. Rows r use the low nibble, rows r + 8 the high nibble, whose
# unit is 2**4 larger.
NIBBLE_UNIT = {f.BF16: 133, f.F16: 24}
_MINUS_EIGHT = "0x80808008"  # -8 in the units of both nibbles, rows r in the low half
_ONE_EXPONENT = {f.BF16: (127, 7), f.F16: (15, 10)}  # exponent field of 1.0, lowest bit of the field
# A half of a word holds two e4m3 codes. One is already in position, so a mask extracts it; the other fills the
# remaining bits. Lowest bit of the code, the mask, and for the other code (left shift, mask) pairs.
_E4M3_PLACE = {f.BF16: (4, 0x87F0, ((4, 0x80F0), (-4, 0x0700))), f.F16: (7, 0xBF80, ((7, 0x3F80), (1, 0x8000)))}


class Unpack:
    """A form's inline PTX: `pack` packed words and `metas` scale words to `outputs` registers.

    A class, not a function: compile-time code in Triton cannot call plain Python functions.
    """

    def __init__(self, form: WeightForm) -> None:
        self.text, self.outputs, self.metas = fp8_statements(form) if form.activations == f.E4M3 else _statements(form)
        self.each = 4 if form.activations == f.E4M3 else 2  # numbers per register
        self.pack = self.outputs * self.each * form.bits // 32

    @property
    def constraints(self) -> str:
        """Operand constraints: each operand of the elementwise call takes `pack` registers."""
        return ",".join(["=&r"] * self.outputs + ["r"] * (self.pack * (1 + self.metas)))


def power(exponent: int, activations: str) -> str:
    """2**exponent in both halves of a register."""
    one, low = _ONE_EXPONENT[activations]
    return _pair((one + exponent) << low)


def _pair(bits: int) -> str:
    return f"0x{bits << 16 | bits:08x}"


# ---------------------------------------------------------------- bit positions of the codes


def places(form: WeightForm, n3: int, k3: int, k4: int, k5: int, k0: int) -> Bits:
    """Word and bit position of each bit of one code, for 16-bit activations."""
    if form.code == f.E2M1_CODE and form.activations == f.BF16:
        return _e2m1_places(n3, k3, k4, k5, k0)
    if form.bits == 4:
        start = 4 * (n3 + 2 * k3) + 16 * k0
        return tuple((b, k4 + 2 * k5, start + b) for b in range(4))
    word = 4 * k5 + n3 + 2 * k3
    if form.code == f.E4M3_CODE:
        return tuple((b, word, _e4m3_place(form, b, k4) + 16 * k0) for b in range(8))
    return tuple((b, word, 8 * k4 + 16 * k0 + b) for b in range(8))


def _e2m1_places(n3: int, k3: int, k4: int, k5: int, k0: int) -> Bits:
    positions = []
    window = n3 + 2 * k3
    for bit, position in _E2M1_BITS:
        target = position + 16 * k0
        if window < 3:
            word, source = k4, (target - _ROTATIONS[window]) % 32
        else:
            merged = (target - _MERGED_ROTATIONS[k4]) % 32
            word, source = (0, merged) if _MERGED_FROM_0 >> merged & 1 else (1, merged - 2)
        positions.append((bit, word + 2 * k5, source))
    return tuple(positions)


def _e4m3_place(form: WeightForm, bit: int, k4: int) -> int:
    low, _, moves = _E4M3_PLACE[form.activations]
    target = 15 if bit == 7 else low + bit
    return target - sum(shift for shift, brought in moves if brought >> target & 1) if k4 else target


# ---------------------------------------------------------------- codes to 16-bit numbers


def _e2m1_bf16(words: list[str], out: dict[tuple[int, int, int], str]) -> list[str]:
    """e2m1 as bf16 times 2**-126: its bits become the lowest exponent and highest mantissa bits of bf16."""
    lines = []
    for k4 in range(2):
        for window in range(3):
            source = words[k4]
            if window:
                lines.append(f"shf.l.wrap.b32 t, {source}, {source}, {_ROTATIONS[window]};")
                source = "t"
            lines.append(f"and.b32 {out[window & 1, window >> 1, k4]}, {source}, {_E2M1_MASK:#x};")
    lines += [f"shl.b32 t, {words[1]}, 2;", f"lop3.b32 t, {words[0]}, t, {_MERGED_FROM_0:#x}, 0xe4;"]
    for k4, rotation in enumerate(_MERGED_ROTATIONS):
        lines += [f"shf.l.wrap.b32 u, t, t, {rotation};", f"and.b32 {out[1, 1, k4]}, u, {_E2M1_MASK:#x};"]
    return lines


def _subnormal_nibbles(words: list[str], out: dict[tuple[int, int, int], str]) -> list[str]:
    """int4 as subnormal numbers (see `NIBBLE_UNIT`): a mask per register and a shift per word."""
    lines = []
    for k4, word in enumerate(words):
        lines += [f"and.b32 {out[n3, 0, k4]}, {word}, {0x000F000F << 4 * n3:#010x};" for n3 in range(2)]
        lines.append(f"shr.u32 t, {word}, 8;")
        lines += [f"and.b32 {out[n3, 1, k4]}, t, {0x000F000F << 4 * n3:#010x};" for n3 in range(2)]
    return lines


def _nibbles(words: list[str], out: dict[tuple[int, int, int], str], form: WeightForm) -> list[str]:
    """int4 as 128 + code (bf16) or 1024 + code (fp16); e2m1 as fp16 times 2**-14."""
    lines = []
    for (n3, k3, k4), register in out.items():
        shift = 4 * (n3 + 2 * k3)
        if form.code == f.INT4_CODE:
            magic = _pair(INT4_MAGIC[form.activations])
            source = words[k4]
            if shift:
                lines.append(f"shr.u32 t, {source}, {shift};")
                source = "t"
            lines.append(f"lop3.b32 {register}, {source}, 0x000f000f, {magic}, 0xea;")
        else:
            lines += [
                f"shl.b32 t, {words[k4]}, {12 - shift};",
                "and.b32 u, t, 0x70007000;",
                "shr.u32 u, u, 3;",
                f"lop3.b32 {register}, t, 0x80008000, u, 0xea;",
            ]
    return lines


def _byte(word: str, k4: int, register: str, form: WeightForm) -> list[str]:
    """int8 exactly; e4m3 times 2**-120 (bf16) or 2**-8 (fp16): its exponent becomes the low bits of the wider one."""
    if form.code == f.E4M3_CODE:
        _, mask, moves = _E4M3_PLACE[form.activations]
        if k4 == 0:
            return [f"and.b32 {register}, {word}, {_pair(mask)};"]
        lines = [
            f"shl.b32 {t}, {word}, {n};" if n > 0 else f"shr.u32 {t}, {word}, {-n};" for t, (n, _) in zip("tu", moves)
        ]
        (_, first), (_, second) = moves
        return [*lines, f"and.b32 t, t, {_pair(first)};", f"lop3.b32 {register}, u, {_pair(second)}, t, 0xea;"]
    lines = [f"shr.u32 t, {word}, {8 * k4};"]
    if form.activations == f.F16:
        return [
            *lines,
            f"lop3.b32 t, t, 0x00ff00ff, {_pair(0x6400)}, 0xea;",
            f"sub.rn.f16x2 {register}, t, {_pair(0x6480)};",
        ]
    # bf16 has seven mantissa bits: 128 + the low seven bits, minus 128 or 256 depending on the eighth.
    return [
        *lines,
        f"lop3.b32 u, t, 0x00800080, {_pair(0x4380)}, 0x6a;",
        f"lop3.b32 t, t, 0x007f007f, {_pair(0x4300)}, 0xea;",
        f"sub.rn.bf16x2 {register}, t, u;",
    ]


# ---------------------------------------------------------------- scales


def _factors(
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
        lines += statements + _spread(pair, _name(low), _name(high))
        if form.subnormal:
            lines.append(f"mul.rn.{_PAIR_TYPE[form.activations]} e{number}, {pair}, {_MINUS_EIGHT};")
        if form.subnormal or form.two_part_scale:
            lines += _spread(f"e{number}", _companion(_name(low)), _companion(_name(high)))
    for n3, k4, k5 in itertools.product(range(2), range(2), k5s):
        # A factor covers 16, 32 or at least 64 columns.
        fine = (n3, k4, k5) if form.scale == f.E4M3_G16 else (n3, 0, k5 if form.group == 32 else 0)
        where[n3, k4, k5] = _name(fine)
    return lines, where


Which = tuple[int, int, int]  # a factor: its n3, k4 and k5


def _name(which: Which) -> str:
    return "m{}{}{}".format(*which)


def _companion(factor: str) -> str:
    """The register of a factor's companion: -8 times it, or the rest of a scale that the factor's type cannot hold."""
    return f"a{factor}"


def _spread(pair: str, low: str, high: str) -> list[str]:
    """Copy each half of a register to both halves of a register."""
    return [f"mov.b32 {{h0, h1}}, {pair};", f"mov.b32 {low}, {{h0, h0}};", f"mov.b32 {high}, {{h1, h1}};"]


def _factor_pairs(
    form: WeightForm, metas: list[str], k5s: tuple[int, ...]
) -> Iterator[tuple[str, list[str], Which, Which]]:
    """Pairs of factors: (register, statements that compute it, the factors in its low and high half)."""
    if form.scale == f.E8M0_G32:
        # `scale_rotation` put the exponents of rows r in position; those of rows r + 8 are a byte away.
        one, low = _ONE_EXPONENT[form.activations]
        mask = _pair((2 * one + 1) << low)
        yield "p0", [f"and.b32 p0, {metas[0]}, {mask};"], (0, 0, 0), (0, 0, 1)
        rotated = f"shf.l.wrap.b32 p1, {metas[0]}, {metas[0]}, 8;"
        yield "p1", [rotated, f"and.b32 p1, p1, {mask};"], (1, 0, 1), (1, 0, 0)
    elif form.scale == f.E4M3_G16:
        for k5, k4 in itertools.product(k5s, range(2)):
            pair = f"p{2 * k5 + k4}"
            pick = f"prmt.b32 {pair}, {metas[k5]}, 0, 0x{2 * k4 + 1}4{2 * k4}4;"
            yield pair, [pick, *_e4m3_factors(pair, form.activations)], (0, k4, k5), (1, k4, k5)
    else:
        for part in range(2 if form.group == 32 else 1):
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
    rounded = f"cvt.rn.{_PAIR_TYPE[form.activations]}.f32 {remainder}, y, x;"
    return pair, [*lines, "sub.rn.f32 x, x, v;", "sub.rn.f32 y, y, w;", rounded]


def code_shift(form: WeightForm) -> int:
    """The power of two by which unpacked codes are too small."""
    shifts = {f.E2M1_CODE: {f.BF16: 126, f.F16: 14}, f.E4M3_CODE: {f.BF16: 120, f.F16: 8}}
    return shifts.get(form.code, {}).get(form.activations, 0)


def row_shift(form: WeightForm) -> int:
    """The part of `code_shift` that goes to the row's factor, because a group's factor cannot hold it."""
    if form.scale == f.E4M3_G16:
        return {f.BF16: 20, f.F16: 7}[form.activations]
    return 0


# ---------------------------------------------------------------- complete statements


def _statements(form: WeightForm) -> tuple[str, int, int]:
    outputs = 16 if form.bits == 4 else 8
    words = [f"${outputs + i}" for i in range(4)]
    metas = [f"${outputs + 4 + 4 * i}" for i in range(form.scale_words)]
    split = form.scale_words - form.zero_words
    k5s = (0, 1) if form.bits == 4 else (0,)
    lines, factor = _factors(form, metas[:split], k5s)
    more, zero = _zeros(form, metas[split:], k5s)
    lines += more
    for k5 in k5s:
        out = _output_registers(form, k5)
        if form.bits == 8:
            for (n3, k3, k4), register in out.items():
                lines += _byte(words[n3 + 2 * k3], k4, register, form)
        elif form.code == f.E2M1_CODE and form.activations == f.BF16:
            lines += _e2m1_bf16(words[2 * k5 : 2 * k5 + 2], out)
        elif form.subnormal:
            lines += _subnormal_nibbles(words[2 * k5 : 2 * k5 + 2], out)
        else:
            lines += _nibbles(words[2 * k5 : 2 * k5 + 2], out, form)
        for (n3, _, k4), register in out.items():
            lines += _finish(form, register, zero.get((n3, k5)), factor.get((n3, k4, k5)))
    lines, constants = _name_constants([_fused(line) for line in lines])
    registers = {*factor.values(), *zero.values(), *(f"{kind}{i}" for kind in "pe" for i in range(4))}
    if form.subnormal or form.two_part_scale:
        registers |= {_companion(m) for m in factor.values()}
    named = ["t", "u", *sorted(registers), *constants]
    head = f"{{\n.reg .b32 {', '.join(named)}; .reg .f32 x, y, v, w; .reg .b16 h0, h1;\n"
    return head + "\n".join(lines) + "\n}", outputs, form.scale_words


def _fused(line: str) -> str:
    """x * y as x * y + -0 and x - y as y * -1 + x: before sm_90, bf16x2 has only fused multiply-add. The same bits."""
    line = re.sub(r"mul(\.rn\.bf16x2 .*);", r"fma\1, 0x80008000;", line)
    return re.sub(r"sub(\.rn\.bf16x2 \S+) (\S+), (\S+);", r"fma\1 \3, 0xbf80bf80, \2;", line)


def _name_constants(lines: list[str]) -> tuple[list[str], list[str]]:
    """Packed arithmetic takes no immediates: move each constant to a register first."""
    names: dict[str, str] = {}

    def name(match: re.Match[str]) -> str:
        return names.setdefault(match[0], f"c{len(names)}")

    named = [re.sub(r"0x[0-9a-f]{8}\b", name, line) if "x2 " in line else line for line in lines]
    return [f"mov.b32 {register}, {value};" for value, register in names.items()] + named, list(names.values())


def _output_registers(form: WeightForm, k5: int) -> dict[tuple[int, int, int], str]:
    """The register of each (n3, k3, k4). Output tensor j = n3 + 2 k3 (+ 4 k4 for nibbles) has two registers."""
    out = {}
    for k4, k3, n3 in itertools.product(range(2), repeat=3):
        j = n3 + 2 * k3
        out[n3, k3, k4] = f"${2 * (j + 4 * k4) + k5}" if form.bits == 4 else f"${2 * j + k4}"
    return out


def _zeros(form: WeightForm, metas: list[str], k5s: tuple[int, ...]) -> tuple[list[str], dict[tuple[int, int], str]]:
    """Zero points in both halves of a register; they are stored with the code's magic number added."""
    lines: list[str] = []
    where: dict[tuple[int, int], str] = {}
    for part, meta in enumerate(metas):
        lines += _spread(meta, f"z0{part}", f"z1{part}")
    if form.zero:
        where = {(n3, k5): f"z{n3}{k5 if form.group == 32 else 0}" for n3 in range(2) for k5 in k5s}
    return lines, where


def _finish(form: WeightForm, register: str, zero: str | None, factor: str | None) -> list[str]:
    """Subtract the zero point and multiply by the factor, if the form has them."""
    act, to = form.activations, _PAIR_TYPE[form.activations]
    lines = []
    if form.subnormal and factor is not None:
        return [f"fma.rn.{to} {register}, {register}, {factor}, {_companion(factor)};"]
    if form.code == f.INT4_CODE:
        lines.append(f"sub.rn.{to} {register}, {register}, {zero or _pair(INT4_MAGIC[act] + 8)};")
    if factor is not None and form.two_part_scale:
        lines.append(f"mul.rn.{to} t, {register}, {_companion(factor)};")
        lines.append(f"fma.rn.{to} {register}, {register}, {factor}, t;")
    elif factor is not None:
        lines.append(f"mul.rn.{to} {register}, {register}, {factor};")
    elif code_shift(form):
        lines.append(f"mul.rn.{to} {register}, {register}, {power(code_shift(form), act)};")
    return lines
