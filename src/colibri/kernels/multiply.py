"""What a pipeline stage holds, and the product of one tile: stages in, accumulators out (Gluon)."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from colibri.kernels import dequant
from colibri.kernels.dequant import dequantise, load_codes, load_scales
from colibri.kernels.forms import BOX
from colibri.kernels.renamed import copy_tile


@gluon.constexpr_function
def stage_blocks(form, SLICES):
    return form.stage_blocks(SLICES)


@gluon.constexpr_function
def block_of(form, SLICES, slice):
    """The stage's scale block that a slice belongs to."""
    if form.block_columns == 0:
        return 0
    return min(slice * form.slice_columns // form.block_columns, form.stage_blocks(SLICES) - 1)


@gluon.constexpr_function
def stages_per_block(form, SLICES):
    """Stages that read the same scale block (0: all of them)."""
    return 0 if form.block_columns == 0 else max(1, form.block_columns // (SLICES * form.slice_columns))


@gluon.constexpr_function
def stage_scale_words(form, SLICES):
    return form.stage_scale_words(SLICES)


@gluon.constexpr_function
def scale_box(form, SLICES):
    """Words one copy of scales brings."""
    return min(form.stage_scale_words(SLICES), BOX)


@gluon.constexpr_function
def scale_copies(form, SLICES):
    """Copies that bring a stage's scales."""
    return -(-form.stage_scale_words(SLICES) // BOX)


@gluon.jit
def copy_weights(w_desc, s_desc, wb, sb, stage, bar, unit, block, slices, scale_blocks, SLICES: gl.constexpr,
                 form: gl.constexpr):  # fmt: skip
    """Start the copies of one unit's codes and scales for a stage; `unit` counts over all experts."""
    copy_tile(w_desc, [(unit * slices + block * SLICES) * dequant.slice_rows(form), 0], bar, wb.index(stage))
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
            copy_tile(s_desc, [at], bar, sb.index(stage * COPIES + i))


@gluon.jit
def load_half(wb, sb, stage, slice: gl.constexpr, half: gl.constexpr, SLICES: gl.constexpr, form: gl.constexpr):
    """Packed words of a half of a slice, and their scales (the words again where there are none)."""
    codes = load_codes(wb.index(stage), slice, half, form)
    if dequant.scale_words(form) > 0:
        BLOCK: gl.constexpr = block_of(form, SLICES, slice)
        PER_BOX: gl.constexpr = scale_box(form, SLICES) // (64 * dequant.scale_words(form))
        box = sb.index(stage * scale_copies(form, SLICES) + BLOCK // PER_BOX)
        return codes, load_scales(box, BLOCK % PER_BOX, half, form)
    else:
        return codes, codes


@gluon.jit
def load_slice(wb, sb, stage, turn: gl.constexpr, SLICES: gl.constexpr, UNITS: gl.constexpr, form: gl.constexpr):
    """(codes, scales) of both halves of a turn of a stage: slices in order, in each its units."""
    at = stage * UNITS + turn % UNITS
    return load_half(wb, sb, at, turn // UNITS, 0, SLICES, form), load_half(wb, sb, at, turn // UNITS, 1, SLICES, form)


@gluon.jit
def add_half(sums, half: gl.constexpr, a, x):
    """One half's product into its accumulator, without waiting."""
    return sums[:half] + (warpgroup_mma(a, x, sums[half], is_async=True),) + sums[half + 1 :]


@gluon.jit
def multiply(xb, x2b, wb, sb, empty, full, step, blocks, T: gl.constexpr, U: gl.constexpr, STAGES: gl.constexpr,
             SLICES: gl.constexpr, UNITS: gl.constexpr, form: gl.constexpr):  # fmt: skip
    """The product of one tile: accumulators of every half of its units, [64, T] each and [64, U] each.

    While one half's wgmma runs, the next is dequantised: registers an outstanding wgmma reads are never
    written, because each dequantisation waits for the wgmma before the last. Packed words of the next turn are
    read from shared memory while this one is multiplied. A stage goes back to the feeder once the first
    wgmma of the next stage has followed it.
    """
    DEPTH: gl.constexpr = 32 if dequant.narrow(form) else 16
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T, DEPTH])
    THIN: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, U if U > 0 else 8, DEPTH])
    KWIDTH: gl.constexpr = 4 if dequant.narrow(form) else 2
    HALVES: gl.constexpr = 2 * UNITS
    TURNS: gl.constexpr = SLICES * UNITS
    sums = ()
    for _ in gl.static_range(HALVES):
        sums += (gl.zeros([64, T], gl.float32, WIDE),)
    if U > 0:
        for _ in gl.static_range(HALVES):
            sums += (gl.zeros([64, U], gl.float32, THIN),)
    for block in range(blocks):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), (step // STAGES) & 1)
        ahead = load_slice(wb, sb, stage, 0, SLICES, UNITS, form)
        for turn in gl.static_range(TURNS):
            held = ahead
            if turn + 1 < TURNS:
                ahead = load_slice(wb, sb, stage, turn + 1, SLICES, UNITS, form)
            at = stage * SLICES + turn // UNITS
            for half in gl.static_range(2):
                a = dequantise(held[half][0], held[half][1], WIDE, form)
                sums = add_half(sums, turn % UNITS * 2 + half, a, xb.index(at).permute((1, 0)))
                if U > 0:
                    a = gl.convert_layout(a, gl.DotOperandLayout(0, THIN, KWIDTH), assert_trivial=True)
                    sums = add_half(sums, HALVES + turn % UNITS * 2 + half, a, x2b.index(at).permute((1, 0)))
                sums = warpgroup_mma_wait(2 if U > 0 else 1, deps=sums)
                if turn == 0 and half == 0:
                    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=block > 0)
        step += 1
    sums = warpgroup_mma_wait(0, deps=sums)
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=blocks > 0)
    return sums, step


