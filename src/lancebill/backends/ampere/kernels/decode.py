"""The GEMM for a handful of tokens with mma.sync: each slot is a tile, the ids are the tile list (Gluon).

The stages of all tiles form one sequence, and each block takes a chunk of it (`decode_chunks`), so that all SMs read
memory even with one token. A chunk may start and end inside a tile: partial sums are fp32, and the block that arrives
last adds them in a fixed order (`decode_finish`). Copies run ahead through the whole chunk, over the ends of tiles.

The block that sees a full counter resets it to zero.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from lancebill.backends.ampere.kernels.mainloop import accumulator_layout, multiply_stage, zero_sums
from lancebill.backends.ampere.kernels.pipeline import allocate_ring, copy_rows, copy_weights, pipeline_config
from lancebill.backends.hopper.kernels import dequant
from lancebill.backends.hopper.kernels.decode_chunks import chunk_length, count_bits, find_local_slots, segment_at
from lancebill.backends.hopper.kernels.decode import (
    clear_tokens,
    finish_segment,
    load_factors,
)

T = gl.constexpr(8)  # the smallest N of mma; seven of its eight columns are padding


@gluon.jit
def copy_stage(arrays, ring, stage, tile, slot, e, block, units, slices, scale_blocks, width, slots_per_row, inside,
               config: gl.constexpr):  # fmt: skip
    """Start all copies of one stage of a tile, or none if it is not `inside` the block's chunk."""
    x, w, s = arrays
    there = gl.where(inside, slices, 0)
    copy_weights(w, s, ring, stage, e * units + tile % units, block, there, scale_blocks, config)
    copy_rows(x, ring, stage, block, slot // slots_per_row, gl.where(inside, 1, 0), width, config)
    async_copy.commit_group()
