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
from lancebill.backends.ampere.kernels.pipeline import allocate_ring, copy_rows, copy_weights, tile_config
from lancebill.backends.gpu.kernels import dequant
from lancebill.backends.gpu.kernels.decode_chunks import chunk_length, count_bits, find_local_slots, segment_at
from lancebill.backends.gpu.kernels.decode_finish import clear_tokens, finish_segment, load_factors
from lancebill.backends.gpu.kernels.epilogue import epilogue_config


@gluon.jit
def locate(local, tile, units):
    """The slot and expert of a tile."""
    _, numbers, slots_and_experts = local
    found = gl.max(gl.where(numbers == tile // units, slots_and_experts, 0), 0)
    return found >> 24, found & 0xFFFFFF


@gluon.jit
def copy_stage(arrays, ring, stage, place, local, units, slices, scale_blocks, width, slots_per_row, blocks,
               config: gl.constexpr):  # fmt: skip
    """Start all copies of the stage at `place`, none if the chunk has no more; returns the next place.

    A place is (tile, slot, expert, stage of the tile, stages left in the chunk).
    """
    x, w, s = arrays
    tile, slot, e, block, left = place
    there = gl.where(left > 0, slices, 0)
    copy_weights(w, s, ring, stage, e * units + tile % units, block, there, scale_blocks, config)
    copy_rows(x, ring, stage, block, slot // slots_per_row, gl.minimum(left, 1), width)
    async_copy.commit_group()
    block += 1
    if block == blocks:
        block = 0
        tile += 1
        slot, e = locate(local, tile, units)
    return tile, slot, e, block, gl.maximum(left - 1, 0)


@gluon.jit
def decode_chunk(arrays, out, parts, counters, factors, bias, ids, top_k, weights, local, ring, start, end, units,
                 slices, scale_blocks, width, columns, slots_per_row, each, limit, alpha, beta, config: gl.constexpr,
                 epilogue: gl.constexpr, PIECES: gl.constexpr, SLOTS: gl.constexpr):  # fmt: skip
    """GEMM and epilogue of every segment of one chunk of the sequence of stages."""
    STAGES: gl.constexpr = config.stages
    AHEAD: gl.constexpr = STAGES - 1
    MMA: gl.constexpr = accumulator_layout()
    blocks = (slices + config.slices - 1) // config.slices
    tile = start // blocks
    slot, e = locate(local, tile, units)
    place = (tile, slot, e, start - tile * blocks, end - start)
    async_copy.wait_group(0)  # copies after the end of the chunk before write zeros to the ring
    for i in gl.static_range(AHEAD):
        place = copy_stage(arrays, ring, i, place, local, units, slices, scale_blocks, width, slots_per_row, blocks,
                           config)  # fmt: skip
    step = 0
    at = start
    while at < end:
        tile, slot, e, _, count = segment_at(local, at, end, units, blocks)
        at += count
        top = load_factors(factors, e, tile % units, units, 0, MMA)
        bottom = load_factors(factors, e, tile % units, units, 1, MMA)
        sums = zero_sums(config)
        for _ in range(count):
            async_copy.wait_group(AHEAD - 1)
            place = copy_stage(arrays, ring, (step + AHEAD) % STAGES, place, local, units, slices, scale_blocks, width,
                               slots_per_row, blocks, config)  # fmt: skip
            sums = multiply_stage(ring, step % STAGES, sums, config)
            step += 1
        finish_segment(out, parts, parts, counters, bias, ids, local[0], top_k, weights, sums, (top, bottom), tile,
                       slot, e, start // each, 1.0, units, blocks, columns, each, limit, alpha, beta, epilogue, PIECES,
                       SLOTS, False)  # fmt: skip


@gluon.jit
def decode_gemm(
    x, w, s, out, parts, counters, factors, bias, ids, id_words, id_row, id_column, expert_map, mapped, experts,
    weights, weight_kind, weight_row, weight_column, top_k, total_slots, units, slices, scale_blocks, width, columns,
    slots_per_row, least, shares, limit, alpha, beta, CODE: gl.constexpr, SCALE: gl.constexpr, GROUP: gl.constexpr,
    ACT: gl.constexpr, ZERO: gl.constexpr, STAGES: gl.constexpr, SLICES: gl.constexpr, PIECES: gl.constexpr,
    SLOTS: gl.constexpr, KIND: gl.constexpr, ACTIVATION: gl.constexpr, BIAS: gl.constexpr, WEIGHTED: gl.constexpr,
):  # fmt: skip
    """One GEMM of the layer with one slot per tile. `slots_per_row` slots read the same row of x; a token has SLOTS.

    A chunk has `least` stages or, to have no more than `shares` chunks, more. No tile has more than PIECES pieces;
    PIECES = 1 if chunks are whole tiles.
    """
    form: gl.constexpr = dequant.form_of(CODE, SCALE, GROUP, ACT, ZERO)
    config: gl.constexpr = tile_config(form, 1, STAGES, SLICES, 1)
    epilogue: gl.constexpr = epilogue_config(KIND, ACTIVATION, BIAS, WEIGHTED)
    ring = allocate_ring(x.dtype.element_ty, config)
    ids = (ids, id_words, id_row, id_column, expert_map, mapped, experts)
    weights = (weights, weight_kind, weight_row, weight_column)
    local = find_local_slots(ids, top_k, total_slots, 4)
    blocks = (slices + SLICES - 1) // SLICES
    local_slots = count_bits(local[0])
    total = local_slots * units * blocks
    each = chunk_length(local_slots, units, blocks, least, shares)
    if KIND == "rows":
        clear_tokens(out, local[0], total_slots, units, columns, SLOTS)
    for start in range(gl.program_id(0) * each, total, gl.num_programs(0) * each):
        decode_chunk((x, w, s), out, parts, counters, factors, bias, ids, top_k, weights, local, ring, start,
                     gl.minimum(start + each, total), units, slices, scale_blocks, width, columns, slots_per_row, each,
                     limit, alpha, beta, config, epilogue, PIECES, SLOTS)  # fmt: skip
