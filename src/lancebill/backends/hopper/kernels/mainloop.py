"""What a pipeline stage holds, and the product of one tile: stages in, accumulators out (Gluon)."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from lancebill.backends.hopper.kernels import dequant
from lancebill.backends.hopper.kernels.dequant import dequantise, load_codes, load_scales
from lancebill.backends.hopper.kernels.gluon_names import LARGER_VIEWS, copy_tile, view
from lancebill.backends.hopper.kernels.weight_form import BOX


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


@gluon.constexpr_function
def widths(TOKENS):
    """A tile's tokens as powers of two, which tensors have: 112 is 64 + 32 + 16. The last is a copy's box."""
    found = [1 << bit for bit in reversed(range(TOKENS.bit_length())) if TOKENS >> bit & 1]
    return found if LARGER_VIEWS else found[-1:] * (TOKENS // found[-1])


@gluon.constexpr_function
def width_at(TOKENS, number):
    return widths(TOKENS)[number]


@gluon.constexpr_function
def before(TOKENS, number):
    """Tokens of the widths before this one."""
    return sum(widths(TOKENS)[:number])


@gluon.constexpr_function
def width_count(TOKENS):
    return len(widths(TOKENS))


@gluon.constexpr_function
def sums_of(TOKENS, number, form):
    """The layout of a width's accumulators."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, widths(TOKENS)[number], 32 if dequant.narrow(form) else 16])


