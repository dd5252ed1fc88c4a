"""PTX that looks up 4-bit codes in a table of 16 numbers, for 16-bit activations.

A permute instruction looks up four codes at once in eight bytes. A table is therefore stored as bytes: magnitudes as
16-bit fixed-point numbers, high bytes and low bytes apart, eight codes without the top bit and eight with it. The top
bit is also the sign. A byte is a number already (`unpack_scales.BYTE_UNIT`), so a magnitude is

    high * factor + low * factor / 256

which a multiplication and a fused multiply-add round to 16 bits once, but for a tiny error of the smaller term.
"""

from __future__ import annotations

from lancebill.backends.gpu.kernels import weight_form as f
from lancebill.backends.gpu.kernels.unpack_ptx_fp8 import Bits
from lancebill.backends.gpu.kernels.unpack_scales import PAIR_TYPE, companion, low_byte
from lancebill.backends.gpu.kernels.weight_form import WeightForm

# Magnitudes by code, 2**16 being 1 for NF4 and 128 for IQ4; the first eight are negative. One is a unit short of 2**16:
# the difference is lost in rounding.
MAGNITUDES = {
    f.NF4_CODE: (
        65535, 45626, 34411, 25881, 18641, 12109, 5967, 0, 5215, 10547, 16129, 22146, 28882, 36872, 47380, 65535,
    ),
    f.IQ4_CODE: tuple(
        v << 9 for v in (127, 104, 83, 65, 49, 35, 22, 10, 1, 13, 25, 38, 53, 69, 89, 113)
    ),
}  # fmt: skip
_PICK = (0x5140, 0x7362)  # bytes 0 and 1, or 2 and 3, as the low bytes of two halves; the signs as their high bytes


def codebook_places(n3: int, k3: int, k4: int, k5: int, k0: int) -> Bits:
    """The codes of a register are neighbours. Top bits are the top bits of bytes: of the lower four codes as they are,
    of the upper four after a shift by 4."""
    code = k0 + 2 * (n3 + 2 * k3)
    top = 8 * code + 7 if code < 4 else 8 * (code - 4) + 3
    return (*((b, k4 + 2 * k5, 4 * code + b) for b in range(3)), (3, k4 + 2 * k5, top))


def table_registers(form: WeightForm) -> tuple[list[str], list[str]]:
    """Statements that fill the registers of the table, and all names: high and low bytes, of 4 codes each."""
    magnitudes = MAGNITUDES[form.code]
    lines, names = [], ["i", "j", "q", "g", "high", "low"]
    for kind, shift in (("high", 8), ("low", 0)):
        for four in range(4):
            part = [m >> shift & 255 for m in magnitudes[4 * four : 4 * four + 4]]
            names.append(f"{kind}{four}")
            lines.append(f"mov.b32 {names[-1]}, {int.from_bytes(part, 'little'):#010x};")
    return lines, names


def codebook_lines(word: str, out: dict[tuple[int, int], str], factor: dict[int, str], form: WeightForm) -> list[str]:
    """The numbers of a word's eight codes; registers by (n3, k3), factors by n3."""
    lines = [f"and.b32 i, {word}, 0x77777777;"]
    for k3 in range(2):
        tops = word
        if k3:
            lines += ["shr.u32 i, i, 16;", f"shl.b32 j, {word}, 4;"]
            tops = "j"
        lines.append(f"prmt.b32 q, {tops}, 0, 0xba98;")  # copies each byte's top bit to the whole byte
        lines.append(f"lop3.b32 g, {tops}, 0x80808080, 0, 0x0c;")  # signs: not the top bits
        for kind in ("high", "low"):
            lines += [f"prmt.b32 {kind}, {kind}0, {kind}1, i;", f"prmt.b32 u, {kind}2, {kind}3, i;"]
            lines.append(f"lop3.b32 {kind}, q, u, {kind}, 0xca;")
        for n3 in range(2):
            register = out[n3, k3]
            lines += [f"prmt.b32 {register}, high, g, {_PICK[n3]:#06x};", f"prmt.b32 t, low, g, {_PICK[n3]:#06x};"]
            lines += _scaled(register, factor[n3], form)
    return lines


def _scaled(register: str, factor: str, form: WeightForm) -> list[str]:
    """High bytes in `register`, low bytes in t: their sum times the factor."""
    to = PAIR_TYPE[form.activations]
    lines = [f"mul.rn.{to} t, t, {low_byte(factor)};"]
    if form.two_part_scale:
        lines.append(f"fma.rn.{to} t, {register}, {companion(factor)}, t;")
    return [*lines, f"fma.rn.{to} {register}, {register}, {factor}, t;"]
