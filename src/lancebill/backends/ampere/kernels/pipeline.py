"""A ring of stages in shared memory, filled with cp.async by the threads that also multiply (Gluon).

A stage has SLICES slices of K: rows of tokens, packed codes and scales of a tile's units (128 features each). While one
stage is multiplied, the copies of the next STAGES - 1 are in flight. They may belong to the next tile: the ring does
not drain between tiles.
"""

# No `from __future__ import annotations`: Triton reads the annotations of an aggregate as types.

from dataclasses import dataclass, replace

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.core import _aggregate as aggregate

from lancebill.backends.gpu.kernels import dequant
from lancebill.backends.gpu.kernels.stage import stage_blocks, stage_scale_words, stages_per_block
from lancebill.backends.gpu.kernels.weight_form import WeightForm

_MOST_CHUNK = 32  # tokens


@dataclass(frozen=True)
class TileConfig:
    """The shape of a tile and of its pipeline."""

    form: WeightForm
    tokens: int  # per tile: 1, or a multiple of 8
    stages: int
    slices: int  # of K, per stage
    units: int  # of features, per tile

    def with_tokens(self, tokens: int) -> "TileConfig":
        """The same pipeline for a smaller tile."""
        return replace(self, tokens=tokens)

    @property
    def chunk(self) -> int:
        """Tokens that are multiplied together: a power of two that divides the tile. mma takes at least 8."""
        return min(max(self.tokens & -self.tokens, 8), _MOST_CHUNK)

    @property
    def chunks(self) -> int:
        return -(-self.tokens // self.chunk)


@gluon.constexpr_function
def tile_config(form, TOKENS, STAGES, SLICES, UNITS):
    return TileConfig(form, TOKENS, STAGES, SLICES, UNITS)


@gluon.constexpr_function
def with_tokens(config, TOKENS):
    return config.with_tokens(TOKENS)


@gluon.constexpr_function
def power_of_two(n):
    return 1 << (n - 1).bit_length()


@aggregate
class StageRing:
    """Shared memory of all stages: rows of tokens, packed codes, words of scales."""

    x: gl.shared_memory_descriptor
    codes: gl.shared_memory_descriptor
    scales: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, x, codes, scales):
        self.x = x
        self.codes = codes
        self.scales = scales


@gluon.jit
def allocate_ring(ELEMENT: gl.constexpr, config: gl.constexpr):
    """The ring for the largest tile of a launch."""
    form: gl.constexpr = config.form
    STAGES: gl.constexpr = config.stages
    SLICES: gl.constexpr = config.slices
    COLUMNS: gl.constexpr = dequant.slice_columns(form)
    ROWS: gl.constexpr = config.units * dequant.box_rows(form, SLICES)
    COPIES: gl.constexpr = STAGES * dequant.code_copies(form)
    SWIZZLED: gl.constexpr = gl.SwizzledSharedLayout(COLUMNS // 8, 1, 8, [1, 0])  # vectors of 16 bytes
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    x = gl.allocate_shared_memory(ELEMENT, [STAGES, power_of_two(config.tokens), SLICES * COLUMNS], SWIZZLED)
    codes = gl.allocate_shared_memory(gl.int32, [COPIES, ROWS, 32], PLAIN)
    if dequant.scale_words(form) > 0:
        scales = gl.allocate_shared_memory(
            gl.int32, [STAGES, config.units * stage_scale_words(form, SLICES)], gl.SwizzledSharedLayout(1, 1, 1, [0])
        )
    else:
        scales = codes
    return StageRing(x, codes, scales)


@gluon.jit
def copy_weights(w, s, ring, stage, unit, block, slices, scale_blocks, config: gl.constexpr):
    """Start the copies of codes and scales for a stage of a tile; its first `unit` counts over all experts.

    `block` counts the tile's stages. Slices from `slices` on are filled with zeros.
    """
    form: gl.constexpr = config.form
    SLICES: gl.constexpr = config.slices
    SLICE_ROWS: gl.constexpr = dequant.slice_rows(form)
    COPIES: gl.constexpr = dequant.code_copies(form)
    ROWS: gl.constexpr = dequant.box_rows(form, SLICES)  # of one unit
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    r = gl.arange(0, ring.codes.shape[1], gl.SliceLayout(1, LAYOUT)).expand_dims(1)
    c = gl.arange(0, 32, gl.SliceLayout(0, LAYOUT)).expand_dims(0)
    first = w + unit.to(gl.int64) * slices * (SLICE_ROWS * 32)
    for i in gl.static_range(COPIES):
        row = block * ROWS
        end = slices * (ROWS // SLICES)
        if COPIES == 3:  # two bits of the codes of all slices, then the third
            row += (block + i) * ROWS if i < 2 else slices * 16
            end = slices * (16 if i < 2 else 24)
        at = row + r % ROWS
        words = r // ROWS * (slices * SLICE_ROWS * 32) + at * 32 + c
        async_copy.async_copy_global_to_shared(
            ring.codes.index(stage * COPIES + i), first + words, mask=(at < end) & (c >= 0), cache_modifier=".cg"
        )
    if dequant.scale_words(form) > 0:
        BLOCK: gl.constexpr = 64 * dequant.scale_words(form)  # words
        WORDS: gl.constexpr = stage_scale_words(form, SLICES)  # of one unit
        SHARED: gl.constexpr = stages_per_block(form, SLICES)
        i = gl.arange(0, ring.scales.shape[1], gl.BlockedLayout([4], [32], [4], [0]))
        start = block * 0
        if SHARED == 1:
            start = block * stage_blocks(form, SLICES)
        elif SHARED > 1:
            start = block // SHARED
        async_copy.async_copy_global_to_shared(
            ring.scales.index(stage),
            s + (unit.to(gl.int64) * scale_blocks + start) * BLOCK + (i // WORDS * (scale_blocks * BLOCK) + i % WORDS),
            mask=(i % WORDS < (scale_blocks - start) * BLOCK) & (block * SLICES < slices),
            cache_modifier=".cg",
        )


@gluon.jit
def copy_rows(x, ring, stage, block, row, rows, width):
    """Start the copies of a stage's columns of `rows` rows from `row` on; zeros where a row or the rows end."""
    COUNT: gl.constexpr = ring.x.shape[1]
    COLUMNS: gl.constexpr = ring.x.shape[2]
    VECTOR: gl.constexpr = 128 // ring.x.dtype.primitive_bitwidth
    LANES: gl.constexpr = min(COLUMNS // VECTOR, 32)  # for one row
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, VECTOR], [32 // LANES, LANES], [4, 1], [1, 0])
    t = gl.arange(0, COUNT, gl.SliceLayout(1, LAYOUT)).expand_dims(1)
    k = block * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT)).expand_dims(0)
    first = x + row.to(gl.int64) * width
    inside = (t < rows) & (k < width)
    async_copy.async_copy_global_to_shared(ring.x.index(stage), first + (t * width + k), inside, ".cg")
