"""Layers whose every step is exact or rounded at one known point, and their expected results in float64.

Inputs are a few equal numbers among zeros, scales are powers of two, and only a few gates are open. So sums need fewer
bits than the tensor cores keep even for fp8, and every gate is so large or so small that its sigmoid is one or zero.
The layer rounds activations (in fp32), hidden rows, expert results and the sum to nearest, and 8-bit rows to codes;
`expected_result` does the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lancebill.backends.gpu.plan import GpuPlan
from lancebill.backends.registry import registry
from lancebill.moe.dispatch import Indexed
from lancebill.moe.layout import MatrixShape, Packed
from lancebill.moe.problem import Problem
from lancebill.numbers.codec import dequantize
from lancebill.numbers.dtypes import CODEBOOK
from lancebill.numbers.spec import FP8_CHANNEL
from lancebill.numbers.spec_names import ACTIVATIONS
from lancebill.numbers.weight import LogicalWeight
from lancebill.testing.layers import plausible_weight

OPEN = 6  # hidden features that are not zero
SPARSE = 24  # inputs of a row that are not zero
# The largest number of quantised inputs, e4m3 and int8: rows of it have the scale 1.
LARGEST = {FP8_CHANNEL: 448.0, ACTIVATIONS["int8"].spec: 127.0}
AT_ONCE = 4096  # rows computed at a time, since several processes may share a GPU


@dataclass(frozen=True)
class ExactLayer:
    """Packed weights of all experts, and the values of the distinct ones; the other experts repeat them."""

    problem: Problem
    weights: dict[str, Packed]
    numbers: list[tuple[Tensor, Tensor]]  # w13, w2 in float64

    @property
    def fp8(self) -> bool:
        return self.problem.activations.spec == FP8_CHANNEL

    @property
    def largest(self) -> float | None:
        """The largest number of quantised inputs."""
        return LARGEST.get(self.problem.activations.spec)


def make_exact_layer(problem: Problem, distinct: int = 3, device: str = "cuda", backend: str = "hopper") -> ExactLayer:
    layout = registry()[backend].layout(problem)
    assert problem.w2 is not None and problem.activation.name == "silu"
    numbers = []
    packed = {name: layout.allocate(shape, problem.experts, device) for name, shape in problem.matrices.items()}
    for expert in range(min(distinct, problem.experts)):
        tame = problem.activations.spec == FP8_CHANNEL
        first = exact_weight(problem.w13, expert, device, gated=True, tame=tame)
        pair = first, exact_weight(problem.w2, 50 + expert, device)
        numbers.append((dequantize(pair[0]).double(), dequantize(pair[1]).double()))
        for (name, shape), weight in zip(problem.matrices.items(), pair):
            layout.pack(shape, weight, {role: tensor[expert] for role, tensor in packed[name].items()})
    for tensors in packed.values():
        for tensor in tensors.values():
            for expert in range(distinct, problem.experts):
                tensor[expert] = tensor[expert % distinct]
    return ExactLayer(problem, packed, numbers)


def exact_weight(
    shape: MatrixShape, seed: int, device: str, *, gated: bool = False, tame: bool = False
) -> LogicalWeight:
    """Random codes with scales 1 and 2. Of gate rows all but a few are zero, and their scales are 2**8 times larger.

    `tame`: rows of open features are 2, 3 and 4, so that hidden numbers are within a factor of 16 of each other, and a
    few of them as e4m3 add exactly in 14 bits.
    """
    weight = plausible_weight(shape, seed, device)
    generator = torch.Generator(device).manual_seed(seed)
    level = shape.spec.scales[0]
    power = torch.randint(0, 2, level.shape(shape.n, shape.k), generator=generator, device=device).float()
    codes, outer = weight.codes.clone(), [torch.ones_like(scale) for scale in weight.scales[1:]]
    if shape.spec.dtype.bits == 8:  # small integers only
        small = torch.randint(-4, 5, codes.shape, generator=generator, device=device)
        codes = shape.spec.dtype.encode(small.float())
    if shape.spec.dtype.kind == CODEBOOK:  # exact numbers only
        codes = shape.spec.dtype.encode(torch.randint(-1, 2, codes.shape, generator=generator, device=device).float())
    if gated:
        half = shape.n // 2
        if outer:
            outer[0][: len(outer[0]) // 2] = 2**8
        else:
            power[: len(power) // 2] += 8
        opened = torch.randperm(half, generator=generator, device=device)[:OPEN]
        gates = codes[opened].clone()
        zero = 0 if weight.zero is None else 8
        codes[:half] = shape.spec.dtype.encode(torch.zeros(1) + zero).to(device)
        codes[opened] = gates
        if tame:
            some = shape.spec.dtype.encode(torch.tensor([2.0, 3.0, 4.0]) + zero).to(device)
            rows = torch.cat([opened, half + opened])
            codes[rows] = some[torch.randint(3, (len(rows), shape.k), generator=generator, device=device)]
    if weight.zero is not None:
        weight = replace(weight, zero=torch.full_like(weight.zero, 8))
    return replace(weight, stored=codes, scales=(level.dtype.encode(torch.exp2(power)), *outer))


def exact_inputs(layer: ExactLayer, tokens: int, seed: int, device: str = "cuda") -> Tensor:
    """Rows of zeros and a few equal numbers, with random signs unless fp8."""
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.zeros(tokens, layer.problem.hidden, device=device)
    where = torch.randint(layer.problem.hidden, (tokens, SPARSE), generator=generator, device=device)
    signs = torch.randint(0, 2, (tokens, SPARSE), generator=generator, device=device) * 2.0 - 1
    magnitude = layer.largest or 1.0
    x.scatter_(1, where, torch.full_like(signs, magnitude) if layer.fp8 else signs * magnitude)
    return x.to(layer.problem.input.storage)


def exact_weights_of_slots(routed: Indexed, seed: int) -> Indexed:
    """Routing weights that are powers of two."""
    generator = torch.Generator(routed.ids.device).manual_seed(seed)
    power = torch.randint(-3, 1, routed.ids.shape, generator=generator, device=routed.ids.device)
    return Indexed(routed.ids, torch.exp2(power.float()))


def expected_result(layer: ExactLayer, plan: GpuPlan, x: Tensor, routed: Indexed) -> Tensor:
    """The expected result, bit for bit."""
    kind, (tokens, top_k) = x.dtype, routed.ids.shape
    y = torch.zeros(tokens * top_k, layer.problem.hidden, device=x.device)
    flat = routed.ids.reshape(-1)
    for number, (w13, w2) in enumerate(layer.numbers):
        ours = ((flat >= 0) & (flat % len(layer.numbers) == number)).nonzero().squeeze(1)
        for slots in ours.split(AT_ONCE):
            gate, up = (x[slots // top_k].double() @ w13.t()).float().chunk(2, 1)
            h = (gate * torch.sigmoid(gate) * up).to(kind)
            y[slots] = (h.double() @ w2.t()).float() if layer.largest is None else _quantised(h, w2, layer.largest)
    if not plan.decode:
        y = y.to(kind).float()
    weights = torch.where(routed.ids >= 0, routed.weights, torch.zeros_like(routed.weights))
    total = torch.zeros(tokens, layer.problem.hidden, device=x.device)
    for choice in range(top_k):
        total += y.view(tokens, top_k, -1)[:, choice] * weights[:, choice : choice + 1]
    return total.to(kind)


def _quantised(h: Tensor, w2: Tensor, most: float) -> Tensor:
    """The second GEMM in fp32, of rows that are quantised as in the kernels."""
    largest = h.float().abs().amax(1, keepdim=True)
    # Dividing by a scalar, torch on a GPU would multiply by its reciprocal.
    scale = largest / torch.full_like(largest, most)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    codes = h.float() / scale
    codes = codes.round() if most == LARGEST[ACTIVATIONS["int8"].spec] else codes.to(torch.float8_e4m3fn)
    return (codes.double() @ w2.t()).float() * scale
