"""Translates specs to the kernels' form: how codes decode, the scales and zeros of a group, how inputs are quantised.

Types of up to 4 bits become a table of 16 integers times one step. Larger integers need no table: those of 5 and 6
bits take six, others a byte. Minifloats of 5 to 8 bits are stored as 8-bit minifloats, whose bits the kernels only
shift. Scales of whole rows are multiplied into one factor per row. Small integers under a float stay two levels; all
other levels become one scale and one zero per group and row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from lancebill.backends.base import NoForm, Reason
from lancebill.backends.cpu.native import abi
from lancebill.backends.cpu.records import fit_records
from lancebill.moe.layout import MatrixShape
from lancebill.numbers.dtypes import (
    BF16,
    E2M3,
    E3M2,
    E3M4,
    E4M3,
    E4M3FNUZ,
    E5M2,
    E8M0,
    F16,
    F32,
    INTEGER,
    ZERO16,
    DType,
)
from lancebill.numbers.spec import ALL, MUL, ActivationSpec, QuantSpec, Scale

GROUPS = (128, 64, 32, 16)
_SCALE_KINDS = {
    BF16: abi.ScaleKind.BF16, F16: abi.ScaleKind.F16, F32: abi.ScaleKind.F32, E8M0: abi.ScaleKind.E8M0,
    E4M3: abi.ScaleKind.E4M3,
}  # fmt: skip
_UNQUANTISED_INPUTS = {BF16: abi.Input.BF16, F16: abi.Input.F16, F32: abi.Input.F32}
# Minifloats: mantissa bits of the 8-bit type that stores them, and the step that corrects the exponent bias.
_MINIFLOATS = {E4M3: (3, 1.0), E5M2: (2, 1.0), E3M4: (4, 1.0), E4M3FNUZ: (3, 0.5), E2M3: (3, 1.0), E3M2: (3, 1.0)}
_ONE_LOOKUP, _TWO_LOOKUPS = 127, 16383  # largest table entry for one and for two byte lookups
_FLOAT_LOOKUP = 2**24 - 1  # for lookups of fp32 numbers
# Significant bits that a scale adds to a weight: none for powers of two.
_SCALE_BITS = {
    abi.ScaleKind.NONE: 0, abi.ScaleKind.E8M0: 0, abi.ScaleKind.E4M3: 4, abi.ScaleKind.BF16: 8,
    abi.ScaleKind.F16: 11, abi.ScaleKind.F32: 24, abi.ScaleKind.I8: 24,
}  # fmt: skip
_LONG_ROW = 256  # columns
_CODES_OF_RECORDS = (abi.Codes.TABLE4, abi.Codes.BITS6)
OFFSETS = (abi.ZeroKind.OFFSET_F32, abi.ZeroKind.OFFSET_I8)


@dataclass(frozen=True)
class Values:
    """The value of a code: step * (table[code] - center), and likewise for bytes and minifloats."""

    codes: abi.Codes
    table: tuple[int, ...] = ()
    center: int = 0
    step: float = 1.0
    mantissa: int = 0
    in_floats: bool = False  # multiplied in fp32: the entries of the table are too long for integer products


@dataclass(frozen=True)
class Record:
    """Two levels that the kernels read as small integers under a factor: see `records.py`."""

    name: str  # of the packed tensor
    number: int  # indices of the levels
    factor: int


@dataclass(frozen=True)
class CpuForm:
    """The form of one packed matrix and its inputs."""

    values: Values
    group: int
    factor: int  # columns that share a factor; 0: there are no records
    scale: abi.ScaleKind
    zero: abi.ZeroKind
    row_scale: bool
    records: tuple[Record, ...]
    kept: tuple[int, ...]  # levels that the kernels' arrays do not preserve; stored separately for `unpack`
    input: abi.Input
    input_group: int
    tiles: bool  # whether weights rounded to bf16 are accurate enough for tiles


@lru_cache(maxsize=1024)
def matrix_form(shape: MatrixShape, activations: ActivationSpec) -> CpuForm:
    """The form of a matrix and its inputs. Raises `NoForm` with a reason if no kernel supports it."""
    kind, input_group = _input_kind(activations)
    spec = shape.spec
    values = _values(spec.dtype, kind == abi.Input.F32)
    group = _group_size(shape, input_group)
    inner = [level for level in spec.scales if level.block[1] != ALL]
    zero = _zero_kind(spec, values)
    native = len(inner) == 1 and inner[0].op == MUL and inner[0].dtype in _SCALE_KINDS and not spec.minimum
    integers = values.codes in _CODES_OF_RECORDS and not values.in_floats
    records = _records(spec, zero, group) if integers else ()
    if native:
        scale = _SCALE_KINDS[inner[0].dtype]
    elif records:
        scale, zero = abi.ScaleKind.I8, abi.ZeroKind.OFFSET_I8 if spec.minimum else zero
    else:
        scale = abi.ScaleKind.F32 if inner or spec.minimum else abi.ScaleKind.NONE
    factor = spec.levels[records[0].factor].block[1] if records else 0
    preserved = {spec.levels.index(inner[0])} if native else set()
    preserved |= {index for record in records for index in (record.number, record.factor)}
    if zero == abi.ZeroKind.U8:
        preserved.add(len(spec.scales))
    row_scale = len(inner) < len(spec.scales) and not spec.minimum
    kept = tuple(i for i in range(len(spec.levels)) if i not in preserved)
    tiles = _exact_in_bf16(values, scale, zero) or _close_in_bf16(shape, values, zero, kind)
    return CpuForm(values, group, factor, scale, zero, row_scale, records, kept, kind, input_group, tiles)


def _records(spec: QuantSpec, zero: abi.ZeroKind, group: int) -> tuple[Record, ...]:
    """The records of the scales, and of the minima if there are any; none unless all of them fit."""
    scales = [(i, scale) for i, scale in enumerate(spec.scales) if scale.block[1] != ALL]
    first = len(spec.levels) - len(spec.minimum)
    pairs = {"scales": scales} | ({"zeros": list(enumerate(spec.minimum, first))} if spec.minimum else {})
    if not all(_fit_records([level for _, level in pair]) for pair in pairs.values()):
        return ()
    if zero == abi.ZeroKind.OFFSET_F32 and (spec.zero is not None or len(scales) < len(spec.scales)):
        return ()  # the offset is more than the minimum
    widths = {factor.block[1] // group for _, (_, factor) in pairs.values()}
    if len(widths) > 1 or any(groups & (groups - 1) for groups in widths):
        return ()
    return tuple(Record(name, number, factor) for name, ((number, _), (factor, _)) in pairs.items())


def _fit_records(levels: list[Scale]) -> bool:
    pair = len(levels) == 2 and all(level.op == MUL for level in levels)
    return pair and fit_records(levels[0].dtype, levels[1].dtype)


def _exact_in_bf16(values: Values, scale: abi.ScaleKind, zero: abi.ZeroKind) -> bool:
    """Whether every code times its group's scale fits the 8 significant bits of bf16."""
    if values.codes == abi.Codes.FLOAT8:
        bits = values.mantissa + 1
    elif not values.table:
        bits = 8
    elif zero == abi.ZeroKind.U8:
        bits = max(values.table).bit_length()
    else:
        bits = max(_significant(entry - values.center) for entry in values.table)
    return zero not in OFFSETS and bits + _SCALE_BITS[scale] <= 8


