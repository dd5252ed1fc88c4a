"""The GEMM for a handful of tokens: each slot is a tile, the ids are the tile list, nothing is sorted (Gluon).

With very few slots there are fewer tiles than resident blocks, so K may be split over several blocks. Each block writes
its partial sums in fp32. The block that arrives last (an integer counter decides, never a float atomic) adds them in a
fixed order and applies the epilogue. Without a split, the epilogue runs on the accumulators in registers. In the second
GEMM the sums are always partial: they are terms of the weighted sum over a token's experts. That last reduction is on
the critical path, so it issues all its loads before the first addition. A layer is two launches.

With fp8 inputs every block quantises the row it multiplies while its first weights are in flight, so no block waits
for a row that another block quantises.

The block that sees a full counter resets it to zero.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from lancebill.backends.hopper.kernels import dequant
from lancebill.backends.hopper.kernels import dispatch_combine as rows
from lancebill.backends.hopper.kernels.dequant import form_of
from lancebill.backends.hopper.kernels.epilogue import gated_activation, ungated_activation
from lancebill.backends.hopper.kernels.gemm import let_successor_start, wait_for_predecessor
from lancebill.backends.hopper.kernels.gluon_names import LARGER_VIEWS, barrier, copy_tile, view
from lancebill.backends.hopper.kernels.mainloop import (
    accumulator_layout,
    copy_weights,
    scale_copies,
    stage_scale_words,
    tile_gemm,
)
from lancebill.backends.hopper.kernels.pipeline import Ring, epilogue_config, pipeline_config

column_at = gluon.jit(rows.column_at.fn)
T = gl.constexpr(8)  # the smallest N of wgmma; seven of its eight columns are padding


@gluon.jit
def expert_of(ids, slot, experts):
    """The expert of a slot; negative for padding and for experts of other ranks."""
    e = gl.load(ids + slot)
    return gl.where(e < experts, e, -1)


@gluon.jit
def part_at(ids, experts, index, units, blocks, SPLIT: gl.constexpr):
    """Work index to (slot, expert, unit, first K block, K blocks); 0 blocks if the slot has no local expert."""
    tile = index // SPLIT
    slot = tile // units
    e = expert_of(ids, slot, experts)
    each = (blocks + SPLIT - 1) // SPLIT
    first = gl.minimum((index % SPLIT) * each, blocks)
    count = gl.minimum(each, blocks - first)
    return slot, e, tile % units, first, gl.where(e >= 0, count, 0)


@gluon.jit
def decode_producer(x_desc, w_desc, s_desc, ids, experts, total_slots, ring, units, slices, scale_blocks,
                    slots_per_row, config: gl.constexpr, SPLIT: gl.constexpr, DEPEND: gl.constexpr,
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
    total = total_slots * units * SPLIT
    if DEPEND and not PREFETCH:
        wait_for_predecessor()
    ahead = 0
    if PREFETCH:
        if gl.program_id(0) < total:
            _, e, unit, first, count = part_at(ids, experts, gl.program_id(0), units, blocks, SPLIT)
            ahead = gl.minimum(count, STAGES)
            for i in range(ahead):
                bar = ring.full.index(i)
                mbarrier.expect(bar, BYTES)
                copy_weights(w_desc, s_desc, ring, i, bar, e * units + unit, first + i, slices, scale_blocks, config)
        wait_for_predecessor()
    step = 0
    for index in range(gl.program_id(0), total, gl.num_programs(0)):
        slot, e, unit, first, count = part_at(ids, experts, index, units, blocks, SPLIT)
        for block in range(first, first + count):
            stage = step % STAGES
            bar = ring.full.index(stage)
            if step >= ahead:
                mbarrier.wait(ring.empty.index(stage), ((step // STAGES) & 1) ^ 1)
                mbarrier.expect(bar, BYTES)
                copy_weights(w_desc, s_desc, ring, stage, bar, e * units + unit, block, slices, scale_blocks, config)
            if config.row_slices == 0:
                for j in gl.static_range(SLICES):
                    k = (block * SLICES + j) * dequant.slice_columns(form)
                    copy_tile(x_desc, [slot // slots_per_row, k], bar, ring.x.index(stage * SLICES + j))
            step += 1


@gluon.constexpr_function
def row_buffer_shape(ROW_SLICES):
    """Shape of the shared-memory buffer for a quantised row.

    wgmma reads eight tokens, of which seven are padding with arbitrary contents. With LARGER_VIEWS the padding
    overlaps the slices that follow; otherwise every slice is stored eight times.
    """
    return [ROW_SLICES + T.value, 1, 128] if LARGER_VIEWS else [ROW_SLICES, T.value, 128]


@gluon.jit
def row_scale(x, width):
    """The fp8 scale of a row: its largest magnitude over 448, the largest e4m3 number."""
    STEP: gl.constexpr = 4096
    c = gl.arange(0, STEP, gl.BlockedLayout([8], [32], [4], [0]))
    largest = 0.0
    for start in range(0, width, STEP):
        value = gl.load(x + start + c, mask=start + c < width, other=0.0)
        largest = gl.maximum(largest, gl.max(gl.abs(value.to(gl.float32)), 0))
    scale = gl.div_rn(largest, 448.0)
    return gl.where(scale > 0, scale, 1.0)


@gluon.constexpr_function
def slices_layout(SLICES):
    """Layout of [slices, 128] columns of a row: neighbouring columns per thread, all threads busy if possible."""
    if SLICES < 16:
        return gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    return gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])


@gluon.jit
def load_slices(x, first, width, SLICES: gl.constexpr):
    """SLICES slices of a row as [SLICES, 128], columns permuted as by `dispatch_combine.prepare_rows`."""
    PART: gl.constexpr = slices_layout(SLICES)
    s = first + gl.arange(0, SLICES, gl.SliceLayout(1, PART)).expand_dims(1)
    k = s * 128 + column_at(gl.arange(0, 128, gl.SliceLayout(0, PART))).expand_dims(0)
    k = gl.max_contiguous(gl.multiple_of(k, [1, 4]), [1, 4])
    return gl.load(x + k, mask=k < width, other=0.0)


@gluon.jit
def quantise_slices(part, scale):
    """Quantise to e4m3. Plain divisions: the branch in `dispatch_combine._divide` costs more than it saves here."""
    return gl.div_rn(part.to(gl.float32), scale).to(gl.float8e4nv)


@gluon.jit
def quantise_row(x, xb, row, first, width, ROW_SLICES: gl.constexpr):
    """Quantise the block's part of a row into `xb`; returns the row's scale.

    The first slices are loaded before the scale is computed, to overlap both latencies.
    """
    TOGETHER: gl.constexpr = min(ROW_SLICES, 16)
    x += row.to(gl.int64) * width
    ahead = load_slices(x, first, width, TOGETHER)
    scale = row_scale(x, width)
    for i in gl.static_range(0, ROW_SLICES, TOGETHER):
        part = ahead
        if i + TOGETHER < ROW_SLICES:
            ahead = load_slices(x, first + i + TOGETHER, width, TOGETHER)
        store_slices(xb, quantise_slices(part, scale), i, ROW_SLICES)
    fence_async_shared()
    barrier()
    return scale


@gluon.jit
def store_slices(xb, part, first: gl.constexpr, ROW_SLICES: gl.constexpr):
    """Store slices to `xb`: one row each if rows overlap (see `row_buffer_shape`), else eight copies each."""
    COUNT: gl.constexpr = part.shape[0]
    if xb.shape[1] == 1:
        view(xb.index(0), xb.dtype, [ROW_SLICES, 128], xb.layout).slice(first, COUNT, 0).store(part)
    else:
        LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8, 16], [4, 1, 8], [4, 1, 1], [2, 1, 0])
        part = gl.convert_layout(part.to(gl.int8, bitcast=True), gl.SliceLayout(1, LAYOUT))
        tokens = part.expand_dims(1) + gl.zeros([COUNT, T, 128], gl.int8, LAYOUT)
        target = view(xb, xb.dtype, [ROW_SLICES * T, 128], xb.layout).slice(first * T, COUNT * T, 0)
        target.store(tokens.reshape([COUNT * T, 128]).to(gl.float8e4nv, bitcast=True))


@gluon.jit
def load_factors(factors, e, unit, units, half: gl.constexpr, MMA: gl.constexpr):
    """The per-feature factors of one half. Loaded before the GEMM, which hides the latency."""
    at = (gl.maximum(e, 0) * units + unit) * 128 + 64 * half
    return gl.load(factors + at + gl.arange(0, 64, gl.SliceLayout(1, MMA)))


@gluon.jit
def store_part(part, sums, factor):
    """Store column 0 of an accumulator, scaled; the other seven columns are padding."""
    MMA: gl.constexpr = sums.type.layout
    r = gl.arange(0, 64, gl.SliceLayout(1, MMA)).expand_dims(1)
    only = gl.arange(0, T, gl.SliceLayout(0, MMA)).expand_dims(0) == 0
    gl.store(part + r + gl.zeros_like(sums).to(gl.int32), sums * factor.expand_dims(1), mask=only & (r >= 0))


@gluon.jit
def sum_parts(parts, slot, n, N, SPLIT: gl.constexpr):
    """Features n of a slot: partial sums added in a fixed order. Bypasses L1, since other blocks wrote them."""
    total = gl.load(parts + slot * SPLIT * N + n, cache_modifier=".cg")
    for i in gl.static_range(1, SPLIT):
        total += gl.load(parts + (slot * SPLIT + i) * N + n, cache_modifier=".cg")
    return total


@gluon.jit
def finish_slot(out, parts, bias, scale, slot, e, unit, units, columns, limit, alpha, beta, SPLIT: gl.constexpr,
                KIND: gl.constexpr, ACTIVATION: gl.constexpr, BIAS: gl.constexpr):  # fmt: skip
    """Epilogue of one unit of a slot from its partial sums: bias, activation, store."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    WIDTH: gl.constexpr = 64 if KIND == "gated" else 128
    N = units * 128
    c = gl.arange(0, WIDTH, LAYOUT)
    n = unit * 128 + c
    value = sum_parts(parts, slot, n, N, SPLIT) * scale
    if BIAS:
        value += gl.load(bias + e * N + n)
    if KIND == "gated":
        u = sum_parts(parts, slot, n + 64, N, SPLIT) * scale
        if BIAS:
            u += gl.load(bias + e * N + n + 64)
        value = gated_activation(value, u, limit, alpha, beta, ACTIVATION)
    else:
        value = ungated_activation(value, ACTIVATION)
    column = unit * WIDTH + c
    gl.store(out + slot * columns + column, value.to(out.dtype.element_ty), mask=column < columns)


