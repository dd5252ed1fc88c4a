"""The GEMM of one matrix for a few rows of x, without pieces that blocks must exchange (Gluon).

A strip is 16 features, what one warp has of a unit. A block has STRIPS of them and all of K: its warps have every
PARTS-th slice, and add their sums in shared memory in the end, in order. So there are many small blocks: a matrix of
4096 features has 256 strips, but only 32 units.

Packed words go straight from memory to the registers of the warp that multiplies them: no other warp needs them, and
the first reads begin a few instructions after the launch. AHEAD steps of a warp's slices are in flight. Columns of x
are copied to shared memory by windows; the next window is on the way while one is used, and warps wait for each other
once for each. The matrix instruction is mma.sync: wgmma takes 64 features.
"""

from __future__ import annotations

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from lancebill.backends.gpu.kernels import dequant
from lancebill.backends.gpu.kernels.dequant import dequantise, form_of
from lancebill.backends.gpu.kernels.gluon_names import view
from lancebill.backends.hopper.kernels.gemm import let_successor_start, wait_for_predecessor

COLUMNS = gl.constexpr(64)  # of a slice


@dataclass(frozen=True)
class StripBlock:
    """What a block has of a matrix, and how it goes through it."""

    strips: int
    apart: int  # 1: strips are neighbours; 4: they are in the halves of a unit
    parts: int
    ahead: int
    window: int
    exact: bool


@gluon.constexpr_function
def strip_block(STRIPS, APART, PARTS, AHEAD, WINDOW, EXACT):
    return StripBlock(STRIPS, APART, PARTS, AHEAD, WINDOW, EXACT)


@gluon.constexpr_function
def sums_layout(PARTS, STRIPS):
    return gl.NVMMADistributedLayout([2, 0], [PARTS, STRIPS, 1], [1, 16, 8])


@gluon.constexpr_function
def warp_bases(PARTS, STRIPS, size):
    """Where each bit of a warp's number leads in [PARTS, STRIPS * size]."""
    strips = [[0, size << bit] for bit in range(STRIPS.bit_length() - 1)]
    return strips + [[1 << bit, 0] for bit in range(PARTS.bit_length() - 1)]


@gluon.constexpr_function
def word_layout(PARTS, STRIPS):
    """[PARTS, words]: four neighbouring words per thread, 128 per strip."""
    lanes = [[0, 4 << bit] for bit in range(5)]
    warps = warp_bases(PARTS, STRIPS, 128)
    return gl.DistributedLinearLayout([[0, 1], [0, 2]], lanes, warps, [], [PARTS, 128 * STRIPS])


@gluon.constexpr_function
def byte_word_layout(PARTS, STRIPS):
    """[2, PARTS, words]: the same for each half of the columns, which are apart for codes of eight bits."""
    lanes = [[0, 0, 4 << bit] for bit in range(5)]
    warps = [[0, *base] for base in warp_bases(PARTS, STRIPS, 128)]
    return gl.DistributedLinearLayout([[0, 0, 1], [0, 0, 2], [1, 0, 0]], lanes, warps, [], [2, PARTS, 128 * STRIPS])


@gluon.constexpr_function
def scale_layout(PARTS, STRIPS, WORDS):
    """[PARTS, words]: four lanes share the words of one pair of rows."""
    inner = [[0, 1 << bit] for bit in range(WORDS.bit_length() - 1)]
    lanes = [[0, 0], [0, 0], *([0, WORDS << bit] for bit in range(3))]
    warps = warp_bases(PARTS, STRIPS, 8 * WORDS)
    return gl.DistributedLinearLayout(inner, lanes, warps, [], [PARTS, 8 * WORDS * STRIPS])


@gluon.constexpr_function
def row_layout(T, WARPS):
    """[slices, T, columns] of x: vectors of 16 bytes."""
    return gl.BlockedLayout([1, 1, 8], [1, 4, 8] if T > 1 else [4, 1, 8], [WARPS, 1, 1], [2, 1, 0])


