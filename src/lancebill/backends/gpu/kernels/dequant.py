"""Packed words in shared memory to wgmma A fragments in registers (Gluon).

This module is independent of the weight format. The form selects the PTX (`unpack_ptx.Unpack`); only the code bits and
the width of the activations decide the register layout. Every layout conversion is asserted trivial: a layout that
would move data between threads does not compile.

Each warp has 16 rows of an operand with 16-bit numbers. All warps share the columns of a slice, or groups of warps have
slices of their own: the layout of the sums says how many, as the first of its three dimensions.
"""

from __future__ import annotations

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lancebill.backends.gpu.kernels.gluon_names import view
from lancebill.backends.gpu.kernels.unpack_ptx import Unpack
from lancebill.backends.gpu.kernels.unpack_ptx_fp8 import ZERO_BITS
from lancebill.backends.gpu.kernels.unpack_ptx_int8 import INTEGER_UNIT
from lancebill.backends.gpu.kernels.weight_form import BF16, E4M3, E8M0_G32, F16, S8, WeightForm


@gluon.constexpr_function
def form_of(CODE, SCALE, GROUP, ACT, ZERO):
    return WeightForm(CODE, SCALE, GROUP, ACT, ZERO)


@gluon.constexpr_function
def slice_rows(form):
    return form.slice_rows


@gluon.constexpr_function
def slice_columns(form):
    return form.slice_columns


@gluon.constexpr_function
def scale_words(form):
    return form.scale_words


@gluon.constexpr_function
def byte_inputs(form):
    return form.byte_inputs


@gluon.constexpr_function
def sum_type(form):
    """The type of sums over all of K."""
    return gl.int32 if form.integer_sums else gl.float32


@gluon.constexpr_function
def product_type(form):
    """The type in which tensor cores sum products."""
    return gl.int32 if form.activations == S8 else gl.float32


@gluon.constexpr_function
def group_unit(form):
    """The factor of a promoted form's scales."""
    return INTEGER_UNIT if form.sixteenfold else 1.0


@gluon.constexpr_function
def sum_unit(form):
    """What an integer sum over all of K counts."""
    return INTEGER_UNIT if form.sixteenfold and form.integer_sums else 1.0


@gluon.constexpr_function
def code_bits(form):
    """Bits of a code in the first plane."""
    return form.planes[0]


@gluon.constexpr_function
def code_copies(form):
    return form.code_copies


@gluon.constexpr_function
def box_rows(form, SLICES):
    return form.box_rows(SLICES)


@gluon.constexpr_function
def two_planes(form):
    return len(form.planes) == 2


@gluon.constexpr_function
def asm_text(form):
    return Unpack(form).text


@gluon.constexpr_function
def asm_constraints(form):
    return Unpack(form).constraints


@gluon.constexpr_function
def asm_metas(form):
    return Unpack(form).metas


@gluon.constexpr_function
def asm_pack(form):
    return Unpack(form).pack


@gluon.constexpr_function
def byte_scales(form):
    """Whether each lane loads its own two scale bytes, for rows r and r + 8."""
    return form.scale == E8M0_G32 and form.activations == E4M3


@gluon.constexpr_function
def promoted(form):
    return form.promoted


@gluon.constexpr_function
def scale_mask(form):
    """Mask that removes the zero point from a promoted form's scale word."""
    return ~ZERO_BITS if form.zero else -1


@gluon.constexpr_function
def asm_tensors(form):
    """The types of the output tensors; each has one element per packed word."""
    unpacked = Unpack(form)
    kinds = {BF16: gl.bfloat16, F16: gl.float16, E4M3: gl.float8e4nv, S8: gl.int8}
    return (kinds[form.activations],) * (unpacked.outputs * unpacked.each // unpacked.pack)


@gluon.constexpr_function
def warp_count(MMA):
    return math.prod(MMA.warps_per_cta)


@gluon.constexpr_function
def operand_shape(MMA):
    """The shape of an A operand with 16-bit numbers: slices if warps have their own, rows, columns."""
    *slices, rows, _ = MMA.warps_per_cta
    return [*slices, 16 * rows, 64]


@gluon.constexpr_function
def word_layout(rows):
    """[rows, 32] words of a half: four neighbouring words per thread, the next four 16 rows below.

    Eight rows: two neighbouring words per thread.
    """
    if rows == 8:
        return gl.DistributedLinearLayout(
            [[0, 1]], [[0, 2], [0, 4], [0, 8], [0, 16], [1, 0]], [[2, 0], [4, 0]], [], [8, 32]
        )
    more = [[16, 0], [32, 0]][: rows.bit_length() - 5]
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], *more], [[0, 4], [0, 8], [0, 16], [1, 0], [2, 0]], [[4, 0], [8, 0]], [], [rows, 32]
    )


