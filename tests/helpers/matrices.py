"""Random weights of any spec, and a simple scalar dequantiser as reference."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from lancebill.numbers.dtypes import ZERO16, DType, codebook
from lancebill.numbers.spec import DIV, Level, QuantSpec, Scale, Zero, group
from lancebill.numbers.spec_names import parse_spec
from lancebill.numbers.weight import LogicalWeight

# Covers each number type, each shape of block and every combination of levels.
NAMES = [
    "bf16", "fp16", "fp32", "mxfp4", "mxfp6-e2m3", "mxfp6-e3m2", "mxfp8", "mxfp8-e5m2", "nvfp4", "nvfp4-div", "nf4",
    "int1-g8", "int2-g16", "int3-g64", "int4-g128", "int5-tensor", "int6-g16:int8-g64:fp16", "int7-g3:fp32", "int8",
    "int4-g32-zp", "int4-g32-zp:fp16", "int8-zp", "int4-tensor-zp", "twos4-g32", "uint4-g32", "uint4b8-g8-zp",
    "uint5-g32:fp16-min.g32:fp16", "uint4-g8:uint6-g16:fp16-min.g8:uint6-min.g16", "iq4-g32:fp16", "bnbfp4-g64",
    "fp8-tensor", "fp8-channel", "fp8-block", "fp8-b3x5", "fp8-b2xall", "fp8-ballx4", "e4m3fnuz-channel", "e5m2-g16",
    "e3m4-g16", "e2m1-g16:ue5m3-/channel", "ternary-tensor", "ternary-/tensor", "int4-g16:e4m3fn-b2xall:bf16",
    "e2m1-tensor-g16:e4m3fn", "fp8-unscaled", "int8-channel:fp32-tensor:inv127", "int4-g16-zp.channel:fp16",
    "int4-channel-zp.g8", "twos8-g32:e8m0", "int4-g32:fp16-channel:fp32",
    "e2m1-/g32:e8m0", "int4-g32-channel",
]  # fmt: skip
SPECS: dict[str, QuantSpec] = {name: parse_spec(name) for name in NAMES}
SPECS["codebook"] = QuantSpec(codebook([0.5, -3, 2, 0, -0.25, 7, 1, -8]), (Scale(SPECS["bf16"].dtype, group(4)),))

MX = ["mxfp4", "mxfp6-e2m3", "mxfp6-e3m2", "mxfp8", "mxfp8-e5m2"]


def random_matrix(n: int, k: int, seed: int, scale: float = 1.0) -> Tensor:
    """Magnitudes over many binades, some exact zeros, one block of zeros."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(n, k, generator=generator) * torch.exp2(torch.randn(n, k, generator=generator) * 2)
    values[torch.rand(n, k, generator=generator) < 0.05] = 0
    values[0, : k // 2] = 0
    return values * scale


def random_matrices() -> st.SearchStrategy[Tensor]:
    exponent = st.integers(-40, 40)
    return st.builds(
        lambda n, k, seed, e: random_matrix(n, k, seed, 2.0**e),
        st.integers(1, 9), st.integers(1, 70), st.integers(0, 10**6), exponent,
    )  # fmt: skip


def random_weight(spec: QuantSpec, n: int, k: int, seed: int, *, perm: bool = False) -> LogicalWeight:
    """Random codes, scales of both signs over many binades, zero points over their whole range."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(level: Level) -> Tensor:
        shape = level.shape(n, k)
        if isinstance(level, Zero) and level.dtype == ZERO16:
            return torch.randint(0, (1 << spec.dtype.bits) + 1, shape, generator=generator).to(torch.int16)
        if level.dtype.table:
            return codes_of(level.dtype, shape, generator)
        values = torch.randn(shape, generator=generator) * torch.exp2(torch.randn(shape, generator=generator) * 3)
        return level.dtype.encode(torch.where(values == 0, torch.ones_like(values), values))

    order = torch.randperm(k, generator=generator).to(torch.int32) if perm else None
    return LogicalWeight(
        spec,
        codes_of(spec.dtype, (n, k), generator),
        tuple(numbers(level) for level in spec.scales),
        numbers(spec.zero) if spec.zero is not None else None,
        tuple(numbers(level) for level in spec.minimum),
        bias=torch.randn(n, generator=generator).bfloat16(),
        perm=order,
    )


def codes_of(dtype: DType, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if not dtype.table:
        return torch.randn(shape, generator=generator).to(dtype.storage)
    legal = torch.tensor(dtype.valid_codes, dtype=torch.uint8)
    return legal[torch.randint(len(legal), shape, generator=generator)]


def number(level: Level, tensor: Tensor, row: int, column: int) -> np.float32:
    """The number of a level for one element."""
    rows, columns = level.block
    stored = tensor[row // rows if rows else 0, column // columns if columns else 0].item()
    return np.float32(level.dtype.table[int(stored)] if level.dtype.table else stored)


def scalar_dequantize(weight: LogicalWeight) -> Tensor:
    """The formula of `numbers/spec.py`, element by element in fp32."""
    np.seterr(over="ignore")
    spec, out = weight.spec, np.zeros((weight.n, weight.k), dtype=np.float32)
    for row in range(weight.n):
        for column in range(weight.k):
            code = weight.codes[row, column].item()
            value = np.float32(spec.dtype.table[int(code)] if spec.dtype.table else code)
            if spec.zero is not None and weight.zero is not None:
                value = np.float32(value - number(spec.zero, weight.zero, row, column))
            for scale, tensor in zip(spec.scales, weight.scales):
                factor = number(scale, tensor, row, column)
                value = np.float32(value / factor if scale.op == DIV else value * factor)
            if spec.minimum:
                parts = [number(s, t, row, column) for s, t in zip(spec.minimum, weight.minimum)]
                value = np.float32(value - math.prod(parts[1:], start=parts[0]))
            natural = column if weight.perm is None else int(weight.perm[column])
            out[row, natural] = value
    return torch.from_numpy(out)


def steps(weight: LogicalWeight) -> Tensor:
    """|product of the scales| for every element, fp64."""
    total = torch.ones(weight.n, weight.k, dtype=torch.float64)
    for level, tensor in zip(weight.spec.scales, weight.scales):
        values = torch.tensor(
            [[float(number(level, tensor, r, c)) for c in range(weight.k)] for r in range(weight.n)],
            dtype=torch.float64,
        )
        total = total / values if level.op == DIV else total * values
    return total.abs()
