"""The layer for one token by strips of features: no pieces of tiles, and no counters (Gluon).

In the first GEMM a block has two strips of one chosen expert: of gated experts, a gate's and its up projection's, so
that it applies the activation. In the second, a block has one strip of the result and sums over all chosen experts:
nothing is exchanged between blocks. See `strips` for how a block reads and multiplies.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from lancebill.backends.gpu.kernels import dequant, slots
from lancebill.backends.gpu.kernels.decode_chunks import LANES, count_bits
from lancebill.backends.gpu.kernels.dequant import form_of
from lancebill.backends.gpu.kernels.epilogue import gated_activation, ungated_activation
from lancebill.backends.gpu.kernels.gluon_names import view
from lancebill.backends.hopper.kernels.gemm import let_successor_start, wait_for_predecessor
from lancebill.backends.hopper.kernels.strips import (
    COLUMNS,
    add_parts,
    copy_window,
    load_step,
    multiply_step,
    result_layout,
    share_parts,
    strip_block,
    strip_sums,
    strip_words,
    sums_layout,
)

load_experts, load_weights = gluon.jit(slots.load_experts.fn), gluon.jit(slots.load_weights.fn)


@gluon.jit
def expert_words(e, unit, units, slices, form: gl.constexpr):
    """Words before a unit of an expert: all experts may have more than 2**31."""
    return (e * units + unit).to(gl.int64) * slices * (dequant.slice_rows(form) * 32)


@gluon.jit
def expert_scales(e, unit, units, scale_blocks, form: gl.constexpr):
    return (e * units + unit).to(gl.int64) * scale_blocks * (64 * dequant.scale_words(form))


@gluon.jit
def slot_strips(
    x, codes, scales, out, factors, bias, ids, id_words, id_row, id_column, expert_map, mapped, experts, weights,
    weight_kind, weight_row, weight_column, top_k, units, slices, scale_blocks, width, columns, limit, alpha, beta,
    CODE: gl.constexpr, SCALE: gl.constexpr, GROUP: gl.constexpr, ACT: gl.constexpr, ZERO: gl.constexpr,
    PARTS: gl.constexpr, AHEAD: gl.constexpr, WINDOW: gl.constexpr, EXACT: gl.constexpr, GATED: gl.constexpr,
    ACTIVATION: gl.constexpr, BIAS: gl.constexpr, WEIGHTED: gl.constexpr, DEPEND: gl.constexpr,
):  # fmt: skip
    """The first GEMM: the hidden rows of all slots with local experts. A block has two strips of a unit of one slot."""
    form: gl.constexpr = form_of(CODE, SCALE, GROUP, ACT, ZERO)
    block: gl.constexpr = strip_block(2, 4 if GATED else 1, PARTS, AHEAD, WINDOW, EXACT)
    slot = gl.program_id(1)
    if DEPEND:
        wait_for_predecessor()
        let_successor_start()
    ids = (ids, id_words, id_row, id_column, expert_map, mapped, experts)
    e = load_experts(ids, 0, slot, True)
    if e >= 0:
        unit = gl.program_id(0) // 4
        strip = gl.program_id(0) % 4 * (1 if GATED else 2)
        codes += expert_words(e, unit, units, slices, form) + strip_words(strip, form)
        scales += expert_scales(e, unit, units, scale_blocks, form) + strip * (8 * dequant.scale_words(form))
        RESULT: gl.constexpr = result_layout(PARTS, 2)
        r = gl.arange(0, 16, gl.SliceLayout(1, RESULT))
        NEXT: gl.constexpr = 64 if GATED else 16  # features from the first strip to the second
        n = (e * units + unit) * 128 + strip * 16 + r
        top_factor = gl.load(factors + n)
        bottom_factor = gl.load(factors + n + NEXT)
        top_bias = gl.load(bias + n) if BIAS else top_factor
        bottom_bias = gl.load(bias + n + NEXT) if BIAS else top_factor
        scale = load_weights((weights, weight_kind, weight_row, weight_column), 0, slot, True) if WEIGHTED else 1.0
        parts = share_parts(strip_sums(x, codes, scales, 1, slices, width, 1, block, form))
        top = add_parts(parts, 0, 16, RESULT) * top_factor.expand_dims(1) * scale
        bottom = add_parts(parts, 16, 16, RESULT) * bottom_factor.expand_dims(1) * scale
        if BIAS:
            top += top_bias.expand_dims(1)
            bottom += bottom_bias.expand_dims(1)
        out += slot * columns
        only = gl.arange(0, 8, gl.SliceLayout(0, RESULT)).expand_dims(0) == 0  # the row is there eight times
        if GATED:
            column = (unit * 64 + strip * 16 + r).expand_dims(1)
            value = gated_activation(top, bottom, limit, alpha, beta, ACTIVATION)
            gl.store(out + column + gl.zeros_like(top).to(gl.int32), value.to(out.dtype.element_ty),
                     mask=only & (column < columns))  # fmt: skip
        else:
            column = (unit * 128 + strip * 16 + r).expand_dims(1) + gl.zeros_like(top).to(gl.int32)
            top, bottom = ungated_activation(top, ACTIVATION), ungated_activation(bottom, ACTIVATION)
            gl.store(out + column, top.to(out.dtype.element_ty), mask=only & (column < columns))
            gl.store(out + column + 16, bottom.to(out.dtype.element_ty), mask=only & (column + 16 < columns))


@gluon.jit
def find_local_choices(ids, top_k):
    """(how many choices are local; by choice, of at most LANES: its number among them or -1; itself and its expert)."""
    choice = gl.arange(0, LANES, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    e = load_experts(ids, 0, choice, choice < top_k)
    bit = 1 << choice
    mask = gl.sum(gl.where(e >= 0, bit, 0), 0)
    return count_bits(mask), gl.where(e >= 0, count_bits(mask & (bit - 1)), -1), choice << 24 | gl.maximum(e, 0)


@gluon.jit
def choice_at(local, number):
    """(choice, expert) of a local choice."""
    _, numbers, choices_and_experts = local
    found = gl.max(gl.where(numbers == number, choices_and_experts, 0), 0)
    return found >> 24, found & 0xFFFFFF


@gluon.jit
def next_step(at, steps, count):
    """The step after this one, of this local choice or the next; the last one again after the last."""
    number, step = at
    ends = step + 1 == steps
    last = number + 1 == count
    return gl.where(ends & (not last), number + 1, number), gl.where(ends, gl.where(last, step, 0), step + 1)


@gluon.jit
def load_token_step(codes, scales, factors, local, weights, at, unit, strip, units, slices,
                    scale_blocks, block: gl.constexpr, form: gl.constexpr, WEIGHTED: gl.constexpr):  # fmt: skip
    """Words of one step of a local choice's expert, and what its products are multiplied with."""
    choice, e = choice_at(local, at[0])
    words = load_step(
        codes + expert_words(e, unit, units, slices, form), scales + expert_scales(e, unit, units, scale_blocks, form),
        at[1], slices, block, form,
    )  # fmt: skip
    MMA: gl.constexpr = sums_layout(block.parts, 1)
    n = (e * units + unit) * 128 + strip * 16 + gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, MMA)))
    factor = gl.load(factors + n)
    return words + (factor * load_weights(weights, 0, choice, True) if WEIGHTED else factor,)


