"""The tuning policy of the Hopper backend: from sizes to tiles. Pure functions; measured numbers are in `hopper.json`.

A rule of the data lists the token tiles to use up to some average number of rows per expert, launch by launch. Tiles
follow the rows that each expert really gets; the average only decides which sizes are compiled in.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from lancebill.backends.gpu.chunks import Chunks, cut, equal_parts, even_chunks, one_tile_each, whole_tiles
from lancebill.backends.gpu.kernels.limits import MOST_SLOTS
from lancebill.backends.gpu.kernels.weight_form import E4M3, ROWS, S8, WeightForm
from lancebill.backends.gpu.plan import GemmPlan
from lancebill.backends.gpu.tiles import Rule, SlotStrips, Strips, Tile, power_of_two

SHARED_PER_SM = 228 * 1024
RESERVED = 1024  # shared memory per block that the driver reserves
_BARRIERS = 512  # barriers and alignment
_MOST_STAGES = 8
_PROCESSORS = 132
_CACHE = 50 << 20  # bytes of L2
_TOGETHER = 16  # full tiles that share a unit of weights
_FEWEST_BLOCKS = 2  # per SM; one alone has nothing that hides its waits
_FILLED = 0.8  # the share of all rounds of tiles that blocks must at least be busy
_DECODE_BLOCKS = 3  # per SM, when decoding; or 2, see `decode_chunks`
_TWO_PER_SM = 2 * _PROCESSORS
_SHORT_TILE = 8  # stages
_FEW_ROWS = (8, 16)  # of one matrix that are one tile: its sizes
MOST_FEW_ROWS = max(_FEW_ROWS)
# How blocks share strips, by the bits of a code, then by rows and features: the strips, how many blocks per SM run at
# once (None: there may be more than run at once), and the most slices of a row (None: any).
_STRIPS: dict[int, tuple[tuple[Strips, int | None, int | None], ...]] = {
    4: (
        (Strips(1, 8, 4, 1, 64), 4, None),
        (Strips(1, 4, 4, 1, 64), None, None),
        (Strips(1, 8, 4, 8, 32), 3, 192),
        (Strips(2, 4, 4, 8, 32), 3, 128),
        (Strips(4, 4, 2, 8, 16), 2, 64),
        (Strips(4, 2, 4, 8, 16), None, 64),
        (Strips(2, 4, 4, 16, 16, 128), 2, 80),
    ),
    8: (
        (Strips(1, 8, 4, 1, 64), 4, None),
        (Strips(1, 4, 4, 1, 64), None, None),
        (Strips(1, 8, 4, 8, 32), 3, None),
        (Strips(2, 4, 4, 8, 32), 3, None),
        (Strips(4, 4, 2, 8, 16), 2, None),
        (Strips(2, 4, 4, 8, 32), None, None),
        (Strips(2, 4, 4, 16, 16, 128), 2, 192),
    ),
}
# Strips of a whole layer, where they were measured to be faster than tiles.
_FIRST_AHEAD = {4: 4, 8: 2}  # by the bits of a code; with more, registers spill
_SECOND_AHEAD = 2
_MOST_READ = 48e6  # bytes of codes
_FEWEST_BLOCKS_OF_SECOND = 1.3  # per SM
_MOST_WARPS = 3200  # of the first GEMM: 24 per SM
_MOST_HIDDEN = 512  # slices of hidden rows in shared memory
_WASTED = 1.15  # how many slices a block may take for each that a row has
# Slices of an fp8 row in shared memory, when decoding; they fit even at eight copies each (Triton 3.8 and later).
_MOST_ROW_SLICES = 128
MOST_PROMOTED = 96
# Token tile: (slices per stage for 16-bit and for fp8 activations, blocks per SM).
_SHAPES = {
    8: ((4, 2), 4),
    16: ((4, 1), 4),
    24: ((4, 1), 3),
    32: ((4, 2), 2),
    40: ((2, 1), 2),
    48: ((2, 1), 2),
    64: ((2, 1), 2),
    80: ((2, 1), 2),
    96: ((2, 1), 2),
    112: ((2, 1), 2),
    128: ((2, 2), 2),
    144: ((1, 1), 2),
    160: ((1, 1), 2),
}
_MORE_BLOCKS = {48: 3}  # blocks per SM where `has_more_blocks`
# The same as `_SHAPES` for tiles that may take two units.
_PAIRED = {8: ((2, 1), 3), 16: ((2, 1), 3), 24: ((2, 1), 2), 32: ((2, 1), 2)}
_REGISTERS = {4: 64, 3: 80, 2: 128}  # registers per thread, by blocks per SM (256 threads each)


@cache
def data() -> dict[str, Any]:
    text = (Path(__file__).parent / "hopper.json").read_text()
    return dict(json.loads(text))


def rule(form: WeightForm, slots: int, experts: int, units: int) -> Rule:
    """The rule for `slots` rows over `experts` with `units` units in total. With few units, large tiles would leave SMs
    idle at the end. Tiles that are launched alone to have more blocks are for forms that have them."""
    rows = slots / experts
    entry = next(  # the last one has no limit
        entry
        for entry in data()["8-bit" if form.byte_inputs else "16-bit"]
        if (entry["rows_up_to"] is None or rows <= entry["rows_up_to"])
        and units >= entry.get("units_from", 0)
        and (has_more_blocks(form) or not entry.get("more_blocks", False))
    )
    return Rule.parse(entry["tiles"], overlap=entry["overlap"], paired=bool(entry.get("paired", False)))


def decodes(activations: str, slots: int, slices: int) -> bool:
    """Whether there are so few slots that each becomes a tile. An fp8 row has to fit in shared memory.

    int8 rows are not quantised by the GEMM.
    """
    if activations == S8:
        return False
    if activations == E4M3 and slices > _MOST_ROW_SLICES:
        return False
    return slots <= int(data()["decode_slots"]["8-bit" if activations in (E4M3, S8) else "16-bit"])


def graphed(tokens: int) -> bool:
    """Whether a call's launches are submitted as one CUDA graph. With few tokens the host is the bottleneck."""
    return tokens <= int(data()["graph_tokens"])


