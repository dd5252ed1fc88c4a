"""The Ampere kernels that a wheel contains compiled, by the compute capability they are compiled for."""

from __future__ import annotations

from collections.abc import Iterator

from lancebill.backends.ampere.steps import kernels
from lancebill.backends.gpu.shipped import TOKENS, pack_kernels, problems, route_kernels
from lancebill.jit.compile import KernelSource
from lancebill.moe.problem import Device

# Machine code, and the GPUs whose pipelines are compiled to it: sm_86 stands for all with 99 KB of shared memory.
TARGETS = {80: (80, 86), 120: (120,)}


def shipped(target: int) -> Iterator[KernelSource]:
    """Every kernel of a target, without duplicates."""
    yield from dict.fromkeys((*route_kernels(target), *_kernels(target)))


def _kernels(target: int) -> Iterator[KernelSource]:
    for problem in problems():
        if problem.activations.spec.quantized:
            continue
        yield from pack_kernels(problem, target)
        for arch in TARGETS[target]:
            for tokens in TOKENS:
                yield from kernels(problem, tokens, Device("cuda", arch))
