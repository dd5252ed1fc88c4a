"""Decode every matrix and find stored values that cannot be right.

Problems: NaN or infinity in codes, scales, minima, zero points or biases; a zero point outside 0 .. 2**bits; an
activation scale that is not positive; a zero scale over non-zero codes (except where scales are small integers, as in
GGUF, which writes an empty block that way). What cannot be decoded, such as an act-order with a group that does not
exist, is a problem too.

Warnings: scales that were not fitted to the weights (all equal, or most of them the largest of their type), and
activation scales that no calibration gives. A negative scale is only a note, and only for float codes: integer formats
use the sign to reach one more step of range.

What only a comparison with other experts shows is in `compare_experts`: each matrix leaves a `Profile` for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lancebill.checkpoint.load.projections import load_projection
from lancebill.checkpoint.read.slices import Reader
from lancebill.checkpoint.resolve.stored_layer import Projection
from lancebill.errors import BadValue, LancebillError
from lancebill.numbers.bit_packing import Nibbles, as_bytes
from lancebill.numbers.blocks import expand
from lancebill.numbers.codec import dequantize
from lancebill.numbers.dtypes import E8M0, FLOAT, INTEGER, ZERO16, DType
from lancebill.numbers.scan import Extent, Survey, any_negative, contains_any, extent, survey
from lancebill.numbers.spec import DIV, TENSOR, Scale
from lancebill.numbers.weight import LogicalWeight

OUTER_SCALE = "scale_2"  # the formats' role for the second level of scales
MIN_BLOCKS = 64  # equal scales are suspicious only from this many on
WIDE_BLOCK = 1024  # weights in a block; power-of-two scales of blocks this large are often all equal
PLAUSIBLE_INPUTS = (1e-12, 1e12)  # an activation scale outside this range means that the expert saw no token
_EXPORT_AGAIN = "tokens that are routed there get a wrong answer: export the checkpoint again"
_RECALIBRATE = "calibrate with data that reaches every expert, or quantise the weights only"


@dataclass(frozen=True)
class Profile:
    """What other matrices of the checkpoint are compared with: a few numbers that tell matrices apart."""

    projection: Projection
    digest: tuple[int, ...]  # equal for equal matrices
    peak: float  # a bound on the largest magnitude; 0: the matrix is zero
    tensor_scale: float | None  # the product of the scales of the whole matrix, if it has any
    inputs: Mapping[str, float]  # activation scales of the whole input


@dataclass(frozen=True)
class Findings:
    """The errors of one projection, what is suspicious, and what is unusual but legal."""

    problems: tuple[LancebillError, ...] = ()
    warnings: tuple[BadValue, ...] = ()
    notes: tuple[BadValue, ...] = ()
    profile: Profile | None = None


def check_values(read: Reader, projection: Projection) -> Findings:
    """Decode one projection and check every value."""
    try:
        weight = load_projection(read, projection)
    except LancebillError as error:
        return Findings((error,))
    checker = _Checker(projection, weight)
    problems = tuple(checker.problems())
    if problems:
        return Findings(problems)
    return Findings((), tuple(checker.warnings()), tuple(checker.notes()), checker.profile())


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
        self.extents = [extent(level.dtype, codes) for level, codes in zip(weight.spec.scales, weight.scales)]
        self.survey = _survey(weight)
        self.codes_extent = self._codes_extent()

    def _codes_extent(self) -> Extent:
        """Of the codes, as far as it is quick to tell: integers are only told apart from a constant."""
        dtype, stored, survey = self.spec.dtype, self.weight.stored, self.survey
        packed = isinstance(stored, Nibbles)
        if survey is None or (dtype.ordered and not packed):
            return extent(dtype, self.weight.codes)
        if dtype.ordered:
            mask = dtype.magnitude_mask
            return Extent(0.0, dtype.max if survey.any & (mask << 4 | mask) else 0.0)
        invalid = set(range(len(dtype.table))) - set(dtype.valid_codes)
        if invalid:
            return Extent(0.0, dtype.max, not contains_any(self.weight.codes, invalid))
        return Extent(0.0, dtype.max if survey.low != survey.high or bool(dequantize(self.weight).any()) else 0.0)

    def problems(self) -> Iterator[BadValue]:
        weight, spec = self.weight, self.spec
        if not self.codes_extent.finite:
            yield from self._invalid("codes", "codes", spec.dtype, weight.codes)
        for i, (level, codes, found) in enumerate(zip(spec.scales, weight.scales, self.extents)):
            if not found.finite:
                yield from self._invalid(self._scale_role(i), f"scale {i + 1}", level.dtype, codes)
        yield from self._zero_scales()
        for i, (level, codes) in enumerate(zip(spec.minimum, weight.minimum)):
            if not extent(level.dtype, codes).finite:
                yield from self._invalid("minimum", f"minimum {i + 1}", level.dtype, codes)
        yield from self._zero_points()
        if weight.bias is not None:
            yield from self._report("bias", "bias", "not finite", ~weight.bias.float().isfinite())
        for role, tensor in weight.inputs.items():
            bad = ~tensor.float().isfinite()
            if role != "input_zero_point":
                bad |= tensor.float() <= 0
            yield from self._report(role, role, "not a positive number", bad, _RECALIBRATE)

    def warnings(self) -> Iterator[BadValue]:
        for i, (level, codes, found) in enumerate(zip(self.spec.scales, self.weight.scales, self.extents)):
            what, role = f"scale {i + 1}", self._scale_role(i)
            if found.high == level.dtype.max and level.dtype.table and codes.numel() > 1:
                top = codes == level.dtype.encode(
                    torch.tensor(level.dtype.max, dtype=torch.float32, device=codes.device)
                )
                if 2 * int(torch.count_nonzero(top)) > codes.numel():
                    hint = "the scales were not fitted to these weights: quantise them again"
                    yield from self._report(role, what, f"saturated at {level.dtype.max:g}", top, hint)
            elif found.low == found.high and codes.numel() >= MIN_BLOCKS and self._tells_apart(level):
                got = f"{codes.numel()} scales of {found.high:g}"
                hint = "the scales were not fitted to these weights: quantise them again"
                yield BadValue(f"{what}: all blocks have the same", where=self._where(role), got=got, hint=hint)
        for role, value in _scalars(self.weight.inputs).items():
            if not PLAUSIBLE_INPUTS[0] <= value <= PLAUSIBLE_INPUTS[1]:
                what = f"{role}: no calibration gives such a value"
                yield BadValue(what, where=self._where(role), got=f"{value:g}", hint=_RECALIBRATE)

    def _tells_apart(self, level: Scale) -> bool:
        """Whether fitted scales of this level differ from block to block."""
        if self.codes_extent.high == 0:
            return False
        rows, columns = (side or size for side, size in zip(level.block, (self.weight.n, self.weight.k)))
        return level.dtype != E8M0 or rows * columns < WIDE_BLOCK

    def notes(self) -> Iterator[BadValue]:
        if self.spec.dtype.kind != FLOAT:
            return
        for i, (level, codes) in enumerate(zip(self.spec.scales, self.weight.scales)):
            if level.dtype.kind == FLOAT and any_negative(level.dtype, codes):
                negative = level.dtype.decode(codes) < 0
                yield from self._report(self._scale_role(i), f"scale {i + 1}", "negative", negative)

    def profile(self) -> Profile:
        peak = self.codes_extent.high
        for level, found in zip(self.spec.scales, self.extents):
            if level.op == DIV:
                peak = peak / found.low if found.low else 0.0
            else:
                peak *= found.high
        codes = _digest(self.weight.codes) if self.survey is None else self.survey.digest
        whole = [i for i, level in enumerate(self.spec.scales) if level.block == TENSOR]
        scale = [1 / self.extents[i].high if self.spec.scales[i].op == DIV else self.extents[i].high for i in whole]
        return Profile(
            self.projection,
            (codes, *(_digest(tensor) for tensor in self.weight.scales)),
            peak,
            math.prod(scale) if scale else None,
            _scalars(self.weight.inputs),
        )

    def _invalid(self, role: str, what: str, dtype: DType, codes: Tensor) -> Iterator[BadValue]:
        yield from self._report(role, what, "NaN or infinite", ~dtype.decode(codes).isfinite(), _EXPORT_AGAIN)

    def _zero_scales(self) -> Iterator[BadValue]:
        """A zero scale discards its codes, so they must be zero too."""
        weight, spec = self.weight, self.spec
        blocks_may_be_empty = any(level.dtype.kind == INTEGER for level in spec.scales)
        for i, (level, codes, found) in enumerate(zip(spec.scales, weight.scales, self.extents)):
            if found.low > 0 or (blocks_may_be_empty and found.high > 0):
                continue
            zero = level.dtype.decode(codes) == 0
            values = spec.dtype.decode(weight.codes)
            if spec.zero is not None and weight.zero is not None:
                values -= expand(spec.zero.dtype.decode(weight.zero), spec.zero.block, weight.n, weight.k)
            lost = expand(zero, level.block, weight.n, weight.k) & (values != 0)
            yield from self._report(
                self._scale_role(i), f"scale {i + 1}", "zero over non-zero codes", lost, _EXPORT_AGAIN
            )

    def _zero_points(self) -> Iterator[BadValue]:
        weight, spec = self.weight, self.spec
        if weight.zero is None or spec.zero is None:
            return
        if spec.zero.dtype == ZERO16:
            highest = 1 << spec.dtype.bits
            low, high = (int(end) for end in torch.aminmax(weight.zero))
            if low >= 0 and high <= highest:
                return
            bad = (weight.zero < 0) | (weight.zero > highest)
            yield from self._report("zero", "zero points", f"outside 0 to {highest}", bad)
        elif not extent(spec.zero.dtype, weight.zero).finite:
            yield from self._invalid("zero", "zero points", spec.zero.dtype, weight.zero)

    def _report(self, role: str, what: str, how: str, bad: Tensor, hint: str | None = None) -> Iterator[BadValue]:
        count = int(bad.sum())
        if count:
            first = [int(i) for i in bad.nonzero()[0]]
            got = f"{count} of {bad.numel()}, the first at {first}"
            yield BadValue(f"{what}: {how}", where=self._where(role), got=got, hint=hint)

    def _scale_role(self, level: int) -> str:
        """The role of the part that stores a level of scales; some formats store all levels in one part."""
        return OUTER_SCALE if level and OUTER_SCALE in self.projection.sources else "scale"

    def _where(self, role: str) -> str:
        source = self.projection.sources.get(role)
        return f"{self.projection.where} ({source.tensor if source is not None else self.projection.module})"


def _scalars(inputs: Mapping[str, Tensor]) -> dict[str, float]:
    """The activation scales that are one number, other than zero points."""
    scales = {role: tensor for role, tensor in inputs.items() if role != "input_zero_point"}
    return {role: float(tensor) for role, tensor in scales.items() if tensor.numel() == 1}


def _survey(weight: LogicalWeight) -> Survey | None:
    """Of the codes as they are held, in any order, if a byte holds one or two of them."""
    stored = weight.stored
    data = as_bytes(stored.source) if isinstance(stored, Nibbles) else stored
    return survey(data) if data.dtype == torch.uint8 and data.numel() else None


def _digest(tensor: Tensor) -> int:
    return survey(as_bytes(tensor)).digest if tensor.numel() else 0
