"""Random weights that behave like trained ones: all codes are used, values have mean 0 and variance 1 / K.

Engines start with such weights to measure speed without a checkpoint. Zeros would make a GPU draw less power, and
unscaled codes would overflow.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from lancebill.numbers.dtypes import CODEBOOK, INTEGER, ZERO16, DType
from lancebill.numbers.spec import DIV, QuantSpec, Scale, Zero
from lancebill.numbers.weight import LogicalWeight


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
        None if spec.zero is None else _zero_points(spec.zero, n, k, mean, device),
        minimum,
        bias=torch.randn(n, generator=generator, dtype=torch.float32, device=device).mul_(0.1) if bias else None,
        perm=torch.randperm(k, generator=generator, device=device).to(torch.int32) if act_order else None,
    )


@cache
def _filler(dtype: DType) -> tuple[tuple[int, ...], int]:
    """Codes that do not occur, and the code near the mean that takes their place.

    They are the codes that are not finite, repetitions in a codebook, and one end of an even number of integers: then
    the mean is a code, 0 where there are negative numbers.
    """
    kept = sorted(dtype.valid_codes, key=dtype.table.__getitem__)
    if dtype.kind == CODEBOOK:
        kept = list({dtype.table[code]: code for code in kept}.values())
    if dtype.kind == INTEGER and len(kept) >= 4 and len(kept) % 2 == 0:
        lowest, highest = dtype.table[kept[0]], dtype.table[kept[-1]]
        kept = kept[:-1] if -highest < lowest < 0 else kept[1:]
    mean = sum(dtype.table[code] for code in kept) / len(kept)
    nearest = min(kept, key=lambda code: abs(dtype.table[code] - mean))
    return tuple(code for code in range(len(dtype.table)) if code not in kept), nearest


def _moments(dtype: DType) -> tuple[float, float]:
    """Mean and standard deviation of a random code's value."""
    unused, filler = _filler(dtype)
    values = [dtype.table[filler if code in unused else code] for code in range(len(dtype.table))]
    mean = sum(values) / len(values)
    return mean, math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))


def _codes(spec: QuantSpec, n: int, k: int, size: float, generator: torch.Generator) -> Tensor:
    """All codes, equally often; 16- and 32-bit floats are normally distributed."""
    dtype, device = spec.dtype, generator.device
    if not dtype.table:
        return torch.randn(n, k, generator=generator, dtype=torch.float32, device=device).mul_(size).to(dtype.storage)
    # Eight bytes from each random number: on a CPU, generating them is most of the work.
    words = torch.randint(-(1 << 63), (1 << 63) - 1, (-(-n * k // 8),), generator=generator, device=device)
    codes = words.view(torch.uint8)[: n * k].view(n, k)
    if dtype.bits < 8:
        codes &= len(dtype.table) - 1
    unused, filler = _filler(dtype)
    for code in unused:
        codes.masked_fill_(codes == code, filler)
    return codes


def _zero_points(zero: Zero, n: int, k: int, mean: float, device: torch.device) -> Tensor:
    """The mean code, so that values have mean zero."""
    shape = zero.shape(n, k)
    if zero.dtype != ZERO16:
        return zero.dtype.encode(torch.full(shape, mean, dtype=torch.float32, device=device))
    return torch.full(shape, round(mean), dtype=torch.int16, device=device)


def _scales(
    levels: tuple[Scale, ...], n: int, k: int, size: float, generator: torch.Generator
) -> tuple[tuple[Tensor, ...], float]:
    """Tensors for each level, whose product is about `size`, and that product. The level of widest range sets it."""
    typical = [_typical(level.dtype) for level in levels]
    widest = max(range(len(levels)), key=lambda i: (_range(levels[i].dtype), i), default=None)
    if widest is not None:
        others = math.prod(_applied(levels[i], typical[i]) for i in range(len(levels)) if i != widest)
        dtype = levels[widest].dtype
        wanted = _applied(levels[widest], size / others)
        typical[widest] = min(max(wanted, 2 * dtype.min_positive), max(dtype.max / 2, dtype.min_positive))
    tensors = []
    for level, value in zip(levels, typical):
        drawn = torch.rand(level.shape(n, k), generator=generator, dtype=torch.float32, device=generator.device)
        jitter = drawn.mul_(0.5).add_(0.75)
        tensors.append(level.dtype.encode(jitter.mul_(value)))
    return tuple(tensors), math.prod(map(_applied, levels, typical))


def _typical(dtype: DType) -> float:
    return 0.75 * dtype.max if dtype.kind == INTEGER else min(1.0, dtype.max)


def _range(dtype: DType) -> float:
    """Binades of a float; integers do not set the size."""
    return 0.0 if dtype.kind == INTEGER else math.log2(dtype.max / dtype.min_positive)


def _applied(level: Scale, value: float) -> float:
    """The factor that a scale of this value is."""
    return 1 / value if level.op == DIV else value
