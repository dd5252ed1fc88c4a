"""The codes of a `DType`: values to codes and back, on tensors. `dtypes.py` has the rules.

It is apart from the types themselves so that their names are checked without torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable
from fractions import Fraction
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

INTEGER = "integer"
_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.int16)
_BYTES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz)
TORCH_TYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (*_TYPES, *_BYTES)}


class NumberType(Hashable, Protocol):
    """What coding reads of a `DType`."""

    @property
    def bits(self) -> int: ...
    @property
    def kind(self) -> str: ...
    @property
    def table(self) -> tuple[float, ...]: ...
    @property
    def ieee(self) -> tuple[int, int] | None: ...
    @property
    def native(self) -> torch.dtype | None: ...
    @property
    def wide(self) -> torch.dtype | None: ...
    @property
    def max(self) -> float: ...
    @property
    def min(self) -> float: ...
    @property
    def nan_code(self) -> int | None: ...
    @property
    def valid_codes(self) -> tuple[int, ...]: ...


def decode(dtype: NumberType, codes: Tensor) -> Tensor:
    """See `DType.decode`."""
    if dtype.wide is not None:
        return codes.float()
    if dtype.native is not None:
        return codes.view(dtype.native).float()
    if dtype.kind == INTEGER and dtype.nan_code is None:
        return _decode_integer(dtype, codes)
    return _table_on(dtype, codes.device).index_select(0, codes.reshape(-1).int()).view(codes.shape)


def encode(dtype: NumberType, values: Tensor) -> Tensor:
    """See `DType.encode`."""
    if dtype.wide is not None:
        rounded = values.nan_to_num(nan=0.0).round() if dtype.kind == INTEGER else values
        return rounded.clamp(dtype.min, dtype.max).to(dtype.wide)
    values = values.float()
    if dtype.native is not None:
        return values.clamp(dtype.min, dtype.max).to(dtype.native).view(torch.uint8)
    if dtype.kind == INTEGER:
        codes = _encode_integer(dtype, values)
    elif dtype.ieee is not None:
        codes = _encode_minifloat(dtype, *dtype.ieee, values)
    else:
        codes = _encode_table(dtype, values)
    return codes if dtype.nan_code is None else codes.masked_fill_(values.isnan(), dtype.nan_code)


def nearest(dtype: NumberType, values: Tensor) -> Tensor:
    """See `DType.nearest`."""
    if dtype.native is not None:
        return values.clamp(dtype.min, dtype.max).to(dtype.native).float()
    if dtype.kind == INTEGER and dtype.wide is None:
        return values.clamp(dtype.min, dtype.max).round_()
    if dtype.ieee is not None and dtype.min < 0:
        return _nearest_minifloat(dtype, *dtype.ieee, values)
    return decode(dtype, encode(dtype, values))


def _twos_complement(dtype: NumberType) -> bool:
    return dtype.table[0] == 0 and dtype.table[-1] < 0


def _decode_integer(dtype: NumberType, codes: Tensor) -> Tensor:
    if _twos_complement(dtype):  # sign-extend
        half = 1 << (dtype.bits - 1)
        return (codes ^ half).float().sub_(half)
    return codes.float().add_(dtype.table[0])


def _encode_integer(dtype: NumberType, values: Tensor) -> Tensor:
    """torch.round rounds half to even, so integers need no table search."""
    rounded = values.nan_to_num(nan=0.0).clamp_(dtype.min, dtype.max).round_()
    if _twos_complement(dtype):
        return rounded.to(torch.int32).bitwise_and_((1 << dtype.bits) - 1).to(torch.uint8)
    return rounded.sub_(dtype.table[0]).to(torch.int32).to(torch.uint8)


def _encode_minifloat(dtype: NumberType, mantissa: int, bias: int, values: Tensor) -> Tensor:
    """The same codes as the table search, by arithmetic; several times faster.

    Adding 2**(23 - mantissa) times the value's power of two makes fp32 round it to the type's
    mantissa, half to even. The difference of the bit patterns is then the code within its binade.
    Below the smallest normal the exponent is clamped, which yields the subnormals.
    """
    magnitude = values.abs().nan_to_num_(nan=0.0).clamp_(max=dtype.max)
    smallest = (128 - bias) << 23
    exponent = (magnitude.view(torch.int32) & 0x7F800000).clamp_(min=smallest)
    shifter = exponent + ((23 - mantissa) << 23)
    code = magnitude.add_(shifter.view(torch.float32)).view(torch.int32).sub_(shifter)
    code += exponent.sub_(smallest).bitwise_right_shift_(23 - mantissa)
    if dtype.min == 0:
        return code.masked_fill_(values < 0, 0).to(torch.uint8)
    sign = values.view(torch.int32) >> (32 - dtype.bits)
    return code.bitwise_or_(sign.bitwise_and_(1 << (dtype.bits - 1))).to(torch.uint8)


def _nearest_minifloat(dtype: NumberType, mantissa: int, bias: int, values: Tensor) -> Tensor:
    """As `_encode_minifloat`: subtracting the power of two again leaves the rounded number."""
    rounded = values.clamp(dtype.min, dtype.max)
    exponent = (rounded.view(torch.int32) & 0x7F800000).clamp_(min=(128 - bias) << 23).add_((23 - mantissa) << 23)
    shifter = exponent.view(torch.float32).copysign_(rounded)
    return rounded.add_(shifter).sub_(shifter)


def _encode_table(dtype: NumberType, values: Tensor) -> Tensor:
    """Nearest entry of any table, by one look-up and one comparison instead of a search.

    The top 16 bits of an fp32 number select an interval, which for most tables holds at most one
    decision boundary. The look-up returns the lower of the two candidates and that boundary.
    """
    boundaries, codes, cells = _search_tables(dtype, values.device)
    values = values.nan_to_num(nan=0.0)
    if cells is None:
        rank = torch.bucketize(values.contiguous(), boundaries, out_int32=True)
    else:
        below, limit = cells
        cell = (values.view(torch.int32) >> 16).bitwise_and_(0xFFFF).reshape(-1)
        rank = below.index_select(0, cell).view(values.shape)
        rank += values > limit.index_select(0, cell).view(values.shape)
    if codes is None:
        return rank.to(torch.uint8)
    return codes.index_select(0, rank.reshape(-1).int()).view(values.shape)


@lru_cache(maxsize=512)
def _table_on(dtype: NumberType, device: torch.device) -> Tensor:
    return torch.tensor(dtype.table, dtype=torch.float32, device=device)


@lru_cache(maxsize=512)
def _search_tables(
    dtype: NumberType, device: torch.device
) -> tuple[Tensor, Tensor | None, tuple[Tensor, Tensor] | None]:
    """Sorted decision boundaries (fp32), the code of each interval (None: its rank), the cells.

    A value equal to a boundary rounds down. If the tie must round up, the boundary is moved to the
    next lower float. A midpoint that fp32 cannot represent is rounded down, which affects no fp32 value.
    """
    codes = sorted(dtype.valid_codes, key=lambda c: (dtype.table[c], c))
    codes = [c for i, c in enumerate(codes) if i == 0 or dtype.table[c] != dtype.table[codes[i - 1]]]
    edges = []
    for low, high in itertools.pairwise(codes):
        exact = (Fraction(dtype.table[low]) + Fraction(dtype.table[high])) / 2
        middle = torch.tensor(float(exact), dtype=torch.float32, device="cpu")  # whatever the default device is
        if Fraction(middle.item()) > exact or (Fraction(middle.item()) == exact and low % 2 == 1 and high % 2 == 0):
            middle = torch.nextafter(middle, torch.tensor(-math.inf, dtype=torch.float32, device="cpu"))
        edges.append(middle.item())
    boundaries = torch.tensor(edges, dtype=torch.float32, device="cpu")
    code_of = None if codes == list(range(len(codes))) else torch.tensor(codes, dtype=torch.uint8, device=device)
    cells = _cells(boundaries)
    return boundaries.to(device), code_of, cells and (cells[0].to(device), cells[1].to(device))


def _cells(boundaries: Tensor) -> tuple[Tensor, Tensor] | None:
    """For each pattern of the top 16 bits: the lowest rank and the boundary above it.

    None if two boundaries share a cell, which happens only for tables with very close values.
    """
    top = torch.arange(1 << 16, dtype=torch.int64, device="cpu") << 16
    ends = torch.stack([top, top + 0xFFFF]).to(torch.int32).view(torch.float32)
    ends = torch.where(ends.isfinite().all(0), ends, torch.zeros_like(ends))  # NaN and infinity are never looked up
    ranks = torch.bucketize(ends, boundaries)
    below, above = ranks.amin(0), ranks.amax(0)
    if int((above - below).amax()) > 1:
        return None
    return below.to(torch.uint8), torch.cat([boundaries, torch.tensor([math.inf], dtype=torch.float32, device="cpu")])[
        below
    ]
