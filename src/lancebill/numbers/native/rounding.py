"""The calls that round values to codes under given levels and measure the error, in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref
from dataclasses import dataclass

import torch
from torch import Tensor

from lancebill.native.address import host_address
from lancebill.numbers.dtypes import FLOAT, INTEGER, DType
from lancebill.numbers.native import (
    MOST_SCALES,
    CodeTypeStruct,
    LevelStruct,
    RoundingStruct,
    TrialsStruct,
    library_for,
)

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
    code_type = _code_type(dtype)
    calls = library_for(values, codes, *(level.numbers for level in numbers))
    if calls is None or code_type is None or len(levels.scales) > MOST_SCALES:
        return None
    rows, columns = values.shape
    work = RoundingStruct(host_address(values), host_address(codes), rows, columns)
    work.minimum, work.step, work.zero = map(_struct, (levels.minimum, levels.step, levels.zero))
    work.scale_count = len(levels.scales)
    for i, scale in enumerate(levels.scales):
        work.scales[i] = _struct(scale)
    work.type = code_type
    work.beyond_low, work.beyond_high = limits
    calls.lancebill_round(byref(work))
    return work


def scale_errors(values: Tensor, steps: Tensor, side: int, dtype: DType, zero: BlockNumbers | None) -> Tensor | None:
    """Weighted squared errors [candidates, rows, blocks] with steps of the same shape.

    Blocks have `side` columns. None if it does not apply.
    """
    errors = torch.empty_like(steps)
    return errors if _try_scales(values, steps, side, dtype, zero, errors=errors) else None


def best_scales(values: Tensor, steps: Tensor, side: int, dtype: DType, zero: BlockNumbers | None) -> Tensor | None:
    """As `scale_errors`, but only the index of the least error in each block, the first of equal ones: int64."""
    best = torch.empty(steps.shape[1:], dtype=torch.int64, device=steps.device)
    return best if _try_scales(values, steps, side, dtype, zero, best=best) else None


def _try_scales(
    values: Tensor, steps: Tensor, side: int, dtype: DType, zero: BlockNumbers | None, **results: Tensor
) -> bool:
    code_type = _code_type(dtype)
    calls = library_for(values, steps, *results.values(), *([] if zero is None else [zero.numbers]))
    if calls is None or code_type is None or (dtype.kind == FLOAT and (dtype.min == 0 or zero is not None)):
        return False
    work = TrialsStruct(host_address(values), host_address(steps))
    work.rows, work.columns, work.candidates, work.side = *values.shape, len(steps), side
    work.zero, work.type = _struct(zero), code_type
    work.errors, work.best = (host_address(results[name]) if name in results else None for name in ("errors", "best"))
    calls.lancebill_try_scales(byref(work))
    return True


def _struct(level: BlockNumbers | None) -> LevelStruct:
    if level is None:
        return LevelStruct()
    rows, columns = level.numbers.shape
    return LevelStruct(host_address(level.numbers), columns if rows > 1 else 0, level.side, int(level.divide))


def _code_type(dtype: DType) -> CodeTypeStruct | None:
    """None for types whose codes are searched in a table."""
    if dtype.kind == INTEGER and dtype.table:
        twos_complement = dtype.table[0] == 0 and dtype.table[-1] < 0
        offset, mask = (0, (1 << dtype.bits) - 1) if twos_complement else (round(dtype.table[0]), 255)
        return CodeTypeStruct(_INTEGER, dtype.min, dtype.max, offset, mask, 0, 0, dtype.bits)
    if dtype.kind == FLOAT and dtype.ieee is not None:
        return CodeTypeStruct(_MINIFLOAT, dtype.min, dtype.max, 0, 0, *dtype.ieee, dtype.bits)
    return None
