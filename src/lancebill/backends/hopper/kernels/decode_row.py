"""Decoding with fp8: a block quantises a row of x into shared memory, in the order of the weights (Gluon)."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from lancebill.backends.gpu.kernels import convert_row
from lancebill.backends.gpu.kernels.decode_finish import T
from lancebill.backends.gpu.kernels.gluon_names import LARGER_VIEWS, barrier, view

column_at, divide = gluon.jit(convert_row.column_at.fn), gluon.jit(convert_row.divide.fn)


@gluon.constexpr_function
def row_buffer_shape(ROW_SLICES):
    """Shape of the shared-memory buffer for a quantised row.

    wgmma reads eight tokens, of which seven are padding with arbitrary contents. With LARGER_VIEWS the padding
    overlaps the slices that follow; otherwise every slice is stored eight times.
    """
    return [ROW_SLICES + T.value, 1, 128] if LARGER_VIEWS else [ROW_SLICES, T.value, 128]


@gluon.jit
def row_scale(x, width):
    """The fp8 scale of a row: its largest magnitude over 448, the largest e4m3 number. Joins all warps."""
    STEP: gl.constexpr = 4096
    c = gl.arange(0, STEP, gl.BlockedLayout([8], [32], [4], [0]))
    largest = 0.0
    for start in range(0, width, 2 * STEP):  # two loads in flight
        value = gl.load(x + start + c, mask=start + c < width, other=0.0)
        more = gl.load(x + start + STEP + c, mask=start + STEP + c < width, other=0.0)
        either = gl.maximum(gl.abs(value.to(gl.float32)), gl.abs(more.to(gl.float32)))
        largest = gl.maximum(largest, gl.max(either, 0))
    scale = gl.div_rn(largest, 448.0)
    return gl.where(scale > 0, scale, 1.0)


@gluon.constexpr_function
def slices_layout(SLICES):
    """Layout of [slices, 128] columns of a row: neighbouring columns per thread, all threads busy if possible."""
    if SLICES < 16:
        return gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    return gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])


@gluon.jit
def load_slices(x, first, width, SLICES: gl.constexpr):
    """SLICES slices of a row as [SLICES, 128], columns permuted as by `dispatch_combine.prepare_rows`."""
    PART: gl.constexpr = slices_layout(SLICES)
    s = first + gl.arange(0, SLICES, gl.SliceLayout(1, PART)).expand_dims(1)
    k = s * 128 + column_at(gl.arange(0, 128, gl.SliceLayout(0, PART))).expand_dims(0)
    k = gl.max_contiguous(gl.multiple_of(k, [1, 4]), [1, 4])
    return gl.load(x + k, mask=k < width, other=0.0)


@gluon.jit
def quantise_slices(part, scale):
    """Quantise to e4m3, as `convert_row` does."""
    return divide(part.to(gl.float32), scale).to(gl.float8e4nv)


@gluon.jit
def quantise_part(x, xb, scale, first, end, width, ROW_SLICES: gl.constexpr):
    """Quantise slices `first` to `end` of a row into their places in `xb`. All warps are done with the old ones."""
    TOGETHER: gl.constexpr = min(ROW_SLICES, 16)
    for i in gl.static_range(0, ROW_SLICES, TOGETHER):
        if (i + TOGETHER > first) & (i < end):
            store_slices(xb, quantise_slices(load_slices(x, i, width, TOGETHER), scale), i, ROW_SLICES)
    fence_async_shared()
    barrier()


@gluon.jit
def store_slices(xb, part, first: gl.constexpr, ROW_SLICES: gl.constexpr):
    """Store slices to `xb`: one row each if rows overlap (see `row_buffer_shape`), else eight copies each."""
    COUNT: gl.constexpr = part.shape[0]
    if xb.shape[1] == 1:
        view(xb.index(0), xb.dtype, [ROW_SLICES, 128], xb.layout).slice(first, COUNT, 0).store(part)
    else:
        LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8, 16], [4, 1, 8], [4, 1, 1], [2, 1, 0])
        part = gl.convert_layout(part.to(gl.int8, bitcast=True), gl.SliceLayout(1, LAYOUT))
        tokens = part.expand_dims(1) + gl.zeros([COUNT, T, 128], gl.int8, LAYOUT)
        target = view(xb, xb.dtype, [ROW_SLICES * T, 128], xb.layout).slice(first * T, COUNT * T, 0)
        target.store(tokens.reshape([COUNT * T, 128]).to(gl.float8e4nv, bitcast=True))
