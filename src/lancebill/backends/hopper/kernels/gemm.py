"""The grouped GEMM of every weight form on Hopper: one pipeline, one scheduler (Gluon).

    out[row, n] = epilogue(sum over k of x[row, k] * W[expert(row), n, k])

The operands are swapped: weights are wgmma's A operand, dequantised straight into registers, and tokens are B, in
swizzled shared memory. So a tile can have any multiple of 8 tokens, from 8 to 160, and one kernel serves decode and
prefill. A block is one consumer warpgroup and one producer warp, connected by a ring of stages. Two to four blocks
share an SM and hide each other's latencies. The grid is persistent. Block p starts with tile p of a list made on the
device (`dispatch_combine`), so the host never reads the routing. Further tiles come from a global counter: some SMs are
slower than others, and a fixed assignment would leave blocks idle. A tile's result does not depend on the block.

A tile is one or two units (128 features each) by some tokens. Tensors have power-of-two sizes, so 96 tokens are two
accumulators, for 64 and for 32 (`mainloop.widths`). Two units share the tokens they read: with few tokens per tile, L2
bandwidth is the limit and the accumulators are small. A launch may have tiles of several sizes: a branch per size costs
less than a launch per size.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from lancebill.backends.gpu.kernels import dequant
from lancebill.backends.gpu.kernels.dequant import form_of
from lancebill.backends.gpu.kernels.epilogue import epilogue_config, load_targets, scale_rows, store_rows
from lancebill.backends.gpu.kernels.gluon_names import copy_tile
from lancebill.backends.gpu.kernels.tile_sizes import largest_size, size_count, size_of
from lancebill.backends.hopper.kernels.mainloop import (
    copy_weights,
    first_token,
    scale_copies,
    tile_gemm,
    tokens_at,
    width_at,
    width_count,
)
from lancebill.backends.hopper.kernels.pipeline import Ring, pipeline_config

# DEPEND: when a kernel waits for its predecessor (programmatic dependent launch). 0: never, a plain launch. 1: before
# it reads. 2: only at its end, for the later tile classes of a GEMM, since their inputs are older than the predecessor.


@gluon.jit
def wait_for_predecessor():
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def let_successor_start():
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def place_of(index, units, count, TOGETHER: gl.constexpr):
    """Which entry of the tile list, and which unit, the tile `index` of `count` is.

    Entries of an expert follow each other. One after the other, all units of each, its weights are read from L2 from
    the second entry on, unless they do not fit. Then TOGETHER entries take turns at every unit, so that each unit is
    read from memory once for all of them.
    """
    if TOGETHER == 1:
        return index // units, index % units
    else:
        first = index // (TOGETHER * units) * TOGETHER
        at = index - first * units
        entries = gl.minimum(count // units - first, TOGETHER)
        return first + at % entries, at // entries


@gluon.jit
def tile_at(tiles, index, units, count, TOGETHER: gl.constexpr):
    """Tile index to (expert, unit, first row, rows, size of the tile)."""
    entry, unit = place_of(index, units, count, TOGETHER)
    record = tiles + entry * 4
    return gl.load(record), unit, gl.load(record + 1), gl.load(record + 2), gl.load(record + 3)


@gluon.constexpr_function
def config_of(config, size):
    """The pipeline for one of the launch's tile sizes."""
    return config.with_tokens(size)


@gluon.constexpr_function
def tokens_of(config):
    return config.tokens


@gluon.constexpr_function
def stage_bytes(config):
    return config.stage_bytes


