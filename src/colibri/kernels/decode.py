"""The same product for a handful of tokens: a tile is one slot, ids are the tile list, nothing is sorted (Gluon).

With few slots there are few tiles, so K is split over several blocks. Each writes its part in fp32; the last to
arrive (an integer counter decides, never a float atomic) adds the parts in a fixed order and finishes: the first
product with the activation, the second with the weighted sum over a token's experts. Everyone waits for that last
one, so it asks for all it needs at once. A layer is two launches, and one more where the inputs are quantised; the
hidden rows are quantised by whoever finishes them.

Counters go back to zero by the hand that saw them full.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from colibri.kernels import dequant, rows
from colibri.kernels.dequant import form_of
from colibri.kernels.epilogue import gate, squash
from colibri.kernels.gemm import let_successor_start, wait_for_predecessor
from colibri.kernels.multiply import copy_weights, product_of, scale_copies, stage_scale_words, sums_of
from colibri.kernels.renamed import barrier, copy_tile

column_at = gluon.jit(rows.column_at.fn)
T = gl.constexpr(8)  # the narrowest wgmma; one of its columns is used


@gluon.jit
def expert_of(ids, slot, experts):
    """A slot's expert; -1 for what is no expert's here, padding of any kind."""
    e = gl.load(ids + slot)
    return gl.where(e < experts, e, -1)


@gluon.jit
def part_at(ids, experts, index, units, blocks, SPLIT: gl.constexpr):
    """Work number to (slot, expert, unit, first stage, stages): none where the slot is not ours."""
    tile = index // SPLIT
    slot = tile // units
    e = expert_of(ids, slot, experts)
    each = (blocks + SPLIT - 1) // SPLIT
    first = gl.minimum((index % SPLIT) * each, blocks)
    count = gl.minimum(each, blocks - first)
    return slot, e, tile % units, first, gl.where(e >= 0, count, 0)


@gluon.jit
def feed_slots(x_desc, w_desc, s_desc, ids, experts, total_slots, xb, wb, sb, empty, full, units, slices,
               scale_blocks, slots_per_row, STAGES: gl.constexpr, SLICES: gl.constexpr, form: gl.constexpr,
               SPLIT: gl.constexpr, DEPEND: gl.constexpr, PREFETCH: gl.constexpr):  # fmt: skip
    """The feeding warp. PREFETCH: ids are older than the predecessor, so weights may start before it ends."""
    BYTES: gl.constexpr = SLICES * T * 128 + w_desc.block_type.nbytes + 4 * stage_scale_words(form, SLICES)
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
                mbarrier.expect(full.index(i), BYTES)
                copy_weights(w_desc, s_desc, wb, sb, i, full.index(i), e * units + unit, first + i, slices,
                             scale_blocks, SLICES, form)  # fmt: skip
        wait_for_predecessor()
    step = 0
    for index in range(gl.program_id(0), total, gl.num_programs(0)):
        slot, e, unit, first, count = part_at(ids, experts, index, units, blocks, SPLIT)
        for block in range(first, first + count):
            stage = step % STAGES
            bar = full.index(stage)
            if step >= ahead:
                mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
                mbarrier.expect(bar, BYTES)
                copy_weights(w_desc, s_desc, wb, sb, stage, bar, e * units + unit, block, slices, scale_blocks, SLICES,
                             form)  # fmt: skip
            for j in gl.static_range(SLICES):
                k = (block * SLICES + j) * dequant.slice_columns(form)
                copy_tile(x_desc, [slot // slots_per_row, k], bar, xb.index(stage * SLICES + j))
            step += 1


@gluon.jit
def load_factors(factors, e, unit, units, half: gl.constexpr, MMA: gl.constexpr):
    """The factors of a half's rows: asked for before the product, needed after it."""
    at = (gl.maximum(e, 0) * units + unit) * 128 + 64 * half
    return gl.load(factors + at + gl.arange(0, 64, gl.SliceLayout(1, MMA)))


@gluon.jit
def store_part(part, sums, factor):
    """The one column of an accumulator that is used."""
    MMA: gl.constexpr = sums.type.layout
    r = gl.arange(0, 64, gl.SliceLayout(1, MMA)).expand_dims(1)
    only = gl.arange(0, T, gl.SliceLayout(0, MMA)).expand_dims(0) == 0
    gl.store(part + r + gl.zeros_like(sums).to(gl.int32), sums * factor.expand_dims(1), mask=only & (r >= 0))


