"""The Hopper kernels that a wheel contains compiled."""

from __future__ import annotations

from collections.abc import Iterator

from lancebill.backends.gpu.shipped import TOKENS, pack_kernels, problems, route_kernels
from lancebill.backends.hopper.steps import kernels
from lancebill.jit.compile import KernelSource

ARCH = 90


def shipped() -> Iterator[KernelSource]:
    """Every kernel of the set, without duplicates."""
    yield from dict.fromkeys((*route_kernels(ARCH), *_kernels()))


def _kernels() -> Iterator[KernelSource]:
    for problem in problems():
        yield from pack_kernels(problem, ARCH)
        for tokens in TOKENS:
            yield from kernels(problem, tokens)
