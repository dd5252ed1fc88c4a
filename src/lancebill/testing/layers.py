"""Layers for tests and benchmarks: random weights and routings, and relative errors of results."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lancebill.backends.base import Backend, Executor, TensorTable
from lancebill.backends.registry import registry
from lancebill.moe.activation import Activation
from lancebill.moe.device import parse_device
from lancebill.moe.dispatch import Indexed
from lancebill.moe.layout import W2, W13, MatrixShape, Packed
from lancebill.moe.problem import Problem
from lancebill.numbers.dtypes import BF16, E8M0, F16, F32, FLOAT, INTEGER, ZERO16, DType
from lancebill.numbers.spec_names import ACTIVATIONS, parse_spec
from lancebill.numbers.weight import LogicalWeight


def layer_problem(
    spec: str, activations: str = "bf16", *, hidden: int, intermediate: int, experts: int, top_k: int,
    activation: Activation | None = None, bias: bool = False, act_order: bool = False, weight_on_input: bool = False,
) -> Problem:  # fmt: skip
    """A layer of routed experts with one spec for all matrices; with fp16 or fp32 activations the inputs are too."""
    parsed, activation = parse_spec(spec), activation or Activation()
    rows = intermediate * (2 if activation.gated else 1)
    stacked = parsed.stacked(intermediate) if activation.gated else parsed
    return Problem(
        MatrixShape(W13, rows, hidden, stacked, bias, act_order),
        MatrixShape(W2, hidden, intermediate, parsed, bias),
        experts,
        experts,
        top_k,
        activation,
        {"fp16": F16, "fp32": F32}.get(activations, BF16),
        ACTIVATIONS[activations],
        weight_on_input=weight_on_input,
    )


def plausible_weight(shape: MatrixShape, seed: int, device: str = "cpu", *, exact: bool = False) -> LogicalWeight:
    """Random codes, with scales that keep results near one. `exact`: scales are powers of two."""
    generator = torch.Generator(device).manual_seed(seed)
    spec, n, k = shape.spec, shape.n, shape.k
    zero = None
    if spec.zero is not None:
        assert spec.zero.dtype == ZERO16
        largest = min(1 << spec.dtype.bits, 16)
        zero = torch.randint(0, largest + 1, spec.zero.shape(n, k), generator=generator, device=device).to(torch.int16)
    legal = torch.tensor(spec.dtype.valid_codes, dtype=torch.uint8, device=device)
    codes = legal[torch.randint(len(legal), (n, k), generator=generator, device=device)]
    target = 1.0 / (spec.dtype.max * k**0.5)
    scales = []
    for i, level in enumerate(spec.scales):
        share = (
            target if i == 0 and level.dtype.kind == FLOAT and len(spec.scales) == 1 else (1.0 if i == 0 else target)
        )
        scales.append(_scale(level.dtype, level.shape(n, k), share, generator, device, exact))
    bias = torch.randn(n, generator=generator, device=device) * 0.1 if shape.bias else None
    perm = None
    if shape.act_order:
        perm = torch.randperm(k, generator=generator, device=device).to(torch.int32)
    return LogicalWeight(spec, codes, tuple(scales), zero, bias=bias, perm=perm)


def _scale(
    dtype: DType, shape: tuple[int, int], size: float, generator: torch.Generator, device: str, exact: bool
) -> Tensor:
    assert dtype.kind != INTEGER
    power = torch.randint(-1, 3, shape, generator=generator, device=device).float()
    if not exact and dtype != E8M0:
        power = torch.rand(shape, generator=generator, device=device) * 3 - 1
    base = 2.0 ** round(torch.log2(torch.tensor(size)).item())
    return dtype.encode(torch.exp2(power) * base)


@dataclass(frozen=True)
class SampleLayer:
    """The packed weights of a problem, for one backend on one device."""

    problem: Problem
    backend: Backend
    weights: dict[str, Packed]
    device: torch.device

    def __call__(self, x: Tensor, routed: Indexed, out: Tensor | None = None) -> Tensor:
        out = torch.full_like(x, float("nan")) if out is None else out
        return self.executor.run(x, routed, out)

    @cached_property
    def executor(self) -> Executor:
        device = parse_device(str(self.device))
        return self.backend.executor(self.problem, device, TensorTable.of(self.weights))


def make_layer(
    problem: Problem, backend: str, device: str = "cuda", *, exact: bool = False, distinct: int | None = None
) -> SampleLayer:
    """A layer with random weights; `distinct`: generate only this many experts and repeat them, to save time."""
    chosen = registry()[backend]
    layout = chosen.layout(problem)
    weights: dict[str, Packed] = {}
    for number, (name, shape) in enumerate(problem.matrices.items()):
        packed = layout.allocate(shape, problem.experts, device)
        for expert in range(problem.experts):
            if distinct is not None and expert >= distinct:
                for tensor in packed.values():
                    tensor[expert] = tensor[expert % distinct]
                continue
            weight = plausible_weight(shape, 10_000 * number + expert, device, exact=exact)
            layout.pack(shape, weight, {role: tensor[expert] for role, tensor in packed.items()})
        weights[name] = packed
    return SampleLayer(problem, chosen, weights, torch.device(device))


def routing(problem: Problem, tokens: int, seed: int, device: str = "cuda", kind: str = "uniform") -> Indexed:
    """Random routing. `kind`: uniform, zipf, one (every token's first expert is 1), holes (a third of slots are -1)."""
    generator = torch.Generator(device).manual_seed(seed)
    score = torch.rand(tokens, problem.experts, generator=generator, device=device)
    if kind == "zipf":
        score = score.log() * torch.arange(1, problem.experts + 1, device=device)
    elif kind == "one":
        score[:, 1] = 2
        score[:, 0] = -1
    ids = score.topk(problem.top_k, 1).indices.to(torch.int32)
    weights = torch.rand(tokens, problem.top_k, generator=generator, device=device) + 0.1
    weights = weights / weights.sum(1, keepdim=True)
    if kind == "holes":
        ids = torch.where(torch.rand(ids.shape, generator=generator, device=device) < 0.33, -1, ids).to(torch.int32)
    return Indexed(ids.contiguous(), weights.contiguous())


def worst_row(got: Tensor, want: Tensor) -> float:
    """The largest relative error of a row; NaN counts as infinite."""
    return float(row_errors(got, want).nan_to_num(nan=float("inf")).max())


def row_errors(got: Tensor, want: Tensor) -> Tensor:
    """The relative error of each row."""
    got, want = got.double(), want.double()
    errors: Tensor = (got - want).norm(dim=1) / want.norm(dim=1).clamp(min=1e-30)
    return errors
