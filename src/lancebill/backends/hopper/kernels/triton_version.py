"""The one place that knows which Triton this is.

Built and measured with 3.6; 3.7 and 3.8 compile the same sources through `renamed`, and 3.9 all but some products of
128 tokens (with fp8 inputs, and second ones of MXFP4), where its assembler spills registers, which is refused. From 3.8
on an fp8 row that a block of few tokens keeps takes eight times the room, so that fewer blocks share an SM. Older ones
lack Gluon's Hopper layouts.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

OLDEST = (3, 6)


def triton_version() -> str | None:
    """The installed Triton, without importing it."""
    try:
        return version("triton")
    except PackageNotFoundError:
        return None


def problem() -> str | None:
    """Why kernels cannot be compiled here; None when they can."""
    found = triton_version()
    if found is None:
        return "Triton is not installed"
    if tuple(int(part) for part in found.split(".")[:2]) < OLDEST:
        return f"Triton {found} is too old"
    return None
