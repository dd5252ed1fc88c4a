"""The names of specs, parsed and printed in this one place.

    name     = base ("-" word)*
    base     = bf16 | fp16 | fp32 | mxfp4 | nvfp4 | ... | int1 .. int8 | any dtype (fp8 = e4m3fn)
    word     = ["/"] block [":" dtype]      a scale level; "/" divides; dtype where not the usual one
             | "zp" [":" dtype]             a zero point for each block of the first scale
             | "min." block [":" dtype]     a level of the additive minimum
    block    = tensor | channel | g<columns> | block | b<rows>x<columns>

`int4-g128`, `int4-g32-zp`, `fp8-block`, `int4-g128:fp16`, `uint4-g32:uint6-g256:fp16-min.g32:uint6-min.g256:fp16`.
Printing gives the shortest name that parses back to the same spec.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from colibri import dtypes as d
from colibri.errors import SpecError
from colibri.quant import (
    ALL,
    CHANNEL,
    DENSE_BF16,
    DENSE_F16,
    DENSE_F32,
    DIV,
    FP8_BLOCK_SIDES,
    FP8_CHANNEL,
    FP8_TENSOR,
    MUL,
    MXFP4,
    MXFP6_E2M3,
    MXFP6_E3M2,
    MXFP8,
    MXFP8_E5M2,
    NF4_G64,
    NVFP4,
    NVFP4_DIV,
    TENSOR,
    ActivationSpec,
    Block,
    QuantSpec,
    Scale,
    Zero,
    fp8_spec,
    group,
)

NAMED: dict[str, QuantSpec] = {
    "bf16": DENSE_BF16,
    "fp16": DENSE_F16,
    "fp32": DENSE_F32,
    "mxfp4": MXFP4,
    "mxfp6-e2m3": MXFP6_E2M3,
    "mxfp6-e3m2": MXFP6_E3M2,
    "mxfp8": MXFP8,
    "mxfp8-e5m2": MXFP8_E5M2,
    "nvfp4": NVFP4,
    "nvfp4-div": NVFP4_DIV,
    "nf4": NF4_G64,
}
_NAME_OF = {spec: name for name, spec in NAMED.items()}

_DTYPES: dict[str, d.DType] = {
    t.name: t
    for t in (
        d.E2M1, d.E2M3, d.E3M2, d.E3M4, d.E4M3, d.E4M3FNUZ, d.E5M2, d.E8M0, d.UE5M3, d.NF4,
        d.BNB_FP4, d.IQ4, d.INV127, d.TERNARY, d.F16, d.BF16, d.F32,
    )
}  # fmt: skip
_DTYPES["fp8"] = d.E4M3

ACTIVATIONS: dict[str, ActivationSpec] = {
    "bf16": ActivationSpec(DENSE_BF16),
    "fp16": ActivationSpec(DENSE_F16),
    "fp32": ActivationSpec(DENSE_F32),
    "fp8": ActivationSpec(FP8_CHANNEL),
    "fp8-static": ActivationSpec(FP8_TENSOR, static=True),
    "fp8-g128": ActivationSpec(fp8_spec(group(128))),
    "int8": ActivationSpec(QuantSpec(d.biased_type(8), (Scale(d.F32, CHANNEL),))),
    "int8-static": ActivationSpec(QuantSpec(d.biased_type(8), (Scale(d.F32, TENSOR),)), static=True),
    "mxfp8": ActivationSpec(MXFP8),
    "mxfp4": ActivationSpec(MXFP4),
    "nvfp4": ActivationSpec(NVFP4),
}
_ACTIVATION_NAME_OF = {spec: name for name, spec in ACTIVATIONS.items()}

EXAMPLES = "bf16, mxfp4, nvfp4, nf4, int4-g128, int4-g32-zp, int8, fp8-block"
_LEVEL = re.compile(r"(?P<div>/?)(?P<block>[a-z0-9]+)(?::(?P<dtype>[a-z0-9]+))?")


def parse_spec(name: str) -> QuantSpec:
    """The spec a weight name stands for."""
    if name in NAMED:
        return NAMED[name]
    base, *words = name.split("-")
    zero_word = next((w for w in words if w == "zp" or w.startswith("zp:")), None)
    minimum = tuple(_level(w[4:], d.F16, name) for w in words if w.startswith("min."))
    scales = [w for w in words if w is not zero_word and not w.startswith("min.")]
    dtype = _code_type(base, zero=zero_word is not None, name=name)
    usual = _usual_scale(dtype)
    levels = tuple(_level(w, usual, name) for w in scales or ["channel"]) if dtype.wide is None else ()
    if dtype.wide is not None and words:
        raise SpecError(f"{base} takes no scales", where=f"spec '{name}'", hint=f"for example {EXAMPLES}")
    zero = None
    if zero_word is not None:
        zero_type = _scale_type(zero_word[3:], name) if zero_word != "zp" else d.ZERO16
        zero = Zero(zero_type, levels[0].block)
    return QuantSpec(dtype, levels, zero, minimum)


def spec_name(spec: QuantSpec) -> str:
    """The shortest name that parses back to `spec`."""
    if spec in _NAME_OF:
        return _NAME_OF[spec]
    words = [_code_name(spec)]
    usual = _usual_scale(spec.dtype)
    levels = [_level_name(s, usual) for s in spec.scales]
    if levels != ["channel"]:
        words += levels
    if spec.zero is not None:
        words.append("zp" if spec.zero.dtype == d.ZERO16 else f"zp:{spec.zero.dtype}")
    words += [f"min.{_level_name(s, d.F16)}" for s in spec.minimum]
    return "-".join(words)


def parse_activation(name: str) -> ActivationSpec:
    """The spec an activation name stands for."""
    if name not in ACTIVATIONS:
        raise SpecError(f"no activation spec is called '{name}'", expected=f"one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def activation_name(spec: ActivationSpec) -> str:
    return _ACTIVATION_NAME_OF.get(spec) or f"{spec_name(spec.spec)}{'-static' if spec.static else ''}"


def _code_type(base: str, *, zero: bool, name: str) -> d.DType:
    """`int4` is offset binary; with a zero point the codes themselves, unsigned."""
    integer = re.fullmatch(r"(u?)int([1-8])", base)
    if integer:
        make: Callable[[int], d.DType] = d.uint_type if zero or integer[1] else d.biased_type
        return make(int(integer[2]))
    if base not in _DTYPES:
        raise SpecError(f"unknown number type '{base}'", where=f"spec '{name}'", hint=f"for example {EXAMPLES}")
    return _DTYPES[base]


def _code_name(spec: QuantSpec) -> str:
    if spec.dtype == d.E4M3:
        return "fp8"
    if spec.dtype == d.biased_type(spec.dtype.bits if spec.quantized else 8):
        return f"int{spec.dtype.bits}"
    if spec.zero is not None and spec.dtype.kind == d.INTEGER:
        return f"int{spec.dtype.bits}"
    return spec.dtype.name


def _usual_scale(dtype: d.DType) -> d.DType:
    """The scale dtype that goes without saying: bf16 for integers, fp32 for the rest."""
    return d.BF16 if dtype.kind == d.INTEGER else d.F32


def _scale_type(name: str, spec: str) -> d.DType:
    biased = re.fullmatch(r"uint([1-8])b\d+", name)
    if biased:
        return d.biased_type(int(biased[1]))
    integer = re.fullmatch(r"(u?)int([1-8])", name)
    if integer:
        return d.uint_type(int(integer[2])) if integer[1] else d.int_type(int(integer[2]))
    if name not in _DTYPES:
        raise SpecError(f"unknown scale type '{name}'", where=f"spec '{spec}'", expected=", ".join(_DTYPES))
    return _DTYPES[name]


def _level(word: str, usual: d.DType, name: str) -> Scale:
    match = _LEVEL.fullmatch(word)
    block = _block(match["block"]) if match else None
    if match is None or block is None:
        raise SpecError(
            f"cannot read '{word}'",
            where=f"spec '{name}'",
            expected="tensor, channel, block, g<size>, b<rows>x<columns> or zp",
            hint=f"for example {EXAMPLES}",
        )
    dtype = _scale_type(match["dtype"], name) if match["dtype"] else usual
    return Scale(dtype, block, DIV if match["div"] else MUL)


def _block(word: str) -> Block | None:
    fixed = {"tensor": TENSOR, "channel": CHANNEL, "block": FP8_BLOCK_SIDES}
    sides = re.fullmatch(r"b([1-9]\d*|all)x([1-9]\d*|all)", word)
    columns = re.fullmatch(r"g([1-9]\d*)", word)
    if columns:
        return group(int(columns[1]))
    if sides:
        rows, cols = (ALL if side == "all" else int(side) for side in sides.groups())
        return (rows, cols)
    return fixed.get(word)


def _level_name(scale: Scale, usual: d.DType) -> str:
    rows, columns = scale.block
    if scale.block in (TENSOR, CHANNEL, FP8_BLOCK_SIDES):
        block = {TENSOR: "tensor", CHANNEL: "channel", FP8_BLOCK_SIDES: "block"}[scale.block]
    elif rows == 1:
        block = f"g{columns}"
    else:
        block = f"b{rows or 'all'}x{columns or 'all'}"
    suffix = "" if scale.dtype == usual else f":{scale.dtype}"
    return f"{'/' if scale.op == DIV else ''}{block}{suffix}"
