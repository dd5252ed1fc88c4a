"""All kernels that a wheel contains compiled, by the name of the GPUs they are compiled for."""

from __future__ import annotations

from collections.abc import Iterator

from lancebill.backends.ampere import shipped as ampere
from lancebill.backends.gpu.target import FP8_FROM, compile_target
from lancebill.backends.hopper import shipped as hopper
from lancebill.jit.compile import KernelSource
from lancebill.jit.targets import TARGETS


def shipped_for(target: str) -> list[KernelSource]:
    """The kernels of one of `TARGETS`."""
    arch = int(target.removeprefix("sm_"))
    return list(hopper.shipped() if arch == hopper.ARCH else ampere.shipped(arch))


def targets_of(arch: int) -> tuple[str, ...]:
    """The targets whose kernels a GPU of this compute capability launches."""
    launched = {f"sm_{compile_target(arch, fp8=fp8)}" for fp8 in {False, arch >= FP8_FROM}}
    return tuple(target for target in TARGETS if target in launched)


def all_shipped() -> Iterator[KernelSource]:
    """The kernels of all targets."""
    for target in TARGETS:
        yield from shipped_for(target)
