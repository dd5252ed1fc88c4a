"""Which kernels stand for a set that would take long to compile."""

from __future__ import annotations

from collections.abc import Iterable

from lancebill.jit.compile import KernelSource


def each_size_once(gemms: Iterable[KernelSource], number: int) -> list[KernelSource]:
    """Of every size of tiles one GEMM: that of gate and up, and that of down, in turn.

    With two neighbouring numbers, each size is paired with each GEMM.
    """
    held = [(source, dict(source.constants)) for source in gemms]
    sizes = list(dict.fromkeys(constants["SIZES"] for _, constants in held))
    kinds = list(dict.fromkeys(constants["KIND"] for _, constants in held))
    return [
        source
        for source, constants in held
        if (sizes.index(constants["SIZES"]) + kinds.index(constants["KIND"]) + number) % 2 == 0
    ]
