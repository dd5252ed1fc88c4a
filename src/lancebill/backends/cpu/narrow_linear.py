"""Rows of fp32 times a matrix that memory holds in 16 bits: the numbers of the fp32 matrix, in half the bytes.

A few rows are multiplied by the native library, which converts numbers in registers. With many rows the arithmetic
takes longer than reading the matrix, and torch's product of fp32 matrices is faster; then some rows of the matrix at a
time are converted, into memory that stays in the cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lancebill.backends.cpu import native
from lancebill.backends.cpu.native.abi import Float, IsaLevel
from lancebill.native.address import host_address

NARROW = {torch.bfloat16: Float.BF16, torch.float16: Float.F16}
MOST_ROWS = 96  # that the native library multiplies
CONVERTED = 1 << 20  # numbers of the matrix at a time


def is_supported() -> bool:
    """Whether the native library multiplies 16-bit numbers faster than torch multiplies fp32."""
    library = native.library()
    return library is not None and library.best != IsaLevel.PORTABLE


def narrow_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., K] times weight [N, K], with a bias [N], all of any floating dtype: [..., N] in x's dtype."""
    library = native.library()
    bias = None if bias is None else bias.to(x.dtype).expand(weight.shape[0]).contiguous()
    readable = x.is_cpu and x.dtype == torch.float32 and weight.dtype in NARROW and weight.is_contiguous()
    if library is None or not readable:
        return torch.nn.functional.linear(x, weight.to(x.dtype), bias)
    columns = x.shape[-1]
    rows = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, columns).contiguous()
    out = x.new_empty(rows.shape[0], weight.shape[0])
    if rows.shape[0] > MOST_ROWS:
        _multiply_converted(rows, weight, bias, out)
    elif out.numel():
        kind, shape = NARROW[weight.dtype], (weight.shape[0], columns)
        given = host_address(weight), kind, shape, None if bias is None else host_address(bias)
        library.linear(*given, rows, out)
    return out if x.dim() == 2 else out.view(*x.shape[:-1], weight.shape[0])


def _multiply_converted(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    step = max(1, CONVERTED // weight.shape[1])
    wide = x.new_empty(min(step, weight.shape[0]), weight.shape[1])
    for first in range(0, weight.shape[0], step):
        part = weight[first : first + step]
        torch.mm(x, wide[: part.shape[0]].copy_(part).t(), out=out[:, first : first + step])
    if bias is not None:
        out += bias
