"""The grammar of spec names, and its parser. Printing is `str(spec)`.

    name     = base ("-" word)* ["-h" columns]    "h": rotated by Hadamard matrices of this size
    base     = bf16 | fp16 | fp32 | mxfp4 | nvfp4 | ... | int1 .. int8 | any number type (fp8 = e4m3fn)
    word     = ["/"] block [":" type]       a scale level; "/" divides; the type if not the default
             | "unscaled"                   no scale level at all
             | "zp" ["." block] [":" type]  a zero point per block, by default the first scale's block
             | "min." block [":" type]      a level of the additive minimum
    block    = tensor | channel | g<columns> | block | b<rows>x<columns>

`int4-g128`, `int4-g32-zp`, `fp8-block`, `int4-g128:fp16`, `uint4-g32:uint6-g256:fp16-min.g32:uint6-min.g256`.

`int4` is offset binary; with a zero point it is unsigned. `uint4b8` and `uint4` name the two forms
explicitly, and `twos4` is two's complement. Scales of integer weights are bf16 by default, all other
scales fp32. For activations every scale is fp32 by default, the default block is the row (`fp8`,
`int8`), and `-static` means a scale from the checkpoint, by default one for the whole tensor.

A printed name parses back to the same spec. The exception is an unnamed codebook, whose name is a
hash of its values.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from lancebill.errors import SpecError
from lancebill.numbers import dtypes as d
from lancebill.numbers.spec import (
    ALL,
    BLOCK_WORDS,
    DIV,
    DYNAMIC_DEFAULTS,
    MUL,
    NAMED,
    STATIC_DEFAULTS,
    STATIC_SUFFIX,
    TENSOR,
    UNSCALED,
    WEIGHT_DEFAULTS,
    ActivationSpec,
    Block,
    NameDefaults,
    QuantSpec,
    Scale,
    Zero,
    int_spec,
)

# Names that other engines use for quantising at load time. Parsed, never printed.
ALIASES: dict[str, QuantSpec] = {"experts_int8": int_spec(8, scale=d.F32)}

_TYPES: dict[str, d.DType] = {
    t.name: t
    for t in (
        d.E2M1, d.E2M3, d.E3M2, d.E3M4, d.E4M3, d.E4M3FNUZ, d.E5M2, d.E8M0, d.UE5M3, d.NF4,
        d.BNB_FP4, d.IQ1, d.IQ2, d.IQ3, d.IQ3S, d.IQ4, d.ODD3, d.ODD4, d.UINT2B1, d.INV127, d.TERNARY, d.F16, d.BF16,
        d.F32,
    )
}  # fmt: skip
_TYPES |= {make(b).name: make(b) for make in (d.int_type, d.uint_type, d.biased_type) for b in range(1, 9)}
_TYPES["fp8"] = d.E4M3

_SIZE = "[1-9][0-9]{0,17}"
_ROTATED = re.compile(f"(.*)-h({_SIZE})")
_GROUP = re.compile(f"g({_SIZE})")
_SIDES = re.compile(f"b({_SIZE}|all)x({_SIZE}|all)")

EXAMPLES = "bf16, mxfp4, nvfp4, nf4, int4-g128, int4-g32-zp, int8, fp8-block"


def parse_spec(name: str) -> QuantSpec:
    """The spec that a weight name denotes."""
    return ALIASES[name] if name in ALIASES else _parse(name, WEIGHT_DEFAULTS)


def parse_activation(name: str) -> ActivationSpec:
    """The spec that an activation name denotes."""
    static = name.endswith(STATIC_SUFFIX)
    spec = _parse(name.removesuffix(STATIC_SUFFIX), STATIC_DEFAULTS if static else DYNAMIC_DEFAULTS)
    if static and not spec.quantized:
        raise SpecError(f"{spec} activations have no scale that could be static", where=f"spec '{name}'")
    return ActivationSpec(spec, static)


def _parse(name: str, defaults: NameDefaults) -> QuantSpec:
    if name in NAMED:
        return NAMED[name]
    if rotated := _ROTATED.fullmatch(name):
        return replace(_parse(rotated[1], defaults), rotation=int(rotated[2]))
    base, *words = name.split("-")
    zeros = [w for w in words if re.match(r"zp\b", w)]
    minima = [w for w in words if w.startswith("min.")]
    scales = [w for w in words if w not in zeros and w not in minima]
    dtype = _code_type(base, zero=bool(zeros), name=name)
    if words and dtype.wide_name is not None:
        raise SpecError(f"{base} takes no scales", where=f"spec '{name}'", hint=f"for example {EXAMPLES}")
    if len(zeros) > 1:
        raise SpecError("more than one zero point", where=f"spec '{name}'")
    if scales == [UNSCALED] or dtype.wide_name is not None:
        levels: tuple[Scale, ...] = ()
    else:
        levels = tuple(_scale(w, defaults.scale_type(dtype), name) for w in scales or [defaults.block])
    zero = _zero(zeros[0], levels, name) if zeros else None
    return QuantSpec(dtype, levels, zero, tuple(_scale(w[4:], d.F16, name) for w in minima))


def _code_type(base: str, *, zero: bool, name: str) -> d.DType:
    integer = re.fullmatch("(int|twos)([1-8])", base)
    if integer is None:
        if any(named.split("-")[0] == base for named in NAMED) and base not in _TYPES:
            raise SpecError(f"{base} takes no such suffixes", where=f"spec '{name}'", expected=", ".join(NAMED))
        return _type(base, name)
    canonical = d.uint_type if zero else d.biased_type
    make: Callable[[int], d.DType] = d.int_type if integer[1] == "twos" else canonical
    return make(int(integer[2]))


def _type(word: str, name: str) -> d.DType:
    if word in _TYPES:
        return _TYPES[word]
    hint = "docs/formats.md explains the names"
    if "#" in word:
        hint = "an unnamed codebook cannot be parsed from its name"
    elif word.lower() in _TYPES or name.lower() in NAMED:
        hint = f"names are in lower case: {name.lower()}"
    raise SpecError(
        f"unknown number type '{word}'", where=f"spec '{name}'", expected=f"a spec such as {EXAMPLES}", hint=hint
    )


def _scale(word: str, default: d.DType, name: str) -> Scale:
    block, colon, dtype = word.removeprefix("/").partition(":")
    op = DIV if word.startswith("/") else MUL
    return Scale(_type(dtype, name) if colon else default, _block(block, name), op)


def _zero(word: str, levels: tuple[Scale, ...], name: str) -> Zero:
    head, colon, dtype = word.partition(":")
    block = _block(head[3:], name) if head != "zp" else levels[0].block if levels else TENSOR
    return Zero(_type(dtype, name) if colon else d.ZERO16, block)


def _block(word: str, name: str) -> Block:
    if word in BLOCK_WORDS:
        return BLOCK_WORDS[word]
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


# Names that every command lists in its help; any other name that parses works as well.
ACTIVATIONS: dict[str, ActivationSpec] = {
    name: parse_activation(name)
    for name in (
        "bf16", "fp16", "fp32", "fp8", "fp8-static", "fp8-g128", "int8", "int8-static", "mxfp8", "mxfp4", "nvfp4",
    )
}  # fmt: skip
