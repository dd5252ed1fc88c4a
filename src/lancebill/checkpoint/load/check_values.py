"""Decode every matrix and find stored values that cannot be right.

Errors: NaN or infinity in codes, scales, minima, zero points or biases; a zero point outside 0 .. 2**bits; an
act-order that is not a permutation; an activation scale that is not positive; a zero scale over non-zero codes
(except where scales are small integers, as in GGUF, which writes an empty block that way). A negative scale is only
a note, and only for float codes: integer formats use the sign to reach one more step of range.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lancebill.checkpoint.load.load_experts import load_projection
from lancebill.checkpoint.read.slices import Reader
from lancebill.checkpoint.resolve.manifest import Projection
from lancebill.errors import BadValue, LancebillError
from lancebill.numbers.dtypes import FLOAT, INTEGER, ZERO16, DType
from lancebill.numbers.weight import LogicalWeight, expand

OUTER_SCALE = "scale_2"  # the role formats give to the second level of scales


@dataclass(frozen=True)
class Findings:
    """The errors of one projection, and what is unusual but legal."""

    problems: tuple[LancebillError, ...] = ()
    notes: tuple[BadValue, ...] = ()


def check_values(read: Reader, projection: Projection) -> Findings:
    """Decode one projection and check every value."""
    try:
        weight = load_projection(read, projection)
    except LancebillError as error:
        return Findings((error,))
    checker = _Checker(projection, weight)
    return Findings(tuple(checker.problems()), tuple(checker.notes()))


def check_stored_size(read: Reader, projection: Projection) -> LancebillError | None:
    """An error if a tensor that states the size of the matrix, as some formats have, states another one.

    It reads that small tensor and no other.
    """
    sources = []

    def stored(role: str) -> Tensor | None:
        source = projection.sources.get(role)
        if source is None or source.rows_per_expert:
            return None
        sources.append(source.tensor)
        return read(source.tensor, () if source.expert is None else (source.expert,))

    expected = projection.stored_n, projection.k
    try:
        size = projection.scheme.stored_size(stored)
        if size in (None, expected):
            return None
        raise BadValue("a matrix of another size is stored", expected=list(expected), got=list(size))
    except LancebillError as error:
        return error.within(f"{projection.where} ({', '.join(sources)})")


class _Checker:
    def __init__(self, projection: Projection, weight: LogicalWeight) -> None:
        self.projection, self.weight, self.spec = projection, weight, weight.spec

    def problems(self) -> Iterator[BadValue]:
        weight, spec = self.weight, self.spec
        yield from self._finite("codes", "codes", spec.dtype, weight.codes)
        for i, (level, codes) in enumerate(zip(spec.scales, weight.scales)):
            yield from self._finite(self._scale_role(i), f"scale {i + 1}", level.dtype, codes)
        yield from self._zero_scales()
        for i, (level, codes) in enumerate(zip(spec.minimum, weight.minimum)):
            yield from self._finite("minimum", f"minimum {i + 1}", level.dtype, codes)
        yield from self._zero_points()
        yield from self._order()
        if weight.bias is not None:
            yield from self._report("bias", "bias", "not finite", ~weight.bias.float().isfinite())
        for role, tensor in weight.inputs.items():
            bad = ~tensor.float().isfinite()
            if role != "input_zero_point":
                bad |= tensor.float() <= 0
            yield from self._report(role, role, "not a positive number", bad)

    def notes(self) -> Iterator[BadValue]:
        if self.spec.dtype.kind != FLOAT:
            return
        for i, (level, codes) in enumerate(zip(self.spec.scales, self.weight.scales)):
            yield from self._report(self._scale_role(i), f"scale {i + 1}", "negative", level.dtype.decode(codes) < 0)

    def _finite(self, role: str, what: str, dtype: DType, codes: Tensor) -> Iterator[BadValue]:
        if dtype.wide is not None:
            bad = ~codes.isfinite() if codes.is_floating_point() else None
        elif len(dtype.valid_codes) < len(dtype.table):
            valid = torch.zeros(len(dtype.table), dtype=torch.bool)
            valid[list(dtype.valid_codes)] = True
            bad = ~valid[codes.int()]
        else:
            bad = None
        if bad is not None:
            yield from self._report(role, what, "NaN or infinite", bad)

    def _zero_scales(self) -> Iterator[BadValue]:
        """A zero scale discards its codes, so they must be zero too."""
        weight, spec = self.weight, self.spec
        if any(level.dtype.kind == INTEGER for level in spec.scales):
            return
        for i, (level, codes) in enumerate(zip(spec.scales, weight.scales)):
            zero = level.dtype.decode(codes) == 0
            if not bool(zero.any()):
                continue
            values = spec.dtype.decode(weight.codes)
            if spec.zero is not None and weight.zero is not None:
                values -= expand(spec.zero.dtype.decode(weight.zero), spec.zero.block, weight.n, weight.k)
            lost = expand(zero, level.block, weight.n, weight.k) & (values != 0)
            yield from self._report(self._scale_role(i), f"scale {i + 1}", "zero over non-zero codes", lost)

    def _zero_points(self) -> Iterator[BadValue]:
        weight, spec = self.weight, self.spec
        if weight.zero is None or spec.zero is None:
            return
        if spec.zero.dtype == ZERO16:
            highest = 1 << spec.dtype.bits
            bad = (weight.zero < 0) | (weight.zero > highest)
            yield from self._report("zero", "zero points", f"outside 0 to {highest}", bad)
        else:
            yield from self._finite("zero", "zero points", spec.zero.dtype, weight.zero)

    def _order(self) -> Iterator[BadValue]:
        perm = self.weight.perm
        if perm is not None and not torch.equal(perm.sort().values, torch.arange(self.weight.k, dtype=perm.dtype)):
            yield BadValue("the act-order is not a permutation", where=self._where("perm"))

    def _report(self, role: str, what: str, how: str, bad: Tensor) -> Iterator[BadValue]:
        count = int(bad.sum())
        if count:
            first = [int(i) for i in bad.nonzero()[0]]
            got = f"{count} of {bad.numel()}, the first at {first}"
            yield BadValue(f"{what}: {how}", where=self._where(role), got=got)

    def _scale_role(self, level: int) -> str:
        """The role of the part that stores a level of scales; some formats store all levels in one part."""
        return OUTER_SCALE if level and OUTER_SCALE in self.projection.sources else "scale"

    def _where(self, role: str) -> str:
        source = self.projection.sources.get(role)
        return f"{self.projection.where} ({source.tensor if source is not None else self.projection.module})"
