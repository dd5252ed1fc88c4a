"""Fast searches in codes: for numbers that are not finite, for zeros, for the largest magnitude.

`==` and `isfinite` write a bool for every number, and `any` and `all` read them one by one. A bitwise operation and a
minimum or maximum are vectorised: ten times as fast, which matters for the scales of every layer that is loaded, and
for `verify --values`, which reads every byte of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from lancebill.numbers import native
from lancebill.numbers.dtypes import INTEGER, DType
from lancebill.numbers.unusual import unusual

# Bits of the exponent, which are all set in NaN and infinity.
_EXPONENTS = {torch.float16: 0x7C00, torch.bfloat16: 0x7F80, torch.float32: 0x7F800000}
_INTEGERS = {2: torch.int16, 4: torch.int32}


def contains_any(codes: Tensor, wanted: Iterable[int]) -> bool:
    """Whether any of the `wanted` codes is in a uint8 tensor."""
    wanted = bytes(wanted)
    found = native.contains(codes, wanted)
    if found is not None:
        return found
    return codes.numel() > 0 and any(unusual((codes ^ code).min() == 0) for code in wanted)


def all_finite(numbers: Tensor) -> bool:
    """Whether no number is NaN or infinite; true of integers."""
    exponent = _EXPONENTS.get(numbers.dtype)
    if exponent is None or numbers.numel() == 0:
        return True
    finite = native.all_finite(numbers, exponent)
    if finite is not None:
        return finite
    exponents = numbers.view(_INTEGERS[numbers.dtype.itemsize]) & exponent
    return int(exponents.max()) < exponent


def any_negative(dtype: DType, codes: Tensor) -> bool:
    """Whether any number of a float type is below zero, or minus zero."""
    if codes.numel() == 0 or dtype.min >= 0:
        return False
    if dtype.wide is not None:
        return int(codes.view(_INTEGERS[codes.dtype.itemsize]).min()) < 0
    return int(codes.max()) > dtype.magnitude_mask


@dataclass(frozen=True)
class Extent:
    """The smallest and the largest magnitude of some numbers, and whether all of them are finite."""

    low: float
    high: float
    finite: bool = True


def extent(dtype: DType, codes: Tensor) -> Extent:
    """The extent of codes of this type. If they are not all finite, the magnitudes mean nothing."""
    if codes.numel() == 0:
        return Extent(0.0, 0.0)
    if dtype.wide is not None and dtype.kind != INTEGER:
        integer = _INTEGERS[codes.dtype.itemsize]
        bits = torch.stack(torch.aminmax(codes.view(integer) & torch.iinfo(integer).max))  # without the sign
        low, high = bits.view(codes.dtype).tolist()
        return Extent(low, high, int(bits[1]) < _EXPONENTS[codes.dtype])
    if dtype.ordered:
        low, high = (int(code) for code in torch.aminmax(codes & dtype.magnitude_mask))
        return Extent(dtype.table[low], dtype.table[high], high in dtype.valid_codes)
    magnitudes = dtype.decode(codes).abs_()
    low, high = (float(value) for value in torch.aminmax(magnitudes))
    return Extent(low, high, all_finite(magnitudes))


@dataclass(frozen=True)
class Survey:
    """What one look at all bytes of a tensor tells."""

    digest: int  # the sum of the bytes, eight at a time: different for almost all pairs of tensors
    any: int  # all bits that occur
    low: int
    high: int


def survey(data: Tensor) -> Survey:
    """The survey of a uint8 tensor that is not empty."""
    data = data.contiguous().reshape(-1)
    rest = int(data[len(data) // 8 * 8 :].sum()) << 64
    found = native.survey(data)
    if found is not None:
        return Survey(found.sum + rest, found.any, found.low, found.high)
    words = data[: len(data) // 8 * 8].view(torch.int64)
    low, high = (int(byte) for byte in torch.aminmax(data))
    return Survey(int(words.sum()) + rest, _all_bits(data), low, high)


def _all_bits(data: Tensor) -> int:
    while len(data) > 1:
        half = -(-len(data) // 2)
        data = data[:half] | data[-half:]  # of an odd number the middle one is in both
    return int(data[0])
