"""Chooses scales, zero points and minima for a matrix: the first step of `quantize`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lancebill.errors import BadValue
from lancebill.numbers.blocks import finest, reduce_blocks, row_chunks, spread
from lancebill.numbers.dtypes import E8M0, INTEGER, TERNARY, ZERO16, DType
from lancebill.numbers.spec import DIV, Block, QuantSpec, Scale, blocks_along

FLOOR, CEIL = "floor", "ceil"  # how the power-of-two scale of an MX block is rounded

Rows = Callable[[int, int], Tensor]  # returns fp32 rows [low, high) of a matrix; the result is read-only


@dataclass(frozen=True)
class Levels:
    """One tensor per level of a spec."""

    scales: tuple[Tensor, ...] = ()
    zero: Tensor | None = None
    minimum: tuple[Tensor, ...] = ()


def fit_levels(rows: Rows, size: tuple[int, int], device: torch.device, spec: QuantSpec, rule: str) -> Levels:
    """Levels that make the range of the codes match each block's values. Computed in fp64."""
    grid = Grid(finest(level.block for level in spec.levels), size, device)
    if spec.zero is None and not spec.minimum:
        op = partial(torch.mean, dtype=torch.float64) if spec.dtype == TERNARY else torch.amax
        peaks = grid.measure(lambda low, high: rows(low, high).abs(), op)
        return Levels(grid.fit(peaks, spec.scales, reach_of(spec.dtype), rule, empty=1.0))
    low, high = (grid.measure(rows, op).double() for op in (torch.amin, torch.amax))
    minimum = grid.fit(-low.clamp(max=0), spec.minimum, 1.0, rule, empty=0.0)
    if spec.minimum:
        low, high = torch.zeros_like(low), high + grid.product(spec.minimum, minimum)
    if spec.zero is None:
        scales = grid.fit(torch.maximum(high, -low), spec.scales, reach_of(spec.dtype), rule, empty=1.0)
        return Levels(scales, None, minimum)
    low, high = low.clamp(max=0), high.clamp(min=0)
    scales = grid.fit(high - low, spec.scales, spec.dtype.max - spec.dtype.min, rule, empty=1.0)
    step = grid.product(spec.scales, scales)
    zero = spec.dtype.min - low / step.masked_fill(step == 0, math.inf)
    if spec.zero.dtype == ZERO16:
        zero = zero.round().clamp(spec.dtype.min, spec.dtype.max)
    return Levels(scales, spec.zero.dtype.encode(grid.coarsen(zero, spec.zero.block)), minimum)


def reach_of(dtype: DType) -> float:
    """The divisor that turns a block's largest magnitude into its scale.

    For integers of b bits, half the range, (2**b - 1) / 2, so that no value is off by more than half a
    step; for eight bits the customary 127. For other types, the largest value both signs can represent.
    """
    if dtype.kind == INTEGER and dtype != TERNARY and dtype.bits < 8 and dtype.min < 0:
        return (dtype.max - dtype.min) / 2
    return min((side for side in (dtype.max, -dtype.min) if side > 0), default=1.0)


@dataclass(frozen=True)
class Grid:
    """A matrix of `size` divided into blocks that tile the blocks of all levels."""

    block: Block
    size: tuple[int, int]
    device: torch.device

    def measure(self, rows: Rows, op: Callable[..., Tensor]) -> Tensor:
        """`op` (amax, mean ...) of the values of each block; raises `BadValue` for NaN and infinity."""
        n, k = self.size
        per_row = torch.empty(n, blocks_along(k, self.block[1]), dtype=torch.float32, device=self.device)
        for low, high in row_chunks(n, k, self.device):
            per_row[low:high] = reduce_blocks(op, rows(low, high), 1, self.block[1])
        if not per_row.isfinite().all():
            raise BadValue("cannot quantise NaN or infinity", hint="`lancebill verify --values` finds where they are")
        return reduce_blocks(op, per_row, 0, self.block[0])

    def coarsen(self, tensor: Tensor, outer: Block) -> Tensor:
        """The largest number in each outer block."""
        for axis in (0, 1):
            side = outer[axis] // (self.block[axis] or 1)
            tensor = tensor if outer[axis] == self.block[axis] else reduce_blocks(torch.amax, tensor, axis, side)
        return tensor

    def product(self, levels: Sequence[Scale], tensors: Sequence[Tensor]) -> Tensor:
        """The product of all levels, broadcastable against one number per block."""
        total = torch.ones(1, 1, dtype=torch.float64, device=self.device)
        for level, tensor in zip(levels, tensors):
            rows, columns = (outer and side for outer, side in zip(level.block, self.block))
            factor = spread(level.dtype.decode(tensor).double(), level.block, (rows, columns), *self.size)
            total = total / factor if level.op == DIV else total * factor
        return total

    def fit(
        self, peaks: Tensor, levels: Sequence[Scale], reach: float, rule: str, *, empty: float
    ) -> tuple[Tensor, ...]:
        """Write peaks / reach as a product of `levels`; `empty` is the scale of a block of zeros.

        The coarsest level is fitted first, so that the finer levels' small types use their full range.
        Finer levels are fitted to the coarse level after rounding and so absorb its rounding error.
        """
        fitted: dict[int, Tensor] = {}
        order = sorted(range(len(levels)), key=lambda i: (math.prod(levels[i].shape(*self.size)), -i))
        for step, i in enumerate(order):
            outer = self.product([levels[j] for j in order[:step]], [fitted[j] for j in order[:step]])
            remaining = peaks.double() / outer.masked_fill_(outer == 0, math.inf)
            inner_max = math.prod(levels[j].dtype.max for j in order[step + 1 :] if levels[j].dtype.table)
            fitted[i] = _encode(self.coarsen(remaining, levels[i].block), reach * inner_max, levels[i], rule, empty)
        return tuple(fitted[i] for i in range(len(levels)))


def _encode(peaks: Tensor, reach: float, level: Scale, rule: str, empty: float) -> Tensor:
    """Codes of the scale that maps `reach` to `peaks`."""
    dtype = level.dtype
    if dtype == E8M0:
        exponent = _exponent(peaks, reach, rule).masked_fill_(peaks == 0, 0 if empty else -127)
        return ((-exponent if level.op == DIV else exponent) + 127).clamp_(0, 254).to(torch.uint8)
    scale = (peaks / reach).masked_fill_(peaks == 0, empty)
    scale = 1 / scale if level.op == DIV else scale
    if empty and dtype.kind != INTEGER:  # a non-zero scale must not round to zero
        scale.clamp_(min=dtype.min_positive)
    return dtype.encode(scale)


def _exponent(peaks: Tensor, reach: float, rule: str) -> Tensor:
    """floor: OCP's floor(log2(amax)) - emax, which may saturate the largest values; ceil never saturates."""
    if rule == FLOOR:
        return torch.frexp(peaks).exponent - math.frexp(reach)[1]
    mantissa, exponent = torch.frexp(peaks / reach)
    return torch.where(mantissa == 0.5, exponent - 1, exponent)