@gluon.jit
def add_products(total, words, x, inside, form: gl.constexpr):
    """Add the products of each warp's slice, with their expert's factors and weight."""
    sums = multiply_step(gl.zeros_like(total), words[: len(words) - 1], x, form)
    factor = words[len(words) - 1].expand_dims(0).expand_dims(2)
    return total + gl.where(inside, sums * factor, 0.0)


@gluon.jit
def token_sums(
    x, codes, scales, factors, local, weights, unit, strip, units, slices, scale_blocks, width,
    block: gl.constexpr, form: gl.constexpr, SLOTS: gl.constexpr, WEIGHTED: gl.constexpr, DEPEND: gl.constexpr,
):  # fmt: skip
    """The weighted sums [PARTS, 16, 8] over local experts, of which there is one or more. A window is a hidden row."""
    gl.static_assert(block.window % block.parts == 0)
    WORDS: gl.constexpr = 2 if dequant.scale_words(form) == 0 else 3
    PARTS: gl.constexpr = block.parts
    AHEAD: gl.constexpr = block.ahead
    GROUPS: gl.constexpr = block.window // PARTS
    count = local[0]
    steps = (slices + PARTS - 1) // PARTS
    read = (0, 0)  # the local choice and its step that are read next
    ahead = ()
    for _i in gl.static_range(AHEAD):
        ahead += load_token_step(codes, scales, factors, local, weights, read, unit, strip, units, slices,
                                 scale_blocks, block, form, WEIGHTED)  # fmt: skip
        read = next_step(read, steps, count)
    if DEPEND:
        wait_for_predecessor()
        let_successor_start()
    SWIZZLED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 1, [2, 1, 0])
    held = gl.allocate_shared_memory(x.dtype.element_ty, [SLOTS * block.window, 1, COLUMNS], SWIZZLED)
    rows = view(held, held.dtype, [SLOTS, block.window, 1, COLUMNS], SWIZZLED)
    groups = view(held, held.dtype, [SLOTS * GROUPS, PARTS, 1, COLUMNS], SWIZZLED)
    for number in range(count):
        copy_window(x + choice_at(local, number)[0] * width, rows.index(number), 0, 1, width)
    async_copy.wait_group(0)
    total = gl.zeros([PARTS, 16, 8], gl.float32, sums_layout(PARTS, 1))
    used = (0, 0)  # what is multiplied next
    rounds = (count * steps + AHEAD - 1) // AHEAD
    for _round in range(rounds - 1):
        for _j in gl.static_range(AHEAD):
            total = add_products(total, ahead[:WORDS], groups.index(used[0] * GROUPS + used[1]), True, form)
            used = next_step(used, steps, count)
            ahead = ahead[WORDS:] + load_token_step(codes, scales, factors, local, weights, read, unit, strip,
                                                    units, slices, scale_blocks, block, form, WEIGHTED)  # fmt: skip
            read = next_step(read, steps, count)
    for i in gl.static_range(AHEAD):
        inside = (rounds - 1) * AHEAD + i < count * steps
        words = ahead[i * WORDS : (i + 1) * WORDS]
        total = add_products(total, words, groups.index(used[0] * GROUPS + used[1]), inside, form)
        used = next_step(used, steps, count)
    return total


