"""Scales of least weighted squared error: a second step of `quantize`, which `convert` takes by default.

`fit_levels` lets the codes of each block reach its largest value. A smaller scale clips that value but rounds all
smaller values more finely. With float types, a block's values may also be closer to the steps of another scale. For
every block this module tries a few scales around the fitted one, and keeps the one with the least weighted sum of
squared rounding errors. It looks at the weights only; no data is needed.

An error counts as much as the weight is large, by its square. With equal counts the search clips large weights, on
which a model depends most: the error over all weights falls, and yet the perplexity rises (`benchmarks rounding`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lancebill.numbers.blocks import apply_per_block, finest, reduce_blocks, rows_of
from lancebill.numbers.dtypes import E8M0, FLOAT, INTEGER, TERNARY, DType
from lancebill.numbers.native.rounding import BlockNumbers, best_scales, scale_errors
from lancebill.numbers.scales import Grid, Levels, Rows, reach_of
from lancebill.numbers.spec import ALL, DIV, TENSOR, QuantSpec, Scale

_CHUNK = 1 << 20  # elements rounded at a time
# What is tried besides the fitted scale: offsets of its code if it is a small float, else factors. More of them take
# longer and give little.
_NEXT_POWER = (1,)
_NEIGHBOURS = (-1, 4, 5)  # four or five of E4M3's codes are a factor of 1.5: 4 in place of 6 for the largest value
_CLIPPED = {2: (0.9, 0.8), 3: (0.95, 0.88), 4: (0.97, 0.93), 5: (0.97,)}  # by bits: with more, nothing is gained
_CLIPPED_CODEBOOK = (0.95, 0.88)
_OCTAVE = (1.4, 1.7)  # the steps of floats repeat after an octave
_TERNARY = (1.3, 1.6)  # times the mean magnitude


def search_pays(spec: QuantSpec) -> bool:
    """Whether `convert` searches unless told otherwise: for types whose scales the native library tries.

    There the search takes less than twice the time of plain rounding, and the predictions of the demo's model come
    nearer to those of its stored weights (`benchmarks rounding`). Codes of codebooks are looked up in a table, and
    one scale for a whole matrix is hardly better than another.
    """
    whole = finest(level.block for level in spec.levels) == TENSOR
    return spec.dtype.kind in (INTEGER, FLOAT) and not whole and can_search(spec)


def can_search(spec: QuantSpec) -> bool:
    """Whether a search tries more than one scale per block. 8-bit integers, for example, have no alternatives."""
    inner = _innermost(spec)
    if inner is None or spec.minimum:  # no format that we write has a minimum
        return False
    dtype = spec.scales[inner].dtype
    return dtype.kind == FLOAT if dtype.table else bool(_factors(spec))


def _innermost(spec: QuantSpec) -> int | None:
    """Which scale has the smallest blocks; None if another level has smaller ones."""
    block = finest(level.block for level in spec.levels)
    return next((i for i, scale in enumerate(spec.scales) if scale.block == block), None)


def search_scales(rows: Rows, size: tuple[int, int], device: torch.device, spec: QuantSpec, levels: Levels) -> Levels:
    """`levels` with other innermost scales in the blocks that they round better; the other levels stay."""
    grid = Grid(finest(level.block for level in spec.levels), size, device)
    inner = _innermost(spec)
    if inner is None or not can_search(spec):
        return levels
    scale, fitted = spec.scales[inner], levels.scales[inner]
    others = [i for i in range(len(spec.scales)) if i != inner]
    outer = grid.product([spec.scales[i] for i in others], [levels.scales[i] for i in others]).float()
    trial, chosen, side = _Trial(rows, spec, levels, grid), torch.empty_like(fitted), grid.block[0]
    for low, high in _bands(size, side):
        blocks = slice(low // (side or 1), None if side == ALL else -(-high // side))
        candidates = torch.stack([fitted[blocks], *_candidates(scale, spec, fitted[blocks])])
        factors = scale.dtype.decode(candidates)
        outer_of = outer if len(outer) == 1 else outer[blocks]
        steps = outer_of / factors if scale.op == DIV else outer_of * factors
        chosen[blocks] = candidates.gather(0, trial.best(steps, low, high)[None])[0]
    return replace(levels, scales=tuple(chosen if i == inner else t for i, t in enumerate(levels.scales)))


def _candidates(scale: Scale, spec: QuantSpec, codes: Tensor) -> Iterator[Tensor]:
    """Codes of the other scales to try."""
    dtype = scale.dtype
    if dtype.table and dtype.kind == FLOAT:  # its positive codes are in the order of their values
        ends = torch.tensor([dtype.min_positive, dtype.max], dtype=torch.float32, device="cpu")
        lowest, highest = dtype.encode(ends).tolist()
        for offset in _NEXT_POWER if dtype == E8M0 else _NEIGHBOURS:
            yield (codes.int() + (-offset if scale.op == DIV else offset)).clamp_(lowest, highest).to(torch.uint8)
    elif not dtype.table:
        values = codes.double()
        for factor in _factors(spec):
            yield dtype.encode(values / factor if scale.op == DIV else values * factor)


def _factors(spec: QuantSpec) -> tuple[float, ...]:
    dtype = spec.dtype
    if dtype == TERNARY:
        return _TERNARY
    if dtype.kind == FLOAT:
        return _OCTAVE
    if dtype.kind != INTEGER:
        return _CLIPPED_CODEBOOK
    if spec.zero is None and dtype.bits < 8 and 0 < dtype.max < -dtype.min:
        outermost = reach_of(dtype) / -dtype.min  # one side has a step more: the largest value on it, by the sign
        return outermost, -outermost
    return _CLIPPED.get(dtype.bits, ())


def _bands(size: tuple[int, int], side: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows that consist of whole blocks of `side` rows."""
    n, k = size
    step = n if side == ALL else max(1, _CHUNK // (k * side)) * side
    return ((low, min(n, low + step)) for low in range(0, n, step))


_Inputs = tuple[Tensor, Tensor, int, DType, BlockNumbers | None]  # of the native calls


@dataclass(frozen=True)
class _Trial:
    """Rounds a matrix with every candidate."""

    rows: Rows
    spec: QuantSpec
    levels: Levels
    grid: Grid

    def best(self, steps: Tensor, low: int, high: int) -> Tensor:
        """The index of the candidate with the least error, for each block of rows [low, high).

        `steps` is [candidates, blocks of these rows, blocks along k].
        """
        (_, k), side = self.grid.size, self.grid.block[0]
        if side == 1:
            found = best_scales(*self._inputs(steps, low, high))
            return _least(self._errors(steps, low, high)) if found is None else found
        per_row = torch.empty(len(steps), high - low, steps.shape[2], dtype=torch.float32, device=self.grid.device)
        count = max(1, _CHUNK // k)
        for first in range(low, high, count):
            last = min(high, first + count)
            ours = torch.stack([rows_of(step, side, first - low, last - low) for step in steps])
            ours = ours.expand(-1, last - first, -1).contiguous()
            per_row[:, first - low : last - low] = self._errors(ours, first, last)
        return _least(reduce_blocks(torch.sum, per_row, 1, side))

    def _errors(self, steps: Tensor, low: int, high: int) -> Tensor:
        """The weighted squared errors of rows [low, high) with these steps, summed over the columns of each block."""
        inputs = self._inputs(steps, low, high)
        errors = scale_errors(*inputs)
        return torch.stack([self._errors_of(each, inputs) for each in steps]) if errors is None else errors

    def _inputs(self, steps: Tensor, low: int, high: int) -> _Inputs:
        values, zero = self.rows(low, high), None
        if self.spec.zero is not None and self.levels.zero is not None:
            level = self.spec.zero
            numbers = level.dtype.decode(rows_of(self.levels.zero, level.block[0], low, high))
            zero = BlockNumbers(numbers, level.block[1])
        return values, steps, self.grid.block[1] or values.shape[1], self.spec.dtype, zero

    def _errors_of(self, step: Tensor, inputs: _Inputs) -> Tensor:
        values, _, side, dtype, zero = inputs
        position = apply_per_block(torch.mul, values, 1 / step, side)
        if zero is not None:
            apply_per_block(torch.add, position, zero.numbers, zero.side, out=position)
        error = dtype.nearest(position).sub_(position).mul_(values).square_()
        return reduce_blocks(_sum_by_halves, error, 1, side).mul_(step.square())


def _sum_by_halves(numbers: Tensor, axis: int, keepdim: bool = False) -> Tensor:
    """The sum in an order that vector units follow too: the upper half is added to the lower one, again and again."""
    numbers = numbers.movedim(axis, -1)
    width = 1 << (numbers.shape[-1] - 1).bit_length()
    numbers = torch.nn.functional.pad(numbers, (0, width - numbers.shape[-1]))
    while width > 1:
        width //= 2
        numbers = numbers[..., :width] + numbers[..., width:]
    return numbers if keepdim else numbers.squeeze(-1)


def _least(errors: Tensor) -> Tensor:
    """The index of the least error in each block; the first of equal ones. NaN is never less."""
    best, least = torch.zeros(errors.shape[1:], dtype=torch.int64, device=errors.device), errors[0]
    for index, error in enumerate(errors[1:], 1):
        better = error < least
        best, least = best.masked_fill_(better, index), torch.where(better, error, least)
    return best
