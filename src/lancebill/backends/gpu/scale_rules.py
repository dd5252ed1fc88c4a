"""How the scales of a form are stored, as numbers: for the definition in torch and for the kernel that packs them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from lancebill.backends.gpu.kernels import weight_form as f
from lancebill.backends.gpu.kernels.unpack_ptx_fp8 import LEAST_EXPONENT
from lancebill.backends.gpu.kernels.unpack_scales import BYTE_UNIT, code_shift, row_shift, scale_shift
from lancebill.backends.gpu.kernels.weight_form import WeightForm


@dataclass(frozen=True)
class ExponentRange:
    """e8m0 exponents relative to the row's base: the largest and the smallest that the kernel applies exactly, and the
    offset of the stored byte (the exponent field of the factor)."""

    top: int
    bottom: int
    offset: int


EXPONENT_RANGE = {
    (f.E2M1_CODE, f.BF16): ExponentRange(1, -252, 253),
    (f.E2M1_CODE, f.F16): ExponentRange(1, -23, 29),
    (f.E2M1_CODE, f.E4M3): ExponentRange(6, LEAST_EXPONENT, -LEAST_EXPONENT),
    (f.E4M3_CODE, f.BF16): ExponentRange(7, -246, 247),
    (f.E4M3_CODE, f.F16): ExponentRange(7, -15, 23),
}


@dataclass(frozen=True)
class BaseRule:
    """Per row, the power of two that moves from its scales to its factor: the exponent of its largest scale (as frexp
    gives it; of e8m0 scales the exponent itself) plus `shift`. With `clamp` at least 0."""

    shift: int
    clamp: bool


@lru_cache(maxsize=256)
def base_rule(form: WeightForm) -> BaseRule | None:
    """The rule of a form; None if scales are stored as they are.

    Group scales above 2**6 are lowered to it. With fp16 activations smaller ones are raised to it too, because fp16
    underflows early. Where unpacked codes are in units so small that a scale has the inverse unit, room is made for it:
    bf16 has room for scales below 2**-5 (int4), which holds for almost every row, fp16 below 2**-8.
    """
    wide = form.activations == f.BF16  # almost every row then needs no base
    if form.scale == f.E8M0_G32:
        return BaseRule(-EXPONENT_RANGE[form.code, form.activations].top, wide)
    if form.promoted or form.scale in (f.NO_SCALE, f.E4M3_G16):
        return None
    if form.subnormal or form.code in f.CODEBOOKS:
        # Rounding may double.
        unit = BYTE_UNIT[form.activations] if form.subnormal else code_shift(form) - row_shift(form) + 1
        return BaseRule(unit - 128 if wide else unit - 16, wide)
    return BaseRule(-6, form.activations != f.F16)


def units(form: WeightForm) -> tuple[int, int]:
    """The powers of two in the stored scales of rows r and r + 8, which undo that of unpacked codes.

    Subnormal forms: rows r + 8 use the high nibble, whose unit is 2**4 larger.
    """
    if form.subnormal:
        return BYTE_UNIT[form.activations], BYTE_UNIT[form.activations] - 4
    return scale_shift(form), scale_shift(form)
