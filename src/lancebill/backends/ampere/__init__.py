"""GPUs from Ampere on (sm_80 to sm_121): the packed weights of `hopper`, multiplied with mma.sync; see `kernels`."""

from __future__ import annotations

from collections.abc import Iterator

from lancebill.backends.ampere.plan import make_plan
from lancebill.backends.ampere.steps import steps
from lancebill.backends.base import NoForm, Plan, Reason
from lancebill.backends.gpu.backend import GpuBackend
from lancebill.backends.gpu.cards import ARCHS
from lancebill.backends.gpu.choose_form import kernel_form
from lancebill.backends.gpu.kernels.weight_form import E4M3
from lancebill.backends.gpu.plan import GpuPlan
from lancebill.backends.gpu.step import Step
from lancebill.backends.gpu.target import FP8_FROM
from lancebill.moe.device import Device
from lancebill.moe.problem import Problem


class Ampere(GpuBackend):
    """mma.sync and cp.async, which all these GPUs have."""

    name = "ampere"

    def check_device(self, device: Device) -> Iterator[Reason]:
        if device.kind != "cuda" or device.arch not in ARCHS:
            known = ", ".join(map(str, ARCHS))
            yield Reason("device", f"needs a GPU of compute capability {known} (sm_{ARCHS[0]} ...), not {device}")

    def check(self, problem: Problem, device: Device) -> Iterator[Reason]:
        yield from super().check(problem, device)
        if device.arch in ARCHS and device.arch < FP8_FROM and _multiplies_fp8(problem):
            yield Reason(
                "activations", f"fp8 activations need sm_{FP8_FROM} or later, not {device}", "use int8 or bf16"
            )

    def plan(self, problem: Problem, tokens: int, device: Device) -> Plan:
        return make_plan(problem, tokens, device)

    def steps(self, plan: GpuPlan) -> tuple[Step, ...]:
        return steps(plan)


def _multiplies_fp8(problem: Problem) -> bool:
    """Whether a GEMM's inputs are fp8. A matrix without a form has its own reason."""
    try:
        forms = [kernel_form(shape, problem.inputs_of(name)) for name, shape in problem.matrices.items()]
    except NoForm:
        return False
    return any(form.activations == E4M3 for form in forms)


BACKEND = Ampere()
