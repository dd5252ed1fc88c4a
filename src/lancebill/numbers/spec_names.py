"""The names of specs, parsed and printed in this one place.

    name     = base ("-" word)*
    base     = bf16 | fp16 | fp32 | mxfp4 | nvfp4 | ... | int1 .. int8 | any number type (fp8 = e4m3fn)
    word     = ["/"] block [":" type]       a scale level; "/" divides; the type where not the usual one
             | "unscaled"                   no scale level at all
             | "zp" ["." block] [":" type]  a zero point for each block, by default those of the first scale
             | "min." block [":" type]      a level of the additive minimum
    block    = tensor | channel | g<columns> | block | b<rows>x<columns>

`int4-g128`, `int4-g32-zp`, `fp8-block`, `int4-g128:fp16`, `uint4-g32:uint6-g256:fp16-min.g32:uint6-min.g256`.

`int4` is offset binary, or with a zero point the codes themselves; `uint4b8` and `uint4` say so
outright and `twos4` is two's complement. A weight's integers have bf16 scales unless the name says
otherwise, all other scales are fp32. For activations every scale is fp32, the block that goes
without saying is the row (`fp8`, `int8`), and `-static` means a scale from the checkpoint, one
for the tensor unless the name says otherwise.

Printing gives a name that parses back to the same spec. Only a codebook of a file's own does not
parse: it is known by its values.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from lancebill.errors import SpecError
from lancebill.numbers import dtypes as d
from lancebill.numbers.spec import (
    ALL,
    CHANNEL,
    DENSE_BF16,
    DENSE_F16,
    DENSE_F32,
    DIV,
    FP8_BLOCK_SIDES,
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
    int_spec,
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
# What other engines call quantising while loading; read, never printed.
ALIASES: dict[str, QuantSpec] = {"experts_int8": int_spec(8, scale=d.F32)}

_TYPES: dict[str, d.DType] = {
    t.name: t
    for t in (
        d.E2M1, d.E2M3, d.E3M2, d.E3M4, d.E4M3, d.E4M3FNUZ, d.E5M2, d.E8M0, d.UE5M3, d.NF4,
        d.BNB_FP4, d.IQ4, d.INV127, d.TERNARY, d.F16, d.BF16, d.F32,
    )
}  # fmt: skip
_TYPES |= {make(b).name: make(b) for make in (d.int_type, d.uint_type, d.biased_type) for b in range(1, 9)}
_TYPES["fp8"] = d.E4M3

_BLOCKS: dict[str, Block] = {"tensor": TENSOR, "channel": CHANNEL, "block": FP8_BLOCK_SIDES}
_BLOCK_NAMES = {block: name for name, block in _BLOCKS.items()}
_SIZE = "[1-9][0-9]{0,17}"
_GROUP = re.compile(f"g({_SIZE})")
_SIDES = re.compile(f"b({_SIZE}|all)x({_SIZE}|all)")

_UNSCALED, _STATIC = "unscaled", "-static"
EXAMPLES = "bf16, mxfp4, nvfp4, nf4, int4-g128, int4-g32-zp, int8, fp8-block"


@dataclass(frozen=True)
class _Dialect:
    """What goes without saying: the block, and the type of integers' scales."""

    block: str
    integer_scale: d.DType
    prints_block: bool  # for floats; integers never do

    def scale(self, dtype: d.DType) -> d.DType:
        return self.integer_scale if dtype.kind == d.INTEGER else d.F32


_WEIGHT = _Dialect("channel", d.BF16, prints_block=True)
_DYNAMIC = _Dialect("channel", d.F32, prints_block=False)
_FIXED = _Dialect("tensor", d.F32, prints_block=False)


def parse_spec(name: str) -> QuantSpec:
    """The spec a weight name stands for."""
    return ALIASES[name] if name in ALIASES else _parse(name, _WEIGHT)


def spec_name(spec: QuantSpec) -> str:
    """The shortest name that parses back to `spec`."""
    return _print(spec, _WEIGHT)


def parse_activation(name: str) -> ActivationSpec:
    """The spec an activation name stands for."""
    static = name.endswith(_STATIC)
    spec = _parse(name.removesuffix(_STATIC), _FIXED if static else _DYNAMIC)
    if static and not spec.quantized:
        raise SpecError(f"{spec} activations have no scale that could be static", where=f"spec '{name}'")
    return ActivationSpec(spec, static)


def activation_name(spec: ActivationSpec) -> str:
    return _print(spec.spec, _FIXED) + _STATIC if spec.static else _print(spec.spec, _DYNAMIC)