@gluon.jit
def finish_sums(out, top, bottom, top_factor, bottom_factor, bias, scale, slot, e, unit, units, columns, limit, alpha,
                beta, KIND: gl.constexpr, ACTIVATION: gl.constexpr, BIAS: gl.constexpr):  # fmt: skip
    """`finish_slot` without a split of K: the sums are still in registers."""
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
def finish_token(out, parts, bias, scales, ids, experts, weights, token, unit, units, columns, SPLIT: gl.constexpr,
                 SLOTS: gl.constexpr, BIAS: gl.constexpr, FP8: gl.constexpr, WEIGHTED: gl.constexpr):  # fmt: skip
    """The weighted sum over a token's slots for one unit, in slot order. Issues all loads before the first addition."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    N = units * 128
    n = unit * 128 + gl.arange(0, 128, LAYOUT)
    rows = ()
    for i in gl.static_range(SLOTS):
        slot = token * SLOTS + i
        e = expert_of(ids, slot, experts)
        row = sum_parts(parts, slot, n, N, SPLIT)
        if FP8:
            row *= gl.load(scales + slot, cache_modifier=".cg")
        if BIAS:
            row += gl.load(bias + gl.maximum(e, 0) * N + n)
        if WEIGHTED:
            row *= gl.load(weights + slot)
        rows += (gl.where(e >= 0, row, 0.0),)
    total = rows[0]
    for i in gl.static_range(1, SLOTS):
        total += rows[i]
    gl.store(out + token * columns + n, total.to(out.dtype.element_ty), mask=n < columns)


@gluon.jit
def decode_consumer(x, out, scales, parts, counters, factors, bias, ids, experts, weights, total_slots, ring, units,
                    slices, width, columns, slots_per_row, limit, alpha, beta, config: gl.constexpr,
                    epilogue: gl.constexpr, SPLIT: gl.constexpr, SLOTS: gl.constexpr,
                    DEPEND: gl.constexpr):  # fmt: skip
    """The consumer warpgroup: GEMM and epilogue of every work item."""
    SLICES: gl.constexpr = config.slices
    ROW_SLICES: gl.constexpr = config.row_slices
    KIND: gl.constexpr = epilogue.kind
    ACTIVATION: gl.constexpr = epilogue.activation
    BIAS: gl.constexpr = epilogue.bias
    WEIGHTED: gl.constexpr = epilogue.weighted
    if DEPEND:
        wait_for_predecessor()
    let_successor_start()
    blocks = (slices + SLICES - 1) // SLICES
    MMA: gl.constexpr = accumulator_layout(T, 0, config.form)
    step = 0
    for index in range(gl.program_id(0), total_slots * units * SPLIT, gl.num_programs(0)):
        slot, e, unit, first, count = part_at(ids, experts, index, units, blocks, SPLIT)
        top = load_factors(factors, e, unit, units, 0, MMA)
        bottom = load_factors(factors, e, unit, units, 1, MMA)
        scale = 1.0
        if ROW_SLICES > 0:
            scale = quantise_row(x, ring.x, slot // slots_per_row, first * SLICES, width, ROW_SLICES)
            if KIND == "rows":
                gl.store(scales + slot, scale)  # every block of the slot stores the same value
        sums, step = tile_gemm(ring, step, count, config)
        UNSPLIT: gl.constexpr = SPLIT == 1 and KIND != "rows"
        if WEIGHTED and KIND != "rows":
            scale = scale * gl.load(weights + slot)
        if not UNSPLIT:
            part = parts + (slot * SPLIT + index % SPLIT) * (units * 128) + unit * 128
            store_part(part, sums[0], top)
            store_part(part + 64, sums[1], bottom)
            barrier()
        if KIND == "rows":
            token = slot // SLOTS
            counter = counters + token * units + unit
            if gl.atomic_add(counter, 1, sem="acq_rel") == SLOTS * SPLIT - 1:
                gl.store(counter, 0)
                finish_token(out, parts, bias, scales, ids, experts, weights, token, unit, units, columns, SPLIT,
                             SLOTS, BIAS, ROW_SLICES > 0, WEIGHTED)  # fmt: skip
        elif UNSPLIT:
            if e >= 0:
                finish_sums(out, sums[0], sums[1], top, bottom, bias, scale, slot, e, unit, units, columns, limit,
                            alpha, beta, KIND, ACTIVATION, BIAS)  # fmt: skip
        else:
            counter = counters + slot * units + unit
            if gl.atomic_add(counter, 1, sem="acq_rel") == SPLIT - 1:
                gl.store(counter, 0)
                if e >= 0:
                    finish_slot(out, parts, bias, scale, slot, e, unit, units, columns, limit, alpha, beta, SPLIT,
                                KIND, ACTIVATION, BIAS)  # fmt: skip


@gluon.jit
def decode_gemm(
    x_desc, w_desc, s_desc, x, out, scales, parts, counters, factors, bias, ids, weights, experts, total_slots, units,
    slices, scale_blocks, width, columns, slots_per_row, limit, alpha, beta, CODE: gl.constexpr, SCALE: gl.constexpr,
    GROUP: gl.constexpr, ACT: gl.constexpr, ZERO: gl.constexpr, STAGES: gl.constexpr, SLICES: gl.constexpr,
    ROW_SLICES: gl.constexpr, SPLIT: gl.constexpr, SLOTS: gl.constexpr, KIND: gl.constexpr, ACTIVATION: gl.constexpr,
    BIAS: gl.constexpr, WEIGHTED: gl.constexpr, DEPEND: gl.constexpr, PREFETCH: gl.constexpr, PROMOTE: gl.constexpr,
):  # fmt: skip
    """One GEMM of the layer with one slot per tile. `slots_per_row` slots read the same row of x; a token has SLOTS.

    ROW_SLICES = 0: the producer streams rows through `x_desc`. ROW_SLICES > 0: each block reads its row from `x`
    (`width` columns), quantises its part of K and keeps it in shared memory as ROW_SLICES slices. The second GEMM also
    stores the row's scale, which the final reduction needs.
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
    gl.warp_specialize([
        (decode_consumer, (x, out, scales, parts, counters, factors, bias, ids, experts, weights, total_slots, ring,
                           units, slices, width, columns, slots_per_row, limit, alpha, beta, config, epilogue, SPLIT,
                           SLOTS, DEPEND)),
        (decode_producer, (x_desc, w_desc, s_desc, ids, experts, total_slots, ring, units, slices, scale_blocks,
                           slots_per_row, config, SPLIT, DEPEND, PREFETCH)),
    ], [1], [24])  # fmt: skip
