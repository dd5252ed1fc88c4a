"""The installed Triton version, and whether the kernels support it.

Built and measured with 3.6. Triton 3.7 and 3.8 compile the same sources through `gluon_names`. With 3.9 some GEMMs of
128 tokens spill registers and are refused (with fp8 inputs, and the second GEMM of MXFP4). From 3.8 on the quantised
row of a decode block takes eight times the shared memory, so fewer blocks share an SM. Versions before 3.6 lack Gluon's
Hopper layouts.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version

OLDEST = (3, 6)


@cache
def triton_version() -> str | None:
    """The installed version, without importing Triton."""
    try:
        return version("triton")
    except PackageNotFoundError:
        return None


def problem() -> str | None:
    """Why kernels cannot be compiled here; None if they can."""
    installed = triton_version()
    if installed is None:
        return "Triton is not installed"
    if tuple(int(part) for part in installed.split(".")[:2]) < OLDEST:
        return f"Triton {installed} is too old"
    return None
