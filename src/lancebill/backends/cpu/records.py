"""Small integer scales under a float, such as those of GGUF's K-quants: the records of native/lancebill.h.

A record has the floats of 16 rows in fp32, then a signed byte for each of their groups.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from lancebill.numbers.dtypes import BF16, F16, F32, DType

BLOCK = 16
FACTOR_BYTES = 4 * BLOCK
_FACTORS = (F16, BF16, F32)


def fit_records(number: DType, factor: DType) -> bool:
    """Whether every code of `number` is a signed byte of its own, under a float."""
    values = {number.table[code] for code in number.valid_codes}
    small = len(values) == 1 << number.bits and all(v == int(v) and -128 <= v <= 127 for v in values)
    return small and factor in _FACTORS


def record_bytes(groups: int) -> int:
    return FACTOR_BYTES + BLOCK * groups


def join_records(numbers: Tensor, factors: Tensor) -> Tensor:
    """Bytes [..., n, groups] and fp32 [..., n, records] to [..., blocks, records, bytes]."""
    records = factors.shape[-1]
    by_block = factors.unflatten(-2, (-1, BLOCK)).transpose(-1, -2).contiguous().view(torch.uint8)
    groups = numbers.unflatten(-2, (-1, BLOCK)).unflatten(-1, (records, -1)).movedim(-3, -1)
    return torch.cat([by_block, groups.flatten(-2)], dim=-1)


def split_records(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `join_records`."""
    factors = packed[..., :FACTOR_BYTES].contiguous().view(torch.float32)
    numbers = packed[..., FACTOR_BYTES:].unflatten(-1, (-1, BLOCK)).movedim(-1, -3)
    return numbers.flatten(-2).flatten(-3, -2), factors.transpose(-1, -2).flatten(-3, -2)


def to_bytes(dtype: DType, codes: Tensor) -> Tensor:
    """The signed byte of each code."""
    return codes if _are_bytes(dtype) else _look_up(_byte_map_on(dtype, 0, codes.device), codes)


def from_bytes(dtype: DType, numbers: Tensor) -> Tensor:
    """The inverse of `to_bytes`."""
    return numbers if _are_bytes(dtype) else _look_up(_byte_map_on(dtype, 1, numbers.device), numbers)


@cache
def _are_bytes(dtype: DType) -> bool:
    """Whether codes are the bytes of their numbers already."""
    return all(int(value) % 256 == code for code, value in enumerate(dtype.table))


def _look_up(table: Tensor, codes: Tensor) -> Tensor:
    return table.index_select(0, codes.reshape(-1).int()).view(codes.shape)


@cache  # not `lru_cache`: recorded graphs read these tables for ever (split/recorded.py)
def _byte_map_on(dtype: DType, way: int, device: torch.device) -> Tensor:
    stored = torch.tensor([int(v) % 256 for v in dtype.table], dtype=torch.uint8, device="cpu")
    back = torch.zeros(256, dtype=torch.uint8, device="cpu")
    back[stored.int()] = torch.arange(len(stored), dtype=torch.uint8, device="cpu")
    return (stored, back)[way].to(device)
