"""Sources of the Hopper GEMMs: the compile-time values of each kernel, for building and for loading."""

from __future__ import annotations

from collections.abc import Mapping

from lancebill.backends.gpu.form_constants import ELEMENT, form_constants
from lancebill.backends.gpu.kernels.weight_form import BOX, E4M3, WeightForm
from lancebill.backends.gpu.row_kernels import ID_ARGUMENTS, WEIGHT_ARGUMENTS, packed_bytes
from lancebill.backends.gpu.tiles import SlotStrips, Strips, Tile
from lancebill.jit.compile import Desc, KernelSource

GEMM, DECODE = "lancebill.backends.hopper.kernels.gemm", "lancebill.backends.hopper.kernels.decode"
FEW_ROWS = "lancebill.backends.hopper.kernels.few_rows"
STRIPS = "lancebill.backends.hopper.kernels.strips"
SLOT_STRIPS = "lancebill.backends.hopper.kernels.slot_strips"
ALONE, FIRST, LATER = 0, 1, 2  # when a kernel waits for its predecessor: see DEPEND in kernels/gemm.py


def grouped_gemm(
    form: WeightForm, tile: Tile, out: str, kind: str, activation: str, *, bias: bool, depend: int, prefetch: bool,
    promote: bool,
) -> KernelSource:  # fmt: skip
    """One GEMM over one list of tiles."""
    element = ELEMENT[form.activations]
    arguments: list[tuple[str, str | Desc]] = [
        ("x_desc", Desc(element, (tile.box, form.slice_columns), 128)),
        ("w_desc", Desc("i32", (form.box_rows(tile.slices), 32), 128)),
        ("s_desc", Desc("i32", (_scale_box(form, tile),), 0)),
        ("out", f"*{out}"),
        *((name, "*i32" if name in ("slots", "tiles", "tile_count", "taken") else "*fp32")
          for name in ("slots", "factors", "bias", "token_scales", "tiles", "tile_count", "taken")),
        *((name, "i32") for name in ("units", "slices", "scale_blocks", "columns")),
        *((name, "fp32") for name in ("limit", "alpha", "beta")),
    ]  # fmt: skip
    constants = {
        **form_constants(form),
        "SIZES": packed_bytes(tile.sizes), "STAGES": tile.stages, "SLICES": tile.slices, "UNITS": tile.units,
        "TOGETHER": tile.together, "KIND": kind, "ACTIVATION": activation, "BIAS": bias, "DEPEND": depend,
        "PREFETCH": prefetch, "PROMOTE": promote,
    }  # fmt: skip
    aligned = ("out", "slots", "factors", "bias", "token_scales", "tiles", "tile_count", "columns")
    options = (("num_warps", 4), ("maxnreg", tile.registers))
    return KernelSource(GEMM, "grouped_gemm", tuple(arguments), tuple(constants.items()), aligned, options)


def _scale_box(form: WeightForm, tile: Tile) -> int:
    """32-bit words in one copy of scales. Forms without scales need a valid descriptor, which is never used."""
    return min(form.stage_scale_words(tile.slices), BOX) or BOX


def decode_gemm(
    form: WeightForm, tile: Tile, pieces: int, slots: int, out: str, kind: str, activation: str, *, bias: bool,
    weighted: bool, depend: bool, prefetch: bool, promote: bool,
) -> KernelSource:  # fmt: skip
    """One GEMM for few tokens: one tile per slot, at most `pieces` blocks for a tile, `slots` per token."""
    integers = (
        "top_k", "total_slots", "units", "slices", "scale_blocks", "width", "columns", "slots_per_row", "least",
        "shares",
    )  # fmt: skip
    pointers = {
        "x": out, "out": out, "scales": "fp32", "parts": "fp32", "counters": "i32", "factors": "fp32", "bias": "fp32",
    }  # fmt: skip
    arguments: list[tuple[str, str | Desc]] = [
        ("x_desc", Desc("i32", (8, 32), 128) if form.activations == E4M3 else Desc(out, (8, form.slice_columns), 128)),
        ("w_desc", Desc("i32", (form.box_rows(tile.slices), 32), 128)),
        ("s_desc", Desc("i32", (_scale_box(form, tile),), 0)),
        *((name, f"*{element}") for name, element in pointers.items()),
        *ID_ARGUMENTS.items(),
        *WEIGHT_ARGUMENTS.items(),
        *((name, "i32") for name in integers),
        *((name, "fp32") for name in ("limit", "alpha", "beta")),
    ]
    constants = {
        **form_constants(form),
        "STAGES": tile.stages, "SLICES": tile.slices, "ROW_SLICES": tile.row_slices, "PIECES": pieces, "SLOTS": slots,
        "KIND": kind, "ACTIVATION": activation, "BIAS": bias, "WEIGHTED": weighted, "DEPEND": depend,
        "PREFETCH": prefetch, "PROMOTE": promote,
    }  # fmt: skip
    options, aligned = (("num_warps", 4), ("maxnreg", tile.registers)), (*pointers, "width", "columns")
    return KernelSource(DECODE, "decode_gemm", tuple(arguments), tuple(constants.items()), aligned, options)


