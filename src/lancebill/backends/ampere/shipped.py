"""The Ampere kernels that a wheel contains compiled, by the compute capability they are compiled for."""

from __future__ import annotations

from collections.abc import Iterator

from lancebill.backends.ampere.plan import make_plan
from lancebill.backends.ampere.steps import steps
from lancebill.backends.gpu.shipped import TOKENS, pack_kernels, problems, route_kernels
from lancebill.jit.compile import KernelSource
from lancebill.moe.problem import Device, Problem

# Machine code, and the GPUs whose configurations are compiled to it: sm_86 stands for all with 99 KB of shared memory.
TARGETS = {80: (80, 86), 89: (89,), 120: (120,)}
_FIRST_FP8 = 89


def shipped(target: int) -> Iterator[KernelSource]:
    """Every kernel of a target, without duplicates. sm_89 has only what sm_80 cannot have: fp8 activations."""
    rows = () if target == _FIRST_FP8 else route_kernels(target)
    yield from dict.fromkeys((*rows, *_kernels(target)))


def _kernels(target: int) -> Iterator[KernelSource]:
    for problem in problems():
        if target != _FIRST_FP8 and (target > _FIRST_FP8 or not _quantised(problem)):
            yield from pack_kernels(problem, target)
        for arch in TARGETS[target]:
            if arch < _FIRST_FP8 and _quantised(problem):
                continue
            for tokens in TOKENS:
                plan = make_plan(problem, tokens, Device("cuda", arch))
                if plan.arch == target:
                    yield from (step.source for step in steps(plan))


def _quantised(problem: Problem) -> bool:
    return problem.activations.spec.quantized