def _parse(name: str, dialect: _Dialect) -> QuantSpec:
    if name in NAMED:
        return NAMED[name]
    base, *words = name.split("-")
    zeros = [w for w in words if re.match(r"zp\b", w)]
    minima = [w for w in words if w.startswith("min.")]
    scales = [w for w in words if w not in zeros and w not in minima]
    dtype = _code_type(base, zero=bool(zeros), name=name)
    if words and dtype.wide is not None:
        raise SpecError(f"{base} takes no scales", where=f"spec '{name}'", hint=f"for example {EXAMPLES}")
    if len(zeros) > 1:
        raise SpecError("more than one zero point", where=f"spec '{name}'")
    if scales == [_UNSCALED] or dtype.wide is not None:
        levels: tuple[Scale, ...] = ()
    else:
        levels = tuple(_scale(w, dialect.scale(dtype), name) for w in scales or [dialect.block])
    zero = _zero(zeros[0], levels, name) if zeros else None
    return QuantSpec(dtype, levels, zero, tuple(_scale(w[4:], d.F16, name) for w in minima))


def _print(spec: QuantSpec, dialect: _Dialect) -> str:
    if spec in _NAME_OF:
        return _NAME_OF[spec]
    base = _code_name(spec)
    levels = [_scale_name(s, dialect.scale(spec.dtype)) for s in spec.scales] or [_UNSCALED]
    silent = base not in NAMED and (spec.dtype.kind == d.INTEGER or not dialect.prints_block)
    words = [base] if silent and levels == [dialect.block] else [base, *levels]
    if spec.zero is not None:
        words.append(_zero_name(spec.zero, spec.scales))
    return "-".join(words + [f"min.{_scale_name(s, d.F16)}" for s in spec.minimum])


def _code_type(base: str, *, zero: bool, name: str) -> d.DType:
    integer = re.fullmatch("(int|twos)([1-8])", base)
    if integer is None:
        if any(named.split("-")[0] == base for named in NAMED) and base not in _TYPES:
            raise SpecError(f"{base} takes no such words", where=f"spec '{name}'", expected=", ".join(NAMED))
        return _type(base, name)
    canonical = d.uint_type if zero else d.biased_type
    make: Callable[[int], d.DType] = d.int_type if integer[1] == "twos" else canonical
    return make(int(integer[2]))


def _code_name(spec: QuantSpec) -> str:
    dtype, bits = spec.dtype, spec.dtype.bits
    if dtype.kind == d.INTEGER and dtype.wide is None:
        canonical = d.uint_type(bits) if spec.zero is not None else d.biased_type(bits)
        return {canonical: f"int{bits}", d.int_type(bits): f"twos{bits}"}.get(dtype, dtype.name)
    return "fp8" if dtype == d.E4M3 else dtype.name


def _type(word: str, name: str) -> d.DType:
    if word in _TYPES:
        return _TYPES[word]
    hint = "a codebook is known by its values" if "#" in word else f"for example {EXAMPLES}"
    raise SpecError(f"unknown number type '{word}'", where=f"spec '{name}'", expected=", ".join(_TYPES), hint=hint)


def _scale(word: str, usual: d.DType, name: str) -> Scale:
    block, colon, dtype = word.removeprefix("/").partition(":")
    op = DIV if word.startswith("/") else MUL
    return Scale(_type(dtype, name) if colon else usual, _block(block, name), op)


def _scale_name(scale: Scale, usual: d.DType) -> str:
    suffix = "" if scale.dtype == usual else f":{scale.dtype}"
    return f"{'/' if scale.op == DIV else ''}{_block_name(scale.block)}{suffix}"


def _zero(word: str, levels: tuple[Scale, ...], name: str) -> Zero:
    head, colon, dtype = word.partition(":")
    block = _block(head[3:], name) if head != "zp" else levels[0].block if levels else TENSOR
    return Zero(_type(dtype, name) if colon else d.ZERO16, block)


def _zero_name(zero: Zero, levels: tuple[Scale, ...]) -> str:
    where = "" if zero.block == (levels[0].block if levels else TENSOR) else f".{_block_name(zero.block)}"
    return f"zp{where}" if zero.dtype == d.ZERO16 else f"zp{where}:{zero.dtype}"


def _block(word: str, name: str) -> Block:
    if word in _BLOCKS:
        return _BLOCKS[word]
    if columns := _GROUP.fullmatch(word):
        return 1, int(columns[1])
    if sides := _SIDES.fullmatch(word):
        rows, cols = (ALL if side == "all" else int(side) for side in sides.groups())
        return rows, cols
    raise SpecError(
        f"cannot read '{word}'",
        where=f"spec '{name}'",
        expected="tensor, channel, block, g<size>, b<rows>x<columns>, zp or min.<block>",
        hint=f"for example {EXAMPLES}",
    )


def _block_name(block: Block) -> str:
    rows, columns = block
    if block in _BLOCK_NAMES:
        return _BLOCK_NAMES[block]
    return f"g{columns}" if rows == 1 else f"b{rows or 'all'}x{columns or 'all'}"


# Names that every command offers; any other name the grammar can read works as well.
ACTIVATIONS: dict[str, ActivationSpec] = {
    name: parse_activation(name)
    for name in (
        "bf16", "fp16", "fp32", "fp8", "fp8-static", "fp8-g128", "int8", "int8-static", "mxfp8", "mxfp4", "nvfp4",
    )
}  # fmt: skip
