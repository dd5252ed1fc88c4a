"""The compute capability that kernels are compiled for, so that few targets serve all GPUs."""

from __future__ import annotations


def compile_target(arch: int) -> int:
    """Machine code for sm_80 runs on every sm_8x. Later GPUs run only code of their own."""
    return arch if arch >= 90 else 80