@gluon.jit
def publish_next_tile(next_tiles, next_ready, turn, index, TURNS: gl.constexpr):
    """The producer passes the index of its next tile to the consumer. `turn` counts the block's tiles."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    next_tiles.index(turn % TURNS).store(gl.full([1], index, gl.int32, ONE))
    mbarrier.arrive(next_ready.index(turn % TURNS), count=1)


@gluon.jit
def read_next_tile(next_tiles, next_ready, turn, TURNS: gl.constexpr):
    """The consumer reads the index of the tile after `turn`."""
    ALL: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    mbarrier.wait(next_ready.index(turn % TURNS), (turn // TURNS) & 1)
    return gl.max(next_tiles.index(turn % TURNS).load(ALL), 0)


@gluon.jit
def prefetch_weights(w_desc, s_desc, ring, e, group, units, slices, scale_blocks, config: gl.constexpr):
    """Load the weights of a tile's first stages; returns how many. Its tokens follow in `load_tile`."""
    UNITS: gl.constexpr = config.units
    ahead = gl.minimum((slices + config.slices - 1) // config.slices, config.stages)
    for i in range(ahead):
        bar = ring.full.index(i)
        mbarrier.expect(bar, stage_bytes(config))
        for u in gl.static_range(UNITS):
            unit = e * units + group * UNITS + u
            copy_weights(w_desc, s_desc, ring, i * UNITS + u, bar, unit, i, slices, scale_blocks, config)
    return ahead


@gluon.jit
def load_tile(x_desc, w_desc, s_desc, ring, step, ahead, e, group, row, units, slices, scale_blocks,
              config: gl.constexpr):  # fmt: skip
    """Load weights and token rows of one tile, stage by stage. The weights of steps before `ahead` were prefetched."""
    STAGES: gl.constexpr = config.stages
    SLICES: gl.constexpr = config.slices
    UNITS: gl.constexpr = config.units
    BOX: gl.constexpr = config.box
    for block in range((slices + SLICES - 1) // SLICES):
        stage = step % STAGES
        bar = ring.full.index(stage)
        if step >= ahead:
            mbarrier.wait(ring.empty.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(bar, stage_bytes(config))
            for u in gl.static_range(UNITS):
                unit = e * units + group * UNITS + u
                copy_weights(w_desc, s_desc, ring, stage * UNITS + u, bar, unit, block, slices, scale_blocks, config)
        for j in gl.static_range(SLICES):
            k = (block * SLICES + j) * dequant.slice_columns(config.form)
            for first in gl.static_range(0, tokens_of(config), BOX):
                copy_tile(x_desc, [row + first, k], bar, tokens_at(ring.x, stage * SLICES + j, first, BOX, config))
        step += 1
    return step


@gluon.jit
def producer(x_desc, w_desc, s_desc, tiles, tile_count, taken, ring, next_tiles, next_ready, units, slices,
             scale_blocks, config: gl.constexpr, SIZES: gl.constexpr, TOGETHER: gl.constexpr, DEPEND: gl.constexpr,
             PREFETCH: gl.constexpr):  # fmt: skip
    """The producer warp: loads weights and token rows of every tile with TMA.

    `taken` counts the tiles taken after each block's first. The counter is incremented once all copies of the current
    tile are in flight, since the atomic takes as long as a copy.
    PREFETCH loads the first stages' weights before the predecessor ends. The tile list must be older than the
    predecessor.
    """
    blocks = (slices + config.slices - 1) // config.slices
    groups = units // config.units
    if DEPEND == 1 and not PREFETCH:
        wait_for_predecessor()
    count = gl.load(tile_count) * groups
    ahead = 0
    if PREFETCH:
        if gl.program_id(0) < count:
            e, group, _, _, size = tile_at(tiles, gl.program_id(0), groups, count, TOGETHER)
            for i in gl.static_range(size_count(SIZES)):
                if size_count(SIZES) == 1 or size == size_of(SIZES, i):
                    ahead = prefetch_weights(w_desc, s_desc, ring, e, group, units, slices, scale_blocks,
                                             config_of(config, size_of(SIZES, i)))  # fmt: skip
        wait_for_predecessor()
    step = 0
    index = gl.program_id(0)
    while index < count:
        e, group, row, _, size = tile_at(tiles, index, groups, count, TOGETHER)
        for i in gl.static_range(size_count(SIZES)):
            if size_count(SIZES) == 1 or size == size_of(SIZES, i):
                step = load_tile(x_desc, w_desc, s_desc, ring, step, ahead, e, group, row, units, slices, scale_blocks,
                                 config_of(config, size_of(SIZES, i)))  # fmt: skip
        index = gl.num_programs(0) + gl.atomic_add(taken, 1, sem="relaxed")
        publish_next_tile(next_tiles, next_ready, step // blocks - 1, index, config.stages + 1)


@gluon.jit
def finish_unit(out, slots, staging, top, bottom, factors, bias, token_scales, row, rows, unit, columns, limit, alpha,
                beta, T: gl.constexpr, form: gl.constexpr, epilogue: gl.constexpr):  # fmt: skip
    """Epilogue of one unit: accumulators to T rows of `out`."""
    KIND: gl.constexpr = epilogue.kind
    ACTIVATION: gl.constexpr = epilogue.activation
    BIAS: gl.constexpr = epilogue.bias
    CHUNK: gl.constexpr = min(T, staging.shape[0])
    WIDTH: gl.constexpr = 64 if KIND == "gated" else 128
    QUANTISED: gl.constexpr = dequant.byte_inputs(form)
    UNIT: gl.constexpr = dequant.sum_unit(form)
    targets = load_targets(slots, row, rows, T, CHUNK, KIND)
    top = scale_rows(top, factors, bias, token_scales, row, rows, BIAS, QUANTISED, UNIT)
    bottom = scale_rows(bottom, factors + 64, bias + 64, token_scales, row, rows, BIAS, QUANTISED, UNIT)
    store_rows(out, targets, staging.slice(0, CHUNK, 0), top, bottom, rows, unit * WIDTH, columns, limit, alpha, beta,
               CHUNK, KIND, ACTIVATION)  # fmt: skip


@gluon.jit
def compute_tile(out, slots, factors, bias, token_scales, ring, staging, step, e, group, row, rows, units, blocks,
                 columns, limit, alpha, beta, config: gl.constexpr, epilogue: gl.constexpr):  # fmt: skip
    """GEMM and epilogue of one tile; returns the next step of the ring."""
    UNITS: gl.constexpr = config.units
    form: gl.constexpr = config.form
    sums, step = tile_gemm(ring, step, blocks, 0, config)
    for u in gl.static_range(UNITS):
        unit = group * UNITS + u
        at = (e * units + unit) * 128
        for i in gl.static_range(width_count(config) - 1, -1, -1):  # smallest first, which frees registers early
            top, bottom = sums[2 * (UNITS * i + u)], sums[2 * (UNITS * i + u) + 1]
            first = first_token(config, i)
            finish_unit(out, slots, staging, top, bottom, factors + at, bias + at, token_scales, row + first,
                        rows - first, unit, columns, limit, alpha, beta, width_at(config, i), form,
                        epilogue)  # fmt: skip
    return step


@gluon.jit
def consumer(out, slots, factors, bias, token_scales, tiles, tile_count, ring, staging, next_tiles, next_ready, units,
             slices, columns, limit, alpha, beta, config: gl.constexpr, epilogue: gl.constexpr, SIZES: gl.constexpr,
             TOGETHER: gl.constexpr, DEPEND: gl.constexpr):  # fmt: skip
    """The consumer warpgroup: GEMM and epilogue of every tile."""
    if DEPEND == 1:
        wait_for_predecessor()
    if DEPEND > 0:
        let_successor_start()
    blocks = (slices + config.slices - 1) // config.slices
    groups = units // config.units
    count = gl.load(tile_count) * groups
    step = 0
    index = gl.program_id(0)
    while index < count:
        e, group, row, rows, size = tile_at(tiles, index, groups, count, TOGETHER)
        for i in gl.static_range(size_count(SIZES)):
            if size_count(SIZES) == 1 or size == size_of(SIZES, i):
                step = compute_tile(out, slots, factors, bias, token_scales, ring, staging, step, e, group, row, rows,
                                    units, blocks, columns, limit, alpha, beta, config_of(config, size_of(SIZES, i)),
                                    epilogue)  # fmt: skip
        index = read_next_tile(next_tiles, next_ready, step // blocks - 1, config.stages + 1)
    if DEPEND == 2:
        wait_for_predecessor()


@gluon.jit
def grouped_gemm(
    x_desc, w_desc, s_desc, out, slots, factors, bias, token_scales, tiles, tile_count, taken, units, slices,
    scale_blocks, columns, limit, alpha, beta, CODE: gl.constexpr, SCALE: gl.constexpr, GROUP: gl.constexpr,
    ACT: gl.constexpr, ZERO: gl.constexpr, SIZES: gl.constexpr, STAGES: gl.constexpr, SLICES: gl.constexpr,
    UNITS: gl.constexpr, TOGETHER: gl.constexpr, KIND: gl.constexpr, ACTIVATION: gl.constexpr, BIAS: gl.constexpr,
    DEPEND: gl.constexpr, PREFETCH: gl.constexpr, PROMOTE: gl.constexpr,
):  # fmt: skip
    """One GEMM of the layer over one tile list, with tiles of these sizes (a byte each).

    The sizes of matrices are run-time arguments, so one binary serves all shapes.
    """
    form: gl.constexpr = form_of(CODE, SCALE, GROUP, ACT, ZERO)
    COLUMNS: gl.constexpr = dequant.slice_columns(form)
    BOX: gl.constexpr = x_desc.block_type.shape[0]
    PITCH: gl.constexpr = largest_size(SIZES)
    xb = gl.allocate_shared_memory(x_desc.dtype, [STAGES * SLICES * (PITCH // BOX), BOX, COLUMNS], x_desc.layout)
    wb = gl.allocate_shared_memory(
        gl.int32, [STAGES * UNITS * dequant.code_copies(form)] + w_desc.block_type.shape, w_desc.layout
    )
    if dequant.scale_words(form) > 0:
        sb = gl.allocate_shared_memory(
            gl.int32, [STAGES * UNITS * scale_copies(form, SLICES)] + s_desc.block_type.shape, s_desc.layout
        )
    else:
        sb = wb
    config: gl.constexpr = pipeline_config(form, PITCH, STAGES, SLICES, UNITS, PROMOTE, 0, BOX, PITCH)
    epilogue: gl.constexpr = epilogue_config(KIND, ACTIVATION, BIAS)
    CHUNK: gl.constexpr = min(width_at(config, 0), 32)
    WIDTH: gl.constexpr = 64 if KIND == "gated" else 128
    STAGING: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, WIDTH], out.dtype.element_ty)
    staging = gl.allocate_shared_memory(out.dtype.element_ty, [CHUNK, WIDTH], STAGING)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    # One more than stages: the producer is at most STAGES tiles ahead of the tile whose successor is still unread.
    next_tiles = gl.allocate_shared_memory(gl.int32, [STAGES + 1, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    next_ready = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES + 1):
        mbarrier.init(next_ready.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(empty.index(i), count=1)
        mbarrier.init(full.index(i), count=1)
    ring = Ring(xb, wb, sb, empty, full)
    gl.warp_specialize([
        (consumer, (out, slots, factors, bias, token_scales, tiles, tile_count, ring, staging, next_tiles, next_ready,
                    units, slices, columns, limit, alpha, beta, config, epilogue, SIZES, TOGETHER, DEPEND)),
        (producer, (x_desc, w_desc, s_desc, tiles, tile_count, taken, ring, next_tiles, next_ready, units, slices,
                    scale_blocks, config, SIZES, TOGETHER, DEPEND, PREFETCH)),
    ], [1], [24])  # fmt: skip