@gluon.jit
def token_strips(
    x, codes, scales, out, factors, bias, ids, id_words, id_row, id_column, expert_map, mapped, experts, weights,
    weight_kind, weight_row, weight_column, top_k, units, slices, scale_blocks, width, columns,
    CODE: gl.constexpr, SCALE: gl.constexpr, GROUP: gl.constexpr, ACT: gl.constexpr, ZERO: gl.constexpr,
    PARTS: gl.constexpr, AHEAD: gl.constexpr, SLOTS: gl.constexpr, SLICES: gl.constexpr, EXACT: gl.constexpr,
    BIAS: gl.constexpr, WEIGHTED: gl.constexpr, DEPEND: gl.constexpr,
):  # fmt: skip
    """The second GEMM and the sum over the chosen experts. A block has one strip of the result.

    Shared memory has room for SLOTS hidden rows of SLICES slices. The first weights are read before the predecessor
    ends: it is the first GEMM, and the ids are older.
    """
    form: gl.constexpr = form_of(CODE, SCALE, GROUP, ACT, ZERO)
    block: gl.constexpr = strip_block(1, 1, PARTS, AHEAD, SLICES, EXACT)
    unit = gl.program_id(0) // 8
    strip = gl.program_id(0) % 8
    local = find_local_choices((ids, id_words, id_row, id_column, expert_map, mapped, experts), top_k)
    weights = (weights, weight_kind, weight_row, weight_column)
    codes += strip_words(strip, form)
    scales += strip * (8 * dequant.scale_words(form))
    total = gl.zeros([PARTS, 16, 8], gl.float32, sums_layout(PARTS, 1))
    if local[0] > 0:
        total = token_sums(x, codes, scales, factors, local, weights, unit, strip, units, slices,
                           scale_blocks, width, block, form, SLOTS, WEIGHTED, DEPEND)  # fmt: skip
    elif DEPEND:
        wait_for_predecessor()  # the launch after this one waits for this one only
    RESULT: gl.constexpr = result_layout(PARTS, 1)
    result = add_parts(share_parts(total), 0, 16, RESULT)
    r = strip * 16 + gl.arange(0, 16, gl.SliceLayout(1, RESULT))
    if BIAS:
        for number in range(local[0]):
            choice, e = choice_at(local, number)
            shift = gl.load(bias + (e * units + unit) * 128 + r)
            result += (shift * load_weights(weights, 0, choice, True) if WEIGHTED else shift).expand_dims(1)
    n = (unit * 128 + r).expand_dims(1) + gl.zeros_like(result).to(gl.int32)
    only = gl.arange(0, 8, gl.SliceLayout(0, RESULT)).expand_dims(0) == 0
    gl.store(out + n, result.to(out.dtype.element_ty), mask=only & (n < columns))
