"""The end of a decoded segment: partial sums, and the epilogue by the block that arrives last (Gluon).

A block writes its partial sums of a tile in fp32. The block that arrives last (an integer counter decides, never a
float atomic) adds the pieces in a fixed order and applies the epilogue. If chunks are whole tiles, the epilogue runs on
the accumulators in registers. In the second GEMM the sums are always partial: they are terms of the weighted sum over a
token's experts. That last reduction is on the critical path, so it issues all its loads before the first addition.

The block that sees a full counter resets it to zero.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lancebill.backends.gpu.kernels import slots
from lancebill.backends.gpu.kernels.decode_chunks import count_bits, number_of, pieces_of, pieces_of_token
from lancebill.backends.gpu.kernels.epilogue import gated_activation, ungated_activation
from lancebill.backends.gpu.kernels.gluon_names import barrier

load_experts, load_weights = gluon.jit(slots.load_experts.fn), gluon.jit(slots.load_weights.fn)
T = gl.constexpr(8)  # the fewest tokens of a matrix instruction; a segment has one, the others are padding


@gluon.jit
def load_factors(factors, e, unit, units, half: gl.constexpr, MMA: gl.constexpr):
    """The per-feature factors of one half. Loaded before the GEMM, which hides the latency."""
    at = (e * units + unit) * 128 + 64 * half
    return gl.load(factors + at + gl.arange(0, 64, gl.SliceLayout(1, MMA)))


@gluon.jit
def store_part(part, sums, factor):
    """Store column 0 of an accumulator, scaled; the other seven columns are padding."""
    MMA: gl.constexpr = sums.type.layout
    r = gl.arange(0, 64, gl.SliceLayout(1, MMA)).expand_dims(1)
    only = gl.arange(0, T, gl.SliceLayout(0, MMA)).expand_dims(0) == 0
    gl.store(part + r + gl.zeros_like(sums).to(gl.int32), sums * factor.expand_dims(1), mask=only & (r >= 0))


@gluon.jit
def sum_pieces(parts, tile, c, count, PIECES: gl.constexpr):
    """Features c of a tile: its `count` pieces added in a fixed order. Bypasses L1, since other blocks wrote them."""
    parts += tile * (PIECES * 128)
    total = gl.load(parts + c, mask=(c >= 0) & (count > 0), other=0.0, cache_modifier=".cg")
    for i in gl.static_range(1, PIECES):
        total += gl.load(parts + i * 128 + c, mask=(c >= 0) & (i < count), other=0.0, cache_modifier=".cg")
    return total


@gluon.jit
def finish_tile(out, parts, bias, scale, tile, slot, e, units, count, columns, limit, alpha, beta,
                PIECES: gl.constexpr, KIND: gl.constexpr, ACTIVATION: gl.constexpr, BIAS: gl.constexpr):  # fmt: skip
    """Epilogue of a tile from its `count` pieces: bias, activation, store."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    WIDTH: gl.constexpr = 64 if KIND == "gated" else 128
    c = gl.arange(0, WIDTH, LAYOUT)
    unit = tile % units
    bias += (e * units + unit) * 128
    value = sum_pieces(parts, tile, c, count, PIECES) * scale
    if BIAS:
        value += gl.load(bias + c)
    if KIND == "gated":
        u = sum_pieces(parts, tile, c + 64, count, PIECES) * scale
        if BIAS:
            u += gl.load(bias + c + 64)
        value = gated_activation(value, u, limit, alpha, beta, ACTIVATION)
    else:
        value = ungated_activation(value, ACTIVATION)
    column = unit * WIDTH + c
    gl.store(out + slot * columns + column, value.to(out.dtype.element_ty), mask=column < columns)


@gluon.jit
def finish_sums(out, top, bottom, top_factor, bottom_factor, bias, scale, slot, e, unit, units, columns, limit, alpha,
                beta, KIND: gl.constexpr, ACTIVATION: gl.constexpr, BIAS: gl.constexpr):  # fmt: skip
    """`finish_tile` where chunks are whole tiles: the sums are still in registers."""
    MMA: gl.constexpr = top.type.layout
    r = gl.arange(0, 64, gl.SliceLayout(1, MMA))
    only = (gl.arange(0, T, gl.SliceLayout(0, MMA)).expand_dims(0) == 0) & (r >= 0).expand_dims(1)
    top = top * top_factor.expand_dims(1) * scale
    bottom = bottom * bottom_factor.expand_dims(1) * scale
    if BIAS:
        n = (e * units + unit) * 128 + r
        top += gl.load(bias + n).expand_dims(1)
        bottom += gl.load(bias + n + 64).expand_dims(1)
    at = out + slot * columns + gl.zeros_like(top).to(gl.int32)
    if KIND == "gated":
        column = (unit * 64 + r).expand_dims(1)
        value = gated_activation(top, bottom, limit, alpha, beta, ACTIVATION)
        gl.store(at + column, value.to(out.dtype.element_ty), mask=only & (column < columns))
    else:
        column = (unit * 128 + r).expand_dims(1)
        top, bottom = ungated_activation(top, ACTIVATION), ungated_activation(bottom, ACTIVATION)
        gl.store(at + column, top.to(out.dtype.element_ty), mask=only & (column < columns))
        gl.store(at + column + 64, bottom.to(out.dtype.element_ty), mask=only & (column + 64 < columns))


