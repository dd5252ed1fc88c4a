"""The compute capability that kernels are compiled for, so that few targets serve all GPUs."""

from __future__ import annotations

FP8_FROM = 89  # the first GPUs whose tensor cores multiply e4m3


def compile_target(arch: int, *, fp8: bool = False) -> int:
    """Machine code for sm_80 runs on every sm_8x, but fp8 needs sm_89. Later GPUs run only code of their own."""
    if arch >= 90:
        return arch
    return FP8_FROM if fp8 else 80
