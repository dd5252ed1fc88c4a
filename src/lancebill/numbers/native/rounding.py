"""The call that rounds values to codes under given levels and measures the error, in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref
from dataclasses import dataclass

from torch import Tensor

from lancebill.numbers.dtypes import FLOAT, INTEGER, DType
from lancebill.numbers.native import MOST_SCALES, LevelStruct, RoundingStruct, library_for

_INTEGER, _MINIFLOAT = 0, 1  # enum lancebill_encoding


@dataclass(frozen=True, eq=False)
class BlockNumbers:
    """One fp32 number for each row (or one row for all) and each `side` columns, 0 for the whole row."""

    numbers: Tensor
    side: int
    divide: bool = False


@dataclass(frozen=True)
class RoundingLevels:
    """The numbers with which a position and a value are computed: see `RoundingStruct`."""

    step: BlockNumbers | None
    scales: Sequence[BlockNumbers]
    zero: BlockNumbers | None
    minimum: BlockNumbers | None


def round_rows(
    values: Tensor, codes: Tensor, dtype: DType, levels: RoundingLevels, limits: tuple[float, float]
) -> RoundingStruct | None:
    """Rounds fp32 `values` into `codes`; positions outside `limits` count as saturated. None if it does not apply."""
    numbers = [level for level in (levels.step, *levels.scales, levels.zero, levels.minimum) if level is not None]
    encoding = _encoding(dtype)
    calls = library_for(values, codes, *(level.numbers for level in numbers))
    if calls is None or encoding is None or len(levels.scales) > MOST_SCALES:
        return None
    rows, columns = values.shape
    work = RoundingStruct(values.data_ptr(), codes.data_ptr(), rows, columns)
    work.minimum, work.step, work.zero = map(_struct, (levels.minimum, levels.step, levels.zero))
    work.scale_count = len(levels.scales)
    for i, scale in enumerate(levels.scales):
        work.scales[i] = _struct(scale)
    work.encoding, work.offset, work.mask = encoding
    work.low, work.high, work.bits = dtype.min, dtype.max, dtype.bits
    work.mantissa, work.bias = dtype.ieee or (0, 0)
    work.beyond_low, work.beyond_high = limits
    calls.lancebill_round(byref(work))
    return work


def _struct(level: BlockNumbers | None) -> LevelStruct:
    if level is None:
        return LevelStruct()
    rows, columns = level.numbers.shape
    return LevelStruct(level.numbers.data_ptr(), columns if rows > 1 else 0, level.side, int(level.divide))


def _encoding(dtype: DType) -> tuple[int, int, int] | None:
    """Kind, offset and mask; None for types whose codes are searched in a table."""
    if dtype.kind == INTEGER and dtype.table:
        twos_complement = dtype.table[0] == 0 and dtype.table[-1] < 0
        return (_INTEGER, 0, (1 << dtype.bits) - 1) if twos_complement else (_INTEGER, round(dtype.table[0]), 255)
    return (_MINIFLOAT, 0, 0) if dtype.kind == FLOAT and dtype.ieee is not None else None
