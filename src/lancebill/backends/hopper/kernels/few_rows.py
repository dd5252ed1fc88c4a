"""The GEMM of one matrix for a few rows: all rows are one tile, so the matrix is read once (Gluon).

A matrix has too few units of features to keep all SMs reading. So the stages of all units form one sequence, and each
block takes a chunk of it, which may start and end inside a unit. The block that arrives last at a unit (an integer
counter decides, never a float atomic) adds its pieces in a fixed order, and resets the counter to zero.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from lancebill.backends.gpu.kernels import dequant
from lancebill.backends.gpu.kernels.decode_chunks import pieces_of
from lancebill.backends.gpu.kernels.decode_finish import load_factors
from lancebill.backends.gpu.kernels.dequant import form_of
from lancebill.backends.gpu.kernels.gluon_names import barrier, copy_tile
from lancebill.backends.hopper.kernels.gemm import let_successor_start, stage_bytes, wait_for_predecessor
from lancebill.backends.hopper.kernels.mainloop import accumulator_layout, allocate_ring, copy_weights, tile_gemm
from lancebill.backends.hopper.kernels.pipeline import pipeline_config


@gluon.jit
def load_chunk(x_desc, w_desc, s_desc, ring, units, slices, scale_blocks, each, config: gl.constexpr,
               DEPEND: gl.constexpr):  # fmt: skip
    """The producer warp: weights and columns of x of every stage of the block's chunk."""
    STAGES: gl.constexpr = config.stages
    SLICES: gl.constexpr = config.slices
    if DEPEND:
        wait_for_predecessor()
    blocks = (slices + SLICES - 1) // SLICES
    start = gl.program_id(0) * each
    for step in range(gl.minimum(each, units * blocks - start)):
        unit = (start + step) // blocks
        block = start + step - unit * blocks
        stage = step % STAGES
        bar = ring.full.index(stage)
        mbarrier.wait(ring.empty.index(stage), ((step // STAGES) & 1) ^ 1)
        mbarrier.expect(bar, stage_bytes(config))
        copy_weights(w_desc, s_desc, ring, stage, bar, unit, block, slices, scale_blocks, config)
        for j in gl.static_range(SLICES):
            k = (block * SLICES + j) * dequant.slice_columns(config.form)
            copy_tile(x_desc, [0, k], bar, ring.x.index(stage * SLICES + j))


@gluon.jit
def multiply_chunk(out, parts, counters, factors, bias, ring, rows, units, slices, columns, each, config: gl.constexpr,
                   PIECES: gl.constexpr, BIAS: gl.constexpr, DEPEND: gl.constexpr):  # fmt: skip
    """The consumer warpgroup: the GEMM of every piece of the block's chunk, and the sums of units it completes."""
    MMA: gl.constexpr = accumulator_layout(config, 0)
    if DEPEND:
        wait_for_predecessor()
    let_successor_start()
    blocks = (slices + config.slices - 1) // config.slices
    at = gl.program_id(0) * each
    end = gl.minimum(at + each, units * blocks)
    step = 0
    while at < end:
        unit = at // blocks
        first = at - unit * blocks
        count = gl.minimum(blocks - first, end - at)
        at += count
        top = load_factors(factors, 0, unit, units, 0, MMA)
        bottom = load_factors(factors, 0, unit, units, 1, MMA)
        sums, step = tile_gemm(ring, step, count, first, config)
        top = sums[0] * top.expand_dims(1)
        bottom = sums[1] * bottom.expand_dims(1)
        if PIECES == 1:
            store_sums(out, top, bias, rows, unit * 128, columns, BIAS)
            store_sums(out, bottom, bias, rows, unit * 128 + 64, columns, BIAS)
        else:
            own = parts + (unit * PIECES + gl.program_id(0) - unit * blocks // each) * (config.tokens * 128)
            store_piece(own, top, rows)
            store_piece(own + 64, bottom, rows)
    if PIECES > 1:
        barrier()
        at = gl.program_id(0) * each
        while at < end:  # after all pieces are stored, so that no GEMM waits for a counter
            unit = at // blocks
            at = (unit + 1) * blocks
            pieces = pieces_of(unit, blocks, each)
            if gl.atomic_add(counters + unit, 1, sem="acq_rel") == pieces - 1:
                gl.store(counters + unit, 0)
                add_pieces(out, parts, bias, rows, unit, pieces, columns, config.tokens, PIECES, BIAS)


@gluon.jit
def store_sums(out, sums, bias, rows, first, columns, BIAS: gl.constexpr):
    """Store an accumulator [64, T], whose features start at `first`, as columns of `out`."""
    MMA: gl.constexpr = sums.type.layout
    n = (first + gl.arange(0, 64, gl.SliceLayout(1, MMA))).expand_dims(1)
    t = gl.arange(0, sums.shape[1], gl.SliceLayout(0, MMA)).expand_dims(0)
    if BIAS:
        sums += gl.load(bias + n)
    gl.store(out + t * columns + n, sums.to(out.dtype.element_ty), mask=(t < rows) & (n < columns))


@gluon.jit
def store_piece(piece, sums, rows):
    """Store an accumulator [64, T] as columns of a piece [T, 128]."""
    MMA: gl.constexpr = sums.type.layout
    n = gl.arange(0, 64, gl.SliceLayout(1, MMA)).expand_dims(1)
    t = gl.arange(0, sums.shape[1], gl.SliceLayout(0, MMA)).expand_dims(0)
    gl.store(piece + t * 128 + n, sums, mask=(t < rows) & (n >= 0))


@gluon.jit
def add_pieces(out, parts, bias, rows, unit, pieces, columns, T: gl.constexpr, PIECES: gl.constexpr,
               BIAS: gl.constexpr):  # fmt: skip
    """The sums of a unit from its pieces, in order. Bypasses L1, since other blocks wrote them."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    t = gl.arange(0, T, gl.SliceLayout(1, LAYOUT)).expand_dims(1)
    c = gl.arange(0, 128, gl.SliceLayout(0, LAYOUT)).expand_dims(0)
    at = parts + unit * (PIECES * T * 128) + t * 128 + c
    total = gl.load(at, mask=(t < rows) & (c >= 0), other=0.0, cache_modifier=".cg")
    for i in gl.static_range(1, PIECES):
        mask = (t < rows) & (c >= 0) & (i < pieces)
        total += gl.load(at + i * (T * 128), mask=mask, other=0.0, cache_modifier=".cg")
    n = unit * 128 + c
    if BIAS:
        total += gl.load(bias + n)
    gl.store(out + t * columns + n, total.to(out.dtype.element_ty), mask=(t < rows) & (n < columns))


@gluon.jit
def few_rows_gemm(
    x_desc, w_desc, s_desc, out, parts, counters, factors, bias, rows, units, slices, scale_blocks, columns, each,
    CODE: gl.constexpr, SCALE: gl.constexpr, GROUP: gl.constexpr, ACT: gl.constexpr, ZERO: gl.constexpr,
    STAGES: gl.constexpr, SLICES: gl.constexpr, PIECES: gl.constexpr, BIAS: gl.constexpr, DEPEND: gl.constexpr,
    PROMOTE: gl.constexpr,
):  # fmt: skip
    """out[row, n] = sum over k of x[row, k] * W[n, k], plus the bias. A chunk has `each` stages, and no unit has more
    than PIECES pieces; PIECES = 1 if chunks are whole units. The height of x's box is that of the tile."""
    form: gl.constexpr = form_of(CODE, SCALE, GROUP, ACT, ZERO)
    T: gl.constexpr = x_desc.block_type.shape[0]
    xb = gl.allocate_shared_memory(x_desc.dtype, [STAGES * SLICES, T, dequant.slice_columns(form)], x_desc.layout)
    config: gl.constexpr = pipeline_config(form, T, STAGES, SLICES, 1, PROMOTE, 0, T, T)
    ring = allocate_ring(xb, w_desc, s_desc, config)
    gl.warp_specialize([
        (multiply_chunk, (out, parts, counters, factors, bias, ring, rows, units, slices, columns, each, config,
                          PIECES, BIAS, DEPEND)),
        (load_chunk, (x_desc, w_desc, s_desc, ring, units, slices, scale_blocks, each, config, DEPEND)),
    ], [1], [24])  # fmt: skip
