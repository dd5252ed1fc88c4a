"""PTX that turns the codes of packed words into 16-bit numbers, and the bit positions that match it.

`places` gives the positions of a code's bits, which the packer uses. Each generator returns the statements that fill
the registers of one k5, by (n3, k3, k4); see `unpack_ptx` for the names of bits.
"""

from __future__ import annotations

from lancebill.backends.gpu.kernels import weight_form as f
from lancebill.backends.gpu.kernels.unpack_codebook import codebook_places
from lancebill.backends.gpu.kernels.unpack_ptx_fp8 import Bits
from lancebill.backends.gpu.kernels.unpack_scales import pair_of
from lancebill.backends.gpu.kernels.weight_form import WeightForm

Registers = dict[tuple[int, int, int], str]  # by (n3, k3, k4)

# Two words hold the codes of the eight bf16 registers of one k5. A mask takes the sign at bit 15 and the exponent and
# mantissa at bits 8, 7, 6 of each half. Three rotations of each word give six registers; the bits that no rotation
# uses, merged from both words, give the other two. 16 operations for 16 codes.
_E2M1_MASK = 0x81C081C0
_E2M1_BITS = ((3, 15), (2, 8), (1, 7), (0, 6))
_ROTATIONS, _MERGED_ROTATIONS, _MERGED_FROM_0 = (0, 4, 10), (6, 12), 0x06030603
# 128 and 1024: OR-ing a small integer into the mantissa adds it.
MAGIC = {f.BF16: 0x4300, f.F16: 0x6400}
# A half of a word holds two e4m3 codes. One is already in position, so a mask extracts it; the other fills the
# remaining bits. Lowest bit of the code, the mask, and for the other code (left shift, mask) pairs.
_E4M3_PLACE = {f.BF16: (4, 0x87F0, ((4, 0x80F0), (-4, 0x0700))), f.F16: (7, 0xBF80, ((7, 0x3F80), (1, 0x8000)))}


def places(form: WeightForm, n3: int, k3: int, k4: int, k5: int, k0: int) -> Bits:
    """Word and bit position of each bit of one code, for 16-bit activations."""
    if form.code == f.E2M1_CODE and form.activations == f.BF16:
        return _e2m1_places(n3, k3, k4, k5, k0)
    if form.code in f.CODEBOOKS:
        return codebook_places(n3, k3, k4, k5, k0)
    if form.bits < 4:
        return _plane_places(form, n3 + 2 * k3 + 4 * k0, k4, k5)
    if form.bits == 4:
        start = 4 * (n3 + 2 * k3) + 16 * k0
        return tuple((b, k4 + 2 * k5, start + b) for b in range(4))
    word = 4 * k5 + n3 + 2 * k3
    if form.code == f.E4M3_CODE:
        return tuple((b, word, _e4m3_place(form, b, k4) + 16 * k0) for b in range(8))
    return tuple((b, word, 8 * k4 + 16 * k0 + b) for b in range(8))


def _plane_places(form: WeightForm, nibble: int, k4: int, k5: int) -> Bits:
    """Two bits of a code in the words 0 and 1, as nibbles of two codes, and a third in word 2: see `nibble_words`."""
    low = ((b, k5, 4 * nibble + 2 * k4 + b) for b in range(2))
    return (*low, (2, 2, 4 * nibble + k4 + 2 * k5)) if form.bits == 3 else tuple(low)


def nibble_words(words: list[str]) -> list[str]:
    """Words with two bits of a code in every nibble, and with two words also the third bit: n0 .. n3, by k4 + 2 k5.

    Two bits stay dirty: the nibble has two bits of another code as well.
    """
    lines = [
        line
        for k5 in range(2)
        for line in (f"mov.b32 n{2 * k5}, {words[k5]};", f"shr.u32 n{2 * k5 + 1}, {words[k5]}, 2;")
    ]
    if len(words) == 2:
        return lines
    for number, shift in enumerate(("shl.b32 t, {}, 2;", "shl.b32 t, {}, 1;", "mov.b32 t, {};", "shr.u32 t, {}, 1;")):
        lines += [shift.format(words[2]), "and.b32 t, t, 0x44444444;"]
        lines.append(f"lop3.b32 n{number}, n{number}, 0x33333333, t, 0xea;")
    return lines


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


def e2m1_bf16(words: list[str], out: Registers) -> list[str]:
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


def subnormal_nibbles(words: list[str], out: Registers, form: WeightForm) -> list[str]:
    """Integers as subnormal numbers (see `BYTE_UNIT`): a mask per register and a shift per word."""
    mask = _code_mask(form)
    lines = []
    for k4, word in enumerate(words):
        lines += [f"and.b32 {out[n3, 0, k4]}, {word}, {mask << 4 * n3:#010x};" for n3 in range(2)]
        lines.append(f"shr.u32 t, {word}, 8;")
        lines += [f"and.b32 {out[n3, 1, k4]}, t, {mask << 4 * n3:#010x};" for n3 in range(2)]
    return lines


def _code_mask(form: WeightForm) -> int:
    return ((1 << form.bits) - 1) * 0x00010001


def nibbles(words: list[str], out: Registers, form: WeightForm) -> list[str]:
    """Integers as 128 + code (bf16) or 1024 + code (fp16); e2m1 as fp16 times 2**-14."""
    lines = []
    for (n3, k3, k4), register in out.items():
        shift = 4 * (n3 + 2 * k3)
        if form.code in f.SMALL_INTEGERS:
            magic = pair_of(MAGIC[form.activations])
            source = words[k4]
            if shift:
                lines.append(f"shr.u32 t, {source}, {shift};")
                source = "t"
            lines.append(f"lop3.b32 {register}, {source}, {_code_mask(form):#010x}, {magic}, 0xea;")
        else:
            lines += [
                f"shl.b32 t, {words[k4]}, {12 - shift};",
                "and.b32 u, t, 0x70007000;",
                "shr.u32 u, u, 3;",
                f"lop3.b32 {register}, t, 0x80008000, u, 0xea;",
            ]
    return lines


def byte(word: str, k4: int, register: str, form: WeightForm) -> list[str]:
    """int8 exactly; e4m3 times 2**-120 (bf16) or 2**-8 (fp16): its exponent becomes the low bits of the wider one."""
    if form.code == f.E4M3_CODE:
        _, mask, moves = _E4M3_PLACE[form.activations]
        if k4 == 0:
            return [f"and.b32 {register}, {word}, {pair_of(mask)};"]
        lines = [
            f"shl.b32 {t}, {word}, {n};" if n > 0 else f"shr.u32 {t}, {word}, {-n};" for t, (n, _) in zip("tu", moves)
        ]
        (_, first), (_, second) = moves
        return [*lines, f"and.b32 t, t, {pair_of(first)};", f"lop3.b32 {register}, u, {pair_of(second)}, t, 0xea;"]
    lines = [f"shr.u32 t, {word}, {8 * k4};"]
    if form.activations == f.F16:
        return [
            *lines,
            f"lop3.b32 t, t, 0x00ff00ff, {pair_of(0x6400)}, 0xea;",
            f"sub.rn.f16x2 {register}, t, {pair_of(0x6480)};",
        ]
    # bf16 has seven mantissa bits: 128 + the low seven bits, minus 128 or 256 depending on the eighth.
    return [
        *lines,
        f"lop3.b32 u, t, 0x00800080, {pair_of(0x4380)}, 0x6a;",
        f"lop3.b32 t, t, 0x007f007f, {pair_of(0x4300)}, 0xea;",
        f"sub.rn.bf16x2 {register}, t, u;",
    ]
