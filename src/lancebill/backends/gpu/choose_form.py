"""The kernel form of a matrix, or the reason why it has none."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from lancebill.backends.base import NoForm, Reason
from lancebill.backends.gpu.kernels import weight_form as f
from lancebill.backends.gpu.kernels.weight_form import WeightForm
from lancebill.moe.layout import MatrixShape
from lancebill.numbers.dtypes import BF16, E2M1, E4M3, E8M0, F16, F32, IQ4, NF4, ZERO16, DType, biased_type, uint_type
from lancebill.numbers.spec import (
    ALL,
    DENSE_BF16,
    DENSE_F16,
    FP8_CHANNEL,
    FP8_TENSOR,
    MUL,
    TENSOR,
    ActivationSpec,
    QuantSpec,
    Scale,
    Zero,
    int_spec,
)

_INT8 = int_spec(8, scale=F32)
_ACTIVATIONS = {DENSE_BF16: f.BF16, DENSE_F16: f.F16, FP8_CHANNEL: f.E4M3, _INT8: f.S8}
_STATIC = {FP8_TENSOR: f.E4M3, int_spec(8, TENSOR, scale=F32): f.S8}  # one input scale per expert, from the checkpoint
_BYTES = {f.E4M3: "fp8", f.S8: "int8"}
_BYTE_CODES = {f.E4M3: (f.INT4_CODE, f.E4M3_CODE), f.S8: (f.INT4_CODE, f.INT8_CODE)}
_GROUP_SCALES = {BF16: f.BF16_GROUP, F16: f.F16_GROUP, F32: f.F32_GROUP}
_CODES: dict[DType, str] = {E2M1: f.E2M1_CODE, E4M3: f.E4M3_CODE, NF4: f.NF4_CODE, IQ4: f.IQ4_CODE}
_INTEGERS = {2: f.INT2_CODE, 3: f.INT3_CODE, 4: f.INT4_CODE, 8: f.INT8_CODE}


@lru_cache(maxsize=1024)
def kernel_form(shape: MatrixShape, activations: ActivationSpec) -> WeightForm:
    """The form of a matrix. Raises NoForm with a reason if no kernel supports it."""
    spec = shape.spec
    act = (_STATIC if activations.static else _ACTIVATIONS).get(activations.spec)
    if act is None:
        raise _no_form("activations", f"{activations} activations have no GPU kernel", "use bf16, fp16, fp8 or int8")
    form = _form(spec, act)
    if shape.k % 32 or shape.n % 16:
        raise _no_form("sizes", f"the matrix is {shape.n} x {shape.k}", "K must be a multiple of 32, N of 16")
    if form.group and shape.k % form.group:
        raise _no_form("group", f"K = {shape.k} is not a multiple of the group size {form.group}", None)
    return _byte_form(spec, form) if form.byte_inputs else form


def _byte_form(spec: QuantSpec, form: WeightForm) -> WeightForm:
    """The form with 8-bit activations: group scales multiply the fp32 sums of 128 columns."""
    inputs = _BYTES[form.activations]
    e8m0 = form.code == f.E2M1_CODE and form.scale == f.E8M0_G32 and form.activations == f.E4M3
    if not e8m0 and (form.code not in _BYTE_CODES[form.activations] or form.scale == f.E8M0_G32):
        raise _no_form("spec", f"{spec} x {inputs} has no GPU kernel yet", "use bf16 activations")
    if form.zero and form.scale == f.NO_SCALE:
        raise _no_form("spec", f"{spec} x {inputs}: zero points per row have no kernel", "use zero points per group")
    if form.scale in (f.NO_SCALE, f.E8M0_G32):
        return form
    if form.group % 128:
        raise _no_form("group", f"groups of {form.group} columns x {inputs}", "use multiples of 128")
    return replace(form, scale=f.F32_GROUP)


def _form(spec: QuantSpec, act: str) -> WeightForm:
    if spec.minimum or not spec.scales:
        raise _no_form("spec", f"{spec} has no GPU kernel", None)
    inner, outer = spec.scales[0], spec.scales[1:]
    if any(level.block[1] != ALL for level in outer) or (inner.op != MUL and inner.block[1] != ALL):
        raise _no_form("spec", f"{spec}: only one level of scales may vary along K", None)
    code = _code(spec)
    group = inner.block[1]
    if code in (f.E2M1_CODE, f.E4M3_CODE) and inner.dtype == E8M0 and inner.block == (1, 32) and not outer:
        return WeightForm(code, f.E8M0_G32, 32, act)
    if code == f.E2M1_CODE and inner.dtype == E4M3 and inner.block == (1, 16) and outer:
        return WeightForm(code, f.E4M3_G16, 16, act)
    if code == f.E2M1_CODE:
        raise _no_form("spec", f"{spec}: e2m1 needs e8m0 scales per 32 columns, or e4m3 scales per 16", None)
    zero = spec.zero is not None
    if group == ALL and code in f.CODEBOOKS:
        raise _no_form("group", f"{spec}: tables of numbers need scales per group of columns", "use 32, 64, 128 ...")
    if group == ALL:
        return WeightForm(code, f.NO_SCALE, 0, act, zero)
    # A stage of a pipeline has whole groups, or a group has whole stages.
    aligned = group >= 64 and group & (group - 1) == 0
    if not (aligned or (group == 32 and inner.block[0] == 1)):
        raise _no_form("group", f"groups of {group} columns", "use 32 (of one row), 64, 128, 256 ...")
    scale = _GROUP_SCALES.get(inner.dtype)
    if scale is None or (scale == f.F32_GROUP and zero) or (code == f.E4M3_CODE and scale != f.F32_GROUP):
        raise _no_form("spec", f"{spec}: {inner.dtype} scales for this code have no GPU kernel", None)
    return WeightForm(code, scale, group, act, zero)


def _code(spec: QuantSpec) -> str:
    code = _CODES.get(spec.dtype) if spec.zero is None else None
    for bits, integer in _INTEGERS.items():
        if spec.zero is None and spec.dtype == biased_type(bits):
            code = integer
        if bits < 8 and spec.dtype == uint_type(bits) and spec.zero == Zero(ZERO16, spec.scales[0].block):
            code = integer
    if code is None:
        raise _no_form("spec", f"{spec} has no GPU kernel yet", "use e2m1, e4m3, nf4, int2, int3, int4 or int8 codes")
    return code


def _no_form(code: str, text: str, hint: str | None) -> NoForm:
    return NoForm(Reason(code, text, hint))


def outer_levels(spec: QuantSpec) -> tuple[Scale, ...]:
    """Scale levels that cover all of K. They become one factor per row."""
    return tuple(level for level in spec.scales if level.block[1] == ALL)
