"""The compute capability that kernels are compiled for, so that few targets serve all GPUs."""

from __future__ import annotations

_FIRST_FP8 = 89


def compile_target(arch: int, *, fp8: bool = False) -> int:
    """Machine code for sm_80 runs on every sm_8x; fp8 needs code for sm_89. Later GPUs run only code of their own."""
    if arch >= 90:
        return arch
    return _FIRST_FP8 if fp8 else 80
