"""The Ampere kernels that a wheel contains compiled, by the compute capability they are compiled for."""

from __future__ import annotations

from collections.abc import Iterator

from lancebill.backends.ampere.steps import kernels
from lancebill.backends.gpu.shipped import TOKENS, pack_kernels, problems, route_kernels
from lancebill.backends.gpu.target import compile_target
from lancebill.jit.compile import KernelSource
from lancebill.moe.device import Device

TARGETS = (80, 89, 120)
# The GPUs whose pipelines are shipped: for 16-bit inputs, where sm_86 stands for all with 99 KB of shared memory, and
# for quantised ones.
PLAIN, QUANTISED = (80, 86, 120), (89, 120)


def shipped(target: int) -> Iterator[KernelSource]:
    """Every kernel of a target, without duplicates."""
    yield from dict.fromkeys(source for source in _kernels() if source.arch == target)


def _kernels() -> Iterator[KernelSource]:
    for target in sorted({compile_target(arch) for arch in PLAIN}):
        yield from route_kernels(target)
    for problem in problems():
        for arch in QUANTISED if problem.activations.spec.quantized else PLAIN:
            yield from pack_kernels(problem, compile_target(arch))
            for tokens in TOKENS:
                yield from kernels(problem, tokens, Device("cuda", arch))