@gluon.constexpr_function
def result_layout(PARTS, STRIPS):
    return gl.BlockedLayout([1, 1], [16, 2], [STRIPS, PARTS], [0, 1])


@gluon.constexpr_function
def slices_per_scale(form):
    """Slices that share a block of scales; 0 if all do."""
    return form.block_columns // form.slice_columns


@gluon.constexpr_function
def words_apart(form, APART):
    """Words from a block's strip to its next: neighbours, or four strips apart, in the halves of a unit."""
    return form.slice_rows * 16 if APART == 4 else 128


@gluon.jit
def strip_words(strip, form: gl.constexpr):
    """Words of a slice before this strip of a unit. For codes of eight bits the halves of the columns are apart."""
    return strip * 128 + (strip // 4 * 512 if dequant.code_bits(form) == 8 else 0)


@gluon.jit
def slice_of(step, slices, PARTS: gl.constexpr, EXACT: gl.constexpr, LAYOUT: gl.constexpr):
    """Which slice each warp takes in a step. Past the end it is the last one: its columns of x are zeros there."""
    slice = step * PARTS + gl.arange(0, PARTS, LAYOUT)
    return slice if EXACT else gl.minimum(slice, slices - 1)


@gluon.jit
def load_words(codes, step, slices, block: gl.constexpr, form: gl.constexpr):
    """Each warp's words of one slice."""
    PARTS: gl.constexpr = block.parts
    STRIPS: gl.constexpr = block.strips
    EXACT: gl.constexpr = block.exact
    SLICE: gl.constexpr = dequant.slice_rows(form) * 32
    NEXT: gl.constexpr = words_apart(form, block.apart)
    if dequant.code_bits(form) == 8:
        HALVES: gl.constexpr = byte_word_layout(PARTS, STRIPS)
        SIDES: gl.constexpr = gl.SliceLayout(0, HALVES)
        half = gl.arange(0, 2, gl.SliceLayout(1, gl.SliceLayout(2, HALVES))).expand_dims(1).expand_dims(2)
        k = slice_of(step, slices, PARTS, EXACT, gl.SliceLayout(1, SIDES)).expand_dims(1).expand_dims(0)
        i = gl.arange(0, 128 * STRIPS, gl.SliceLayout(0, SIDES)).expand_dims(0).expand_dims(0)
        return gl.load(codes + (k * SLICE + half * (SLICE // 4) + i // 128 * NEXT + i % 128))
    else:
        LAYOUT: gl.constexpr = word_layout(PARTS, STRIPS)
        k = slice_of(step, slices, PARTS, EXACT, gl.SliceLayout(1, LAYOUT)).expand_dims(1)
        i = gl.arange(0, 128 * STRIPS, gl.SliceLayout(0, LAYOUT)).expand_dims(0)
        return gl.load(codes + (k * SLICE + i // 128 * NEXT + i % 128))


@gluon.jit
def load_scales(scales, step, slices, block: gl.constexpr, form: gl.constexpr):
    """The matching words of scales."""
    WORDS: gl.constexpr = 8 * dequant.scale_words(form)  # of a strip
    SHARED: gl.constexpr = slices_per_scale(form)
    LAYOUT: gl.constexpr = scale_layout(block.parts, block.strips, dequant.scale_words(form))
    k = slice_of(step, slices, block.parts, block.exact, gl.SliceLayout(1, LAYOUT)).expand_dims(1)
    i = gl.arange(0, WORDS * block.strips, gl.SliceLayout(0, LAYOUT)).expand_dims(0)
    of_slice = k // SHARED if SHARED > 0 else k * 0
    return gl.load(scales + (of_slice * (8 * WORDS) + i // WORDS * (block.apart * WORDS) + i % WORDS))


@gluon.jit
def load_step(codes, scales, step, slices, block: gl.constexpr, form: gl.constexpr):
    """What each warp needs of one slice of weights: its words, and those of scales if the form has any."""
    words = (load_words(codes, step, slices, block, form),)
    if dequant.scale_words(form) > 0:
        words += (load_scales(scales, step, slices, block, form),)
    return words


@gluon.jit
def copy_window(x, held, window, rows, width):
    """Start the copies of one window of columns of x; zeros where a row or the rows end."""
    SLICES: gl.constexpr = held.shape[0]
    T: gl.constexpr = held.shape[1]
    LAYOUT: gl.constexpr = row_layout(T, gl.num_warps())
    SIDES: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    slice = gl.arange(0, SLICES, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))).expand_dims(1).expand_dims(2)
    t = gl.arange(0, T, gl.SliceLayout(1, SIDES)).expand_dims(1).expand_dims(0)
    k = slice * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, SIDES)).expand_dims(0).expand_dims(0)
    k += window * (SLICES * COLUMNS)
    async_copy.async_copy_global_to_shared(held, x + (t * width + k), mask=(t < rows) & (k < width))
    async_copy.commit_group()


@gluon.jit
def turn_window(x, windows, window, rows, width):
    """Wait until this window of x is in shared memory, where the one after it takes the place of the one before.

    The copies of the one after it go on; the next turn waits for them, or the end.
    """
    copy_window(x, windows.index((window + 1) % 2), window + 1, rows, width)
    async_copy.wait_group(1)


@gluon.jit
def multiply_step(sums, words, x, form: gl.constexpr):
    """Add the products of each warp's slice. A single row is replicated: mma takes eight."""
    MMA: gl.constexpr = sums.type.layout
    OPERAND: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    PARTS: gl.constexpr = x.shape[0]
    rows = x.permute((0, 2, 1)).load(OPERAND)
    if x.shape[1] == 1:
        rows, _ = gl.broadcast(rows, gl.zeros([PARTS, COLUMNS, 8], rows.dtype, OPERAND))
    return mma_v2(dequantise(words[0], words[len(words) - 1], MMA, form), rows, sums)


@gluon.jit
def share_parts(sums):
    """The sums [PARTS, features, T] of the warps, in shared memory."""
    held = gl.allocate_shared_memory(gl.float32, sums.shape, gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    held.store(sums)
    return view(held, gl.float32, sums.shape, gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def add_parts(parts, first: gl.constexpr, FEATURES: gl.constexpr, LAYOUT: gl.constexpr):
    """The sums of some features, added over the warps in order: [features, T]."""
    PARTS: gl.constexpr = parts.shape[0]
    total = parts.index(0).slice(first, FEATURES, 0).load(LAYOUT)
    for i in gl.static_range(1, PARTS):
        total += parts.index(i).slice(first, FEATURES, 0).load(LAYOUT)
    return total


@gluon.jit
def strip_sums(x, codes, scales, rows, slices, width, T: gl.constexpr, block: gl.constexpr, form: gl.constexpr):
    """The sums [PARTS, features, T] of each warp's slices. `codes` and `scales` begin at the first strip."""
    gl.static_assert(block.window % (block.parts * block.ahead) == 0)  # windows begin with rounds
    gl.static_assert(block.ahead % 2 == 0)  # the two accumulators are in their places again
    WORDS: gl.constexpr = 1 if dequant.scale_words(form) == 0 else 2
    PARTS: gl.constexpr = block.parts
    AHEAD: gl.constexpr = block.ahead
    STEPS: gl.constexpr = block.window // PARTS  # of a window
    ahead = ()
    for i in gl.static_range(AHEAD):
        ahead += load_step(codes, scales, i, slices, block, form)
    SWIZZLED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, min(T, 8), [2, 1, 0])
    held = gl.allocate_shared_memory(x.dtype.element_ty, [2 * block.window, T, COLUMNS], SWIZZLED)
    windows = view(held, held.dtype, [2, block.window, T, COLUMNS], SWIZZLED)
    steps = view(held, held.dtype, [2 * STEPS, PARTS, T, COLUMNS], SWIZZLED)
    copy_window(x, windows.index(0), 0, rows, width)
    copy_window(x, windows.index(1), 1, rows, width)
    sums = gl.zeros([PARTS, 16 * block.strips, max(T, 8)], gl.float32, sums_layout(PARTS, block.strips))
    others = sums  # of every other step: a chain of products is half as long
    rounds = (slices + AHEAD * PARTS - 1) // (AHEAD * PARTS)
    async_copy.wait_group(1)
    for round in range(rounds - 1):
        if round > 0 and round * AHEAD % STEPS == 0:
            turn_window(x, windows, round * AHEAD // STEPS, rows, width)
        for i in gl.static_range(AHEAD):
            step = round * AHEAD + i
            sums, others = others, multiply_step(sums, ahead[:WORDS], steps.index(step % (2 * STEPS)), form)
            ahead = ahead[WORDS:] + load_step(codes, scales, step + AHEAD, slices, block, form)
    last = (rounds - 1) * AHEAD
    if rounds > 1 and last % STEPS == 0:
        turn_window(x, windows, last // STEPS, rows, width)
    for i in gl.static_range(AHEAD):
        words = ahead[i * WORDS : (i + 1) * WORDS]
        sums, others = others, multiply_step(sums, words, steps.index((last + i) % (2 * STEPS)), form)
    async_copy.wait_group(0)  # of the window past the end: its memory may be used again
    return sums + others


@gluon.jit
def strip_gemm(
    x, codes, scales, out, factors, bias, rows, slices, scale_blocks, width, columns,
    CODE: gl.constexpr, SCALE: gl.constexpr, GROUP: gl.constexpr, ACT: gl.constexpr, ZERO: gl.constexpr,
    STRIPS: gl.constexpr, PARTS: gl.constexpr, AHEAD: gl.constexpr, T: gl.constexpr, WINDOW: gl.constexpr,
    EXACT: gl.constexpr, BIAS: gl.constexpr, DEPEND: gl.constexpr,
):  # fmt: skip
    """out[row, n] = sum over k of x[row, k] * W[n, k], plus the bias, for up to T rows: 1, 8 or 16.

    Shared memory has two windows of WINDOW slices of x, in turns. EXACT: the slices of x are a multiple of
    AHEAD * PARTS.
    """
    form: gl.constexpr = form_of(CODE, SCALE, GROUP, ACT, ZERO)
    block: gl.constexpr = strip_block(STRIPS, 1, PARTS, AHEAD, WINDOW, EXACT)
    first = gl.program_id(0) * (16 * STRIPS)
    unit = first // 128
    strip = first % 128 // 16
    codes += unit * slices * (dequant.slice_rows(form) * 32) + strip_words(strip, form)
    scales += unit * scale_blocks * (64 * dequant.scale_words(form)) + strip * (8 * dequant.scale_words(form))
    if DEPEND:
        wait_for_predecessor()
        let_successor_start()
    RESULT: gl.constexpr = result_layout(PARTS, STRIPS)
    n = first + gl.arange(0, 16 * STRIPS, gl.SliceLayout(1, RESULT))
    factor = gl.load(factors + n)  # now: at the end the block would wait for them
    shift = gl.load(bias + n) if BIAS else factor
    sums = strip_sums(x, codes, scales, rows, slices, width, T, block, form)
    total = add_parts(share_parts(sums), 0, 16 * STRIPS, RESULT) * factor.expand_dims(1)
    if BIAS:
        total += shift.expand_dims(1)
    n = n.expand_dims(1)
    t = gl.arange(0, max(T, 8), gl.SliceLayout(0, RESULT)).expand_dims(0)
    gl.store(out + t * columns + n, total.to(out.dtype.element_ty), mask=(t < rows) & (n < columns))
