"""The base of the GPU backends: which problems their kernels support, and how a call runs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping

from torch import Tensor

from lancebill.backends.base import Backend, Executor, NoForm, Plan, Reason, TensorTable
from lancebill.backends.gpu.choose_form import kernel_form
from lancebill.backends.gpu.executor import GpuExecutor
from lancebill.backends.gpu.kernels import triton_version
from lancebill.backends.gpu.layout import FragmentLayout
from lancebill.backends.gpu.plan import GpuPlan
from lancebill.backends.gpu.step import Step
from lancebill.moe.device import Device
from lancebill.moe.dispatch import Dispatch
from lancebill.moe.layout import Layout, MatrixShape, Packed
from lancebill.moe.problem import Problem
from lancebill.numbers.dtypes import BF16, F16
from lancebill.numbers.spec import DENSE_BF16, DENSE_F16, ActivationSpec

_MOST_EXPERTS = 1024
# The longest row that a block prepares in registers: quantised, or scaled or reordered for its expert, or both.
_MOST_COLUMNS, _MOST_COLUMNS_BOTH = 1 << 15, 1 << 14


_CAPTURED: list[object] = []  # counters of calls without a layer that were captured: nothing says when a graph ends


class GpuBackend(Backend):
    """Our kernels, from ids to the weighted sum of each token's experts. A backend adds its GEMMs: plans and steps."""

    accepts_any_ids = True
    rotates = True

    @abstractmethod
    def steps(self, plan: GpuPlan) -> tuple[Step, ...]:
        """All launches of one call, in order."""

    @abstractmethod
    def check_device(self, device: Device) -> Iterator[Reason]:
        """Why this device cannot run the kernels at all."""

    def check(self, problem: Problem, device: Device) -> Iterator[Reason]:
        yield from self.check_device(device)
        missing = triton_version.problem()
        if missing:
            yield Reason("triton", missing, "pip install 'lancebill[gpu]'")
        yield from _unsupported(problem)

    def layout(self, problem: Problem) -> Layout:
        return FragmentLayout(problem)

    def run(self, plan: Plan, x: Tensor, dispatch: Dispatch, weights: Mapping[str, Packed], out: Tensor) -> Tensor:
        assert isinstance(plan, GpuPlan)
        if x.numel():
            device = Device("cuda", plan.arch, x.device.index or 0)
            executor = GpuExecutor(self, plan.problem, device, TensorTable.of(weights), self.steps)
            executor.run_plan(plan, x, dispatch, out)
            _CAPTURED.extend(executor.graph_memory.values())
        return out

    def executor(self, problem: Problem, device: Device, tensors: TensorTable) -> Executor:
        return GpuExecutor(self, problem, device, tensors, self.steps)


def _unsupported(problem: Problem) -> Iterator[Reason]:
    """Why our kernels cannot compute a problem, on any GPU."""
    if problem.input not in (BF16, F16):
        yield Reason("input", f"{problem.input} inputs", "supported: bf16, fp16")
    if problem.experts > _MOST_EXPERTS:
        yield Reason("experts", f"{problem.experts} local experts", f"up to {_MOST_EXPERTS}")
    if problem.w2 is not None and problem.w2.act_order:
        yield Reason("act-order", "w2's columns are in act-order", "loaders apply that order to w13's rows")
    for shape, activations in _matrices(problem):
        dense = {DENSE_BF16: BF16, DENSE_F16: F16}.get(activations.spec)
        if dense is not None and dense != problem.input:
            yield Reason("input", f"{activations} activations from {problem.input} inputs")
        try:
            form = kernel_form(shape, activations)
        except NoForm as why:
            yield why.reason
            continue
        rotated = shape.spec.rotation > 0
        if rotated and shape.act_order:
            yield Reason("rotation", f"{shape.name}'s columns are in act-order, and its inputs are rotated")
        converted = problem.pre_scale or shape.act_order or rotated
        most = _MOST_COLUMNS_BOTH if rotated or (converted and form.byte_inputs) else _MOST_COLUMNS
        if shape.k > most and (converted or form.byte_inputs):
            yield Reason("sizes", f"rows of {shape.k} columns", f"up to {most} are prepared in one piece")


def _matrices(problem: Problem) -> Iterator[tuple[MatrixShape, ActivationSpec]]:
    yield problem.w13, problem.activations
    if problem.w2 is not None:
        yield problem.w2, problem.second_activations