def promotes(form: WeightForm) -> bool:
    """Whether sums are added to fp32 totals after every slice: required by group scales, optional for other fp8."""
    return form.promoted or (form.activations == E4M3 and bool(data()["promote"]))


def has_more_blocks(form: WeightForm) -> bool:
    """Whether accumulators of some tiles are small enough for more blocks per SM: fp8 without totals."""
    return form.activations == E4M3 and not promotes(form)


def fitting(rule: Rule, forms: Iterable[WeightForm]) -> Rule:
    """The rule with tile sizes for which every form has registers. Promotion needs an extra set of accumulators."""
    if not any(promotes(form) for form in forms) or max(rule.sizes) <= MOST_PROMOTED:
        return rule
    launches = tuple(tuple(size for size in launch if size <= MOST_PROMOTED) for launch in rule.launches)
    return replace(rule, launches=tuple(filter(None, launches)) or ((MOST_PROMOTED,),), full=None)


def stage_bytes(form: WeightForm, tokens: int, slices: int, units: int = 1) -> int:
    """Shared memory of one pipeline stage."""
    return slices * (tokens + units * form.slice_rows) * 128 + units * 4 * form.stage_scale_words(slices)


def well_filled(blocks: int, tiles: int) -> int:
    """Blocks per SM, at most `blocks`, that keep the SMs busy until the last of so many tiles.

    With few tiles, some blocks would have none in the last round while others begin one. Fewer blocks have more shared
    memory and read faster.
    """

    def share(count: int) -> float:
        rounds = tiles / (_PROCESSORS * count)
        return rounds / math.ceil(rounds)

    choices = range(blocks, _FEWEST_BLOCKS - 1, -1)
    return next((count for count in choices if share(count) >= _FILLED), max(choices, key=share))


