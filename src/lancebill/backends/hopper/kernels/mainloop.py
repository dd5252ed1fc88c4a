"""The main loop: the layout of a pipeline stage, and the GEMM of one tile (Gluon)."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from lancebill.backends.gpu.kernels import dequant
from lancebill.backends.gpu.kernels.dequant import dequantise, load_codes, load_scales
from lancebill.backends.gpu.kernels.gluon_names import LARGER_VIEWS, copy_tile, view
from lancebill.backends.gpu.kernels.stage import scale_block_of, stage_blocks, stages_per_block
from lancebill.backends.gpu.kernels.weight_form import BOX
from lancebill.backends.hopper.kernels.pipeline import Ring


@gluon.constexpr_function
def scale_box(form, SLICES):
    """32-bit words in one copy of scales."""
    return min(form.stage_scale_words(SLICES), BOX)


@gluon.constexpr_function
def scale_copies(form, SLICES):
    """Copies needed for a stage's scales."""
    return -(-form.stage_scale_words(SLICES) // BOX)


@gluon.jit
def allocate_ring(x, w_desc, s_desc, config: gl.constexpr):
    """A ring of stages with these token rows and one unit of weights each, and with its barriers ready."""
    form: gl.constexpr = config.form
    STAGES: gl.constexpr = config.stages
    codes = gl.allocate_shared_memory(
        gl.int32, [STAGES * dequant.code_copies(form)] + w_desc.block_type.shape, w_desc.layout
    )
    if dequant.scale_words(form) > 0:
        scales = gl.allocate_shared_memory(
            gl.int32, [STAGES * scale_copies(form, config.slices)] + s_desc.block_type.shape, s_desc.layout
        )
    else:
        scales = codes
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(empty.index(i), count=1)
        mbarrier.init(full.index(i), count=1)
    return Ring(x, codes, scales, empty, full)


@gluon.jit
def copy_weights(w_desc, s_desc, ring, stage, bar, unit, block, slices, scale_blocks, config: gl.constexpr):
    """Start the copies of one unit's codes and scales for a stage; `unit` counts over all experts."""
    form: gl.constexpr = config.form
    SLICES: gl.constexpr = config.slices
    COPIES_OF_CODES: gl.constexpr = dequant.code_copies(form)
    ROWS: gl.constexpr = dequant.box_rows(form, SLICES)
    for i in gl.static_range(COPIES_OF_CODES):
        row = unit * slices * dequant.slice_rows(form) + block * ROWS
        if COPIES_OF_CODES == 3:  # two bits of the codes of all slices, then the third
            row += (block + i) * ROWS if i < 2 else slices * 16
        copy_tile(w_desc, [row, 0], bar, ring.codes.index(stage * COPIES_OF_CODES + i))
    if dequant.scale_words(form) > 0:
        COPIES: gl.constexpr = scale_copies(form, SLICES)
        SHARED: gl.constexpr = stages_per_block(form, SLICES)
        start = unit * scale_blocks
        if SHARED == 1:
            start += block * stage_blocks(form, SLICES)
        elif SHARED > 1:
            start += block // SHARED
        for i in gl.static_range(COPIES):
            at = start * (64 * dequant.scale_words(form)) + i * scale_box(form, SLICES)
            copy_tile(s_desc, [at], bar, ring.scales.index(stage * COPIES + i))


@gluon.constexpr_function
def widths(config):
    """Split a tile's tokens into power-of-two widths: 112 = 64 + 32 + 16."""
    tokens = config.tokens
    if not LARGER_VIEWS:
        return [config.box] * (tokens // config.box)
    return [1 << bit for bit in reversed(range(tokens.bit_length())) if tokens >> bit & 1]


@gluon.constexpr_function
def width_at(config, number):
    return widths(config)[number]


@gluon.constexpr_function
def first_token(config, number):
    """The first token of a width."""
    return sum(widths(config)[:number])


@gluon.constexpr_function
def width_count(config):
    return len(widths(config))


@gluon.constexpr_function
def accumulator_layout(config, number):
    """The layout of one width's accumulators."""
    return gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, widths(config)[number], 32 if dequant.byte_inputs(config.form) else 16]
    )


