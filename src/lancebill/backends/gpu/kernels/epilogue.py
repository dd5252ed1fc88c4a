"""The epilogue of the grouped GEMM: factors, bias, activation, stores (Gluon)."""

from __future__ import annotations

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language import PropagateNan

ALL_NAN = gl.constexpr(PropagateNan.ALL)


@dataclass(frozen=True)
class EpilogueConfig:
    """What happens to the sums of a tile."""

    kind: str  # "gated", "ungated", "rows" or "kept"
    activation: str
    bias: bool
    weighted: bool = False  # multiply by the routing weight


@gluon.constexpr_function
def epilogue_config(KIND, ACTIVATION, BIAS, WEIGHTED=False):
    return EpilogueConfig(KIND, ACTIVATION, BIAS, WEIGHTED)


@gluon.jit
def _reciprocal(x):
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _sigmoid(x):
    """One exponential and one reciprocal: relative error about 2**-22."""
    return _reciprocal(1.0 + gl.exp2(x * -1.4426950408889634))


@gluon.jit
def _tanh(x):
    return 1.0 - 2.0 * _reciprocal(1.0 + gl.exp2(x * 2.8853900817779268))


@gluon.jit
def _gelu(x):
    return 0.5 * x * (1.0 + gl.erf(x * 0.7071067811865476))


@gluon.jit
def _gelu_tanh(x):
    return 0.5 * x * (1.0 + _tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


@gluon.jit
def _at_most(x, limit):
    """The smaller of both. A plain minimum would turn NaN into the limit; this costs the same."""
    return gl.minimum(x, limit, propagate_nan=ALL_NAN)


@gluon.jit
def _within(x, limit):
    return _at_most(gl.maximum(x, -limit, propagate_nan=ALL_NAN), limit)


@gluon.jit
def gated_activation(g, u, limit, alpha, beta, NAME: gl.constexpr):
    """The gated activations of `lancebill.moe.activation`, in fp32. An infinite limit means no limit."""
    if NAME == "silu":
        g = _at_most(g, limit)
        u = _within(u, limit)
        return g * _sigmoid(g) * u
    elif NAME == "gelu":
        return _gelu(g) * u
    elif NAME == "gelu_tanh":
        return _gelu_tanh(g) * u
    elif NAME == "swigluoai":
        g = _at_most(g, limit)
        u = _within(u, limit)
        return g * _sigmoid(g * alpha) * (u + beta)
    elif NAME == "swiglustep":
        return _at_most(g * _sigmoid(g), limit) * _within(u, limit)
    elif NAME == "situ":
        return beta * _tanh(g * _reciprocal(beta + 0.0 * g)) * _sigmoid(g) * u
    else:
        gl.static_assert(NAME == "situ_limited")
        u = limit * _tanh(u * _reciprocal(limit + 0.0 * u))
        return beta * _tanh(g * _reciprocal(beta + 0.0 * g)) * _sigmoid(g) * u


@gluon.jit
def ungated_activation(x, NAME: gl.constexpr):
    """The activations without a gate, in fp32."""
    if NAME == "relu2_no_mul":
        r = gl.maximum(x, 0.0, propagate_nan=ALL_NAN)
        return r * r
    elif NAME == "silu_no_mul":
        return x * _sigmoid(x)
    elif NAME == "gelu_no_mul":
        return _gelu(x)
    else:
        gl.static_assert(NAME == "gelu_tanh_no_mul")
        return _gelu_tanh(x)


@gluon.jit
def scale_rows(acc, factors, bias, token_scales, row, rows, BIAS: gl.constexpr, QUANTISED: gl.constexpr,
               UNIT: gl.constexpr = 1.0):  # fmt: skip
    """Apply each feature's factor and bias, and each quantised token's scale, to an accumulator [features, tokens].

    Integer sums become numbers here; UNIT is what they count.
    """
    MMA: gl.constexpr = acc.type.layout
    n = gl.arange(0, acc.shape[0], gl.SliceLayout(1, MMA))
    acc = acc.to(gl.float32) * (gl.load(factors + n) * UNIT).expand_dims(1)
    if QUANTISED:
        t = gl.arange(0, acc.shape[1], gl.SliceLayout(0, MMA))
        acc = acc * gl.load(token_scales + row + t, mask=t < rows, other=0.0).expand_dims(0)
    if BIAS:
        acc = acc + gl.load(bias + n).expand_dims(1)
    return acc


@gluon.jit
def split_tokens(x, PIECES: gl.constexpr):
    """Split [features, T] along T without moving data between threads."""
    parts = (x,)
    for _ in gl.static_range(PIECES.bit_length() - 1):
        finer = ()
        for i in gl.static_range(len(parts)):
            v = parts[i]
            finer += v.reshape([v.shape[0], 2, v.shape[1] // 2]).permute([0, 2, 1]).split()
        parts = finer
    return parts


@gluon.constexpr_function
def row_layout(KIND):
    """Layout of output rows in registers: a unit gives 64 columns if KIND is "gated", else 128."""
    return gl.BlockedLayout([1, 8], [4, 8] if KIND == "gated" else [2, 16], [4, 1], [1, 0])


@gluon.jit
def load_targets(slots, row, rows, T: gl.constexpr, CHUNK: gl.constexpr, KIND: gl.constexpr):
    """The output row of each of T rows, CHUNK by CHUNK. All loads are issued before the first use.

    "rows" writes each row to its slot (token, choice), so that the rows that combine sums are contiguous. The other
    kinds write to the row of the input.
    """
    targets = ()
    for i in gl.static_range(T // CHUNK):
        r = i * CHUNK + gl.arange(0, CHUNK, gl.SliceLayout(1, row_layout(KIND)))
        if KIND == "rows":
            targets += (gl.load(slots + row + r, mask=r < rows, other=0),)
        else:
            targets += (row + r,)
    return targets


@gluon.jit
def store_rows(
    out, targets, staging, top, bottom, rows, column, columns, limit, alpha, beta,
    CHUNK: gl.constexpr, KIND: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """Store accumulators as rows of `out`, transposed through shared memory, CHUNK tokens at a time."""
    WIDTH: gl.constexpr = 64 if KIND == "gated" else 128
    LAYOUT: gl.constexpr = row_layout(KIND)
    TYPE: gl.constexpr = out.dtype.element_ty
    PIECES: gl.constexpr = top.shape[1] // CHUNK
    tops = split_tokens(top, PIECES)
    bottoms = split_tokens(bottom, PIECES)
    c = column + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    inside = (c < columns).expand_dims(0)
    for i in gl.static_range(PIECES):
        if KIND == "gated":
            staging.permute((1, 0)).store(
                gated_activation(tops[i], bottoms[i], limit, alpha, beta, ACTIVATION).to(TYPE)
            )
        elif KIND == "ungated":
            staging.slice(0, 64, 1).permute((1, 0)).store(ungated_activation(tops[i], ACTIVATION).to(TYPE))
            staging.slice(64, 64, 1).permute((1, 0)).store(ungated_activation(bottoms[i], ACTIVATION).to(TYPE))
        else:
            staging.slice(0, 64, 1).permute((1, 0)).store(tops[i].to(TYPE))
            staging.slice(64, 64, 1).permute((1, 0)).store(bottoms[i].to(TYPE))
        value = staging.load(LAYOUT)
        r = i * CHUNK + gl.arange(0, CHUNK, gl.SliceLayout(1, LAYOUT))
        at = out + targets[i].to(gl.int64).expand_dims(1) * columns + c.expand_dims(0)
        gl.store(at, value, mask=(r < rows).expand_dims(1) & inside)
