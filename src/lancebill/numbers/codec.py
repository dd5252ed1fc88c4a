"""Quantising and dequantising matrices. `dequantize` defines what a weight means; kernels are tested against it.

Plain torch, on CPU and GPU. Matrices are processed in chunks of rows, so fp32 temporaries stay small.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from lancebill.errors import SpecError
from lancebill.numbers.blocks import apply_per_block, finest, row_chunks, rows_of, spread
from lancebill.numbers.loss import SCALE_ROUNDING, Loss, LossMeter, saturation
from lancebill.numbers.native import RoundingStruct
from lancebill.numbers.native.rounding import BlockNumbers, RoundingLevels, round_rows
from lancebill.numbers.recast import recast, rescale
from lancebill.numbers.rotation import rotate
from lancebill.numbers.scales import CEIL, FLOOR, Rows, fit_levels
from lancebill.numbers.search import search_scales
from lancebill.numbers.spec import DIV, QuantSpec, Scale
from lancebill.numbers.weight import FACTORS, LogicalWeight


def dequantize(weight: LogicalWeight) -> Tensor:
    """fp32 [N, K] in natural column order, unrotated: (table[code] - zero) op scale_1 op ... - minimum."""
    rows = rows_reader(weight)
    out = torch.empty(weight.n, weight.k, dtype=torch.float32, device=weight.codes.device)
    for low, high in row_chunks(weight.n, weight.k, out.device):
        out[low:high] = rows(low, high)
    return out


def plain_matrix(weight: LogicalWeight) -> Tensor:
    """`dequantize`, times the factors of the inputs: the matrix for inputs that nothing multiplies."""
    values, factors = dequantize(weight), weight.inputs.get(FACTORS)
    return values if factors is None else values.mul_(factors.float().reshape(1, -1))


def rows_reader(weight: LogicalWeight) -> Rows:
    """`dequantize` by parts: a function that returns rows [low, high)."""
    column_of = None if weight.perm is None else torch.argsort(weight.perm)  # stored column of each input feature

    def rows(low: int, high: int) -> Tensor:
        value = _dequantize_rows(weight, low, high)
        natural = value if column_of is None else value.index_select(1, column_of)
        return rotate(natural, weight.spec.rotation)

    return rows


def _dequantize_rows(weight: LogicalWeight, low: int, high: int) -> Tensor:
    spec = weight.spec
    value = spec.dtype.decode(weight.codes[low:high])
    if (zeros := _zeros(weight, low, high)) is not None:
        apply_per_block(torch.sub, value, *zeros, out=value)
    for scale, codes in zip(spec.scales, weight.scales):
        factor = scale.dtype.decode(rows_of(codes, scale.block[0], low, high))
        apply_per_block(torch.div if scale.op == DIV else torch.mul, value, factor, scale.block[1], out=value)
    if (minimum := _minimum(weight, low, high)) is not None:
        apply_per_block(torch.sub, value, *minimum, out=value)
    return value


# Numbers of rows [low, high), one for each block, and the columns of a block.
PerBlock = tuple[Tensor, int]


def _zeros(weight: LogicalWeight, low: int, high: int) -> PerBlock | None:
    level = weight.spec.zero
    if level is None or weight.zero is None:
        return None
    return level.dtype.decode(rows_of(weight.zero, level.block[0], low, high)), level.block[1]


def _minimum(weight: LogicalWeight, low: int, high: int) -> PerBlock | None:
    levels = weight.spec.minimum
    return _product(levels, weight.minimum, low, high, weight.k) if levels else None


def _step(weight: LogicalWeight, low: int, high: int) -> PerBlock | None:
    """All scales together; infinite instead of zero, so that dividing by it gives zero."""
    if not weight.spec.scales:
        return None
    step, side = _product(weight.spec.scales, weight.scales, low, high, weight.k)
    return step.masked_fill(step == 0, math.inf), side


def _product(levels: Sequence[Scale], tensors: Sequence[Tensor], low: int, high: int, k: int) -> PerBlock:
    """The product of `levels` for rows [low, high), left to right, and the block width of the result."""
    side = finest(level.block for level in levels)[1]
    total = torch.ones(1, 1, dtype=torch.float32, device=tensors[0].device)
    for level, codes in zip(levels, tensors):
        values = level.dtype.decode(rows_of(codes, level.block[0], low, high))
        factor = spread(values, (1, level.block[1]), (1, side), high - low, k)
        total = total / factor if level.op == DIV else total * factor
    return total, side


def quantize(values: Tensor, spec: QuantSpec, *, mx_rule: str = FLOOR, search: bool = False) -> LogicalWeight:
    """Round to nearest under `spec`: scales from each block's largest magnitude, then codes.

    Integers without a zero point use scale = amax / ((2**b - 1) / 2), so that no value is off by more
    than half a step; int8 uses amax / 127. Power-of-two scales follow `mx_rule`: OCP's floor (may
    saturate the largest value) or ceil (never saturates). All-zero blocks get a scale of one.
    `search` replaces these scales by others with a smaller weighted squared error; `mx_rule` does not matter then.
    """
    return _quantize(lambda low, high: values[low:high].float(), values, spec, mx_rule, search, None)


def requantize(
    weight: LogicalWeight, spec: QuantSpec, *, mx_rule: str = FLOOR, search: bool = False, keep_order: bool = True
) -> tuple[LogicalWeight, Loss]:
    """The same matrix under another spec, exact where possible, and the loss.

    If the specs differ only in how scales are stored, the codes are kept, and so is the act-order
    unless `keep_order` is false. Otherwise new scales are fitted over columns in natural order.
    Bias and activation-side tensors are copied.
    """
    count, rows = weight.n * weight.k, rows_reader(weight)
    if weight.perm is None or keep_order:
        exact = recast(weight, spec)
        if exact is not None:
            return exact, Loss(count=count)
        kept = rescale(weight, spec, SCALE_ROUNDING)
        if kept is not None:
            return kept[0], Loss(count=count) if kept[1] else _loss(rows, kept[0])
    meter = LossMeter(spec.dtype)
    result = _quantize(rows, weight.codes, spec, mx_rule, search, meter)
    return replace(result, bias=weight.bias, inputs=weight.inputs), meter.loss()


def recasts(old: QuantSpec, new: QuantSpec) -> bool:
    """Whether `new` can represent every weight under `old` exactly."""
    return recast(_probe(old), new) is not None


def keeps_codes(old: QuantSpec, new: QuantSpec) -> bool:
    """Whether `requantize` from `old` to `new` may keep the codes and at most round the scales."""
    return rescale(_probe(old), new, 0.0) is not None


@lru_cache(maxsize=256)
def _probe(spec: QuantSpec) -> LogicalWeight:
    """One block of zeros with scales of one, which every scale type can represent."""
    rows = max((level.block[0] or 1 for level in spec.levels), default=1)
    return quantize(torch.zeros(rows, spec.widest, dtype=torch.float32, device="cpu"), spec)


def _quantize(
    rows: Rows, like: Tensor, spec: QuantSpec, rule: str, search: bool, meter: LossMeter | None
) -> LogicalWeight:
    """Fit the levels, then round chunk by chunk; with a `meter`, also measure the loss."""
    if rule not in (FLOOR, CEIL):
        raise SpecError("unknown rounding rule for power-of-two scales", expected=f"{FLOOR} or {CEIL}", got=rule)
    (n, k), device = like.shape, like.device
    rows = _rotated(rows, spec)
    levels = fit_levels(rows, (n, k), device, spec, FLOOR if search else rule)
    if search:
        levels = search_scales(rows, (n, k), device, spec, levels)
    codes = torch.empty(n, k, dtype=spec.dtype.storage, device=device)
    result = LogicalWeight(spec, codes, levels.scales, levels.zero, levels.minimum)
    for low, high in row_chunks(n, k, device):
        values = rows(low, high)
        rounded = _round_natively(values, result, low, high)
        if rounded is not None:
            if meter is not None:
                meter.merge(rounded)
            continue
        position = _position(values, result, low, high)
        codes[low:high] = spec.dtype.encode(position)
        if meter is not None:
            meter.add(values, _dequantize_rows(result, low, high), position)
    return result


def _rotated(rows: Rows, spec: QuantSpec) -> Rows:
    """The rows that `spec` stores: the matrix or, if it is rotated, its rotated rows."""
    return (lambda low, high: rotate(rows(low, high), spec.rotation)) if spec.rotation else rows


def _round_natively(values: Tensor, weight: LogicalWeight, low: int, high: int) -> RoundingStruct | None:
    """Write rows [low, high) of the codes in C++ and measure the loss; None where `round_rows` does not apply."""
    spec = weight.spec
    step, zero, minimum = (
        None if found is None else BlockNumbers(*found)
        for found in (_step(weight, low, high), _zeros(weight, low, high), _minimum(weight, low, high))
    )
    scales = [
        BlockNumbers(level.dtype.decode(rows_of(codes, level.block[0], low, high)), level.block[1], level.op == DIV)
        for level, codes in zip(spec.scales, weight.scales)
    ]
    levels = RoundingLevels(step, scales, zero, minimum)
    return round_rows(values, weight.codes[low:high], spec.dtype, levels, saturation(spec.dtype))


def _position(values: Tensor, weight: LogicalWeight, low: int, high: int) -> Tensor:
    """Rows [low, high) of `values` in units of the code table, before rounding: the inverse of the formula."""
    if (minimum := _minimum(weight, low, high)) is not None:
        values = apply_per_block(torch.add, values, *minimum)
    if (step := _step(weight, low, high)) is not None:
        values = apply_per_block(torch.div, values, *step)
    if (zeros := _zeros(weight, low, high)) is not None:
        values = apply_per_block(torch.add, values, *zeros)
    return values


def loss(source: Tensor, result: LogicalWeight) -> Loss:
    """The error of `result` against `source`."""
    return _loss(lambda low, high: source[low:high].float(), result)


def _loss(source: Rows, result: LogicalWeight) -> Loss:
    meter, source = LossMeter(result.spec.dtype), _rotated(source, result.spec)
    for low, high in row_chunks(result.n, result.k, result.codes.device):
        expected = source(low, high)
        if result.perm is not None:
            expected = expected.index_select(1, result.perm)  # in the order of the codes
        meter.add(expected, _dequantize_rows(result, low, high), _position(expected, result, low, high))
    return meter.loss()
