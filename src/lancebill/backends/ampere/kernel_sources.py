"""Kernel sources: the compile-time values of the GEMM kernels, for `lancebill kernels build` and for loading."""

from __future__ import annotations

from lancebill.backends.gpu.form_constants import ELEMENT, form_constants
from lancebill.backends.gpu.kernels.weight_form import WeightForm
from lancebill.backends.gpu.row_kernels import ID_ARGUMENTS, WEIGHT_ARGUMENTS, packed_bytes
from lancebill.backends.gpu.tiles import Tile
from lancebill.jit.compile import KernelSource

GEMM, DECODE = "lancebill.backends.ampere.kernels.gemm", "lancebill.backends.ampere.kernels.decode"


def grouped_gemm(form: WeightForm, tile: Tile, out: str, kind: str, activation: str, *, bias: bool) -> KernelSource:
    """One GEMM over one list of tiles."""
    pointers = {
        "x": ELEMENT[form.activations], "w": "i32", "s": "i32", "out": out, "slots": "i32", "factors": "fp32",
        "bias": "fp32", "token_scales": "fp32", "tiles": "i32", "tile_count": "i32", "taken": "i32",
    }  # fmt: skip
    arguments = {
        **{name: f"*{element}" for name, element in pointers.items()},
        **dict.fromkeys(("units", "slices", "scale_blocks", "width", "columns"), "i32"),
        **dict.fromkeys(("limit", "alpha", "beta"), "fp32"),
    }
    constants = {
        **form_constants(form), "SIZES": packed_bytes(tile.sizes), "STAGES": tile.stages, "SLICES": tile.slices,
        "UNITS": tile.units, "KIND": kind, "ACTIVATION": activation, "BIAS": bias,
    }  # fmt: skip
    aligned = (*(name for name in pointers if name != "taken"), "width", "columns")
    options = (("num_warps", 4), ("maxnreg", tile.registers))
    return KernelSource(GEMM, "grouped_gemm", tuple(arguments.items()), tuple(constants.items()), aligned, options)


def decode_gemm(
    form: WeightForm, tile: Tile, pieces: int, slots: int, out: str, kind: str, activation: str, *, bias: bool,
    weighted: bool,
) -> KernelSource:  # fmt: skip
    """One GEMM for few tokens: one tile per slot, at most `pieces` blocks for a tile, `slots` per token."""
    pointers = {
        "x": out, "w": "i32", "s": "i32", "out": out, "parts": "fp32", "counters": "i32", "factors": "fp32",
        "bias": "fp32",
    }  # fmt: skip
    integers = (
        "top_k", "total_slots", "units", "slices", "scale_blocks", "width", "columns", "slots_per_row", "least",
        "shares",
    )  # fmt: skip
    arguments = {
        **{name: f"*{element}" for name, element in pointers.items()},
        **ID_ARGUMENTS,
        **WEIGHT_ARGUMENTS,
        **dict.fromkeys(integers, "i32"),
        **dict.fromkeys(("limit", "alpha", "beta"), "fp32"),
    }
    constants = {
        **form_constants(form), "STAGES": tile.stages, "SLICES": tile.slices, "PIECES": pieces, "SLOTS": slots,
        "KIND": kind, "ACTIVATION": activation, "BIAS": bias, "WEIGHTED": weighted,
    }  # fmt: skip
    aligned = (*pointers, "width", "columns")
    options = (("num_warps", 4), ("maxnreg", tile.registers))
    return KernelSource(DECODE, "decode_gemm", tuple(arguments.items()), tuple(constants.items()), aligned, options)