@cache
def tile(form: WeightForm, sizes: tuple[int, ...], gated: bool, paired: bool = False, tiles: int | None = None) -> Tile:
    """The pipeline of a launch: as many stages of the largest tile as fit in the block's share of shared memory.

    `tiles`: those of one unit that the GEMM is expected to have, in all its launches (None: many).
    """
    tokens = max(sizes)
    (slices_16, slices_8), blocks = _SHAPES[tokens]
    if has_more_blocks(form):
        blocks = _MORE_BLOCKS.get(tokens, blocks)
    units = 2 if paired and tokens in _PAIRED and form.simple and not promotes(form) else 1
    if units == 2:
        (slices_16, slices_8), blocks = _PAIRED[tokens]
    elif not form.simple or form.byte_inputs or (form.scale_words > 1 and tokens > 8):
        # More words in flight need more registers per thread.
        blocks = min(blocks, 3)
    if tiles is not None:
        blocks = well_filled(blocks, -(-tiles // units))
    slices = slices_8 if form.byte_inputs else slices_16
    if tokens == 24 and units == 1 and form.scale_words > 1:
        slices = min(slices, 2)  # four would spill registers
    room = SHARED_PER_SM // blocks - RESERVED - _BARRIERS - min(tokens, 32) * (64 if gated else 128) * 2
    while slices > 1 and room // stage_bytes(form, tokens, slices, units) < 2:
        slices //= 2
    stages = min(_MOST_STAGES, room // stage_bytes(form, tokens, slices, units))
    assert stages >= 2, (form, tokens)
    return Tile(sizes, stages, slices, blocks, _REGISTERS[blocks], units)


def together(matrix: int, tiles: float) -> int:
    """How many full tiles take turns at every unit, if an expert has `tiles` of them and its larger matrix so many
    bytes.

    A matrix that does not fit in L2 would be read from memory for each tile: Mixtral's w13 has 62 MB. Matrices that
    fit are faster one tile after the other.
    """
    return _TOGETHER if matrix > _CACHE and tiles > 1 else 1


def decode_slices(form: WeightForm) -> int:
    """Slices of a stage when decoding: long stages keep more bytes in flight."""
    return (2 if form.activations == E4M3 else 4) * 4 // form.space


@cache
def decode_tile(form: WeightForm, slices: int, blocks: int = _DECODE_BLOCKS) -> Tile:
    """The pipeline when decoding: long stages, so many blocks per SM, and room for an fp8 row."""
    fp8, stage_slices = form.activations == E4M3, decode_slices(form)
    row_slices = max(8, power_of_two(-(-slices // stage_slices) * stage_slices)) if fp8 else 0
    room = SHARED_PER_SM // blocks - RESERVED - _BARRIERS - (row_slices + 8) * 128 * fp8
    stages = min(_MOST_STAGES, room // stage_bytes(form, 0 if fp8 else 8, stage_slices))
    return Tile((8,), stages, stage_slices, blocks, _REGISTERS[blocks], row_slices=row_slices)


def decode_chunks(form: WeightForm, tiles: int, slices: int, *, known: bool = True) -> tuple[Chunks, int]:
    """How the stages of `tiles` tiles are cut, when decoding, and how many blocks share an SM.

    Three blocks hide each other's waits best. Two have more shared memory each: they are faster if there are no more
    chunks anyway, and if only their chunks begin and end with tiles or with equal parts of one. A chunk that ends
    inside the next tile has one more partial sum to store and to count.
    """
    stages = -(-slices // decode_slices(form))
    three = _cut_for(form, tiles, stages, _DECODE_BLOCKS * _PROCESSORS, known)
    if not known:
        return three, _DECODE_BLOCKS
    two = _cut_for(form, tiles, stages, _TWO_PER_SM, known)
    few = -(-tiles * stages // three.stages) <= _TWO_PER_SM
    if few or (_fits_tiles(two, stages) and not _fits_tiles(three, stages)):
        return three if few else two, 2
    return three, _DECODE_BLOCKS


def _fits_tiles(chunks: Chunks, stages: int) -> bool:
    """Whether a chunk is a number of whole tiles of so many stages, or an equal part of one."""
    return chunks.stages % stages == 0 or stages % chunks.stages == 0


def _cut_for(form: WeightForm, tiles: int, stages: int, resident: int, known: bool) -> Chunks:
    """How the stages of `tiles` tiles, so many each, are cut for so many resident blocks.

    fp8 is faster with one short tile for each block, even where that leaves a third of the blocks idle: every piece of
    a tile converts the row again, and is added to the others.
    """
    if form.activations == E4M3 and known and tiles <= _TWO_PER_SM and stages <= _SHORT_TILE:
        whole = cut(tiles, stages, _TWO_PER_SM)
        if whole.pieces == 1:
            return whole
    parts = equal_parts(tiles, stages, resident) if known else None
    return parts or cut(tiles, stages, resident, known=known)


def strips(form: WeightForm, rows: int, units: int, slices: int) -> Strips | None:
    """How blocks share one matrix for few rows without pieces to exchange; None if they had better share its units.

    Every block reads all of x, and a warp unpacks what it reads: with many rows of x and long rows of codes both cost
    more than pieces. A second round of a few blocks would begin with an empty pipeline.
    """
    if not (form.simple or form.bits == 8):
        return None
    choices = _STRIPS[form.bits]
    tile = next((found.rows for found, _, _ in choices if rows <= found.rows), None)
    for found, blocks, most in choices:
        resident = blocks is None or units * ROWS <= found.features * blocks * _PROCESSORS
        if found.rows == tile and resident and (most is None or slices <= most):
            taken = -(-slices // (found.ahead * found.parts)) * found.ahead * found.parts
            heavy = found.registers > 0 and form.bits == 8 and form.scale_words > 0  # registers would spill
            return replace(found, ahead=2) if heavy or taken > _WASTED * slices else found
    return None


def slot_strips(top_k: int, first: GemmPlan, second: GemmPlan) -> SlotStrips | None:
    """How blocks share the strips of a layer's matrices for one token; None if they had better share tiles.

    Strips have no pieces to exchange, but their warps take longer to unpack: they are faster where little is read, if
    there are enough of them.
    """
    if not all(gemm.form.simple or gemm.form.bits == 8 for gemm in (first, second)):
        return None
    read = sum(top_k * gemm.units * gemm.slices * gemm.form.slice_rows * 128 for gemm in (first, second))
    rows, slices = power_of_two(top_k), power_of_two(second.slices)
    few = second.units * 8 < _FEWEST_BLOCKS_OF_SECOND * _PROCESSORS
    if few or read > _MOST_READ or rows * slices > _MOST_HIDDEN or top_k > MOST_SLOTS:
        return None
    warps = 2 * top_k * first.units * 4  # with one part of K
    fitting = [p for p in (8, 4, 2) if p * warps <= _MOST_WARPS and first.slices > 8 * p]
    parts, ahead = 8 if second.slices > 4 else 4, _FIRST_AHEAD[first.form.bits]
    return SlotStrips(max(fitting, default=2), ahead, parts, _SECOND_AHEAD, 64, rows, max(slices, parts))


@cache
def few_rows_tile(form: WeightForm, rows: int, blocks: int) -> Tile:
    """The pipeline of one matrix with all rows in one tile, for so many blocks per SM."""
    tokens, slices = next(size for size in _FEW_ROWS if rows <= size), decode_slices(form)
    room = SHARED_PER_SM // blocks - RESERVED - _BARRIERS
    if room // stage_bytes(form, tokens, slices) < 3:
        slices //= 2
    stages = min(_MOST_STAGES, room // stage_bytes(form, tokens, slices))
    return Tile((tokens,), stages, slices, blocks, _REGISTERS[blocks])


def few_rows(form: WeightForm, rows: int, units: int, slices: int) -> tuple[Tile, Chunks]:
    """The pipeline of one matrix with all rows in one tile, and how blocks share its stages."""
    whole = one_tile_each(units, _PROCESSORS, _DECODE_BLOCKS)
    tile = few_rows_tile(form, rows, 2 if whole and units <= _TWO_PER_SM else _DECODE_BLOCKS)
    stages = -(-slices // tile.slices)
    return tile, whole_tiles(stages) if whole else even_chunks(units, stages, _PROCESSORS, tile.blocks)
