"""The counterpart of `unpack_ptx_fp8` for int8 activations: registers, words and column order are the same.

Codes become signed bytes. Four bits shifted to the top of a byte are already a signed number, 16 times too large, so
4-bit codes without zero points need one or two operations for four codes. A group's scale or the epilogue undoes the
factor for free (`INTEGER_UNIT`).
"""

from __future__ import annotations

from lancebill.backends.gpu.kernels import weight_form as f
from lancebill.backends.gpu.kernels.unpack_ptx_fp8 import ZERO_BITS, Bits
from lancebill.backends.gpu.kernels.weight_form import WeightForm

INTEGER_UNIT = 1 / 16  # of codes at the top of a byte
_SIGNS = 0x80808080  # the top bit of each byte: codes are stored with an offset of half their range


def places_s8(form: WeightForm, n3: int, k2: int, k3: int, k4: int, k10: int) -> Bits:
    """Word and bit position of each bit of one code; `k10` is k1 k0. The two nibbles of a byte differ in k2."""
    if form.bits == 8:
        return tuple((b, 8 * k4 + 4 * k3 + n3 + 2 * k2, 8 * k10 + b) for b in range(8))
    return tuple((b, 4 * k4 + n3 + 2 * k3, 8 * k10 + 4 * k2 + b) for b in range(4))


def int8_statements(form: WeightForm) -> tuple[str, int, int]:
    """PTX, outputs and scale words of a form. Every output is written anew: see `fp8_statements`."""
    if form.code == f.INT8_CODE:
        return "\n".join(["{", *(f"xor.b32 ${j}, ${4 + j}, {_SIGNS:#010x};" for j in range(4)), "}"]), 4, 0
    lines = ["{", ".reg .b32 t, z0, z1;"]
    if form.zero:
        for n3 in range(2):  # the zero point in every byte
            lines += [f"and.b32 t, ${12 + 4 * n3}, {ZERO_BITS};", f"mul.lo.u32 z{n3}, t, 0x01010101;"]
    for i in range(4):
        n3, k3 = i & 1, i >> 1
        word, low, high = f"${8 + i}", f"${n3 + 4 * k3}", f"${n3 + 2 + 4 * k3}"
        lines += _unsigned(f"z{n3}", word, low, high) if form.zero else _signed(word, low, high)
    return "\n".join([*lines, "}"]), 8, 2 if form.zero else 0


def _signed(word: str, low: str, high: str) -> list[str]:
    """Eight codes times 16: each nibble at the top of a byte, its offset of 8 removed by the top bit."""
    return [
        f"shl.b32 t, {word}, 4;",
        f"lop3.b32 {low}, t, 0xf0f0f0f0, {_SIGNS:#010x}, 0x6a;",
        f"lop3.b32 {high}, {word}, 0xf0f0f0f0, {_SIGNS:#010x}, 0x6a;",
    ]


def _unsigned(zero: str, word: str, low: str, high: str) -> list[str]:
    """Eight codes minus their zero point. The top bit of each byte keeps borrows inside the byte."""
    lines = []
    for register, shift in ((low, 0), (high, 4)):
        source = word
        if shift:
            lines.append(f"shr.u32 t, {word}, {shift};")
            source = "t"
        lines += [
            f"lop3.b32 t, {source}, 0x0f0f0f0f, {_SIGNS:#010x}, 0xea;",
            f"sub.u32 t, t, {zero};",
            f"xor.b32 {register}, t, {_SIGNS:#010x};",
        ]
    return lines
