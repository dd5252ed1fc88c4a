"""The reference backend: dequantises and multiplies in fp32, for every spec, activation and device.

Slow and readable. Tests compare every other backend with it. Weights stay packed; experts that have rows are
dequantised one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from lancebill.backends.base import Backend, Plan, Reason, Speed
from lancebill.backends.plain_rows import expert_inputs, run_indexed
from lancebill.moe.device import Device
from lancebill.moe.dispatch import Contiguous, Dispatch, Indexed
from lancebill.moe.layout import W2, W13, Layout, MatrixShape, Packed, PlainLayout
from lancebill.moe.problem import BATCH_INVARIANT, Problem
from lancebill.numbers.codec import dequantize
from lancebill.numbers.spec import ActivationSpec

_LAYOUT = PlainLayout()
# For time estimates that rank backends: rough fp32 rates, FLOPs to dequantise a weight, overhead of torch calls per
# expert.
_CPU_GFLOPS, _GPU_GFLOPS = 50.0, 20_000.0
_CPU_DEQUANTISE_FLOPS, _GPU_DEQUANTISE_FLOPS = 300, 10
_EXPERT_US = 200.0


class Reference(Backend):
    name = "reference"
    rotates = True
    speed = Speed.DEFINITION

    def check(self, problem: Problem, device: Device) -> Iterator[Reason]:
        return iter(())

    def layout(self, problem: Problem) -> Layout:
        return _LAYOUT

    def plan(self, problem: Problem, tokens: int, device: Device) -> Plan:
        slots = tokens * problem.top_k
        elements = sum(shape.n * shape.k for shape in problem.matrices.values())
        activated = min(problem.experts, slots)
        cpu = device.kind == "cpu"
        rate = _CPU_GFLOPS if cpu else _GPU_GFLOPS
        dequantise = _CPU_DEQUANTISE_FLOPS if cpu else _GPU_DEQUANTISE_FLOPS
        estimate = (2 * slots + dequantise * activated) * elements / rate / 1e3 + _EXPERT_US * activated
        return Plan(problem, tokens, estimate, notes=("dequantises each activated expert, multiplies in fp32",))

    def run(self, plan: Plan, x: Tensor, dispatch: Dispatch, weights: Mapping[str, Packed], out: Tensor) -> Tensor:
        problem = plan.problem
        run_groups = partial(_run_groups, problem, weights)
        if isinstance(dispatch, Indexed):
            return run_indexed(problem, x, dispatch, out, run_groups)
        if isinstance(dispatch, Contiguous):
            run_groups(x, dispatch.offsets.tolist(), out)
            return out
        for expert, count in enumerate(dispatch.counts.tolist()):
            if count:
                out[expert, :count] = run_expert(problem, x[expert, :count], weights, expert)
        return out


def _run_groups(problem: Problem, weights: Mapping[str, Packed], rows: Tensor, edges: list[int], out: Tensor) -> None:
    for expert in range(problem.experts):
        low, high = edges[expert], edges[expert + 1]
        if high > low:
            out[low:high] = run_expert(problem, rows[low:high], weights, expert)


def run_expert(problem: Problem, rows: Tensor, weights: Mapping[str, Packed], expert: int) -> Tensor:
    """w2 @ q(act(w13 @ q(x) + b13)) for the rows of one expert, in fp32."""
    apply = _each_row if problem.order == BATCH_INVARIANT else _all_rows
    projected = gemm(problem.w13, weights[W13], expert, rows, problem.activations, apply)
    if problem.w2 is None:
        return projected
    hidden = apply(problem.activation, projected)
    return gemm(problem.w2, weights[W2], expert, hidden, problem.second_activations, apply)


RowFunction = Callable[[Tensor], Tensor]


def _all_rows(function: RowFunction, rows: Tensor) -> Tensor:
    return function(rows)


def _each_row(function: RowFunction, rows: Tensor) -> Tensor:
    """Row by row, for batch-invariant bits: GEMM libraries change the order of sums with the number of rows."""
    return torch.cat([function(row.clone()) for row in rows.split(1)])


def gemm(
    shape: MatrixShape,
    packed: Packed,
    expert: int,
    rows: Tensor,
    activations: ActivationSpec,
    apply: Callable[[RowFunction, Tensor], Tensor] = _all_rows,
) -> Tensor:
    """rows @ W.T + bias in fp32, with the input rotated as the spec says and quantised as `activations` says."""
    weight = _LAYOUT.unpack(shape, {name: t[expert] for name, t in packed.items()})
    rows = expert_inputs(rows, shape, activations, packed, expert)
    matrix = dequantize(replace(weight, spec=shape.spec.unrotated)).t()
    result = apply(lambda row: row @ matrix, rows)
    return result if weight.bias is None else result + weight.bias


BACKEND = Reference()