@gluon.jit
def tokens_at(xb, slice, first: gl.constexpr, COUNT: gl.constexpr, config: gl.constexpr):
    """COUNT tokens of a tile's slice, from `first`. Widths are contiguous, so `jit.join_wgmma` can merge their wgmmas.

    A box of one token is a slice of a decoded row. The other tokens are padding and overlap the slices that follow.
    """
    BOX: gl.constexpr = xb.shape[1]
    if BOX == 1:
        return view(xb.index(slice), xb.dtype, [COUNT, xb.shape[2]], xb.layout)
    box = xb.index(slice * (config.pitch // BOX) + first // BOX)
    if COUNT == BOX:
        return box
    else:
        return view(box, xb.dtype, [COUNT, xb.shape[2]], xb.layout)


@gluon.jit
def load_half(wb, sb, stage, slice: gl.constexpr, half: gl.constexpr, SLICES: gl.constexpr, form: gl.constexpr):
    """Packed words of a half of a slice, and their scales (the words again if the form has no scales)."""
    codes = load_codes(wb, stage * dequant.code_copies(form), slice, half, SLICES, form)
    if dequant.scale_words(form) > 0:
        BLOCK: gl.constexpr = scale_block_of(form, SLICES, slice)
        PER_BOX: gl.constexpr = scale_box(form, SLICES) // (64 * dequant.scale_words(form))
        box = stage * scale_copies(form, SLICES) + BLOCK // PER_BOX
        return codes, load_scales(sb, box, BLOCK % PER_BOX, half, form)
    else:
        return codes, codes


@gluon.jit
def load_slice(wb, sb, stage, turn: gl.constexpr, SLICES: gl.constexpr, UNITS: gl.constexpr, form: gl.constexpr):
    """(codes, scales) of both halves of one turn. A stage has one turn per slice and unit, units innermost."""
    at = stage * UNITS + turn % UNITS
    return load_half(wb, sb, at, turn // UNITS, 0, SLICES, form), load_half(wb, sb, at, turn // UNITS, 1, SLICES, form)


@gluon.jit
def zero_accumulators(HALVES: gl.constexpr, TYPE: gl.constexpr, config: gl.constexpr):
    """Zero accumulators of HALVES halves, width after width: [64, width] each."""
    sums = ()
    for i in gl.static_range(width_count(config)):
        for _ in gl.static_range(HALVES):
            sums += (gl.zeros([64, width_at(config, i)], TYPE, accumulator_layout(config, i)),)
    return sums


@gluon.jit
def start_width(sums, a, xb, slice, number: gl.constexpr, config: gl.constexpr, ADD: gl.constexpr):
    """Issue the wgmma of one width without waiting."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, sums.type.layout, 4 if dequant.byte_inputs(config.form) else 2)
    x = tokens_at(xb, slice, first_token(config, number), width_at(config, number), config)
    a = gl.convert_layout(a, OPERAND, assert_trivial=True)
    return warpgroup_mma(a, x.permute((1, 0)), sums, use_acc=ADD, is_async=True)


@gluon.jit
def start_half(sums, half: gl.constexpr, a, xb, slice, HALVES: gl.constexpr, config: gl.constexpr, ADD: gl.constexpr):
    """Issue one half's wgmmas, one per width; `jit.join_wgmma` merges them into one instruction."""
    for i in gl.static_range(width_count(config)):
        started = start_width(sums[i * HALVES + half], a, xb, slice, i, config, ADD)
        sums = sums[: i * HALVES + half] + (started,) + sums[i * HALVES + half + 1 :]
    return sums


@gluon.jit
def multiply(ring, step, blocks, first, config: gl.constexpr):
    """The GEMM of one tile: accumulators of every half of its units, for each width.

    The next half is dequantised while one half's wgmma runs. Registers that an outstanding wgmma reads are never
    written, because each dequantisation waits for the wgmma before the last. The packed words of the next turn are
    loaded from shared memory while the current turn is multiplied. A stage is released to the producer after the first
    wgmma of the next stage was issued.
    """
    form: gl.constexpr = config.form
    STAGES: gl.constexpr = config.stages
    SLICES: gl.constexpr = config.slices
    UNITS: gl.constexpr = config.units
    HALVES: gl.constexpr = 2 * UNITS
    TURNS: gl.constexpr = SLICES * UNITS
    sums = zero_accumulators(HALVES, dequant.product_type(form), config)
    for block in range(blocks):
        stage = step % STAGES
        mbarrier.wait(ring.full.index(stage), (step // STAGES) & 1)
        ahead = load_slice(ring.codes, ring.scales, stage, 0, SLICES, UNITS, form)
        for turn in gl.static_range(TURNS):
            current = ahead
            if turn + 1 < TURNS:
                ahead = load_slice(ring.codes, ring.scales, stage, turn + 1, SLICES, UNITS, form)
            slice = (first + block if config.row_slices > 0 else stage) * SLICES + turn // UNITS
            for half in gl.static_range(2):
                a = dequantise(current[half][0], current[half][1], accumulator_layout(config, 0), form)
                sums = start_half(sums, turn % UNITS * 2 + half, a, ring.x, slice, HALVES, config, True)
                sums = warpgroup_mma_wait(1, deps=sums)
                if turn == 0 and half == 0:
                    mbarrier.arrive(ring.empty.index((step + STAGES - 1) % STAGES), count=1, pred=block > 0)
        step += 1
    sums = warpgroup_mma_wait(0, deps=sums)
    mbarrier.arrive(ring.empty.index((step + STAGES - 1) % STAGES), count=1, pred=blocks > 0)
    return sums, step


@gluon.jit
def compute_now(x):
    """Force x to be computed here. Otherwise the compiler delays it and keeps its operands in registers."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def promote_sums(totals, half: gl.constexpr, sums, scales, config: gl.constexpr):
    """Add a half's sums of one slice to its totals, times the group's scales if the form is promoted."""
    form: gl.constexpr = config.form
    for i in gl.static_range(width_count(config)):
        more = sums[i].to(gl.float32)
        if dequant.promoted(form):
            more = more * dequant.row_factors(scales, accumulator_layout(config, i), form).expand_dims(1)
        totals = totals[: 2 * i + half] + (compute_now(totals[2 * i + half] + more),) + totals[2 * i + half + 1 :]
    return totals


@gluon.jit
def wait_for(sums):
    """Wait for all wgmmas; always returns a tuple, unlike `warpgroup_mma_wait` for a single accumulator."""
    if len(sums) == 1:
        return (warpgroup_mma_wait(0, deps=sums),)
    else:
        return warpgroup_mma_wait(0, deps=sums)


@gluon.jit
def multiply_promoted(ring, step, blocks, first, config: gl.constexpr):
    """`multiply` with promotion: every slice is summed separately and added to fp32 totals.

    The tensor cores accumulate fp8 products with about 14 bits, so long sums lose precision. Promotion also lets a
    group's scale multiply the sum of its columns. Both halves share one extra set of accumulators, because two sets do
    not fit in registers. The other blocks of the SM hide the waits.
    """
    form: gl.constexpr = config.form
    STAGES: gl.constexpr = config.stages
    SLICES: gl.constexpr = config.slices
    LAYOUT: gl.constexpr = accumulator_layout(config, 0)
    totals = zero_accumulators(2, gl.float32, config)
    sums = zero_accumulators(1, dequant.product_type(form), config)
    for block in range(blocks):
        stage = step % STAGES
        mbarrier.wait(ring.full.index(stage), (step // STAGES) & 1)
        for j in gl.static_range(SLICES):
            upper = load_half(ring.codes, ring.scales, stage, j, 0, SLICES, form)
            lower = load_half(ring.codes, ring.scales, stage, j, 1, SLICES, form)
            slice = (first + block if config.row_slices > 0 else stage) * SLICES + j
            a = dequantise(upper[0], upper[1], LAYOUT, form)
            sums = start_half(sums, 0, a, ring.x, slice, 1, config, False)
            b = dequantise(lower[0], lower[1], LAYOUT, form)  # overlaps with the first half's wgmma
            sums = wait_for(sums)
            totals = promote_sums(totals, 0, sums, upper[1], config)
            sums = start_half(sums, 0, b, ring.x, slice, 1, config, False)
            sums = wait_for(sums)
            totals = promote_sums(totals, 1, sums, lower[1], config)
        mbarrier.arrive(ring.empty.index(stage), count=1)
        step += 1
    return totals, step


@gluon.jit
def tile_gemm(ring, step, blocks, first, config: gl.constexpr):
    """The GEMM of one tile: its accumulators and the next step of the ring. `blocks` is the number of stages it reads.

    With `row_slices` the tokens are not part of the ring: `ring.x` holds all their slices, and the GEMM starts at stage
    `first` of them.
    """
    if config.promote:
        gl.static_assert(config.units == 1)
        return multiply_promoted(ring, step, blocks, first, config)
    else:
        return multiply(ring, step, blocks, first, config)