@gluon.jit
def finish_token(out, parts, bias, scales, ids, weights, mask, token, unit, units, blocks, each, columns,
                 PIECES: gl.constexpr, SLOTS: gl.constexpr, BIAS: gl.constexpr, FP8: gl.constexpr,
                 WEIGHTED: gl.constexpr):  # fmt: skip
    """The weighted sum over a token's local slots for one unit, in slot order. Zeros if there are none.

    Issues all loads before the first addition.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    c = gl.arange(0, 128, LAYOUT)
    n = unit * 128 + c
    rows = ()
    for i in gl.static_range(SLOTS):
        slot = token * SLOTS + i
        local = (mask >> slot) & 1
        tile = number_of(mask, slot) * units + unit
        row = sum_pieces(parts, tile, c, pieces_of(tile, blocks, each) * local, PIECES)
        if FP8:
            row *= gl.load(scales + slot, mask=local == 1, other=0.0, cache_modifier=".cg")
        if BIAS:
            e = load_experts(ids, token, i, True)
            row += gl.load(bias + e * units * 128 + n, mask=(n >= 0) & (e >= 0), other=0.0)
        if WEIGHTED:
            row *= load_weights(weights, token, i, local == 1)
        rows += (row,)
    total = rows[0]
    for i in gl.static_range(1, SLOTS):
        total += rows[i]
    gl.store(out + token * columns + n, total.to(out.dtype.element_ty), mask=n < columns)


@gluon.constexpr_function
def low_bits(COUNT):
    return -1 if COUNT == 32 else (1 << COUNT) - 1


@gluon.jit
def clear_tokens(out, mask, total_slots, units, columns, SLOTS: gl.constexpr):
    """Store zeros to tokens without local slots, whose sums no block finishes."""
    c = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    count = gl.where(count_bits(mask) < total_slots, total_slots // SLOTS * units, 0)
    for i in range(gl.program_id(0), count, gl.num_programs(0)):
        token = i // units
        if ((mask >> (token * SLOTS)) & low_bits(SLOTS)) == 0:
            n = i % units * 128 + c
            gl.store(out + token * columns + n, gl.zeros_like(c).to(out.dtype.element_ty), mask=n < columns)


@gluon.jit
def finish_segment(out, scales, parts, counters, bias, ids, mask, top_k, weights, sums, factors, tile, slot, e, chunk,
                   scale, units, blocks, columns, each, limit, alpha, beta, epilogue: gl.constexpr,
                   PIECES: gl.constexpr, SLOTS: gl.constexpr, FP8: gl.constexpr):  # fmt: skip
    """What follows the GEMM of a segment: its sums are stored, and the last of its tile or token to arrive finishes it.

    `sums` and `factors`: those of both halves of the unit.
    """
    KIND: gl.constexpr = epilogue.kind
    ACTIVATION: gl.constexpr = epilogue.activation
    BIAS: gl.constexpr = epilogue.bias
    WEIGHTED: gl.constexpr = epilogue.weighted
    unit = tile % units
    WHOLE: gl.constexpr = PIECES == 1 and KIND != "rows"
    if WEIGHTED and KIND != "rows":
        scale = scale * load_weights(weights, slot // top_k, slot % top_k, True)
    if not WHOLE:
        part = parts + (tile * PIECES + chunk - tile * blocks // each) * 128
        store_part(part, sums[0], factors[0])
        store_part(part + 64, sums[1], factors[1])
        barrier()
    if KIND == "rows":
        token = slot // SLOTS
        counter = counters + token * units + unit
        all_pieces = pieces_of_token(mask, token, unit, units, blocks, each, SLOTS)
        if gl.atomic_add(counter, 1, sem="acq_rel") == all_pieces - 1:
            gl.store(counter, 0)
            finish_token(out, parts, bias, scales, ids, weights, mask, token, unit, units, blocks, each, columns,
                         PIECES, SLOTS, BIAS, FP8, WEIGHTED)  # fmt: skip
    elif WHOLE:
        finish_sums(out, sums[0], sums[1], factors[0], factors[1], bias, scale, slot, e, unit, units, columns, limit,
                    alpha, beta, KIND, ACTIVATION, BIAS)  # fmt: skip
    else:
        counter = counters + tile
        all_pieces = pieces_of(tile, blocks, each)
        if gl.atomic_add(counter, 1, sem="acq_rel") == all_pieces - 1:
            gl.store(counter, 0)
            finish_tile(out, parts, bias, scale, tile, slot, e, units, all_pieces, columns, limit, alpha, beta, PIECES,
                        KIND, ACTIVATION, BIAS)  # fmt: skip
