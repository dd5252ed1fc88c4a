"""What a matrix of codes means.

One formula serves every format, in fp32 and strictly left to right, so that judges agree bit for
bit:

    value = (table[code] - zero) op scale_1 op scale_2 ... - minimum

Each scale, the zero point and the minimum cover a block of (rows, columns); `ALL` stands for the
whole axis. Per tensor, per channel, per group, 128 x 128 blocks and NVFP4's two levels are all just
blocks. Stored scale dtypes are kept, never cast.
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
    """A number of `dtype` for each block."""

    dtype: DType
    block: Block

    def __post_init__(self) -> None:
        if min(self.block) < 0:
            raise SpecError("block sides are positive, or ALL (0)", got=self.block)

    def shape(self, n: int, k: int) -> tuple[int, int]:
        return blocks_along(n, self.block[0]), blocks_along(k, self.block[1])


@dataclass(frozen=True)
class Scale(Level):
    """One level of scaling, or of the minimum."""

    op: str = MUL

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.op not in (MUL, DIV):
            raise SpecError("a scale multiplies or divides", expected="mul or div", got=self.op)


@dataclass(frozen=True)
class Zero(Level):
    """A zero point for each block: integers up to 2**bits (`ZERO16`), or floats."""


@dataclass(frozen=True)
class QuantSpec:
    """Codes of `dtype`, levels of scales, an optional zero point, an optional minimum.

    `minimum` is a product of levels like the scales (GGUF's K-quants store it as a 6-bit integer
    times an fp16), subtracted at the end.
    """

    dtype: DType
    scales: tuple[Scale, ...] = ()
    zero: Zero | None = None
    minimum: tuple[Scale, ...] = ()

    def __post_init__(self) -> None:
        if self.dtype.wide is not None and (self.scales or self.zero or self.minimum):
            raise SpecError(f"{self.dtype} weights are stored as they are and take no scales")
        if any(level.op == DIV for level in self.minimum):
            raise SpecError("the levels of a minimum multiply")

    def __str__(self) -> str:
        from lancebill.numbers.spec_names import spec_name

        return spec_name(self)

    @property
    def quantized(self) -> bool:
        return self.dtype.wide is None

    @property
    def levels(self) -> tuple[Level, ...]:
        """Everything that is stored per block."""
        return self.scales + ((self.zero,) if self.zero else ()) + self.minimum

    @property
    def group(self) -> int:
        """Columns that share their innermost scale; ALL for channel and tensor scales."""
        return self.scales[0].block[1] if self.scales else ALL

    @property
    def widest(self) -> int:
        """Columns of the widest block: cuts at its multiples go through none. 1 where none ends inside a row."""
        return max((level.block[1] for level in self.levels), default=1) or 1

    def bits_per_weight(self, n: int, k: int) -> float:
        """Bits of codes and of everything beside them, per weight of an [n, k] matrix."""
        stored = n * k * self.dtype.bits
        for level in self.levels:
            rows, columns = level.shape(n, k)
            bits = self.dtype.bits if level.dtype == ZERO16 else level.dtype.bits
            stored += rows * columns * bits
        return stored / (n * k)

    def with_blocks(self, change: Callable[[Block], Block]) -> QuantSpec:
        """The same levels over other blocks."""
        return replace(
            self,
            scales=tuple(replace(s, block=change(s.block)) for s in self.scales),
            zero=self.zero and replace(self.zero, block=change(self.zero.block)),
            minimum=tuple(replace(s, block=change(s.block)) for s in self.minimum),
        )

    def map_blocks(self, side: int, size: int) -> QuantSpec:
        """The same numbers with each block's `side` (0 rows, 1 columns) cut to gcd(side, size).

        What a cut at multiples of `size` needs where it falls inside a block; exact, since a
        finer block only repeats its scale.
        """

        def cut(block: Block) -> Block:
            if block[side] == ALL:
                return block
            finer = math.gcd(block[side], size)
            return (finer, block[1]) if side == 0 else (block[0], finer)

        return self.with_blocks(cut)

    def stacked(self, rows: int) -> QuantSpec:
        """The spec of several such matrices of `rows` rows stacked along N.

        A scale that spanned all rows becomes one per stacked matrix, so that gate and up keep
        their own global scales exactly; blocks are cut so that none straddles two matrices.
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
    """OCP microscaling: a power-of-two scale for 32 elements along K."""
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


def is_integer(spec: QuantSpec) -> bool:
    return spec.dtype.kind == INTEGER and spec.quantized


@dataclass(frozen=True)
class ActivationSpec:
    """How a GEMM's input is represented: 16-bit as it comes, or quantised row by row.

    `static` scales come from the checkpoint; dynamic ones are measured on each row.
    """

    spec: QuantSpec
    static: bool = False

    def __str__(self) -> str:
        from lancebill.numbers.spec_names import activation_name

        return activation_name(self)