def _close_in_bf16(shape: MatrixShape, values: Values, zero: abi.ZeroKind, kind: abi.Input) -> bool:
    """Whether rounding weights to bf16 is accurate enough: with bf16 inputs and long rows the errors average out.

    Not with quantised inputs or tables of more than 7 bits, where the rounding would dominate the error.
    """
    large_table = max(values.table, default=0) > _ONE_LOOKUP
    return kind == abi.Input.BF16 and zero not in OFFSETS and not large_table and shape.k >= _LONG_ROW


def _significant(number: int) -> int:
    """Number of bits from the highest to the lowest set bit."""
    number = abs(number)
    return number.bit_length() - (number & -number).bit_length() + 1 if number else 0


@lru_cache(maxsize=256)
def _values(dtype: DType, exact_inputs: bool) -> Values:
    if dtype.wide is not None:
        raise NoForm(Reason("weights", f"{dtype} weights are not quantised", "torch-cpu supports them"))
    if dtype.bits <= 4:
        return _table(dtype, exact_inputs)
    if dtype.kind == INTEGER:
        return Values(abi.Codes.BITS6 if dtype.bits <= 6 else abi.Codes.BYTE, center=round(-dtype.min))
    if dtype in _MINIFLOATS:
        mantissa, step = _MINIFLOATS[dtype]
        return Values(abi.Codes.FLOAT8, step=step, mantissa=mantissa)
    raise NoForm(Reason("weights", f"no kernel for {dtype}", "supported: types of up to 4 bits, integers, minifloats"))


