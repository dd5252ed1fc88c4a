"""What a matrix of codes means.

One formula covers every format. It is evaluated in fp32, strictly left to right, so that independent
implementations agree bit for bit:

    value = (table[code] - zero) op scale_1 op scale_2 ... - minimum

Each scale, the zero point and the minimum cover a block of (rows, columns); a side of `ALL` spans the
whole axis. Per-tensor, per-channel, per-group and 128 x 128 scales and NVFP4's two levels differ only
in their blocks. Scales keep the dtype they are stored in. With a `rotation`, these are the values of the rotated matrix
(see `rotation.py`).

`str(spec)` is the spec's name; `spec_names` documents the grammar and parses it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from lancebill.errors import SpecError
from lancebill.numbers.dtypes import (
    BF16,
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    E8M0,
    F16,
    F32,
    INTEGER,
    NF4,
    ZERO16,
    DType,
    biased_type,
    int_type,
    uint_type,
)

ALL = 0  # a block side that spans the whole axis
MUL, DIV = "mul", "div"
Block = tuple[int, int]

TENSOR: Block = (ALL, ALL)
CHANNEL: Block = (1, ALL)


def group(size: int) -> Block:
    return (1, size)


def blocks_along(size: int, side: int) -> int:
    """How many blocks of `side` cover an axis of `size`; the last may be partial."""
    return 1 if side == ALL else -(-size // side)


@dataclass(frozen=True)
class Level:
    """One number of type `dtype` per block."""

    dtype: DType
    block: Block

    def __post_init__(self) -> None:
        if min(self.block) < 0:
            raise SpecError("block sides are positive, or ALL (0)", got=self.block)

    def shape(self, n: int, k: int) -> tuple[int, int]:
        return blocks_along(n, self.block[0]), blocks_along(k, self.block[1])


@dataclass(frozen=True)
class Scale(Level):
    """One level of scaling, or one level of the minimum."""

    op: str = MUL

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.op not in (MUL, DIV):
            raise SpecError("a scale multiplies or divides", expected="mul or div", got=self.op)


@dataclass(frozen=True)
class Zero(Level):
    """One zero point per block: integers up to 2**bits (`ZERO16`), or floats."""


@dataclass(frozen=True)
class QuantSpec:
    """Codes of `dtype`, levels of scales, an optional zero point, an optional minimum.

    `minimum` is a product of levels like the scales, subtracted at the end (GGUF's K-quants store it as a 6-bit
    integer times an fp16). `rotation`: block size in columns of the Hadamard rotation applied to this matrix and to
    its inputs; 0: not rotated.
    """

    dtype: DType
    scales: tuple[Scale, ...] = ()
    zero: Zero | None = None
    minimum: tuple[Scale, ...] = ()
    rotation: int = 0

    def __post_init__(self) -> None:
        if self.dtype.wide_name is not None and (self.scales or self.zero or self.minimum):
            raise SpecError(f"{self.dtype} weights are stored as they are and take no scales")
        if any(level.op == DIV for level in self.minimum):
            raise SpecError("the levels of a minimum multiply")
        if self.rotation and (self.rotation < 2 or self.rotation & (self.rotation - 1)):
            raise SpecError("a block of a rotation has a power of two of columns", got=self.rotation)

    def __str__(self) -> str:
        return _name(self, WEIGHT_DEFAULTS)

    @property
    def quantized(self) -> bool:
        return self.dtype.wide_name is None

    @property
    def levels(self) -> tuple[Level, ...]:
        """All per-block numbers: scales, zero point, minimum."""
        return self.scales + ((self.zero,) if self.zero else ()) + self.minimum

    @property
    def group(self) -> int:
        """Columns that share their innermost scale; ALL for channel and tensor scales."""
        return self.scales[0].block[1] if self.scales else ALL

    @property
    def widest(self) -> int:
        """Columns of the widest block. A cut at its multiples splits no block. 1 if no block ends inside a row."""
        widest = max((level.block[1] for level in self.levels), default=1) or 1
        return math.lcm(widest, self.rotation or 1)

    @property
    def unrotated(self) -> QuantSpec:
        """The spec of the stored numbers alone."""
        return replace(self, rotation=0) if self.rotation else self

    def bits_per_weight(self, n: int, k: int) -> float:
        """Average bits per weight of an [n, k] matrix, including scales, zero points and minima."""
        stored = n * k * self.dtype.bits
        for level in self.levels:
            rows, columns = level.shape(n, k)
            bits = self.dtype.bits if level.dtype == ZERO16 else level.dtype.bits
            stored += rows * columns * bits
        return stored / (n * k)

    def with_blocks(self, change: Callable[[Block], Block]) -> QuantSpec:
        """The same levels with each block replaced by `change(block)`; itself if that changes none."""
        if all(change(level.block) == level.block for level in self.levels):
            return self
        return replace(
            self,
            scales=tuple(replace(s, block=change(s.block)) for s in self.scales),
            zero=self.zero and replace(self.zero, block=change(self.zero.block)),
            minimum=tuple(replace(s, block=change(s.block)) for s in self.minimum),
        )

    def map_blocks(self, side: int, size: int) -> QuantSpec:
        """The same numbers with each block's `side` (0 rows, 1 columns) reduced to gcd(side, size).

        Needed when a matrix is cut at multiples of `size` inside a block. Exact: a finer block only
        repeats its scale.
        """

        def refine(block: Block) -> Block:
            if block[side] == ALL:
                return block
            finer = math.gcd(block[side], size)
            return (finer, block[1]) if side == 0 else (block[0], finer)

        return self.with_blocks(refine)

    def stacked(self, rows: int) -> QuantSpec:
        """The spec of several such matrices of `rows` rows stacked along N.

        A scale that spans all rows becomes one scale per stacked matrix, so that gate and up keep
        their own global scales. Blocks are refined so that none spans two matrices.
        """
        return self.map_blocks(0, rows).with_blocks(lambda block: (block[0] or rows, block[1]))


def int_spec(bits: int, block: Block = CHANNEL, *, zero_point: bool = False, scale: DType = BF16) -> QuantSpec:
    """Symmetric integers (offset binary), or unsigned ones with an integer zero point."""
    if zero_point:
        return QuantSpec(uint_type(bits), (Scale(scale, block),), Zero(ZERO16, block))
    return QuantSpec(biased_type(bits), (Scale(scale, block),))


def fp8_spec(block: Block, *, dtype: DType = E4M3, scale: DType = F32) -> QuantSpec:
    return QuantSpec(dtype, (Scale(scale, block),))


def mx_spec(dtype: DType) -> QuantSpec:
    """OCP microscaling: one power-of-two scale per 32 elements along K."""
    return QuantSpec(dtype, (Scale(E8M0, group(32)),))


FP8_BLOCK_SIDES: Block = (128, 128)
MXFP4 = mx_spec(E2M1)
MXFP6_E2M3 = mx_spec(E2M3)
MXFP6_E3M2 = mx_spec(E3M2)
MXFP8 = mx_spec(E4M3)
MXFP8_E5M2 = mx_spec(E5M2)
NVFP4 = QuantSpec(E2M1, (Scale(E4M3, group(16)), Scale(F32, TENSOR)))
NVFP4_DIV = QuantSpec(E2M1, (Scale(E4M3, group(16)), Scale(F32, TENSOR, DIV)))
NF4_G64 = QuantSpec(NF4, (Scale(F32, group(64)),))
FP8_TENSOR, FP8_CHANNEL, FP8_BLOCK = fp8_spec(TENSOR), fp8_spec(CHANNEL), fp8_spec(FP8_BLOCK_SIDES)
DENSE_BF16, DENSE_F16, DENSE_F32 = QuantSpec(BF16), QuantSpec(F16), QuantSpec(F32)

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


def is_integer(spec: QuantSpec) -> bool:
    return spec.dtype.kind == INTEGER and spec.quantized


@dataclass(frozen=True)
class ActivationSpec:
    """The number format of a GEMM's input: 16-bit and unquantised, or quantised row by row.

    `static` scales come from the checkpoint; dynamic scales are computed from each row.
    """

    spec: QuantSpec
    static: bool = False

    def __str__(self) -> str:
        if self.static:
            return _name(self.spec, STATIC_DEFAULTS) + STATIC_SUFFIX
        return _name(self.spec, DYNAMIC_DEFAULTS)


# Names of specs: the printing half of the grammar in `spec_names`.

UNSCALED, STATIC_SUFFIX = "unscaled", "-static"
BLOCK_WORDS: dict[str, Block] = {"tensor": TENSOR, "channel": CHANNEL, "block": FP8_BLOCK_SIDES}
_WORD_OF_BLOCK = {block: word for word, block in BLOCK_WORDS.items()}
_NAME_OF = {spec: name for name, spec in NAMED.items()}


@dataclass(frozen=True)
class NameDefaults:
    """What a name may omit: the block of a single scale, and the dtype of the scales."""

    block: str
    integer_scale: DType
    prints_block: bool  # for float codes; integer names always omit the default block

    def scale_type(self, codes: DType) -> DType:
        return self.integer_scale if codes.kind == INTEGER else F32


WEIGHT_DEFAULTS = NameDefaults("channel", BF16, prints_block=True)
DYNAMIC_DEFAULTS = NameDefaults("channel", F32, prints_block=False)
STATIC_DEFAULTS = NameDefaults("tensor", F32, prints_block=False)


def _name(spec: QuantSpec, defaults: NameDefaults) -> str:
    """The shortest name that parses back to `spec`."""
    if spec.rotation:
        return f"{_name(spec.unrotated, defaults)}-h{spec.rotation}"
    if spec in _NAME_OF:
        return _NAME_OF[spec]
    base = _code_name(spec)
    levels = [_scale_name(s, defaults.scale_type(spec.dtype)) for s in spec.scales] or [UNSCALED]
    omits_block = base not in NAMED and (spec.dtype.kind == INTEGER or not defaults.prints_block)
    words = [base] if omits_block and levels == [defaults.block] else [base, *levels]
    if spec.zero is not None:
        words.append(_zero_name(spec.zero, spec.scales))
    return "-".join(words + [f"min.{_scale_name(s, F16)}" for s in spec.minimum])


def _code_name(spec: QuantSpec) -> str:
    dtype, bits = spec.dtype, spec.dtype.bits
    if dtype.kind == INTEGER and dtype.wide_name is None:
        canonical = uint_type(bits) if spec.zero is not None else biased_type(bits)
        return {canonical: f"int{bits}", int_type(bits): f"twos{bits}"}.get(dtype, dtype.name)
    return "fp8" if dtype == E4M3 else dtype.name


def _scale_name(scale: Scale, default: DType) -> str:
    suffix = "" if scale.dtype == default else f":{scale.dtype}"
    return f"{'/' if scale.op == DIV else ''}{_block_name(scale.block)}{suffix}"


def _zero_name(zero: Zero, levels: tuple[Scale, ...]) -> str:
    where = "" if zero.block == (levels[0].block if levels else TENSOR) else f".{_block_name(zero.block)}"
    return f"zp{where}" if zero.dtype == ZERO16 else f"zp{where}:{zero.dtype}"


def _block_name(block: Block) -> str:
    rows, columns = block
    if block in _WORD_OF_BLOCK:
        return _WORD_OF_BLOCK[block]
    return f"g{columns}" if rows == 1 else f"b{rows or 'all'}x{columns or 'all'}"
