"""Random weights that behave like trained ones: every code occurs, values have variance 1 / K, nothing is NaN.

Engines start with such weights to measure speed without a checkpoint. Zeros would make a GPU draw less power, and
unscaled codes would overflow.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lancebill.numbers.dtypes import INTEGER, ZERO16, DType
from lancebill.numbers.spec import DIV, QuantSpec, Scale, Zero
from lancebill.numbers.weight import LogicalWeight

FEW = 16  # invalid codes that are replaced one by one


def random_weight(
    spec: QuantSpec, n: int, k: int, generator: torch.Generator, *, bias: bool = False, act_order: bool = False
) -> LogicalWeight:
    """An [n, k] matrix on the generator's device: x @ w.T has the variance of x."""
    device = generator.device
    mean, spread = (0.0, 1.0) if not spec.dtype.table else _moments(spec.dtype)
    size = 1 / (spread * math.sqrt(k))
    scales, product = _scales(spec.scales, n, k, size, generator)
    minimum, _ = _scales(spec.minimum, n, k, product * mean, generator)
    return LogicalWeight(
        spec,
        _codes(spec, n, k, size, generator),
        scales,
        None if spec.zero is None else _zero_points(spec.zero, n, k, mean, generator),
        minimum,
        bias=torch.randn(n, generator=generator, device=device).mul_(0.1) if bias else None,
        perm=torch.randperm(k, generator=generator, device=device).to(torch.int32) if act_order else None,
    )


def _moments(dtype: DType) -> tuple[float, float]:
    """Mean and standard deviation of a uniformly chosen code."""
    values = [dtype.table[code] for code in dtype.valid_codes]
    mean = sum(values) / len(values)
    return mean, math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))


def _codes(spec: QuantSpec, n: int, k: int, size: float, generator: torch.Generator) -> Tensor:
    """Uniform over the codes with finite values; 16- and 32-bit floats are normally distributed."""
    dtype, device = spec.dtype, generator.device
    if not dtype.table:
        return torch.randn(n, k, generator=generator, device=device).mul_(size).to(dtype.storage)
    codes = torch.randint(len(dtype.table), (n, k), generator=generator, device=device, dtype=torch.uint8)
    valid = dtype.valid_codes
    invalid = sorted(set(range(len(dtype.table))) - set(valid))
    if len(invalid) > FEW:
        legal = torch.tensor(valid, dtype=torch.uint8, device=device)
        return legal[(codes.int() * len(valid)) // len(dtype.table)]
    for number, code in enumerate(invalid):
        codes.masked_fill_(codes == code, valid[number * len(valid) // len(invalid)])
    return codes


def _zero_points(zero: Zero, n: int, k: int, mean: float, generator: torch.Generator) -> Tensor:
    """Around the mean code, so that values have mean zero."""
    shape, device = zero.shape(n, k), generator.device
    if zero.dtype != ZERO16:
        return zero.dtype.encode(torch.full(shape, mean, device=device))
    jitter = torch.randint(2, shape, generator=generator, device=device)
    return (jitter + math.floor(mean)).to(torch.int16)


def _scales(
    levels: tuple[Scale, ...], n: int, k: int, size: float, generator: torch.Generator
) -> tuple[tuple[Tensor, ...], float]:
    """Tensors for each level, whose product is about `size`, and that product. The outermost level has the magnitude."""
    tensors, product = [], 1.0
    for number, level in enumerate(levels):
        outermost = number == len(levels) - 1
        typical = 0.75 * level.dtype.max if level.dtype.kind == INTEGER else 1.0
        if outermost and level.dtype.kind != INTEGER:
            typical = size / product if level.op != DIV else product / size
            typical = min(max(typical, 2 * level.dtype.min_positive), level.dtype.max / 2)
        jitter = torch.rand(level.shape(n, k), generator=generator, device=generator.device).mul_(0.5).add_(0.75)
        tensors.append(level.dtype.encode(jitter.mul_(typical)))
        product = product / typical if level.op == DIV else product * typical
    return tuple(tensors), product
