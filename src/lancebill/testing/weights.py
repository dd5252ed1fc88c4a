"""Random weights that a scheme can store: every code, and every legal scale and zero point."""

from __future__ import annotations

import torch
from torch import Tensor

from lancebill.formats.base import Example, Scheme
from lancebill.numbers.dtypes import FLOAT, INTEGER, ZERO16, DType
from lancebill.numbers.spec import QuantSpec
from lancebill.numbers.weight import FACTORS, LogicalWeight


def random_example(example: Example, n: int, k: int, seed: int, order_seed: int = 0) -> LogicalWeight:
    """A weight of the example's scheme, with the bias and input tensors the example declares.

    The act-order and the input factors depend only on `order_seed`: gate and up of an expert have the same
    input and share them.
    """
    generator = torch.Generator().manual_seed(seed)
    inputs = {
        role: _random_factors(k, order_seed) if role == FACTORS else torch.rand(shape, generator=generator) + 0.5
        for role, shape in example.inputs.items()
    }
    bias = torch.randn(n, generator=generator).to(torch.bfloat16) if example.bias else None
    weight = random_weight(example.scheme, n, k, generator)
    perm = _random_order(weight.spec, k, order_seed) if example.scheme.act_order else None
    return LogicalWeight(weight.spec, weight.codes, weight.scales, weight.zero, weight.minimum, bias, perm, inputs)


def random_weight(scheme: Scheme, n: int, k: int, generator: torch.Generator) -> LogicalWeight:
    spec = scheme.spec
    stored = scheme.random_stored(n, k, generator)
    if stored is not None:
        return scheme.unpack(stored, n, k)
    zero = None
    if spec.zero is not None:
        shape = spec.zero.shape(n, k)
        if spec.zero.dtype == ZERO16:
            low, high = scheme.zero_range
            zero = torch.randint(low, high + 1, shape, generator=generator).to(torch.int16)
        else:
            zero = spec.zero.dtype.encode(torch.rand(shape, generator=generator) * spec.dtype.max)
    return LogicalWeight(
        spec,
        random_codes(spec.dtype, (n, k), generator),
        tuple(random_scale(s.dtype, s.shape(n, k), generator) for s in spec.scales),
        zero,
        tuple(random_scale(s.dtype, s.shape(n, k), generator) for s in spec.minimum),
    )


def random_codes(dtype: DType, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Uniform over the codes with finite values; 16- and 32-bit floats are normally distributed."""
    if not dtype.table:
        return torch.randn(shape, generator=generator).to(dtype.storage)
    legal = torch.tensor(dtype.valid_codes, dtype=torch.uint8)
    return legal[torch.randint(len(legal), shape, generator=generator)]


def random_scale(dtype: DType, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Positive scales over six binades; integer scales are uniform over the nonzero codes."""
    if dtype.kind == INTEGER:
        legal = torch.tensor([c for c in dtype.valid_codes if dtype.table[c] != 0], dtype=torch.uint8)
        return legal[torch.randint(len(legal), shape, generator=generator)]
    assert dtype.kind == FLOAT
    return dtype.encode(torch.exp2(torch.rand(shape, generator=generator) * 6 - 5))


def _random_factors(k: int, seed: int) -> Tensor:
    """One power of two per column, so that multiplying by them is exact."""
    return torch.exp2(torch.randint(0, 3, (k,), generator=torch.Generator().manual_seed(seed)).float())


def _random_order(spec: QuantSpec, k: int, seed: int) -> Tensor:
    """A permutation that ascends within each group, as a stable sort of g_idx gives."""
    size = spec.group or k
    order = torch.randperm(k, generator=torch.Generator().manual_seed(seed))
    return torch.cat([chunk.sort().values for chunk in order.split(size)]).to(torch.int32)
