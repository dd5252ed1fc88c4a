"""CPUs: our own kernels (`native`), for every spec of up to 8 bits, in one pass over the weights.

Codes are looked up in registers and multiplied as integers, or as AMX tiles where the CPU has them. 16-bit inputs
keep 16 bits; inputs are rounded to int8 or fp8 only where the problem says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from lancebill.backends.base import Backend, Executor, NoForm, Plan, Reason, TensorTable
from lancebill.backends.cpu import call, native
from lancebill.backends.cpu.executor import CpuExecutor
from lancebill.backends.cpu.form import matrix_form
from lancebill.backends.cpu.layout import CpuLayout
from lancebill.backends.cpu.native.abi import IsaLevel
from lancebill.backends.cpu.plan import CpuPlan, make_plan
from lancebill.errors import LaunchError
from lancebill.moe.device import Device
from lancebill.moe.dispatch import Dispatch
from lancebill.moe.layout import Layout, Packed
from lancebill.moe.problem import Problem
from lancebill.numbers.dtypes import BF16, F16, F32


class Cpu(Backend):
    """Uses the instruction set `level`, or the best that this machine has."""

    name = "cpu"
    accepts_any_ids = True
    rotates = True

    def __init__(self, level: IsaLevel | None = None) -> None:
        self._level = level

    def check(self, problem: Problem, device: Device) -> Iterator[Reason]:
        if device.kind != "cpu":
            yield Reason("device", "runs on CPUs only")
        state = native.state()
        if state.library is None:
            yield Reason("library", state.why, state.hint)
        elif self._level is not None and self._level not in state.library.levels:
            yield Reason("level", f"{self._level} does not run on this machine")
        if problem.input not in (BF16, F16, F32):
            yield Reason("input", f"{problem.input} inputs", "supported: bf16, fp16, fp32")
        for name, shape in problem.matrices.items():
            try:
                matrix_form(shape, problem.inputs_of(name))
            except NoForm as why:
                yield why.reason

    def layout(self, problem: Problem) -> Layout:
        return CpuLayout(problem)

    def plan(self, problem: Problem, tokens: int, device: Device) -> Plan:
        return make_plan(problem, tokens, _library().best if self._level is None else self._level)

    def run(self, plan: Plan, x: Tensor, dispatch: Dispatch, weights: Mapping[str, Packed], out: Tensor) -> Tensor:
        assert isinstance(plan, CpuPlan)
        if x.numel() == 0:
            return out
        call.run(_library(), plan, call.LayerStructs.make(plan, weights), x, dispatch, out)
        return out

    def executor(self, problem: Problem, device: Device, tensors: TensorTable) -> Executor:
        return CpuExecutor(self, problem, device, tensors, _library())


def _library() -> native.Library:
    state = native.state()
    if state.library is None:
        raise LaunchError(state.why, hint=state.hint)
    return state.library


BACKEND = Cpu()
