"""Hopper (sm_90): weights dequantised in registers, one GEMM pipeline for every weight form; see `kernels/gemm.py`."""

from __future__ import annotations

from collections.abc import Iterator

from lancebill.backends.base import Plan, Reason
from lancebill.backends.gpu.backend import GpuBackend
from lancebill.backends.gpu.plan import GpuPlan
from lancebill.backends.gpu.step import Step
from lancebill.backends.hopper.plan import make_plan
from lancebill.backends.hopper.steps import steps
from lancebill.moe.device import Device
from lancebill.moe.problem import Problem


class Hopper(GpuBackend):
    """wgmma and TMA."""

    name = "hopper"

    def check_device(self, device: Device) -> Iterator[Reason]:
        if device.kind != "cuda" or device.arch != 90:
            yield Reason("device", f"needs an sm_90 GPU, not {device}")

    def plan(self, problem: Problem, tokens: int, device: Device) -> Plan:
        return make_plan(problem, tokens)

    def steps(self, plan: GpuPlan) -> tuple[Step, ...]:
        return steps(plan)


BACKEND = Hopper()