@gluon.jit
def sum_parts(parts, slot, n, N, SPLIT: gl.constexpr):
    """Features n of a slot, its parts added in order. Not from L1: other blocks wrote them."""
    total = gl.load(parts + slot * SPLIT * N + n, cache_modifier=".cg")
    for i in gl.static_range(1, SPLIT):
        total += gl.load(parts + (slot * SPLIT + i) * N + n, cache_modifier=".cg")
    return total


@gluon.jit
def finish_slot(out, parts, bias, scale, slot, e, unit, units, columns, limit, alpha, beta, SPLIT: gl.constexpr,
                KIND: gl.constexpr, ACTIVATION: gl.constexpr, BIAS: gl.constexpr):  # fmt: skip
    """All parts of a slot's unit are there: activation, and the row's columns."""
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
        value = gate(value, u, limit, alpha, beta, ACTIVATION)
    else:
        value = squash(value, ACTIVATION)
    column = unit * WIDTH + c
    gl.store(out + slot * columns + column, value.to(out.dtype.element_ty), mask=column < columns)


@gluon.jit
def finish_token(out, parts, bias, token_scales, ids, experts, weights, token, unit, units, columns, slots_per_token,
                 SPLIT: gl.constexpr, SLOTS: gl.constexpr, BIAS: gl.constexpr, NARROW: gl.constexpr,
                 WEIGHTED: gl.constexpr):  # fmt: skip
    """All slots of a token's unit are there: their weighted sum, in slot order. All are loaded before any is added."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    N = units * 128
    n = unit * 128 + gl.arange(0, 128, LAYOUT)
    rows = ()
    for i in gl.static_range(SLOTS):
        slot = token * slots_per_token + gl.minimum(i, slots_per_token - 1)
        e = gl.where(i < slots_per_token, expert_of(ids, slot, experts), -1)
        row = sum_parts(parts, slot, n, N, SPLIT)
        if NARROW:
            row *= gl.load(token_scales + slot)
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
def load_columns(row, c, columns):
    """Columns of a row that other blocks wrote."""
    return gl.load(row + c, mask=c < columns, other=0.0, cache_modifier=".cg").to(gl.float32)


@gluon.jit
def quantise_slot(h, narrow, scales, slot, columns):
    """A finished hidden row as e4m3 with one scale, as `rows.prepare_rows` does it.

    All the others wait for this one block, so the first 2048 columns, mostly all there are, are read only once.
    """
    WIDTH: gl.constexpr = 2048
    place = gl.arange(0, WIDTH, gl.BlockedLayout([4], [32], [4], [0]))
    c = gl.max_contiguous(gl.multiple_of(column_at(place), 4), 4)
    length = (columns + 127) // 128 * 128
    row, out = h + slot * columns, narrow + slot * length
    first = load_columns(row, c, columns)
    largest = gl.abs(first)
    for start in range(WIDTH, columns, WIDTH):
        largest = gl.maximum(largest, gl.abs(load_columns(row, start + c, columns)))
    scale = gl.div_rn(gl.max(largest, 0), 448.0)
    scale = gl.where(scale > 0, scale, 1.0)
    gl.store(out + place, gl.div_rn(first, scale).to(gl.float8e4nv), mask=place < length)
    for start in range(WIDTH, columns, WIDTH):
        more = gl.div_rn(load_columns(row, start + c, columns), scale)
        gl.store(out + start + place, more.to(gl.float8e4nv), mask=start + place < length)
    gl.store(scales + slot, scale)


@gluon.jit
def work_slots(out, narrow, narrow_scales, parts, counters, row_counters, factors, bias, token_scales, ids, experts,
               weights, total_slots, xb, wb, sb, empty, full, units, slices, columns, slots_per_row, slots_per_token,
               limit, alpha, beta, STAGES: gl.constexpr, SLICES: gl.constexpr, form: gl.constexpr, SPLIT: gl.constexpr,
               SLOTS: gl.constexpr, KIND: gl.constexpr, ACTIVATION: gl.constexpr, BIAS: gl.constexpr,
               WEIGHTED: gl.constexpr, DEPEND: gl.constexpr, QUANTISE: gl.constexpr,
               PROMOTE: gl.constexpr):  # fmt: skip
    """The multiplying warpgroup."""
    NARROW: gl.constexpr = dequant.narrow(form)
    if DEPEND:
        wait_for_predecessor()
    let_successor_start()
    blocks = (slices + SLICES - 1) // SLICES
    MMA: gl.constexpr = sums_of(T, 0, form)
    step = 0
    for index in range(gl.program_id(0), total_slots * units * SPLIT, gl.num_programs(0)):
        slot, e, unit, _, count = part_at(ids, experts, index, units, blocks, SPLIT)
        top = load_factors(factors, e, unit, units, 0, MMA)
        bottom = load_factors(factors, e, unit, units, 1, MMA)
        sums, step = product_of(xb, wb, sb, empty, full, step, count, T, STAGES, SLICES, 1, form, PROMOTE)
        part = parts + (slot * SPLIT + index % SPLIT) * (units * 128) + unit * 128
        store_part(part, sums[0], top)
        store_part(part + 64, sums[1], bottom)
        barrier()
        if KIND == "rows":
            token = slot // slots_per_token
            counter = counters + token * units + unit
            if gl.atomic_add(counter, 1, sem="acq_rel") == slots_per_token * SPLIT - 1:
                gl.store(counter, 0)
                finish_token(out, parts, bias, token_scales, ids, experts, weights, token, unit, units, columns,
                             slots_per_token, SPLIT, SLOTS, BIAS, NARROW, WEIGHTED)  # fmt: skip
        else:
            counter = counters + slot * units + unit
            if gl.atomic_add(counter, 1, sem="acq_rel") == SPLIT - 1:
                gl.store(counter, 0)
                if e >= 0:
                    scale = 1.0
                    if NARROW:
                        scale = gl.load(token_scales + slot // slots_per_row)
                    if WEIGHTED:
                        scale = scale * gl.load(weights + slot)
                    finish_slot(out, parts, bias, scale, slot, e, unit, units, columns, limit, alpha, beta, SPLIT,
                                KIND, ACTIVATION, BIAS)  # fmt: skip
                    if QUANTISE:
                        barrier()
                        if gl.atomic_add(row_counters + slot, 1, sem="acq_rel") == units - 1:
                            gl.store(row_counters + slot, 0)
                            quantise_slot(out, narrow, narrow_scales, slot, columns)


@gluon.jit
def slotwise(
    x_desc, w_desc, s_desc, out, narrow, narrow_scales, parts, counters, row_counters, factors, bias, token_scales, ids,
    weights, experts, total_slots, units, slices, scale_blocks, columns, slots_per_row, slots_per_token, limit, alpha,
    beta, CODE: gl.constexpr, SCALE: gl.constexpr, GROUP: gl.constexpr, ACT: gl.constexpr, ZERO: gl.constexpr,
    STAGES: gl.constexpr, SLICES: gl.constexpr, SPLIT: gl.constexpr, SLOTS: gl.constexpr, KIND: gl.constexpr,
    ACTIVATION: gl.constexpr, BIAS: gl.constexpr, WEIGHTED: gl.constexpr, DEPEND: gl.constexpr,
    PREFETCH: gl.constexpr, QUANTISE: gl.constexpr, PROMOTE: gl.constexpr,
):  # fmt: skip
    """One product of the layer, a slot a tile. `slots_per_row`: slots that read the same row of x.

    SLOTS: no fewer than a token's, a power of two. QUANTISE: rows of `out` also go to `narrow` as e4m3, once
    all their columns are there.
    """
    form: gl.constexpr = form_of(CODE, SCALE, GROUP, ACT, ZERO)
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
    gl.warp_specialize([
        (work_slots, (out, narrow, narrow_scales, parts, counters, row_counters, factors, bias, token_scales, ids,
                      experts, weights, total_slots, xb, wb, sb, empty, full, units, slices, columns, slots_per_row,
                      slots_per_token, limit, alpha, beta, STAGES, SLICES, form, SPLIT, SLOTS, KIND, ACTIVATION,
                      BIAS, WEIGHTED, DEPEND, QUANTISE, PROMOTE)),
        (feed_slots, (x_desc, w_desc, s_desc, ids, experts, total_slots, xb, wb, sb, empty, full, units, slices,
                      scale_blocks, slots_per_row, STAGES, SLICES, form, SPLIT, DEPEND, PREFETCH)),
    ], [1], [24])  # fmt: skip
