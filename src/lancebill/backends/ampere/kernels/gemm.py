"""The grouped GEMM of every weight form with mma.sync: one pipeline, one scheduler (Gluon).

    out[row, n] = epilogue(sum over k of x[row, k] * W[expert(row), n, k])

A tile is one or two units (128 features each) by some tokens; two units share the tokens they read. A block has four
warps, which copy and multiply; several blocks share an SM and hide each other's latencies. The grid is persistent:
block p starts with tile p of a list made on the device (`dispatch_combine`), further tiles come from a global counter,
since some SMs are slower than others. A tile's result does not depend on the block. The copies of a tile's first stages
start before the previous tile ends.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from lancebill.backends.ampere.kernels.mainloop import chunk_count, chunk_of, multiply_stage, zero_sums
from lancebill.backends.ampere.kernels.pipeline import (
    allocate_ring,
    copy_rows,
    copy_weights,
    power_of_two,
    tile_config,
    with_tokens,
)
from lancebill.backends.gpu.kernels import dequant
from lancebill.backends.gpu.kernels.epilogue import load_targets, scale_rows, store_rows
from lancebill.backends.gpu.kernels.tile_sizes import largest_size, size_count, size_of


@gluon.jit
def tile_at(tiles, index, count, groups):
    """Tile index to (expert, group of units, first row, rows); no rows if there is no such tile.

    Consecutive tiles share an expert, so its weights stay in L2. A tile is read twice, before its copies and before its
    epilogue: its numbers would take registers from the multiplication.
    """
    record = tiles + index // groups * 4
    exists = index < count
    e = gl.load(record, mask=exists, other=0)
    row = gl.load(record + 1, mask=exists, other=0)
    return e, index % groups, row, gl.load(record + 2, mask=exists, other=0)


@gluon.jit
def request_tile(taken):
    """Ask the counter for the block's next tile. Only the first thread's number is valid; nobody waits for it here."""
    LANES: gl.constexpr = dequant.lane_layout()
    thread = gl.arange(0, 128, LANES)
    return gl.atomic_add(taken + thread * 0, thread * 0 + 1, mask=thread == 0, sem="relaxed")


@gluon.jit
def receive_tile(ticket, mailbox):
    """The index of the requested tile, for all threads."""
    mailbox.store(ticket)
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.num_programs(0) + gl.max(mailbox.slice(0, 1, 0).load(ONE), 0)


@gluon.jit
def copy_stage(arrays, ring, stage, tile, block, units, slices, scale_blocks, width, config: gl.constexpr):
    """Start all copies of one stage of a tile. A tile without rows gets zeros and reads nothing."""
    x, w, s = arrays
    e, group, row, rows = tile
    there = gl.where(rows > 0, slices, 0)
    copy_weights(w, s, ring, stage, e * units + group * config.units, block, there, scale_blocks, config)
    copy_rows(x, ring, stage, block, row, rows, width)
    async_copy.commit_group()


@gluon.jit
def multiply_tile(arrays, ring, mailbox, tiles, taken, count, copied, step, units, slices, scale_blocks, width,
                  config: gl.constexpr, largest: gl.constexpr):  # fmt: skip
    """The sums of one tile, whose first AHEAD stages are `copied`. Also starts the copies of the next tile.

    Copies stay AHEAD stages ahead of the multiplication. Returns the sums, the next tile, its index, and the next step
    of the ring.
    """
    STAGES: gl.constexpr = config.stages
    AHEAD: gl.constexpr = STAGES - 1
    ticket = request_tile(taken)
    sums = zero_sums(config)
    index = 0
    block = AHEAD
    end = (slices + config.slices - 1) // config.slices
    for part in range(2):
        if part == 1:
            index = receive_tile(ticket, mailbox)
            copied = tile_at(tiles, index, count, units // config.units)
            block = 0
            end = AHEAD
        while block < end:
            async_copy.wait_group(AHEAD - 1)
            copy_stage(arrays, ring, (step + AHEAD) % STAGES, copied, block, units, slices, scale_blocks, width,
                       largest)  # fmt: skip
            sums = multiply_stage(ring, step % STAGES, sums, config)
            step += 1
            block += 1
    return sums, copied, index, step


@gluon.jit
def finish_tile(out, slots, staging, sums, factors, bias, token_scales, tile, units, columns, limit, alpha, beta,
                config: gl.constexpr, KIND: gl.constexpr, ACTIVATION: gl.constexpr, BIAS: gl.constexpr):  # fmt: skip
    """Epilogue of one tile: accumulators to rows of `out`."""
    e, group, row, rows = tile
    CHUNK: gl.constexpr = chunk_of(config)
    UNITS: gl.constexpr = config.units
    WIDTH: gl.constexpr = 64 if KIND == "gated" else 128
    QUANTISED: gl.constexpr = dequant.byte_inputs(config.form)
    UNIT: gl.constexpr = dequant.sum_unit(config.form)
    staging = staging.slice(0, CHUNK, 0)
    for i in gl.static_range(chunk_count(config)):
        first, more = row + i * CHUNK, rows - i * CHUNK
        targets = load_targets(slots, first, more, CHUNK, CHUNK, KIND)
        for u in gl.static_range(UNITS):
            unit = group * UNITS + u
            at = (e * units + unit) * 128
            top, bottom = sums[2 * (UNITS * i + u)], sums[2 * (UNITS * i + u) + 1]
            top = scale_rows(top, factors + at, bias + at, token_scales, first, more, BIAS, QUANTISED, UNIT)
            at += 64
            bottom = scale_rows(bottom, factors + at, bias + at, token_scales, first, more, BIAS, QUANTISED, UNIT)
            store_rows(out, targets, staging, top, bottom, more, unit * WIDTH, columns, limit, alpha, beta, CHUNK, KIND,
                       ACTIVATION)  # fmt: skip


@gluon.jit
def grouped_gemm(
    x, w, s, out, slots, factors, bias, token_scales, tiles, tile_count, taken, units, slices, scale_blocks, width,
    columns, limit, alpha, beta, CODE: gl.constexpr, SCALE: gl.constexpr, GROUP: gl.constexpr, ACT: gl.constexpr,
    ZERO: gl.constexpr, SIZES: gl.constexpr, STAGES: gl.constexpr, SLICES: gl.constexpr, UNITS: gl.constexpr,
    KIND: gl.constexpr, ACTIVATION: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """One GEMM of the layer over one tile list, with tiles of these sizes (a byte each).

    `width`: columns of a row of x. A matrix must have at least STAGES - 1 stages.
    """
    form: gl.constexpr = dequant.form_of(CODE, SCALE, GROUP, ACT, ZERO)
    largest: gl.constexpr = tile_config(form, largest_size(SIZES), STAGES, SLICES, UNITS)
    ring = allocate_ring(x.dtype.element_ty, largest)
    mailbox = gl.allocate_shared_memory(gl.int32, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    CHUNK: gl.constexpr = min(power_of_two(largest_size(SIZES)), 32)
    WIDTH: gl.constexpr = 64 if KIND == "gated" else 128
    STAGING: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, WIDTH], out.dtype.element_ty)
    staging = gl.allocate_shared_memory(out.dtype.element_ty, [CHUNK, WIDTH], STAGING)
    arrays = (x, w, s)
    groups = units // UNITS
    count = gl.load(tile_count) * groups
    index = gl.program_id(0)
    copied = tile_at(tiles, index, count, groups)
    for i in gl.static_range(STAGES - 1):
        copy_stage(arrays, ring, i, copied, i, units, slices, scale_blocks, width, largest)
    step = 0
    while index < count:
        size = gl.load(tiles + index // groups * 4 + 3)
        following = index
        for i in gl.static_range(size_count(SIZES)):
            if size_count(SIZES) == 1 or size == size_of(SIZES, i):
                config: gl.constexpr = with_tokens(largest, size_of(SIZES, i))
                sums, copied, following, step = multiply_tile(
                    arrays, ring, mailbox, tiles, taken, count, copied, step, units, slices, scale_blocks, width,
                    config, largest)  # fmt: skip
                tile = tile_at(tiles, index, count, groups)
                finish_tile(out, slots, staging, sums, factors, bias, token_scales, tile, units, columns, limit, alpha,
                            beta, config, KIND, ACTIVATION, BIAS)  # fmt: skip
        index = following
