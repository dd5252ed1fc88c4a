"""Specs in the kernels' terms: how codes become values, which numbers a group has, how inputs come.

Every spec of up to four bits is a table of sixteen integers times one step, wider integers are their own
table, and mini-floats of five to eight bits are read as eight-bit ones. Scales that cover whole rows become
one factor a row; the rest is one scale and one zero for each group of a row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from lancebill.backends.base import NoForm, Reason
from lancebill.backends.cpu.native import abi
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
_NATIVE = {
    BF16: abi.ScaleKind.BF16, F16: abi.ScaleKind.F16, F32: abi.ScaleKind.F32, E8M0: abi.ScaleKind.E8M0, E4M3: abi.ScaleKind.E4M3,
}  # fmt: skip
_WIDE = {BF16: abi.Input.BF16, F16: abi.Input.F16, F32: abi.Input.F32}
# Mini-floats: mantissa bits of the eight-bit type that holds them, and the step where the bias differs.
_FLOATS = {E4M3: (3, 1.0), E5M2: (2, 1.0), E3M4: (4, 1.0), E4M3FNUZ: (3, 0.5), E2M3: (3, 1.0), E3M2: (3, 1.0)}
_ONE_LOOK_UP, _TWO_LOOK_UPS = 127, 16383  # largest table entries
# Significant bits of a scale beside its leading one, which a power of two is all of.
_SCALE_BITS = {
    abi.ScaleKind.NONE: 0, abi.ScaleKind.E8M0: 0, abi.ScaleKind.E4M3: 4, abi.ScaleKind.BF16: 8, abi.ScaleKind.F16: 11, abi.ScaleKind.F32: 24,
}  # fmt: skip
_LONG = 256  # columns


@dataclass(frozen=True)
class Values:
    """What a code stands for: step * (table[code] - center), or the like for bytes and floats."""

    codes: abi.Codes
    table: tuple[int, ...] = ()
    center: int = 0
    step: float = 1.0
    mantissa: int = 0


@dataclass(frozen=True)
class CpuForm:
    """One matrix as the kernels read it."""

    values: Values
    group: int
    scale: abi.ScaleKind
    zero: abi.ZeroKind
    row_scale: bool
    kept: tuple[int, ...]  # levels of the spec that what the kernels read does not give back
    input: abi.Input
    input_group: int
    tiles: bool  # whether weights as bf16 tiles are close enough


def matrix_form(shape: MatrixShape, activations: ActivationSpec) -> CpuForm:
    """The form of a matrix and its inputs; raises `NoForm` with the reason."""
    kind, input_group = _input(activations)
    spec = shape.spec
    values = _values(spec.dtype)
    if kind == abi.Input.F32 and values.codes != abi.Codes.FLOAT8:
        raise NoForm(Reason("activations", "fp32 inputs would keep 16 of their bits", "bf16 and fp16 have kernels"))
    group = _group(shape, input_group)
    inner = [level for level in spec.scales if level.block[1] != ALL]
    zero = _zero(spec, values)
    native = len(inner) == 1 and inner[0].op == MUL and inner[0].dtype in _NATIVE and not spec.minimum
    if native:
        scale = _NATIVE[inner[0].dtype]
    else:
        scale = abi.ScaleKind.F32 if inner or spec.minimum else abi.ScaleKind.NONE
    given = {spec.levels.index(inner[0])} if native else set()
    if zero == abi.ZeroKind.U8:
        given.add(len(spec.scales))
    row_scale = len(inner) < len(spec.scales) and not spec.minimum
    kept = tuple(i for i in range(len(spec.levels)) if i not in given)
    tiles = _exact_in_bf16(values, scale, zero) or _close_in_bf16(shape, values, zero, kind)
    return CpuForm(values, group, scale, zero, row_scale, kept, kind, input_group, tiles)


def _exact_in_bf16(values: Values, scale: abi.ScaleKind, zero: abi.ZeroKind) -> bool:
    """Whether a code times its group's scale has at most the eight significant bits of bf16."""
    if values.codes == abi.Codes.FLOAT8:
        bits = values.mantissa + 1
    elif values.codes == abi.Codes.BYTE:
        bits = 8
    elif zero == abi.ZeroKind.U8:
        bits = max(values.table).bit_length()
    else:
        bits = max(_significant(entry - values.center) for entry in values.table)
    return zero != abi.ZeroKind.OFFSET_F32 and bits + _SCALE_BITS[scale] <= 8


