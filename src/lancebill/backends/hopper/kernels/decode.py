"""The GEMM for a handful of tokens: each slot is a tile, the ids are the tile list, nothing is sorted (Gluon).

The number of tiles rarely fits the number of resident blocks. So all stages of all tiles form one sequence, and each
block takes a chunk of it (`decode_chunks`), which may start and end inside a tile. The block that arrives last at a
tile or token applies the epilogue (`decode_finish`). A layer is two launches.

With fp8 inputs every block quantises the row it multiplies while its first weights are in flight, so no block waits
for a row that another block quantises. It keeps the row for all tiles that read it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from lancebill.backends.gpu.kernels import dequant
from lancebill.backends.gpu.kernels.decode_chunks import chunk_length, count_bits, find_local_slots, segment_at
from lancebill.backends.gpu.kernels.decode_finish import T, clear_tokens, finish_segment, load_factors
from lancebill.backends.gpu.kernels.dequant import form_of
from lancebill.backends.gpu.kernels.epilogue import epilogue_config
from lancebill.backends.gpu.kernels.gluon_names import barrier, copy_tile
from lancebill.backends.gpu.kernels.stage import stage_scale_words
from lancebill.backends.hopper.kernels.decode_row import quantise_part, row_buffer_shape, row_scale
from lancebill.backends.hopper.kernels.gemm import let_successor_start, wait_for_predecessor
from lancebill.backends.hopper.kernels.mainloop import accumulator_layout, allocate_ring, copy_weights, tile_gemm
from lancebill.backends.hopper.kernels.pipeline import pipeline_config


@gluon.jit
def decode_producer(x_desc, w_desc, s_desc, ids, top_k, total_slots, ring, units, slices, scale_blocks,
                    slots_per_row, least, shares, config: gl.constexpr, DEPEND: gl.constexpr,
                    PREFETCH: gl.constexpr):  # fmt: skip
    """The producer warp: loads weights, and rows of x too unless the consumer quantises them (`row_slices` > 0).

    PREFETCH loads the first weights before the predecessor ends. The ids must be older than the predecessor.
    """
    form: gl.constexpr = config.form
    STAGES: gl.constexpr = config.stages
    SLICES: gl.constexpr = config.slices
    WEIGHTS: gl.constexpr = dequant.code_copies(form) * w_desc.block_type.nbytes + 4 * stage_scale_words(form, SLICES)
    BYTES: gl.constexpr = WEIGHTS if config.row_slices > 0 else WEIGHTS + SLICES * T * 128
    blocks = (slices + SLICES - 1) // SLICES
    if DEPEND and not PREFETCH:
        wait_for_predecessor()
    local = find_local_slots(ids, top_k, total_slots, 1)
    local_slots = count_bits(local[0])
    total = local_slots * units * blocks
    each = chunk_length(local_slots, units, blocks, least, shares)
    ahead = 0
    if PREFETCH:
        at = gl.program_id(0) * each
        if at < total:
            tile, _, e, first, count = segment_at(local, at, gl.minimum(at + each, total), units, blocks)
            ahead = gl.minimum(count, STAGES)
            for i in range(ahead):
                bar = ring.full.index(i)
                mbarrier.expect(bar, BYTES)
                unit = e * units + tile % units
                copy_weights(w_desc, s_desc, ring, i, bar, unit, first + i, slices, scale_blocks, config)
        wait_for_predecessor()
    step = 0
    for start in range(gl.program_id(0) * each, total, gl.num_programs(0) * each):
        end = gl.minimum(start + each, total)
        at = start
        while at < end:
            tile, slot, e, first, count = segment_at(local, at, end, units, blocks)
            at += count
            unit = e * units + tile % units
            for block in range(first, first + count):
                stage = step % STAGES
                bar = ring.full.index(stage)
                if step >= ahead:
                    mbarrier.wait(ring.empty.index(stage), ((step // STAGES) & 1) ^ 1)
                    mbarrier.expect(bar, BYTES)
                    copy_weights(w_desc, s_desc, ring, stage, bar, unit, block, slices, scale_blocks, config)
                if config.row_slices == 0:
                    for j in gl.static_range(SLICES):
                        k = (block * SLICES + j) * dequant.slice_columns(form)
                        copy_tile(x_desc, [slot // slots_per_row, k], bar, ring.x.index(stage * SLICES + j))
                step += 1


@gluon.jit
def decode_consumer(x, out, scales, parts, counters, factors, bias, ids, top_k, weights, total_slots, ring, units,
                    slices, width, columns, slots_per_row, least, shares, limit, alpha, beta, config: gl.constexpr,
                    epilogue: gl.constexpr, PIECES: gl.constexpr, SLOTS: gl.constexpr,
                    DEPEND: gl.constexpr):  # fmt: skip
    """The consumer warpgroup: GEMM and epilogue of every segment of its chunks; zeros of tokens without local slots."""
    if DEPEND:
        wait_for_predecessor()
    let_successor_start()
    blocks = (slices + config.slices - 1) // config.slices
    local = find_local_slots(ids, top_k, total_slots, 4)
    mask = local[0]
    local_slots = count_bits(mask)
    total = local_slots * units * blocks
    each = chunk_length(local_slots, units, blocks, least, shares)
    if epilogue.kind == "rows":
        clear_tokens(out, mask, total_slots, units, columns, SLOTS)
    step = 0
    row = -1
    scale = 1.0  # of that row
    held = 0  # 1: the whole row is in shared memory
    for start in range(gl.program_id(0) * each, total, gl.num_programs(0) * each):
        end = gl.minimum(start + each, total)
        at = start
        while at < end:
            tile, slot, e, first, count = segment_at(local, at, end, units, blocks)
            at += count
            if config.row_slices > 0:
                # Neighbouring tiles share a slot, and the slots of a token share a row.
                own = x + (slot // slots_per_row).to(gl.int64) * width
                if slot // slots_per_row != row:
                    row = slot // slots_per_row
                    scale = row_scale(own, width)
                    held = 0
                if held == 0:
                    barrier()
                    end_slice = (first + count) * config.slices
                    quantise_part(own, ring.x, scale, first * config.slices, end_slice, width, config.row_slices)
                    held = (count == blocks).to(gl.int32)
            step = decode_segment(out, scales, parts, counters, factors, bias, ids, mask, top_k, weights, ring, step,
                                  tile, slot, e, first, count, start // each, scale, units, blocks, columns, each,
                                  limit, alpha, beta, config, epilogue, PIECES, SLOTS)  # fmt: skip


@gluon.jit
def decode_segment(out, scales, parts, counters, factors, bias, ids, mask, top_k, weights, ring, step, tile, slot, e,
                   first, count, chunk, scale, units, blocks, columns, each, limit, alpha, beta, config: gl.constexpr,
                   epilogue: gl.constexpr, PIECES: gl.constexpr, SLOTS: gl.constexpr):  # fmt: skip
    """One segment: its GEMM, and the epilogue if it is the last of its tile or token to arrive."""
    ROW_SLICES: gl.constexpr = config.row_slices
    MMA: gl.constexpr = accumulator_layout(config, 0)
    unit = tile % units
    top = load_factors(factors, e, unit, units, 0, MMA)
    bottom = load_factors(factors, e, unit, units, 1, MMA)
    if ROW_SLICES > 0 and epilogue.kind == "rows":
        gl.store(scales + slot, scale)  # every block of the slot stores the same value
    sums, step = tile_gemm(ring, step, count, first, config)
    finish_segment(out, scales, parts, counters, bias, ids, mask, top_k, weights, sums, (top, bottom), tile, slot, e,
                   chunk, scale, units, blocks, columns, each, limit, alpha, beta, epilogue, PIECES, SLOTS,
                   ROW_SLICES > 0)  # fmt: skip
    return step


@gluon.jit
def decode_gemm(
    x_desc, w_desc, s_desc, x, out, scales, parts, counters, factors, bias, ids, id_words, id_row, id_column,
    expert_map, mapped, experts, weights, weight_kind, weight_row, weight_column, top_k, total_slots, units, slices,
    scale_blocks, width, columns, slots_per_row, least, shares, limit, alpha, beta, CODE: gl.constexpr,
    SCALE: gl.constexpr, GROUP: gl.constexpr, ACT: gl.constexpr, ZERO: gl.constexpr, STAGES: gl.constexpr,
    SLICES: gl.constexpr, ROW_SLICES: gl.constexpr, PIECES: gl.constexpr, SLOTS: gl.constexpr, KIND: gl.constexpr,
    ACTIVATION: gl.constexpr, BIAS: gl.constexpr, WEIGHTED: gl.constexpr, DEPEND: gl.constexpr, PREFETCH: gl.constexpr,
    PROMOTE: gl.constexpr,
):  # fmt: skip
    """One GEMM of the layer with one slot per tile. `slots_per_row` slots read the same row of x; a token has SLOTS.

    A chunk has `least` stages or, to have no more than `shares` chunks, more. No tile has more than PIECES pieces;
    PIECES = 1 if chunks are whole tiles.
    ROW_SLICES = 0: the producer streams rows through `x_desc`. ROW_SLICES > 0: each block reads its row from `x`
    (`width` columns), quantises what it needs of it and keeps that in shared memory, which has room for ROW_SLICES
    slices. The second GEMM also stores the row's scale, which the final reduction needs.
    """
    form: gl.constexpr = form_of(CODE, SCALE, GROUP, ACT, ZERO)
    if ROW_SLICES > 0:
        ROW_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
        xb = gl.allocate_shared_memory(gl.float8e4nv, row_buffer_shape(ROW_SLICES), ROW_LAYOUT)
    else:
        xb = gl.allocate_shared_memory(x_desc.dtype, [STAGES * SLICES, T, dequant.slice_columns(form)], x_desc.layout)
    config: gl.constexpr = pipeline_config(form, T, STAGES, SLICES, 1, PROMOTE, ROW_SLICES)
    ring = allocate_ring(xb, w_desc, s_desc, config)
    epilogue: gl.constexpr = epilogue_config(KIND, ACTIVATION, BIAS, WEIGHTED)
    ids = (ids, id_words, id_row, id_column, expert_map, mapped, experts)
    weights = (weights, weight_kind, weight_row, weight_column)
    gl.warp_specialize([
        (decode_consumer, (x, out, scales, parts, counters, factors, bias, ids, top_k, weights, total_slots, ring,
                           units, slices, width, columns, slots_per_row, least, shares, limit, alpha, beta, config,
                           epilogue, PIECES, SLOTS, DEPEND)),
        (decode_producer, (x_desc, w_desc, s_desc, ids, top_k, total_slots, ring, units, slices, scale_blocks,
                           slots_per_row, least, shares, config, DEPEND, PREFETCH)),
    ], [1], [24])  # fmt: skip