@gluon.jit
def tokens_at(xb, slice, first: gl.constexpr, COUNT: gl.constexpr, TOKENS: gl.constexpr):
    """Tokens `first` and following of a tile's slice. Widths lie together, so their products are one (`jit.join`).

    Boxes of one token are slices of one row: the tokens that follow are the slices that follow, and nobody's.
    """
    BOX: gl.constexpr = xb.shape[1]
    if BOX == 1:
        return view(xb.index(slice), xb.dtype, [COUNT, xb.shape[2]], xb.layout)
    box = xb.index(slice * (TOKENS // BOX) + first // BOX)
    if COUNT == BOX:
        return box
    else:
        return view(box, xb.dtype, [COUNT, xb.shape[2]], xb.layout)


@gluon.jit
def load_half(wb, sb, stage, slice: gl.constexpr, half: gl.constexpr, SLICES: gl.constexpr, form: gl.constexpr):
    """Packed words of a half of a slice, and their scales (the words again where there are none)."""
    codes = load_codes(wb.index(stage), slice, half, form)
    if dequant.scale_words(form) > 0:
        BLOCK: gl.constexpr = block_of(form, SLICES, slice)
        PER_BOX: gl.constexpr = scale_box(form, SLICES) // (64 * dequant.scale_words(form))
        box = stage * scale_copies(form, SLICES) + BLOCK // PER_BOX
        return codes, load_scales(sb, box, BLOCK % PER_BOX, half, form)
    else:
        return codes, codes


@gluon.jit
def load_slice(wb, sb, stage, turn: gl.constexpr, SLICES: gl.constexpr, UNITS: gl.constexpr, form: gl.constexpr):
    """(codes, scales) of both halves of a turn of a stage: slices in order, in each its units."""
    at = stage * UNITS + turn % UNITS
    return load_half(wb, sb, at, turn // UNITS, 0, SLICES, form), load_half(wb, sb, at, turn // UNITS, 1, SLICES, form)


@gluon.jit
def no_sums(TOKENS: gl.constexpr, HALVES: gl.constexpr, form: gl.constexpr):
    """Accumulators of HALVES halves, width after width: [64, width] each."""
    sums = ()
    for i in gl.static_range(width_count(TOKENS)):
        for _ in gl.static_range(HALVES):
            sums += (gl.zeros([64, width_at(TOKENS, i)], gl.float32, sums_of(TOKENS, i, form)),)
    return sums


@gluon.jit
def start_width(sums, a, xb, slice, number: gl.constexpr, TOKENS: gl.constexpr, form: gl.constexpr,
                ADD: gl.constexpr):  # fmt: skip
    """A product of one width, without waiting."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, sums.type.layout, 4 if dequant.narrow(form) else 2)
    x = tokens_at(xb, slice, before(TOKENS, number), width_at(TOKENS, number), TOKENS)
    a = gl.convert_layout(a, OPERAND, assert_trivial=True)
    return warpgroup_mma(a, x.permute((1, 0)), sums, use_acc=ADD, is_async=True)


@gluon.jit
def start_half(sums, half: gl.constexpr, a, xb, slice, TOKENS: gl.constexpr, HALVES: gl.constexpr, form: gl.constexpr,
               ADD: gl.constexpr):  # fmt: skip
    """One half's products into its accumulators: as many as there are widths, one in the end."""
    for i in gl.static_range(width_count(TOKENS)):
        started = start_width(sums[i * HALVES + half], a, xb, slice, i, TOKENS, form, ADD)
        sums = sums[: i * HALVES + half] + (started,) + sums[i * HALVES + half + 1 :]
    return sums


@gluon.jit
def multiply(xb, wb, sb, empty, full, step, blocks, TOKENS: gl.constexpr, STAGES: gl.constexpr, SLICES: gl.constexpr,
             UNITS: gl.constexpr, form: gl.constexpr, WHOLE: gl.constexpr):  # fmt: skip
    """The product of one tile: accumulators of every half of its units, for each width.

    While one half's wgmma runs, the next is dequantised: registers an outstanding wgmma reads are never
    written, because each dequantisation waits for the wgmma before the last. Packed words of the next turn are
    read from shared memory while this one is multiplied. A stage goes back to the feeder once the first
    wgmma of the next stage has followed it.
    """
    HALVES: gl.constexpr = 2 * UNITS
    TURNS: gl.constexpr = SLICES * UNITS
    sums = no_sums(TOKENS, HALVES, form)
    for block in range(blocks):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), (step // STAGES) & 1)
        ahead = load_slice(wb, sb, stage, 0, SLICES, UNITS, form)
        for turn in gl.static_range(TURNS):
            held = ahead
            if turn + 1 < TURNS:
                ahead = load_slice(wb, sb, stage, turn + 1, SLICES, UNITS, form)
            slice = (block if WHOLE else stage) * SLICES + turn // UNITS
            for half in gl.static_range(2):
                a = dequantise(held[half][0], held[half][1], sums_of(TOKENS, 0, form), form)
                sums = start_half(sums, turn % UNITS * 2 + half, a, xb, slice, TOKENS, HALVES, form, True)
                sums = warpgroup_mma_wait(1, deps=sums)
                if turn == 0 and half == 0:
                    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=block > 0)
        step += 1
    sums = warpgroup_mma_wait(0, deps=sums)
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=blocks > 0)
    return sums, step


@gluon.jit
def now(x):
    """x, computed before whatever follows: left alone, the compiler puts it off and keeps what it is made of."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def carry(totals, half: gl.constexpr, sums, scales, TOKENS: gl.constexpr, form: gl.constexpr):
    """A half's sums of a slice into its totals, times their rows' factors where the form has such."""
    for i in gl.static_range(width_count(TOKENS)):
        more = sums[i]
        if dequant.promoted(form):
            more = more * dequant.row_factors(scales, sums_of(TOKENS, i, form), form).expand_dims(1)
        totals = totals[: 2 * i + half] + (now(totals[2 * i + half] + more),) + totals[2 * i + half + 1 :]
    return totals


@gluon.jit
def wait_for(sums):
    """All of them; a wait for one gives that one alone."""
    if len(sums) == 1:
        return (warpgroup_mma_wait(0, deps=sums),)
    else:
        return warpgroup_mma_wait(0, deps=sums)


@gluon.jit
def multiply_promoted(xb, wb, sb, empty, full, step, blocks, TOKENS: gl.constexpr, STAGES: gl.constexpr,
                      SLICES: gl.constexpr, form: gl.constexpr, WHOLE: gl.constexpr):  # fmt: skip
    """`multiply` where every slice is summed by itself and carried over in fp32.

    The tensor cores add products of fp8 numbers in about 14 bits, so long sums lose what short ones keep; and a
    group's scale can wait until its own columns are summed. Both halves share one further set of accumulators:
    two do not fit. What waits here is hidden by the other blocks of the SM.
    """
    WIDE: gl.constexpr = sums_of(TOKENS, 0, form)
    totals = no_sums(TOKENS, 2, form)
    sums = no_sums(TOKENS, 1, form)
    for block in range(blocks):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), (step // STAGES) & 1)
        for j in gl.static_range(SLICES):
            held = load_half(wb, sb, stage, j, 0, SLICES, form), load_half(wb, sb, stage, j, 1, SLICES, form)
            slice = (block if WHOLE else stage) * SLICES + j
            a = dequantise(held[0][0], held[0][1], WIDE, form)
            sums = start_half(sums, 0, a, xb, slice, TOKENS, 1, form, False)
            b = dequantise(held[1][0], held[1][1], WIDE, form)  # while the first half is multiplied
            sums = wait_for(sums)
            totals = carry(totals, 0, sums, held[0][1], TOKENS, form)
            sums = start_half(sums, 0, b, xb, slice, TOKENS, 1, form, False)
            sums = wait_for(sums)
            totals = carry(totals, 1, sums, held[1][1], TOKENS, form)
        mbarrier.arrive(empty.index(stage), count=1)
        step += 1
    return totals, step


@gluon.jit
def product_of(xb, wb, sb, empty, full, step, blocks, TOKENS: gl.constexpr, STAGES: gl.constexpr,
               SLICES: gl.constexpr, UNITS: gl.constexpr, form: gl.constexpr, PROMOTE: gl.constexpr,
               WHOLE: gl.constexpr = False):  # fmt: skip
    """The product of one tile. PROMOTE: sums are carried to fp32 after every slice.

    WHOLE: all slices of the tokens lie in `xb`, which then is no part of the ring.
    """
    if PROMOTE:
        gl.static_assert(UNITS == 1)
        return multiply_promoted(xb, wb, sb, empty, full, step, blocks, TOKENS, STAGES, SLICES, form, WHOLE)
    else:
        return multiply(xb, wb, sb, empty, full, step, blocks, TOKENS, STAGES, SLICES, UNITS, form, WHOLE)
