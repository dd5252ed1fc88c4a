"""The counterpart of `unpack_ptx` for fp8 activations, where a register holds four columns.

    k6 k5: lane % 4    k1 k0: byte of the register    k4 k3: wgmma's k32 step    k2: its upper 16 columns

A lane owns 32 neighbouring columns of a slice, a whole group of scales. wgmma expects a different column order, so the
rows of fp8 tokens, which only our own kernels write, are permuted to match: `convert_row.column_at`.

e4m3 has four significant bits, enough for every 4-bit code minus a zero point up to 16, so nothing is rounded here.
Scales that are powers of two are folded into exponents; other scales multiply the accumulators.
"""

from __future__ import annotations

import itertools

from lancebill.backends.gpu.kernels import weight_form as f
from lancebill.backends.gpu.kernels.weight_form import WeightForm

Bits = tuple[tuple[int, int, int], ...]  # (bit of the code, word, bit of the word)

# e4m3 codes of 0 .. 3, 4 .. 7, -8 .. -5, -4 .. -1.
_E4M3_INTEGERS = (0x44403800, 0x4E4C4A48, 0xCACCCED0, 0xB8C0C4C8)
LEAST_EXPONENT = -5  # lowest exponent of a group relative to its row's base: 0.5 is then still a normal e4m3 number
ZERO_BITS = 31  # mask of the zero point in a promoted form's scale word


def places_e4m3(form: WeightForm, n3: int, k2: int, k3: int, k4: int, k10: int) -> Bits:
    """Word and bit position of each bit of one code; `k10` is k1 k0."""
    if form.bits == 8:
        return tuple((b, 8 * k4 + 4 * k3 + n3 + 2 * k2, 8 * k10 + b) for b in range(8))
    word, nibble = 4 * k4 + n3 + 2 * k3, 4 * (k10 + 4 * k2)
    if form.zero:  # columns in pairs, one in each half of the word
        nibble = 4 * ((k10 >> 1) + 2 * k2) + 16 * (k10 & 1)
        return tuple((b, word, nibble + b) for b in range(4))
    sign = 8 * k10 + (3 if k2 else 7)
    return ((0, word, nibble), (1, word, nibble + 1), (2, word, nibble + 2), (3, word, sign))


def fp8_statements(form: WeightForm) -> tuple[str, int, int]:
    """PTX, outputs and scale words of a form: e4m3 codes are copied, other codes are looked up or converted."""
    if form.code == f.E2M1_CODE:
        return _e2m1_e4m3(), 16, 1
    if form.code == f.E4M3_CODE:
        # A copy that the assembler cannot elide (%ctaid.z is always 0, but it cannot know): the loads of the next words
        # must not overwrite registers that an outstanding wgmma reads.
        copies = [f"or.b32 ${j}, ${4 + j}, z;" for j in range(4)]
        return "\n".join(["{", ".reg .b32 z;", "mov.u32 z, %ctaid.z;", *copies, "}"]), 4, 0
    lines = ["{", ".reg .b32 l, h, m, n, s, p, q, t, z0, z1, c; .reg .b16 h0, h1;"]
    if form.zero:
        lines += _e4m3_zeros()
    else:
        lines += [f"mov.b32 {name}, {table:#010x};" for name, table in zip("lhmn", _E4M3_INTEGERS)]
    for i in range(4):
        n3, k3 = i & 1, i >> 1
        word, low, high = f"${8 + i}", f"${n3 + 4 * k3}", f"${n3 + 2 + 4 * k3}"
        lines += _unsigned_e4m3(f"z{n3}", word, low, high) if form.zero else _int4_e4m3(word, low, high)
    return "\n".join([*lines, "}"]), 8, 2 if form.zero else 0


def _e2m1_e4m3() -> str:
    """64 codes, 32 of one row at a time. They share a scale, so one table serves them: e2m1's eight magnitudes as e4m3
    codes, with the exponent d added to all but zero (two multiply-adds). A permute instruction looks up four codes at
    a time. d is stored relative to `LEAST_EXPONENT`, so it needs no sign extension."""
    lines = ["{", ".reg .b32 d, l, h, s, p, t;"]
    for n3 in range(2):
        lines += [
            f"prmt.b32 d, $24, 0, 0x444{n3};",
            f"mad.lo.s32 l, d, 0x08080800, {0x3C383000 + LEAST_EXPONENT * 0x08080800:#010x};",
            f"mad.lo.s32 h, d, 0x08080808, {0x4C484440 + LEAST_EXPONENT * 0x08080808:#010x};",
        ]
        for k4, k3 in itertools.product(range(2), repeat=2):
            word, low, high = f"${16 + 4 * k4 + 2 * k3 + n3}", 2 * (n3 + 4 * k3) + k4, 2 * (n3 + 2 + 4 * k3) + k4
            lines += [
                f"and.b32 s, {word}, 0x77777777;",
                "prmt.b32 p, l, h, s;",
                f"lop3.b32 ${low}, {word}, 0x80808080, p, 0xea;",
                "shr.u32 s, s, 16;",
                "prmt.b32 p, l, h, s;",
                f"shl.b32 t, {word}, 4;",
                f"lop3.b32 ${high}, t, 0x80808080, p, 0xea;",
            ]
    return "\n".join([*lines, "}"])


def _int4_e4m3(word: str, low: str, high: str) -> list[str]:
    """Eight codes: looked up in the tables of 0 .. 7 and -8 .. -1; the top bit of the code selects the table."""
    return [
        f"and.b32 s, {word}, 0x77777777;",
        "prmt.b32 p, l, h, s;",
        "prmt.b32 q, m, n, s;",
        f"prmt.b32 t, {word}, 0, 0xba98;",  # copies each byte's top bit to the whole byte
        f"lop3.b32 {low}, t, p, q, 0xca;",
        "shr.u32 s, s, 16;",
        "prmt.b32 p, l, h, s;",
        "prmt.b32 q, m, n, s;",
        f"shl.b32 t, {word}, 4;",
        "prmt.b32 t, t, 0, 0xba98;",
        f"lop3.b32 {high}, t, p, q, 0xca;",
    ]


def _e4m3_zeros() -> list[str]:
    """1024 + zero point of rows r and r + 8 as fp16 in both halves, from the low bits of their scale words."""
    lines = []
    for n3 in range(2):
        lines += [f"and.b32 t, ${12 + 4 * n3}, {ZERO_BITS};", f"mad.lo.s32 z{n3}, t, 0x00010001, 0x64006400;"]
    return [*lines, "mov.b32 c, 0x64006400;"]


def _unsigned_e4m3(zero: str, word: str, low: str, high: str) -> list[str]:
    """Eight codes minus their zero point, computed in fp16: e4m3 holds all integers up to 16."""
    lines = []
    for k2, register in enumerate((low, high)):
        for pair in range(2):
            shift = 4 * (pair + 2 * k2)
            source = word
            if shift:
                lines.append(f"shr.u32 t, {word}, {shift};")
                source = "t"
            lines += [
                f"lop3.b32 t, {source}, 0x000f000f, c, 0xea;",
                f"sub.rn.f16x2 t, t, {zero};",
                f"cvt.rn.satfinite.e4m3x2.f16x2 h{pair}, t;",
            ]
        lines.append(f"mov.b32 {register}, {{h0, h1}};")
    return lines