@gluon.constexpr_function
def scale_layout(words):
    """[32 * words]: four lanes share the words of one pair of rows."""
    inner = [[1], [2]][: words.bit_length() - 1]
    return gl.DistributedLinearLayout(
        inner, [[0], [0], [words], [2 * words], [4 * words]], [[8 * words], [16 * words]], [], [32 * words]
    )


@gluon.constexpr_function
def lane_layout():
    """[128]: one number per thread."""
    return gl.DistributedLinearLayout([], [[1], [2], [4], [8], [16]], [[32], [64]], [], [128])


@gluon.jit
def load_codes(boxes, box, slice: gl.constexpr, half: gl.constexpr, SLICES: gl.constexpr, form: gl.constexpr):
    """This thread's words of one half of one slice of a pipeline stage, whose first copy is `box`.

    Of 3-bit codes: the words with two bits of each code, and the word with the third.
    """
    if two_planes(form):
        LAYOUT: gl.constexpr = word_layout(8)
        PLACE: gl.constexpr = 2 * slice + half
        two = boxes.index(box + PLACE // SLICES).slice(PLACE % SLICES * 8, 8, 0).load(LAYOUT)
        both = boxes.index(box + 2).slice(slice * 8, 8, 0).load(LAYOUT)  # of both halves
        return two, both.reshape([4, 4, 2, 4, 2]).split()[half]
    else:
        ROWS: gl.constexpr = slice_rows(form) // 2
        LAYOUT: gl.constexpr = word_layout(ROWS)
        return boxes.index(box).slice((2 * slice + half) * ROWS, ROWS, 0).load(LAYOUT)


@gluon.jit
def load_scales(sb, box, block: gl.constexpr, half: gl.constexpr, form: gl.constexpr):
    """The matching scale words, from one of the stage's scale boxes."""
    COUNT: gl.constexpr = 32 * scale_words(form)
    if byte_scales(form):
        EACH: gl.constexpr = lane_layout()
        halves = view(sb, gl.uint16, [sb.shape[0], 2 * sb.shape[1]], sb.layout)
        return halves.index(box).slice(2 * (2 * block + half) * COUNT, 2 * COUNT, 0).load(EACH).to(gl.int32)
    else:
        LAYOUT: gl.constexpr = scale_layout(scale_words(form))
        return sb.index(box).slice((2 * block + half) * COUNT, COUNT, 0).load(LAYOUT)


@gluon.jit
def row_factors(scales, MMA: gl.constexpr, form: gl.constexpr):
    """A promoted form's scale words as fp32 [64], one factor per row of an accumulator."""
    MASK: gl.constexpr = scale_mask(form)
    UNIT: gl.constexpr = group_unit(form)
    factors = (scales & MASK).to(gl.float32, bitcast=True) * UNIT
    factors = factors.reshape([4, 8, 2]).permute([0, 2, 1]).reshape([64])  # n5n4, n3, n2n1n0
    return gl.convert_layout(factors, gl.SliceLayout(1, MMA), assert_trivial=True)


@gluon.jit
def _join(parts):
    """Join tensors 0, 1, 2 ... along new last dimensions, bit 0 of the tensor's index first."""
    joined = parts
    for _ in gl.static_range(len(parts).bit_length() - 1):
        pairs = ()
        for i in gl.static_range(len(joined) // 2):
            pairs += (gl.join(joined[2 * i], joined[2 * i + 1]),)
        joined = pairs
    return joined[0]


@gluon.jit
def _separate(scales, WORDS: gl.constexpr):
    """Split [..., WORDS] into a tuple of WORDS tensors, in order."""
    parts = (scales,)
    for _ in gl.static_range(WORDS.bit_length() - 1):
        finer = ()
        for i in gl.static_range(len(parts)):
            v = parts[i]
            halves = v.reshape([v.shape[0], 4, 2, 2, v.shape[3] // 2]).permute([0, 1, 2, 4, 3]).split()
            finer += (halves[0], halves[1])
        parts = finer
    flat = ()
    for i in gl.static_range(len(parts)):
        flat += (parts[i].reshape([parts[i].shape[0], 4, 2]),)
    return flat


@gluon.jit
def dequantise(words, scales, MMA: gl.constexpr, form: gl.constexpr):
    """Words and scales of a half, or of 16 rows for each warp, to the A operand of a matrix instruction."""
    if byte_inputs(form):
        return _dequantise_bytes(words, scales, MMA, form)
    else:
        return _dequantise_16(words, scales, MMA, form)


@gluon.jit
def _dequantise_16(codes, scales, MMA: gl.constexpr, form: gl.constexpr):
    TEXT: gl.constexpr = asm_text(form)
    CONSTRAINTS: gl.constexpr = asm_constraints(form)
    TENSORS: gl.constexpr = asm_tensors(form)
    PACK: gl.constexpr = asm_pack(form)
    BITS: gl.constexpr = code_bits(form)
    COUNT: gl.constexpr = scale_words(form)
    WARPS: gl.constexpr = warp_count(MMA)
    SHAPE: gl.constexpr = operand_shape(MMA)
    words = codes[0] if two_planes(form) else codes
    if BITS == 8:
        words = words.reshape([2, WARPS, 4, 2, 4, 4])  # k5, then as below
        ROWS_LAYOUT: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(4, gl.SliceLayout(5, words.type.layout)))
    else:
        words = words.reshape([WARPS, 4, 2, 4, BITS])  # warp (n5n4), n2n1, n0, k2k1, word
        ROWS_LAYOUT: gl.constexpr = gl.SliceLayout(3, gl.SliceLayout(4, words.type.layout))
    operands = (words,)
    if two_planes(form):
        third = gl.convert_layout(codes[1], gl.SliceLayout(4, words.type.layout), assert_trivial=True)
        operands += (third.expand_dims(-1),)
    if COUNT > 0:
        each = _separate(scales.reshape([WARPS, 4, 2, COUNT]), COUNT)
        for i in gl.static_range(COUNT):
            s = gl.convert_layout(each[i], ROWS_LAYOUT, assert_trivial=True)
            if BITS == 8:
                s = s.expand_dims(0)
            operands += (s.expand_dims(-1).expand_dims(-1),)
    parts = gl.inline_asm_elementwise(TEXT, CONSTRAINTS, operands, dtype=TENSORS, is_pure=True, pack=PACK)
    if BITS == 2:
        # n5n4, n2n1, n0, k2k1, k0, n3, k3, k4, k5
        a = _join(parts).permute([0, 5, 1, 2, 8, 7, 6, 3, 4])
    elif BITS == 4:
        # n5n4, n2n1, n0, k2k1, k5, k0, n3, k3, k4
        a = _join(parts).reshape([WARPS, 4, 2, 4, 2, 2, 2, 2, 2]).permute([0, 6, 1, 2, 4, 8, 7, 3, 5])
    else:
        # k5, n5n4, n2n1, n0, k2k1, k4, k0, n3, k3
        a = _join(parts).reshape([2, WARPS, 4, 2, 4, 2, 2, 2, 2]).permute([1, 7, 2, 3, 0, 5, 8, 4, 6])
    return gl.convert_layout(a.reshape(SHAPE), gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)


@gluon.jit
def _dequantise_bytes(words, scales, MMA: gl.constexpr, form: gl.constexpr):
    TEXT: gl.constexpr = asm_text(form)
    CONSTRAINTS: gl.constexpr = asm_constraints(form)
    TENSORS: gl.constexpr = asm_tensors(form)
    PACK: gl.constexpr = asm_pack(form)
    if code_bits(form) == 4:
        words = words.reshape([2, 4, 4, 2, 4, 4])  # k4, n5n4, n2n1, n0, k6k5, word
        LANES: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(5, words.type.layout))
        operands = (words,)
        if byte_scales(form):
            s = gl.convert_layout(scales.reshape([4, 4, 2, 4]), LANES, assert_trivial=True)
            operands += (s.expand_dims(0).expand_dims(-1),)
        elif asm_metas(form) == 2:
            each = _separate(scales.reshape([4, 4, 2, 2]), 2)
            for i in gl.static_range(2):
                s = gl.convert_layout(each[i], gl.SliceLayout(3, LANES), assert_trivial=True)
                operands += (s.expand_dims(-1).expand_dims(0).expand_dims(-1),)
        parts = gl.inline_asm_elementwise(TEXT, CONSTRAINTS, operands, dtype=TENSORS, is_pure=True, pack=PACK)
        # k4, n5n4, n2n1, n0, k6k5, k1k0, n3, k2, k3; columns of the operand are k4, k3, k2, k6k5, k1k0
        a = _join(parts).permute([1, 6, 2, 3, 0, 8, 7, 4, 5])
    else:
        words = words.reshape([2, 2, 4, 4, 2, 4, 4])  # k4, k3, n5n4, n2n1, n0, k6k5, word
        parts = gl.inline_asm_elementwise(TEXT, CONSTRAINTS, (words,), dtype=TENSORS, is_pure=True, pack=PACK)
        # k4, k3, n5n4, n2n1, n0, k6k5, k1k0, n3, k2
        a = _join(parts).permute([2, 7, 3, 4, 0, 1, 8, 5, 6])
    return gl.convert_layout(a.reshape([64, 128]), gl.DotOperandLayout(0, MMA, 4), assert_trivial=True)