def _table(dtype: DType, exact_inputs: bool) -> Values:
    """The table as integers: exact if one step divides all entries, else rounded to multiples of a power of two.

    They have at most 14 bits, or 24 with fp32 inputs, which are more accurate than 14 bits. With these a step that is
    no power of two counts as rounding, too: it multiplies every sum.
    """
    finite = [dtype.table[c] for c in dtype.valid_codes]
    low, high = min(*finite, 0.0), max(*finite, 0.0)
    exact = next((s for s in _steps(finite) if _divides(s, finite) and (high - low) / s <= _TWO_LOOKUPS), None)
    in_floats = exact_inputs and (exact is None or not _is_power_of_two(exact))
    largest = _FLOAT_LOOKUP if in_floats else _TWO_LOOKUPS
    step = exact if exact and not in_floats else 2.0 ** math.ceil(math.log2((high - low) / largest))
    center = round(-low / step)
    entries = [round(v / step) + center if math.isfinite(v) else 0 for v in dtype.table]
    return Values(abi.Codes.TABLE4, tuple(entries + [0] * (16 - len(entries))), center, step, in_floats=in_floats)


def _steps(values: list[float]) -> list[float]:
    """Candidate steps: powers of two, largest first, then the smallest magnitude."""
    smallest = min((abs(v) for v in values if v), default=1.0)
    return [2.0**e for e in range(2, -14, -1)] + [smallest]


def _is_power_of_two(step: float) -> bool:
    return math.frexp(step)[0] == 0.5


def _divides(step: float, values: list[float]) -> bool:
    return all(abs(v / step - round(v / step)) < 1e-6 * max(1.0, abs(v / step)) for v in values)


def _group_size(shape: MatrixShape, input_group: int) -> int:
    """The group size: divides the blocks of every level and of the input, with the least padding, then the largest."""
    widths = [level.block[1] for level in shape.spec.levels if level.block[1] != ALL]
    legal = [g for g in GROUPS if all(width % g == 0 for width in (*widths, input_group))]
    if not legal:
        narrowest = min(width for width in (*widths, input_group) if width)
        raise NoForm(Reason("group", f"groups of {narrowest} columns", "supported: multiples of 16"))
    return min(legal, key=lambda g: (padded_columns(shape.k, g), -g))


def padded_columns(columns: int, group: int) -> int:
    unit = max(group, 32)
    return -(-columns // unit) * unit


def _zero_kind(spec: QuantSpec, values: Values) -> abi.ZeroKind:
    if spec.zero is None and not spec.minimum:
        return abi.ZeroKind.NONE
    if spec.minimum or spec.zero is None or spec.zero.dtype != ZERO16:
        return abi.ZeroKind.OFFSET_F32
    largest = values.center + 2**spec.dtype.bits  # a zero point may be one above the largest code
    integers = values.codes != abi.Codes.FLOAT8 and not values.in_floats
    fits = values.step == 1.0 and integers and largest <= 255
    return abi.ZeroKind.U8 if fits else abi.ZeroKind.OFFSET_F32


def _input_kind(activations: ActivationSpec) -> tuple[abi.Input, int]:
    """How inputs are quantised, and the columns per dynamic scale (0: the whole row)."""
    spec = activations.spec
    if spec.dtype in _UNQUANTISED_INPUTS:
        return _UNQUANTISED_INPUTS[spec.dtype], 0
    one_scale = len(spec.scales) == 1 and spec.zero is None and not spec.minimum and _is_plain_scale(spec.scales[0])
    int8 = spec.dtype.kind == INTEGER and spec.dtype.bits == 8 and (spec.dtype.min, spec.dtype.max) == (-128, 127)
    if one_scale and (int8 or spec.dtype == E4M3):
        return abi.Input.INT8 if int8 else abi.Input.E4M3, spec.scales[0].block[1]
    raise NoForm(Reason("activations", f"{activations} activations", "supported: bf16, fp16, fp32, int8, fp8"))


def _is_plain_scale(scale: Scale) -> bool:
    return scale.op == MUL and scale.dtype == F32 and scale.block[0] in (ALL, 1)
