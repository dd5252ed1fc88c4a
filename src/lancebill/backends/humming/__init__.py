"""A backend on the package humming-kernels: GEMMs for GPUs that our kernels do not support, and a benchmark peer.

Selected only by name. The package compiles kernels on first use of a size. Weights are stored exactly, so problems for
which the package would round at load are refused: biases, and scales folded into codes for fp8 inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lancebill.backends.base import Backend, Executor, Plan, Reason, TensorTable
from lancebill.backends.humming.layout import HummingLayout
from lancebill.backends.humming.support import PACKAGE, missing, unsupported
from lancebill.errors import LaunchError
from lancebill.moe.device import Device, require_on
from lancebill.moe.dispatch import Dispatch, Indexed, tensors_of
from lancebill.moe.layout import Layout, Packed
from lancebill.moe.problem import Problem
from lancebill.numbers.dtypes import E2M1, E4M3, F16

if TYPE_CHECKING:
    from lancebill.backends.humming.package import Experts

ARCHS = (80, 86, 87, 89, 90)  # later architectures use another weight order
_GBS, _TFLOPS, _START_US = 1500.0, 250.0, 30.0  # roughly an A100


class Humming(Backend):
    """The GEMMs of the package, with our dispatch around them."""

    name = "humming"
    on_request = True

    def check(self, problem: Problem, device: Device) -> Iterator[Reason]:
        if device.kind != "cuda" or device.arch not in ARCHS:
            yield Reason("device", f"needs a GPU from sm_80 to sm_90, got {device}")
        problem_with_package = missing()
        if problem_with_package:
            yield Reason("package", problem_with_package, f"pip install {PACKAGE}")
        yield from unsupported(problem)
        for name, shape in problem.matrices.items():
            if shape.bias:
                yield Reason("bias", f"the package would round the biases of {name} to {problem.input}")
            if problem.input == F16 and shape.spec.dtype in (E2M1, E4M3):
                yield Reason("input", f"the package would change the scales of {shape.spec} x fp16", "use bf16 inputs")
        if problem.activations.spec.quantized or problem.second_activations.spec.quantized:
            yield Reason(
                "activations", "for fp8 inputs the package would fold scales into weights and round", "use bf16"
            )

    def layout(self, problem: Problem) -> Layout:
        return HummingLayout()

    def plan(self, problem: Problem, tokens: int, device: Device) -> Plan:
        elements = sum(shape.n * shape.k for shape in problem.matrices.values())
        stored = sum(s.n * s.k * s.spec.bits_per_weight(s.n, s.k) / 8 for s in problem.matrices.values())
        reached = min(problem.experts, tokens * problem.top_k)
        flops = 2.0 * tokens * problem.top_k * elements
        us = max(reached * stored / (_GBS * 1e3), flops / (_TFLOPS * 1e6)) + _START_US
        rows = tokens * problem.top_k * (problem.w13.n + problem.intermediate + problem.hidden)
        notes = ("compiles kernels on first use of a size",)
        return Plan(problem, tokens, us, rows * problem.input.storage.itemsize, notes)

    def run(self, plan: Plan, x: Tensor, dispatch: Dispatch, weights: Mapping[str, Packed], out: Tensor) -> Tensor:
        _require_ids(dispatch)
        return _compute(_view_experts(plan.problem, weights), x, dispatch, out)

    def executor(self, problem: Problem, device: Device, tensors: TensorTable) -> Executor:
        return HummingExecutor(self, problem, device, tensors)


class HummingExecutor(Executor):
    """Keeps the package's view of the weights as long as none of them moved."""

    def run(self, x: Tensor, dispatch: Dispatch, out: Tensor) -> Tensor:
        require_on(self.tensors.device, x=x, out=out, **tensors_of(dispatch))
        _require_ids(dispatch)
        problem = self.plan(x, dispatch).problem
        experts = self.remade(
            "experts", self.tensors.addresses(), lambda: _view_experts(problem, self.tensors.packed())
        )
        return _compute(experts, x, dispatch, out)


def _view_experts(problem: Problem, weights: Mapping[str, Packed]) -> Experts:
    """The package's view of packed weights. It shares their memory, so it follows in-place updates."""
    from lancebill.backends.humming.package import INDEXED, Experts, view_matrix

    matrices = {
        name: view_matrix(shape, problem.experts, weights[name], problem.input.storage)
        for name, shape in problem.matrices.items()
    }
    return Experts(problem, matrices, INDEXED)


def _require_ids(dispatch: Dispatch) -> None:
    if not isinstance(dispatch, Indexed):
        raise LaunchError("humming computes experts by token ids", got=type(dispatch))


def _compute(experts: Experts, x: Tensor, dispatch: Dispatch, out: Tensor) -> Tensor:
    assert isinstance(dispatch, Indexed)
    if dispatch.tokens == 0:
        return out
    ids, scale = dispatch.ids.contiguous(), dispatch.weights.contiguous()
    target = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
    experts.compute(x.contiguous(), experts.sort(ids), ids, scale, target)
    return target if target is out else out.copy_(target)


BACKEND = Humming()
