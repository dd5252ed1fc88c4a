"""The same codes under another spec: finer blocks, other scale types, an explicit zero point.

Fitting new scales changes every code. If two specs differ only in how the levels are stored, keeping
the codes is exact, or loses no more than the rounding of a scale.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lancebill.numbers.dtypes import F32, INTEGER, ZERO16, DType, biased_type, uint_type
from lancebill.numbers.spec import ALL, DIV, Level, QuantSpec, Scale
from lancebill.numbers.weight import LogicalWeight


def recast(weight: LogicalWeight, spec: QuantSpec) -> LogicalWeight | None:
    """`weight` under `spec` if that is exact for any values of the scales; otherwise None."""
    if weight.spec == spec:
        return weight
    source = _explicit_zero(weight, spec)
    if not _can_keep_codes(source, spec) or not all(map(_level_fits, source.spec.levels, spec.levels)):
        return None
    return _rewritten(source, spec)


def rescale(weight: LogicalWeight, spec: QuantSpec, tolerance: float) -> tuple[LogicalWeight, bool] | None:
    """`weight` under `spec` with its levels rounded to the new types, and whether that was exact.

    None if a number of some level would change by more than `tolerance` relative to itself. A
    multiplying scale may become a dividing one and vice versa.
    """
    source = _explicit_zero(weight, spec)
    if not _can_keep_codes(source, spec):
        return None
    result, worst = _rewritten(source, spec), 0.0
    for before, after in zip(_factors(_refined(source, spec)), _factors(result)):
        change = torch.where(after == before, torch.zeros_like(before), (after / before - 1).abs())
        worst = max(worst, change.nan_to_num(nan=torch.inf).amax().item())
    return (result, worst == 0.0) if worst <= tolerance else None


def _factors(weight: LogicalWeight) -> list[Tensor]:
    """The numbers of every level as multipliers, in fp64 so that no change is lost to rounding."""
    spec = weight.spec
    values = [level.dtype.decode(tensor).double() for level, tensor in weight.levels()]
    return [1 / t if isinstance(s, Scale) and s.op == DIV else t for s, t in zip(spec.levels, values)]


def _rewritten(weight: LogicalWeight, spec: QuantSpec) -> LogicalWeight:
    """`weight` with the blocks and types of `spec`; requires `_can_keep_codes`."""
    fine = _refined(weight, spec)

    def convert(old: Level, new: Level, tensor: Tensor) -> Tensor:
        flipped = isinstance(old, Scale) and isinstance(new, Scale) and old.op != new.op
        if old.dtype == new.dtype and not flipped:
            return tensor
        values = old.dtype.decode(tensor).double()
        return new.dtype.encode(1 / values if flipped else values)

    zero = fine.zero
    if zero is not None and fine.spec.zero is not None and spec.zero is not None:
        zero = convert(fine.spec.zero, spec.zero, zero)
    return replace(
        fine,
        spec=spec,
        stored=_translate(fine.codes, fine.spec.dtype, spec.dtype),
        scales=tuple(map(convert, fine.spec.scales, spec.scales, fine.scales)),
        zero=zero,
        minimum=tuple(map(convert, fine.spec.minimum, spec.minimum, fine.minimum)),
    )


def _translate(codes: Tensor, old: DType, new: DType) -> Tensor:
    """Codes of one table to codes of another table that contains all its values."""
    if old == new:
        return codes
    table = new.encode(torch.tensor(old.table, dtype=torch.float32, device=codes.device))
    return table.index_select(0, codes.reshape(-1).int()).view(codes.shape)


def _explicit_zero(weight: LogicalWeight, spec: QuantSpec) -> LogicalWeight:
    """Offset-binary integers rewritten as unsigned with the constant zero point 2**(b-1), if `spec` has one."""
    old, bits = weight.spec, weight.spec.dtype.bits
    if old.zero is not None or spec.zero is None or spec.zero.dtype != ZERO16:
        return weight
    if not old.quantized or old.dtype != biased_type(bits) or spec.dtype != uint_type(bits):
        return weight
    zero = torch.full(
        spec.zero.shape(weight.n, weight.k), 1 << (bits - 1), dtype=torch.int16, device=weight.codes.device
    )
    return replace(weight, spec=replace(old, dtype=spec.dtype, zero=spec.zero), zero=zero)


def _can_keep_codes(weight: LogicalWeight, new: QuantSpec) -> bool:
    """Whether `new` has the same kinds of levels over the same or finer blocks, and a code for every value."""
    old = weight.spec
    return (
        old.quantized
        and new.quantized
        and old.rotation == new.rotation
        and len(old.scales) == len(new.scales)
        and len(old.minimum) == len(new.minimum)
        and (old.zero is None) == (new.zero is None)
        and all(map(_refines, old.levels, new.levels))
        and _codes_fit(new.dtype, weight)
    )


def _refined(weight: LogicalWeight, new: QuantSpec) -> LogicalWeight:
    """`weight` with the blocks of `new`."""
    old = weight.spec
    return weight.reblock(
        replace(
            old,
            scales=tuple(replace(o, block=s.block) for o, s in zip(old.scales, new.scales)),
            zero=old.zero and new.zero and replace(old.zero, block=new.zero.block),
            minimum=tuple(replace(o, block=s.block) for o, s in zip(old.minimum, new.minimum)),
        )
    )


def _refines(old: Level, new: Level) -> bool:
    return all(b == a or (b != ALL and (a == ALL or a % b == 0)) for a, b in zip(old.block, new.block))


def _level_fits(old: Level, new: Level) -> bool:
    """Whether `new` can represent every number of `old`."""
    if isinstance(old, Scale) and isinstance(new, Scale) and old.op != new.op:
        return False
    return _type_fits(new.dtype, old.dtype)


def _type_fits(new: DType, old: DType) -> bool:
    """Whether `new` has every value of `old`, NaN included, bit for bit."""
    if old == new or not old.table:
        return old == new or (new == F32 and old.kind != INTEGER)
    return _represents(new, torch.tensor(old.table, dtype=torch.float32, device="cpu"))


def _codes_fit(new: DType, weight: LogicalWeight) -> bool:
    """Whether `new` has every value of the weight's codes. Codes without a value are fine if the weight uses none."""
    old = weight.spec.dtype
    if old == new:
        return True
    values = torch.tensor([old.table[c] for c in old.valid_codes], dtype=torch.float32, device="cpu")
    if not _represents(new, values):
        return False
    return len(old.valid_codes) == len(old.table) or bool(old.decode(weight.codes).isfinite().all())


def _represents(dtype: DType, values: Tensor) -> bool:
    """Whether all `values` survive a round trip through `dtype`."""
    rounded = dtype.decode(dtype.encode(values))
    return bool(((rounded.view(torch.int32) == values.view(torch.int32)) | (rounded.isnan() & values.isnan())).all())