@gluon.jit
def carry(total, sums, scales, form: gl.constexpr):
    """Sums of a slice into the total, times their rows' factors where the form has such."""
    if dequant.promoted(form):
        MMA: gl.constexpr = total.type.layout
        return total + sums * dequant.row_factors(scales, MMA, form).expand_dims(1)
    else:
        return total + sums


@gluon.jit
def multiply_promoted(xb, x2b, wb, sb, empty, full, step, blocks, T: gl.constexpr, U: gl.constexpr,
                      STAGES: gl.constexpr, SLICES: gl.constexpr, form: gl.constexpr):  # fmt: skip
    """`multiply` where every slice is summed by itself and carried over in fp32.

    The tensor cores add products of fp8 numbers in about 14 bits, so long sums lose what short ones keep; and a
    group's scale can wait until its own columns are summed. Both halves share one further set of accumulators:
    two do not fit. What waits here is hidden by the other blocks of the SM.
    """
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T, 32])
    THIN: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, U if U > 0 else 8, 32])
    top = gl.zeros([64, T], gl.float32, WIDE)
    bottom = gl.zeros([64, T], gl.float32, WIDE)
    p = gl.zeros([64, T], gl.float32, WIDE)
    if U > 0:
        top2 = gl.zeros([64, U], gl.float32, THIN)
        bottom2 = gl.zeros([64, U], gl.float32, THIN)
        p2 = gl.zeros([64, U], gl.float32, THIN)
    for _ in range(blocks):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), (step // STAGES) & 1)
        for j in gl.static_range(SLICES):
            held = load_half(wb, sb, stage, j, 0, SLICES, form), load_half(wb, sb, stage, j, 1, SLICES, form)
            x = xb.index(stage * SLICES + j).permute((1, 0))
            x2 = x2b.index(stage * SLICES + j).permute((1, 0))
            a = dequantise(held[0][0], held[0][1], WIDE, form)
            p = warpgroup_mma(a, x, p, use_acc=False, is_async=True)
            if U > 0:
                a2 = gl.convert_layout(a, gl.DotOperandLayout(0, THIN, 4), assert_trivial=True)
                p2 = warpgroup_mma(a2, x2, p2, use_acc=False, is_async=True)
            b = dequantise(held[1][0], held[1][1], WIDE, form)  # while the first half is multiplied
            p = warpgroup_mma_wait(0, deps=[p])
            top = carry(top, p, held[0][1], form)
            p = warpgroup_mma(b, x, p, use_acc=False, is_async=True)
            if U > 0:
                p2 = warpgroup_mma_wait(1, deps=[p2])
                top2 = carry(top2, p2, held[0][1], form)
                b2 = gl.convert_layout(b, gl.DotOperandLayout(0, THIN, 4), assert_trivial=True)
                p2 = warpgroup_mma(b2, x2, p2, use_acc=False, is_async=True)
                p2 = warpgroup_mma_wait(0, deps=[p2])
                bottom2 = carry(bottom2, p2, held[1][1], form)
            p = warpgroup_mma_wait(0, deps=[p])
            bottom = carry(bottom, p, held[1][1], form)
        mbarrier.arrive(empty.index(stage), count=1)
        step += 1
    if U > 0:
        return (top, bottom, top2, bottom2), step
    else:
        return (top, bottom), step


@gluon.jit
def product_of(xb, x2b, wb, sb, empty, full, step, blocks, T: gl.constexpr, U: gl.constexpr, STAGES: gl.constexpr,
               SLICES: gl.constexpr, UNITS: gl.constexpr, form: gl.constexpr, PROMOTE: gl.constexpr):  # fmt: skip
    """The product of one tile. PROMOTE: sums are carried to fp32 after every slice."""
    if PROMOTE:
        gl.static_assert(UNITS == 1)
        return multiply_promoted(xb, x2b, wb, sb, empty, full, step, blocks, T, U, STAGES, SLICES, form)
    else:
        return multiply(xb, x2b, wb, sb, empty, full, step, blocks, T, U, STAGES, SLICES, UNITS, form)