def few_rows_gemm(
    form: WeightForm, tile: Tile, pieces: int, out: str, *, bias: bool, depend: bool, promote: bool
) -> KernelSource:
    """The GEMM of one matrix with all rows in one tile: at most `pieces` blocks for a unit."""
    pointers = {"out": out, "parts": "fp32", "counters": "i32", "factors": "fp32", "bias": "fp32"}
    arguments: list[tuple[str, str | Desc]] = [
        ("x_desc", Desc(out, (tile.box, form.slice_columns), 128)),
        ("w_desc", Desc("i32", (form.box_rows(tile.slices), 32), 128)),
        ("s_desc", Desc("i32", (_scale_box(form, tile),), 0)),
        *((name, f"*{element}") for name, element in pointers.items()),
        *((name, "i32") for name in ("rows", "units", "slices", "scale_blocks", "columns", "each")),
    ]
    constants = {
        **form_constants(form),
        "STAGES": tile.stages, "SLICES": tile.slices, "PIECES": pieces, "BIAS": bias, "DEPEND": depend,
        "PROMOTE": promote,
    }  # fmt: skip
    options, aligned = (("num_warps", 4), ("maxnreg", tile.registers)), (*pointers, "columns")
    return KernelSource(FEW_ROWS, "few_rows_gemm", tuple(arguments), tuple(constants.items()), aligned, options)


def strip_gemm(form: WeightForm, strips: Strips, slices: int, out: str, *, bias: bool, depend: bool) -> KernelSource:
    """The GEMM of one matrix for few rows, by strips of features."""
    pointers = {"x": out, "codes": "i32", "scales": "i32", "out": out, "factors": "fp32", "bias": "fp32"}
    arguments: list[tuple[str, str | Desc]] = [
        *((name, f"*{element}") for name, element in pointers.items()),
        *((name, "i32") for name in ("rows", "slices", "scale_blocks", "width", "columns")),
    ]
    constants = {
        **form_constants(form),
        "STRIPS": strips.count, "PARTS": strips.parts, "AHEAD": strips.ahead, "T": strips.rows,
        "WINDOW": strips.window,
        "EXACT": slices % (strips.ahead * strips.parts) == 0, "BIAS": bias, "DEPEND": depend,
    }  # fmt: skip
    options = (("num_warps", strips.warps), *([("maxnreg", strips.registers)] if strips.registers else []))
    return KernelSource(
        STRIPS, "strip_gemm", tuple(arguments), tuple(constants.items()), (*pointers, "width", "columns"), options
    )


def slot_strips(
    form: WeightForm, strips: SlotStrips, slices: int, out: str, *, gated: bool, activation: str, bias: bool,
    weighted: bool, depend: bool,
) -> KernelSource:  # fmt: skip
    """The first GEMM of a layer for one token, by strips of features."""
    constants = {
        **form_constants(form),
        "PARTS": strips.first_parts, "AHEAD": strips.first_ahead, "WINDOW": strips.window,
        "EXACT": slices % (strips.first_ahead * strips.first_parts) == 0, "GATED": gated, "ACTIVATION": activation,
        "BIAS": bias, "WEIGHTED": weighted, "DEPEND": depend,
    }  # fmt: skip
    options = (("num_warps", 2 * strips.first_parts),)
    return _strips_of_slots("slot_strips", ("limit", "alpha", "beta"), out, constants, options)


def token_strips(
    form: WeightForm, strips: SlotStrips, slices: int, out: str, *, bias: bool, weighted: bool, depend: bool
) -> KernelSource:
    """The second GEMM of a layer for one token and the sum over its experts, by strips of features."""
    constants = {
        **form_constants(form),
        "PARTS": strips.second_parts, "AHEAD": strips.second_ahead, "SLOTS": strips.slots, "SLICES": strips.slices,
        "EXACT": slices % strips.second_parts == 0, "BIAS": bias, "WEIGHTED": weighted, "DEPEND": depend,
    }  # fmt: skip
    # With fewer registers ptxas moves reads to where their words are used: 40% slower on some layers.
    options = (("num_warps", strips.second_parts), ("maxnreg", 128))
    return _strips_of_slots("token_strips", (), out, constants, options)


def _strips_of_slots(
    kernel: str,
    numbers: tuple[str, ...],
    out: str,
    constants: Mapping[str, object],
    options: tuple[tuple[str, int], ...],
) -> KernelSource:
    pointers = {"x": out, "codes": "i32", "scales": "i32", "out": out, "factors": "fp32", "bias": "fp32"}
    arguments: list[tuple[str, str | Desc]] = [
        *((name, f"*{element}") for name, element in pointers.items()),
        *ID_ARGUMENTS.items(),
        *WEIGHT_ARGUMENTS.items(),
        *((name, "i32") for name in ("top_k", "units", "slices", "scale_blocks", "width", "columns")),
        *((name, "fp32") for name in numbers),
    ]
    return KernelSource(
        SLOT_STRIPS, kernel, tuple(arguments), tuple(constants.items()), (*pointers, "width", "columns"), options
    )
