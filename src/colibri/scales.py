"""Choosing scales, zero points and minima for a matrix: what `quantize` does before it rounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from colibri.blocks import finest, gather, row_chunks, spread
from colibri.dtypes import E8M0, INTEGER, TERNARY, ZERO16, DType
from colibri.errors import BadValue
from colibri.quant import DIV, Block, QuantSpec, Scale, blocks_along

FLOOR, CEIL = "floor", "ceil"  # how an MX block rounds its power-of-two scale

Rows = Callable[[int, int], Tensor]  # fp32 rows [low, high) of a matrix; never written to


@dataclass(frozen=True)
class Levels:
    """A tensor for each level of a spec."""

    scales: tuple[Tensor, ...] = ()
    zero: Tensor | None = None
    minimum: tuple[Tensor, ...] = ()


def fit(rows: Rows, size: tuple[int, int], device: torch.device, spec: QuantSpec, rule: str) -> Levels:
    """Levels under which the values of every block are just reached; fp64, on one number a block."""
    block = finest(level.block for level in spec.levels)
    low, high = _extremes(rows, size, device, spec, block)
    grid = _Grid(block, size)
    minimum = grid.fit(-low.clamp(max=0), spec.minimum, 1.0, rule, empty=0.0)
    if spec.minimum:
        low, high = torch.zeros_like(low), high + grid.product(spec.minimum, minimum)
    if spec.zero is None:
        peaks, reach = torch.maximum(high, -low), reach_of(spec.dtype)
    else:
        low, high = low.clamp(max=0), high.clamp(min=0)
        peaks, reach = high - low, spec.dtype.max - spec.dtype.min
    scales = grid.fit(peaks, spec.scales, reach, rule, empty=1.0)
    if spec.zero is None:
        return Levels(scales, None, minimum)
    step = grid.product(spec.scales, scales)
    zero = spec.dtype.min - low / step.masked_fill(step == 0, math.inf)
    if spec.zero.dtype == ZERO16:
        zero = zero.round().clamp(spec.dtype.min, spec.dtype.max)
    return Levels(scales, spec.zero.dtype.encode(grid.gather(zero, spec.zero.block)), minimum)


def reach_of(dtype: DType) -> float:
    """What the largest magnitude of a block is divided by to give its scale.

    Integers of b bits reach half their range, (2**b - 1) / 2, so that no value is more than half a
    step off; at eight bits the customary 127. Other types: what both of their signs can reach.
    """
    if dtype.kind == INTEGER and dtype != TERNARY and dtype.bits < 8 and dtype.min < 0:
        return (dtype.max - dtype.min) / 2
    return min((side for side in (dtype.max, -dtype.min) if side > 0), default=1.0)


def _extremes(
    rows: Rows, size: tuple[int, int], device: torch.device, spec: QuantSpec, block: Block
) -> tuple[Tensor, Tensor]:
    """Smallest and largest value of each block, as far apart from zero as each other where `spec` is symmetric.

    Ternary digits go by the mean magnitude instead of the largest.
    """
    n, k = size
    symmetric = spec.zero is None and not spec.minimum
    largest = torch.mean if spec.dtype == TERNARY else torch.amax
    low = torch.empty(n, blocks_along(k, block[1]), dtype=torch.float32, device=device)
    high = torch.empty_like(low)
    for start, stop in row_chunks(n, k, device):
        values = rows(start, stop)
        if not symmetric:
            low[start:stop] = gather(torch.amin, values, 1, block[1])
        high[start:stop] = gather(largest, values.abs() if symmetric else values, 1, block[1])
    low = -high if symmetric else low
    if not (low.isfinite().all() and high.isfinite().all()):
        raise BadValue("cannot quantise NaN or infinity", hint="`colibri verify --values` finds where they are")
    high = gather(largest, high.double(), 0, block[0])
    return -high if symmetric else gather(torch.amin, low.double(), 0, block[0]), high


@dataclass(frozen=True)
class _Grid:
    """The blocks of a matrix of `size` that tile the blocks of all levels."""

    block: Block
    size: tuple[int, int]

    def gather(self, tensor: Tensor, outer: Block) -> Tensor:
        """The largest number in each outer block."""
        for axis in (0, 1):
            side = outer[axis] // (self.block[axis] or 1)
            tensor = tensor if outer[axis] == self.block[axis] else gather(torch.amax, tensor, axis, side)
        return tensor

    def spread(self, tensor: Tensor, outer: Block) -> Tensor:
        """What broadcasts against one number a block."""
        return spread(tensor, outer, (outer[0] and self.block[0], outer[1] and self.block[1]), *self.size)

    def product(self, levels: Sequence[Scale], tensors: Sequence[Tensor]) -> Tensor:
        """What all levels make together on each block."""
        total = torch.ones(1, 1, dtype=torch.float64, device=tensors[0].device if tensors else None)
        for level, tensor in zip(levels, tensors):
            factor = self.spread(level.dtype.decode(tensor).double(), level.block)
            total = total / factor if level.op == DIV else total * factor
        return total

    def fit(
        self, peaks: Tensor, levels: Sequence[Scale], reach: float, rule: str, *, empty: float
    ) -> tuple[Tensor, ...]:
        """Say peaks / reach as a product of `levels`; `empty` is the scale of a block of zeros.

        The coarsest level comes first, such that the small types inside it just reach their own
        maximum; what its rounding leaves, the finer ones see.
        """
        fitted: dict[int, Tensor] = {}
        order = sorted(range(len(levels)), key=lambda i: (math.prod(levels[i].shape(*self.size)), -i))
        for place, i in enumerate(order):
            level = levels[i]
            inside = math.prod(levels[j].dtype.max for j in order[place + 1 :] if levels[j].dtype.table)
            codes = _encode(self.gather(peaks, level.block), reach * inside, level, rule, empty)
            value = level.dtype.decode(codes).double()
            factor = 1 / value if level.op == DIV else value
            peaks = peaks / self.spread(factor.masked_fill(value == 0, 1.0), level.block)
            fitted[i] = codes
        return tuple(fitted[i] for i in range(len(levels)))


def _encode(peaks: Tensor, reach: float, level: Scale, rule: str, empty: float) -> Tensor:
    """Codes of the scale under which `reach` comes to be `peaks`."""
    dtype = level.dtype
    if dtype == E8M0:
        exponent = _exponent(peaks, reach, rule).masked_fill(peaks == 0, 0 if empty else -127)
        return ((-exponent if level.op == DIV else exponent) + 127).clamp(0, 254).to(torch.uint8)
    want = (peaks / reach).masked_fill(peaks == 0, empty)
    want = 1 / want if level.op == DIV else want
    if dtype.kind != INTEGER:  # a scale that is not zero must not become it
        want = torch.where(want > 0, want.clamp(min=dtype.min_positive), want)
    return dtype.encode(want)


def _exponent(peaks: Tensor, reach: float, rule: str) -> Tensor:
    """floor: OCP's floor(log2(amax)) - emax, which may saturate the largest values; ceil: never does."""
    if rule == FLOOR:
        return torch.frexp(peaks).exponent - math.frexp(reach)[1]
    mantissa, exponent = torch.frexp(peaks / reach)
    return torch.where(mantissa == 0.5, exponent - 1, exponent)
