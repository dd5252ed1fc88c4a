"""The multiplication of one stage: weights dequantised in registers times tokens in shared memory (Gluon).

Weights are mma's A operand. A warp has 16 rows of each half of a unit, so every weight is dequantised once, and one
B fragment of tokens serves both halves. The packed words are in the order of wgmma's A operand from registers, which
is mma's: see `unpack_ptx`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from lancebill.backends.gpu.kernels import dequant
from lancebill.backends.gpu.kernels.dequant import dequantise, load_codes, load_scales
from lancebill.backends.gpu.kernels.stage import scale_block_of, stage_blocks

# Sums of int8 products start with the bits of this number. Those of 128 columns are at most 2**21, so the bits stay a
# float of the same exponent, and one subtraction makes the sum a float. sm_80 converts integers at an eighth of that
# rate.
FLOAT_START = gl.constexpr(1.5 * 2**23)
FLOAT_BITS = gl.constexpr(0x4B400000)


@gluon.constexpr_function
def accumulator_layout():
    return gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])


@gluon.constexpr_function
def chunk_of(config):
    return config.chunk


@gluon.constexpr_function
def chunk_count(config):
    return config.chunks


@gluon.jit
def zero_sums(config: gl.constexpr):
    """Zero accumulators [64 features, tokens of a chunk]: for each chunk, both halves of each unit."""
    sums = ()
    for _ in gl.static_range(2 * config.units * chunk_count(config)):
        sums += (gl.zeros([64, chunk_of(config)], dequant.sum_type(config.form), accumulator_layout()),)
    return sums


@gluon.constexpr_function
def operand_layout(config, operand):
    """A register of an operand has 32 bits: two 16-bit numbers, or four of 8 bits."""
    return gl.DotOperandLayout(
        operand, gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]), 4 if config.form.byte_inputs else 2
    )


@gluon.jit
def weights_of(ring, stage, slice: gl.constexpr, unit: gl.constexpr, half: gl.constexpr, config: gl.constexpr):
    """A half of a unit's slice as mma's A operand, and the words of its scales."""
    form: gl.constexpr = config.form
    # A unit's rows follow those of the unit before, like further slices.
    codes = load_codes(
        ring.codes, stage * dequant.code_copies(form), unit * config.slices + slice, half, config.slices, form
    )
    scales = codes
    if dequant.scale_words(form) > 0:
        BLOCK: gl.constexpr = unit * stage_blocks(form, config.slices) + scale_block_of(form, config.slices, slice)
        scales = load_scales(ring.scales, stage, BLOCK, half, form)
    return dequantise(codes, scales, accumulator_layout(), form), scales


@gluon.jit
def tokens_of(x, slice: gl.constexpr, chunk: gl.constexpr, config: gl.constexpr):
    """One slice of a chunk of tokens as mma's B operand. A single token is replicated: mma takes eight."""
    COLUMNS: gl.constexpr = dequant.slice_columns(config.form)
    CHUNK: gl.constexpr = chunk_of(config)
    LAYOUT: gl.constexpr = operand_layout(config, 1)
    columns = x.slice(slice * COLUMNS, COLUMNS, 1)
    if config.tokens == 1:
        one = columns.permute((1, 0)).load(LAYOUT)
        one, _ = gl.broadcast(one, gl.zeros([COLUMNS, CHUNK], x.dtype, LAYOUT))
        return one
    else:
        return columns.slice(chunk * CHUNK, CHUNK, 0).permute((1, 0)).load(LAYOUT)


@gluon.jit
def multiply_add(sums, weights, scales, tokens, form: gl.constexpr):
    """Add the products of a slice to the sums.

    fp8 products are summed separately first and added in fp32: tensor cores may keep only about 14 bits of such sums,
    and a promoted form's scales multiply the sum of a group. Sums of int8 products are exact: see `FLOAT_START`.
    """
    TYPE: gl.constexpr = dequant.product_type(form)
    if dequant.byte_inputs(form) and dequant.sum_type(form) == gl.float32:
        start = gl.full(sums.shape, FLOAT_BITS if gl.int32 == TYPE else 0.0, TYPE, accumulator_layout())
        more = mma_v2(weights, tokens, start)
        if gl.int32 == TYPE:
            more = more.to(gl.float32, bitcast=True) - FLOAT_START
        if dequant.promoted(form):
            more = more * dequant.row_factors(scales, accumulator_layout(), form).expand_dims(1)
        return sums + more
    else:
        return mma_v2(weights, tokens, sums)


@gluon.jit
def multiply_stage(ring, stage, sums, config: gl.constexpr):
    """Add the products of one stage to the sums."""
    SLICES: gl.constexpr = config.slices
    form: gl.constexpr = config.form
    HALVES: gl.constexpr = 2 * config.units
    x = ring.x.index(stage)
    for j in gl.static_range(SLICES):
        weights = ()
        for h in gl.static_range(HALVES):
            weights += (weights_of(ring, stage, j, h // 2, h % 2, config),)
        for i in gl.static_range(chunk_count(config)):
            tokens = tokens_of(x, j, i, config)
            more = ()
            for h in gl.static_range(HALVES):
                more += (multiply_add(sums[HALVES * i + h], weights[h][0], weights[h][1], tokens, form),)
            sums = sums[: HALVES * i] + more + sums[HALVES * (i + 1) :]
    return sums
