"""The GEMM for a handful of tokens: each slot is a tile, the ids are the tile list, nothing is sorted (Gluon).

The number of tiles rarely fits the number of resident blocks. So all stages of all tiles form one sequence, and each
block takes a chunk of it (`decode_chunks`), which may start and end inside a tile. A block writes its partial sums of a
tile in fp32. The block that arrives last (an integer counter decides, never a float atomic) adds the pieces
in a fixed order and applies the epilogue. If chunks are whole tiles, the epilogue runs on the accumulators in
registers. In the second GEMM the sums are always partial: they are terms of the weighted sum over a token's experts.
That last reduction is on the critical path, so it issues all its loads before the first addition. A layer is two
launches.

With fp8 inputs every block quantises the row it multiplies while its first weights are in flight, so no block waits
for a row that another block quantises. It keeps the row for all tiles that read it.

The block that sees a full counter resets it to zero.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from lancebill.backends.gpu.kernels import dequant, slots
from lancebill.backends.gpu.kernels.decode_chunks import (
    chunk_length,
    count_bits,
    find_local_slots,
    number_of,
    pieces_of,
    pieces_of_token,
    segment_at,
)
from lancebill.backends.gpu.kernels.dequant import form_of
from lancebill.backends.gpu.kernels.epilogue import gated_activation, ungated_activation
from lancebill.backends.gpu.kernels.gluon_names import barrier, copy_tile
from lancebill.backends.hopper.kernels.decode_row import T, quantise_part, row_buffer_shape, row_scale
from lancebill.backends.hopper.kernels.gemm import let_successor_start, wait_for_predecessor
from lancebill.backends.hopper.kernels.mainloop import (
    accumulator_layout,
    copy_weights,
    scale_copies,
    stage_scale_words,
    tile_gemm,
)
from lancebill.backends.hopper.kernels.pipeline import Ring, epilogue_config, pipeline_config

load_experts, load_weights = gluon.jit(slots.load_experts.fn), gluon.jit(slots.load_weights.fn)


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
    WEIGHTS: gl.constexpr = w_desc.block_type.nbytes + 4 * stage_scale_words(form, SLICES)
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
def load_factors(factors, e, unit, units, half: gl.constexpr, MMA: gl.constexpr):
    """The per-feature factors of one half. Loaded before the GEMM, which hides the latency."""
    at = (e * units + unit) * 128 + 64 * half
    return gl.load(factors + at + gl.arange(0, 64, gl.SliceLayout(1, MMA)))


@gluon.jit
def store_part(part, sums, factor):
    """Store column 0 of an accumulator, scaled; the other seven columns are padding."""
    MMA: gl.constexpr = sums.type.layout
    r = gl.arange(0, 64, gl.SliceLayout(1, MMA)).expand_dims(1)
    only = gl.arange(0, T, gl.SliceLayout(0, MMA)).expand_dims(0) == 0
    gl.store(part + r + gl.zeros_like(sums).to(gl.int32), sums * factor.expand_dims(1), mask=only & (r >= 0))


@gluon.jit
def sum_pieces(parts, tile, c, count, PIECES: gl.constexpr):
    """Features c of a tile: its `count` pieces added in a fixed order. Bypasses L1, since other blocks wrote them."""
    parts += tile * (PIECES * 128)
    total = gl.load(parts + c, mask=(c >= 0) & (count > 0), other=0.0, cache_modifier=".cg")
    for i in gl.static_range(1, PIECES):
        total += gl.load(parts + i * 128 + c, mask=(c >= 0) & (i < count), other=0.0, cache_modifier=".cg")
    return total


@gluon.jit
def finish_tile(out, parts, bias, scale, tile, slot, e, units, count, columns, limit, alpha, beta,
                PIECES: gl.constexpr, KIND: gl.constexpr, ACTIVATION: gl.constexpr, BIAS: gl.constexpr):  # fmt: skip
    """Epilogue of a tile from its `count` pieces: bias, activation, store."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    WIDTH: gl.constexpr = 64 if KIND == "gated" else 128
    c = gl.arange(0, WIDTH, LAYOUT)
    unit = tile % units
    bias += (e * units + unit) * 128
    value = sum_pieces(parts, tile, c, count, PIECES) * scale
    if BIAS:
        value += gl.load(bias + c)
    if KIND == "gated":
        u = sum_pieces(parts, tile, c + 64, count, PIECES) * scale
        if BIAS:
            u += gl.load(bias + c + 64)
        value = gated_activation(value, u, limit, alpha, beta, ACTIVATION)
    else:
        value = ungated_activation(value, ACTIVATION)
    column = unit * WIDTH + c
    gl.store(out + slot * columns + column, value.to(out.dtype.element_ty), mask=column < columns)


@gluon.jit
def finish_sums(out, top, bottom, top_factor, bottom_factor, bias, scale, slot, e, unit, units, columns, limit, alpha,
                beta, KIND: gl.constexpr, ACTIVATION: gl.constexpr, BIAS: gl.constexpr):  # fmt: skip
    """`finish_tile` where chunks are whole tiles: the sums are still in registers."""
    MMA: gl.constexpr = top.type.layout
    r = gl.arange(0, 64, gl.SliceLayout(1, MMA))
    only = (gl.arange(0, T, gl.SliceLayout(0, MMA)).expand_dims(0) == 0) & (r >= 0).expand_dims(1)
    top = top * top_factor.expand_dims(1) * scale
    bottom = bottom * bottom_factor.expand_dims(1) * scale
    if BIAS:
        n = (e * units + unit) * 128 + r
        top += gl.load(bias + n).expand_dims(1)
        bottom += gl.load(bias + n + 64).expand_dims(1)
    at = out + slot * columns + gl.zeros_like(top).to(gl.int32)
    if KIND == "gated":
        column = (unit * 64 + r).expand_dims(1)
        value = gated_activation(top, bottom, limit, alpha, beta, ACTIVATION)
        gl.store(at + column, value.to(out.dtype.element_ty), mask=only & (column < columns))
    else:
        column = (unit * 128 + r).expand_dims(1)
        top, bottom = ungated_activation(top, ACTIVATION), ungated_activation(bottom, ACTIVATION)
        gl.store(at + column, top.to(out.dtype.element_ty), mask=only & (column < columns))
        gl.store(at + column + 64, bottom.to(out.dtype.element_ty), mask=only & (column + 64 < columns))