def _close_in_bf16(shape: MatrixShape, values: Values, zero: abi.ZeroKind, kind: abi.Input) -> bool:
    """16-bit inputs and rows so long that rounding each weight averages out; where inputs are integers or tables
    wide, rounded weights would show."""
    wide = max(values.table, default=0) > _ONE_LOOK_UP
    return kind == abi.Input.BF16 and zero != abi.ZeroKind.OFFSET_F32 and not wide and shape.k >= _LONG


def _significant(number: int) -> int:
    """Bits from the highest to the lowest that is set."""
    number = abs(number)
    return number.bit_length() - (number & -number).bit_length() + 1 if number else 0


@lru_cache(maxsize=256)
def _values(dtype: DType) -> Values:
    if dtype.wide is not None:
        raise NoForm(Reason("weights", f"{dtype} weights are not quantised", "torch-cpu multiplies them"))
    if dtype.bits <= 4:
        return _table(dtype)
    if dtype.kind == INTEGER:
        return Values(abi.Codes.BYTE, center=round(-dtype.min))
    if dtype in _FLOATS:
        mantissa, step = _FLOATS[dtype]
        return Values(abi.Codes.FLOAT8, step=step, mantissa=mantissa)
    raise NoForm(Reason("weights", f"no kernel looks up {dtype}", "tables of up to 16 entries, integers, mini-floats"))


def _table(dtype: DType) -> Values:
    """Entries as integers: exactly where one step divides them all, else to 14 bits of their range."""
    finite = [dtype.table[c] for c in dtype.valid_codes]
    low, high = min(*finite, 0.0), max(*finite, 0.0)
    step = next((s for s in _steps(finite) if _divides(s, finite) and (high - low) / s <= _TWO_LOOK_UPS), None)
    if step is None:
        step = 2.0 ** math.ceil(math.log2((high - low) / _TWO_LOOK_UPS))
    center = round(-low / step)
    entries = [round(v / step) + center if math.isfinite(v) else 0 for v in dtype.table]
    return Values(abi.Codes.TABLE4, tuple(entries + [0] * (16 - len(entries))), center, step)


def _steps(values: list[float]) -> list[float]:
    """Powers of two, the largest first, then the smallest magnitude itself."""
    least = min((abs(v) for v in values if v), default=1.0)
    return [2.0**e for e in range(2, -14, -1)] + [least]


def _divides(step: float, values: list[float]) -> bool:
    return all(abs(v / step - round(v / step)) < 1e-6 * max(1.0, abs(v / step)) for v in values)


def _group(shape: MatrixShape, input_group: int) -> int:
    """The largest group that no level's blocks and no input's blocks cross, and that pads least."""
    sides = [level.block[1] for level in shape.spec.levels if level.block[1] != ALL]
    legal = [g for g in GROUPS if all(side % g == 0 for side in (*sides, input_group))]
    if not legal:
        least = min(side for side in (*sides, input_group) if side)
        raise NoForm(Reason("group", f"groups of {least} columns", "multiples of 16 have kernels"))
    return min(legal, key=lambda g: (padded_columns(shape.k, g), -g))


def padded_columns(columns: int, group: int) -> int:
    unit = max(group, 32)
    return -(-columns // unit) * unit


def _zero(spec: QuantSpec, values: Values) -> abi.ZeroKind:
    if spec.zero is None and not spec.minimum:
        return abi.ZeroKind.NONE
    if spec.minimum or spec.zero is None or spec.zero.dtype != ZERO16:
        return abi.ZeroKind.OFFSET_F32
    reach = values.center + 2**spec.dtype.bits  # a zero point may be one past the largest code
    fits = values.step == 1.0 and values.codes != abi.Codes.FLOAT8 and reach <= 255
    return abi.ZeroKind.U8 if fits else abi.ZeroKind.OFFSET_F32


def _input(activations: ActivationSpec) -> tuple[abi.Input, int]:
    """How inputs are represented, and the columns of one measured scale (0: a row)."""
    spec = activations.spec
    if spec.dtype in _WIDE:
        return _WIDE[spec.dtype], 0
    one = len(spec.scales) == 1 and spec.zero is None and not spec.minimum and _plain(spec.scales[0])
    signed = spec.dtype.kind == INTEGER and spec.dtype.bits == 8 and (spec.dtype.min, spec.dtype.max) == (-128, 127)
    if one and (signed or spec.dtype == E4M3):
        return abi.Input.INT8 if signed else abi.Input.E4M3, spec.scales[0].block[1]
    raise NoForm(Reason("activations", f"{activations} activations", "bf16, fp16, fp32, int8 and fp8 have kernels"))


def _plain(scale: Scale) -> bool:
    return scale.op == MUL and scale.dtype == F32 and scale.block[0] in (ALL, 1)
