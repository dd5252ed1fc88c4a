"""Sources of the kernels around the GEMMs: the compile-time values of each, for building and for loading."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lancebill.jit.compile import KernelSource

ROWS_MODULE = "lancebill.backends.gpu.kernels.dispatch_combine"
_REGISTERS = 65536  # per SM
# How a kernel reads the caller's ids and weights: see kernels/slots.py. The caller's pointers may have any alignment.
ID_ARGUMENTS = {
    "ids": "*i32", "id_words": "i32", "id_row": "i32", "id_column": "i32", "expert_map": "*i32", "mapped": "i32",
    "experts": "i32",
}  # fmt: skip
WEIGHT_ARGUMENTS = {"weights": "*i16", "weight_kind": "i32", "weight_row": "i32", "weight_column": "i32"}
_ANY_ALIGNMENT = ("edges", "ids", "expert_map", "weights")


def packed_bytes(numbers: Sequence[int]) -> int:
    """Small numbers in one compile-time integer, a byte each."""
    return int.from_bytes(bytes(numbers), "little")


def rows_kernel(
    name: str, arguments: dict[str, str], constants: Mapping[str, Any], warps: int, blocks: int = 1
) -> KernelSource:
    """A kernel of `dispatch_combine`. Row widths are multiples of 16, and most pointers.

    `blocks`: programs per SM that must fit in its registers.
    """
    aligned = tuple(
        name
        for name, kind in arguments.items()
        if (kind.startswith("*") and name not in _ANY_ALIGNMENT) or name in ("hidden", "width")
    )
    # Without maxnreg the assembler may spill to raise occupancy. With it, the assembler ignores the number of threads.
    most = _REGISTERS // (32 * warps * blocks) // 8 * 8  # they are allocated in eights
    options = (("num_warps", warps), ("maxnreg", min(255, most)))
    return KernelSource(ROWS_MODULE, name, tuple(arguments.items()), tuple(constants.items()), aligned, options)
