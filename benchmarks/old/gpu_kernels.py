"""Compiles the GPU kernels of a benchmark first, on all cores: one by one, as layers need them, it takes far longer."""

from __future__ import annotations

from collections.abc import Iterable

from lancebill.backends.gpu.backend import GpuBackend
from lancebill.backends.gpu.plan import GpuPlan
from lancebill.backends.gpu.shipped import pack_kernels
from lancebill.backends.oracle import select
from lancebill.jit.build import build_all
from lancebill.jit.compile import KernelSource
from lancebill.jit.load import loadable
from lancebill.moe.device import Device, parse_device
from lancebill.moe.problem import Problem

Planned = Iterable[tuple[Problem, int]]


def compile_first(planned: Planned) -> dict[str, str]:
    """Compile what layers launch for these numbers of tokens; returns the kernels that failed, with their errors."""
    device = parse_device("cuda")
    sources = [loadable(source, device.index) for source in kernels_of(planned, device)]
    return {source.label: why for source, why in build_all(sources).items()}


def kernels_of(planned: Planned, device: Device) -> list[KernelSource]:
    """The kernels that pack these problems' weights and compute them for these numbers of tokens."""
    found: dict[KernelSource, None] = {}
    for problem, tokens in dict.fromkeys(planned):
        backend = select(problem, device).backend if problem.experts else None
        if isinstance(backend, GpuBackend):
            plan = backend.plan(problem, tokens, device)
            assert isinstance(plan, GpuPlan)
            found |= dict.fromkeys(pack_kernels(problem, plan.arch))
            found |= dict.fromkeys(step.source for step in backend.steps(plan))
    return list(found)