@gluon.jit
def finish_token(out, parts, bias, scales, ids, weights, mask, token, unit, units, blocks, each, columns,
                 PIECES: gl.constexpr, SLOTS: gl.constexpr, BIAS: gl.constexpr, FP8: gl.constexpr,
                 WEIGHTED: gl.constexpr):  # fmt: skip
    """The weighted sum over a token's local slots for one unit, in slot order. Zeros if there are none.

    Issues all loads before the first addition.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    c = gl.arange(0, 128, LAYOUT)
    n = unit * 128 + c
    rows = ()
    for i in gl.static_range(SLOTS):
        slot = token * SLOTS + i
        local = (mask >> slot) & 1
        tile = number_of(mask, slot) * units + unit
        row = sum_pieces(parts, tile, c, pieces_of(tile, blocks, each) * local, PIECES)
        if FP8:
            row *= gl.load(scales + slot, mask=local == 1, other=0.0, cache_modifier=".cg")
        if BIAS:
            e = load_experts(ids, token, i, True)
            row += gl.load(bias + e * units * 128 + n, mask=(n >= 0) & (e >= 0), other=0.0)
        if WEIGHTED:
            row *= load_weights(weights, token, i, local == 1)
        rows += (row,)
    total = rows[0]
    for i in gl.static_range(1, SLOTS):
        total += rows[i]
    gl.store(out + token * columns + n, total.to(out.dtype.element_ty), mask=n < columns)


@gluon.constexpr_function
def low_bits(COUNT):
    return -1 if COUNT == 32 else (1 << COUNT) - 1


@gluon.jit
def clear_tokens(out, mask, total_slots, units, columns, SLOTS: gl.constexpr):
    """Store zeros to tokens without local slots, whose sums no block finishes."""
    c = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    count = gl.where(count_bits(mask) < total_slots, total_slots // SLOTS * units, 0)
    for i in range(gl.program_id(0), count, gl.num_programs(0)):
        token = i // units
        if ((mask >> (token * SLOTS)) & low_bits(SLOTS)) == 0:
            n = i % units * 128 + c
            gl.store(out + token * columns + n, gl.zeros_like(c).to(out.dtype.element_ty), mask=n < columns)


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
    KIND: gl.constexpr = epilogue.kind
    ACTIVATION: gl.constexpr = epilogue.activation
    BIAS: gl.constexpr = epilogue.bias
    WEIGHTED: gl.constexpr = epilogue.weighted
    MMA: gl.constexpr = accumulator_layout(config, 0)
    unit = tile % units
    top = load_factors(factors, e, unit, units, 0, MMA)
    bottom = load_factors(factors, e, unit, units, 1, MMA)
    if ROW_SLICES > 0 and KIND == "rows":
        gl.store(scales + slot, scale)  # every block of the slot stores the same value
    sums, step = tile_gemm(ring, step, count, first, config)
    WHOLE: gl.constexpr = PIECES == 1 and KIND != "rows"
    if WEIGHTED and KIND != "rows":
        scale = scale * load_weights(weights, slot // top_k, slot % top_k, True)
    if not WHOLE:
        part = parts + (tile * PIECES + chunk - tile * blocks // each) * 128
        store_part(part, sums[0], top)
        store_part(part + 64, sums[1], bottom)
        barrier()
    if KIND == "rows":
        token = slot // SLOTS
        counter = counters + token * units + unit
        all_pieces = pieces_of_token(mask, token, unit, units, blocks, each, SLOTS)
        if gl.atomic_add(counter, 1, sem="acq_rel") == all_pieces - 1:
            gl.store(counter, 0)
            finish_token(out, parts, bias, scales, ids, weights, mask, token, unit, units, blocks, each, columns,
                         PIECES, SLOTS, BIAS, ROW_SLICES > 0, WEIGHTED)  # fmt: skip
    elif WHOLE:
        finish_sums(out, sums[0], sums[1], top, bottom, bias, scale, slot, e, unit, units, columns, limit, alpha,
                    beta, KIND, ACTIVATION, BIAS)  # fmt: skip
    else:
        counter = counters + tile
        all_pieces = pieces_of(tile, blocks, each)
        if gl.atomic_add(counter, 1, sem="acq_rel") == all_pieces - 1:
            gl.store(counter, 0)
            finish_tile(out, parts, bias, scale, tile, slot, e, units, all_pieces, columns, limit, alpha, beta, PIECES,
                        KIND, ACTIVATION, BIAS)  # fmt: skip
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
    wb = gl.allocate_shared_memory(gl.int32, [STAGES] + w_desc.block_type.shape, w_desc.layout)
    if dequant.scale_words(form) > 0:
        sb = gl.allocate_shared_memory(
            gl.int32, [STAGES * scale_copies(form, SLICES)] + s_desc.block_type.shape, s_desc.layout
        )
    else:
        sb = wb
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(empty.index(i), count=1)
        mbarrier.init(full.index(i), count=1)
    ring = Ring(xb, wb, sb, empty, full)
    config: gl.constexpr = pipeline_config(form, T, STAGES, SLICES, 1, PROMOTE, ROW_SLICES)
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
