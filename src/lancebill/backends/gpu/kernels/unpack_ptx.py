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
bits is off by a power of two. The row's factor (`row_shift`) or the group's factor corrects it for free.
"""

from __future__ import annotations

import itertools
import re

from lancebill.backends.gpu.kernels import weight_form as f
from lancebill.backends.gpu.kernels.unpack_codebook import codebook_lines, table_registers
from lancebill.backends.gpu.kernels.unpack_codes import (
    MAGIC,
    Registers,
    byte,
    e2m1_bf16,
    nibble_words,
    nibbles,
    subnormal_nibbles,
)
from lancebill.backends.gpu.kernels.unpack_ptx_fp8 import fp8_statements
from lancebill.backends.gpu.kernels.unpack_ptx_int8 import int8_statements
from lancebill.backends.gpu.kernels.unpack_scales import (
    PAIR_TYPE,
    code_shift,
    companion,
    factors,
    low_byte,
    pair_of,
    power,
    zero_points,
)
from lancebill.backends.gpu.kernels.weight_form import WeightForm

_BYTES = {f.E4M3: fp8_statements, f.S8: int8_statements}


class Unpack:
    """A form's inline PTX: `pack` packed words, a word of the second plane and `metas` scale words to `outputs`
    registers.

    A class, not a function: compile-time code in Triton cannot call plain Python functions.
    """

    def __init__(self, form: WeightForm) -> None:
        self.text, self.outputs, self.metas = _BYTES.get(form.activations, _statements)(form)
        self.each = 4 if form.byte_inputs else 2  # numbers per register
        self.pack = self.outputs * self.each * form.planes[0] // 32
        self.operands = len(form.planes) + self.metas

    @property
    def constraints(self) -> str:
        """Operand constraints: each operand of the elementwise call takes `pack` registers."""
        return ",".join(["=&r"] * self.outputs + ["r"] * (self.pack * self.operands))


def _statements(form: WeightForm) -> tuple[str, int, int]:
    """PTX, outputs and scale words of a form. Eight-bit codes are unpacked by k5 unless it selects the scale."""
    k5s = (0,) if form.bits == 8 and not form.fine else (0, 1)
    outputs = 8 * len(k5s)
    pack = outputs * form.planes[0] // 16
    words = [f"${outputs + i}" for i in range(pack)]
    words += [f"${outputs + pack * i}" for i in range(1, len(form.planes))]
    metas = [f"${outputs + pack * (len(form.planes) + i)}" for i in range(form.scale_words)]
    split = form.scale_words - form.zero_words
    lines, factor = factors(form, metas[:split], k5s)
    more, zero = zero_points(form, metas[split:], k5s)
    tables, names = table_registers(form) if form.code in f.CODEBOOKS else ([], [])
    lines += more + tables
    if form.bits < 4:
        lines, words = lines + nibble_words(words), [f"n{i}" for i in range(4)]
    for k5 in k5s:
        out = _output_registers(form, k5)
        if form.code in f.CODEBOOKS:
            lines += _looked_up(form, words[2 * k5 : 2 * k5 + 2], out, {n3: factor[n3, 0, k5] for n3 in range(2)})
            continue
        lines += _numbers(form, words, k5, out)
        for (n3, _, k4), register in out.items():
            lines += _finish(form, register, zero.get((n3, k5)), factor.get((n3, k4, k5)))
    lines, constants = _name_constants([_fused(line) for line in lines])
    registers = {*factor.values(), *zero.values(), *(f"{kind}{i}" for kind in "pen" for i in range(4))}
    if form.subnormal or form.two_part_scale:
        registers |= {companion(m) for m in factor.values()}
    if form.code in f.CODEBOOKS:
        registers |= {low_byte(m) for m in factor.values()}
    named = ["t", "u", "s", *sorted(registers), *names, *constants]
    head = f"{{\n.reg .b32 {', '.join(named)}; .reg .f32 x, y, v, w; .reg .b16 h0, h1;\n"
    return head + "\n".join(lines) + "\n}", outputs, form.scale_words


def _numbers(form: WeightForm, words: list[str], k5: int, out: Registers) -> list[str]:
    """Codes as 16-bit numbers, before zero points and scales."""
    if form.bits == 8:
        first = 4 * k5
        return [
            line
            for (n3, k3, k4), register in out.items()
            for line in byte(words[first + n3 + 2 * k3], k4, register, form)
        ]
    pair = words[2 * k5 : 2 * k5 + 2]
    if form.code == f.E2M1_CODE and form.activations == f.BF16:
        return e2m1_bf16(pair, out)
    return subnormal_nibbles(pair, out, form) if form.subnormal else nibbles(pair, out, form)


def _looked_up(form: WeightForm, words: list[str], out: Registers, factor: dict[int, str]) -> list[str]:
    lines = []
    for k4, word in enumerate(words):
        lines += codebook_lines(word, {(n3, k3): out[n3, k3, k4] for n3 in range(2) for k3 in range(2)}, factor, form)
    return lines


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


def _output_registers(form: WeightForm, k5: int) -> Registers:
    """The register of each (n3, k3, k4). An output tensor has half a register for each packed word: it is n3 + 2 k3,
    and what of 4 k4 + 8 k5 does not select one of its registers."""
    out = {}
    for k4, k3, n3 in itertools.product(range(2), repeat=3):
        j = n3 + 2 * k3
        eight = 4 * j + 2 * k5 + k4 if form.fine else 2 * j + k4
        number = {2: j + 4 * k4 + 8 * k5, 4: 2 * (j + 4 * k4) + k5, 8: eight}
        out[n3, k3, k4] = f"${number[form.planes[0]]}"
    return out


def _finish(form: WeightForm, register: str, zero: str | None, factor: str | None) -> list[str]:
    """Subtract the zero point and multiply by the factor, if the form has them."""
    act, to = form.activations, PAIR_TYPE[form.activations]
    lines = []
    if form.subnormal and factor is not None:
        return [f"fma.rn.{to} {register}, {register}, {factor}, {companion(factor)};"]
    if form.code in f.SMALL_INTEGERS:
        lines.append(f"sub.rn.{to} {register}, {register}, {zero or pair_of(MAGIC[act] + (1 << form.bits - 1))};")
    if factor is not None and form.two_part_scale:
        lines.append(f"mul.rn.{to} t, {register}, {companion(factor)};")
        lines.append(f"fma.rn.{to} {register}, {register}, {factor}, t;")
    elif factor is not None:
        lines.append(f"mul.rn.{to} {register}, {register}, {factor};")
    elif code_shift(form):
        lines.append(f"mul.rn.{to} {register}, {register}, {power(code_shift(form), act)};")
    return lines
