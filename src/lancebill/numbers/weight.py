"""A matrix in canonical form: the interface between formats and kernel layouts.

A `LogicalWeight` is transient. It holds one matrix, or the same matrix of several experts: then every tensor has a
leading expert dimension. Every operation here is exact; `codec` does the rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lancebill.errors import BadValue, WrongDtype, WrongShape
from lancebill.numbers.bit_packing import Nibbles
from lancebill.numbers.blocks import spread
from lancebill.numbers.spec import ALL, TENSOR, Level, QuantSpec, blocks_along

# Activation-side tensors that a checkpoint may store for a projection.
FACTORS = "pre_quant_scale"  # multiplies the input: the only one with a number for each column
INPUT_ROLES = ("input_scale", "input_global_scale", "input_zero_point", FACTORS)


@dataclass(frozen=True, eq=False)
class LogicalWeight:
    """Codes [N, K], and for each level of the spec a tensor with one number per block.

    `stored` has one byte per code, or two 4-bit codes per byte, as most checkpoints store them: whoever needs single
    codes takes `codes`.

    With `perm` (act-order) the columns are sorted by group, so that groups are contiguous: column j
    belongs to input feature perm[j]. `dequantize` restores the natural order.
    """

    spec: QuantSpec
    stored: Tensor | Nibbles
    scales: tuple[Tensor, ...] = ()
    zero: Tensor | None = None
    minimum: tuple[Tensor, ...] = ()
    bias: Tensor | None = None
    perm: Tensor | None = None
    inputs: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        n, k, lead = self.n, self.k, self.lead
        _expect("codes", self.stored, (*lead, n, k), self.spec.dtype.storage)
        actual = (len(self.scales), self.zero is not None, len(self.minimum))
        expected = (len(self.spec.scales), self.spec.zero is not None, len(self.spec.minimum))
        if actual != expected:
            raise WrongShape(
                "a weight needs one tensor for each level of its spec",
                where=str(self.spec),
                expected="{} scales, zero point {}, {} minima".format(*expected),
                got="{} scales, zero point {}, {} minima".format(*actual),
            )
        for level, tensor in self.levels():
            _expect(f"level {level}", tensor, (*lead, *level.shape(n, k)), level.dtype.storage)
        if self.spec.rotation and k % self.spec.rotation:
            raise WrongShape(
                "the blocks of a rotation must fill a row",
                expected=f"a multiple of {self.spec.rotation} columns",
                got=k,
            )
        if self.bias is not None:
            _expect("bias", self.bias, (*lead, n), self.bias.dtype)
        if self.perm is not None:
            _expect("perm", self.perm, (*lead, k), torch.int32)

    @property
    def n(self) -> int:
        return int(self.stored.shape[-2])

    @property
    def k(self) -> int:
        return int(self.stored.shape[-1])

    @property
    def lead(self) -> tuple[int, ...]:
        """() for one matrix, (experts,) for several."""
        return tuple(self.stored.shape[:-2])

    @cached_property
    def codes(self) -> Tensor:
        """One byte per code; 16- and 32-bit types as they are."""
        return self.stored.unpack() if isinstance(self.stored, Nibbles) else self.stored

    @property
    def device(self) -> torch.device:
        return self.stored.device

    def equals(self, other: LogicalWeight) -> bool:
        """Bitwise equality, including the spec and the activation-side tensors."""
        mine, theirs = self._tensors(), other._tensors()
        return (
            self.spec == other.spec
            and mine.keys() == theirs.keys()
            and all(same_bits(mine[name], theirs[name]) for name in mine)
        )

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {"codes": self.codes, "zero": self.zero, "bias": self.bias, "perm": self.perm}
        tensors |= {f"scale{i}": s for i, s in enumerate(self.scales)}
        tensors |= {f"minimum{i}": s for i, s in enumerate(self.minimum)}
        tensors |= {f"input.{role}": t for role, t in self.inputs.items()}
        return {name: t for name, t in tensors.items() if t is not None}

    def levels(self) -> list[tuple[Level, Tensor]]:
        """Every level of the spec with its tensor, in the spec's order."""
        zero = () if self.zero is None else (self.zero,)
        return list(zip(self.spec.levels, self.scales + zero + self.minimum))

    def _map_levels(self, change: Callable[[Level, Tensor], Tensor], **fields: Any) -> LogicalWeight:
        """A copy with `change` applied to each level's tensor, in the spec's order, and `fields` replaced."""
        spec = self.spec
        return replace(
            self,
            scales=tuple(map(change, spec.scales, self.scales)),
            zero=None if spec.zero is None or self.zero is None else change(spec.zero, self.zero),
            minimum=tuple(map(change, spec.minimum, self.minimum)),
            **fields,
        )

    def _map_tensors(self, change: Callable[[Any], Any]) -> LogicalWeight:
        """A copy with `change` applied to every tensor, codes as they are stored."""
        return self._map_levels(
            lambda _, t: change(t),
            stored=change(self.stored),
            bias=None if self.bias is None else change(self.bias),
            perm=None if self.perm is None else change(self.perm),
            inputs={role: change(t) for role, t in self.inputs.items()},
        )

    def to(self, device: torch.device) -> LogicalWeight:
        """All tensors on this device; itself if they are."""
        held: list[Tensor | Nibbles | None] = [self.stored, self.bias, self.perm, *self.inputs.values()]
        held += [tensor for _, tensor in self.levels()]
        if all(tensor is None or tensor.device == device for tensor in held):
            return self
        return self._map_tensors(lambda tensor: tensor.to(device))

    def rows(self, index: Tensor) -> LogicalWeight:
        """Rows `index`, in that order. Blocks along N are refined to single rows first."""
        fine, index = self.reblock(self.spec.map_blocks(0, 1)), index.to(self.device)
        bias = None if fine.bias is None else fine.bias.index_select(-1, index)
        return fine._map_levels(
            lambda level, t: t if level.block[0] == ALL else t.index_select(-2, index),
            stored=fine.stored.index_select(-2, index),
            bias=bias,
        )

    def cut(self, rows: tuple[int, int], columns: tuple[int, int]) -> LogicalWeight:
        """The sub-matrix [rows, columns). Cuts must start on block edges: call `reblock` first if needed.

        The act-order must be undone before columns are cut.
        """
        assert self.perm is None or columns == (0, self.k), "undo the act-order before cutting columns"
        for (low, high), size in ((rows, self.n), (columns, self.k)):
            if not 0 <= low <= high <= size:
                raise BadValue("a cut outside the matrix", expected=f"within 0 to {size}", got=f"{low} to {high}")
        if self.spec.rotation and any(edge % self.spec.rotation for edge in columns):
            raise BadValue(
                "a cut inside a block of a rotation", expected=f"multiples of {self.spec.rotation}", got=list(columns)
            )
        inputs = dict(self.inputs)
        if FACTORS in inputs:
            inputs[FACTORS] = inputs[FACTORS][..., columns[0] : columns[1]]
        return self._map_levels(
            lambda level, t: _cut_level(level, t, rows, columns),
            stored=_cut_codes(self.stored, rows, columns),
            bias=None if self.bias is None else self.bias[..., rows[0] : rows[1]],
            inputs=inputs,
        )

    def reblock(self, spec: QuantSpec) -> LogicalWeight:
        """The same numbers with finer blocks: each scale is repeated over the new blocks inside its block."""
        if spec is self.spec or spec == self.spec:
            return self
        if spec.with_blocks(lambda _: TENSOR) != self.spec.with_blocks(lambda _: TENSOR):
            raise WrongShape("only blocks can be refined", expected=self.spec, got=spec)
        finer = iter(spec.levels)
        n, k = self.n, self.k
        return self._map_levels(lambda level, t: spread(t, level.block, next(finer).block, n, k), spec=spec)


def stack(weights: Sequence[LogicalWeight]) -> LogicalWeight:
    """Matrices of equal spec and width stacked along N: gate over up. Exact even if their scales differ.

    Activation-side tensors are kept only if all projections agree on them.
    """
    first, rows = weights[0], math.gcd(*(weight.n for weight in weights))
    for weight in weights:
        if weight.spec != first.spec or weight.k != first.k:
            raise WrongShape(
                "stacked projections must agree",
                expected=f"{first.spec} [{first.n}, {first.k}]",
                got=f"{weight.spec} [{weight.n}, {weight.k}]",
            )
        if not same_or_none(weight.perm, first.perm):
            raise BadValue("gate and up have different act-orders, but they share one input")
    spec = first.spec.stacked(rows)
    fine = [w.reblock(spec) for w in weights]
    return LogicalWeight(
        spec,
        _join_codes(torch.cat, [w.stored for w in fine], -2),
        tuple(torch.cat(ts, -2) for ts in zip(*(w.scales for w in fine))),
        _join_optional(torch.cat, [w.zero for w in fine], -2),
        tuple(torch.cat(ts, -2) for ts in zip(*(w.minimum for w in fine))),
        bias=_join_optional(torch.cat, [w.bias for w in fine], -1),
        perm=first.perm,
        inputs={r: t for r, t in first.inputs.items() if all(same_or_none(w.inputs.get(r), t) for w in weights)},
    )


def join_rows(weights: LogicalWeight, count: int) -> LogicalWeight:
    """Each `count` neighbouring matrices of several as one of all their rows, as `stack` would give it: a view if no
    block is refined. Without activation-side tensors."""

    def join(tensor: Tensor) -> Tensor:
        pieces: Tensor = tensor.unflatten(0, (-1, count))
        return pieces.flatten(1, 2)

    fine = weights.reblock(weights.spec.stacked(weights.n))
    assert fine.perm is None, "act-orders are not joined"
    return fine._map_levels(
        lambda _, t: join(t),
        stored=fine.stored.join_rows(count) if isinstance(fine.stored, Nibbles) else join(fine.stored),
        bias=None if fine.bias is None else join(fine.bias.unsqueeze(-1)).squeeze(-1),
        inputs={},
    )


def split_rows(weight: LogicalWeight, step: int) -> LogicalWeight:
    """Rows 0, step, 2 * step ..., then rows 1, 1 + step ...: rows that alternate between matrices, one after the other.

    Blocks along N are refined to single rows.
    """

    def split(tensor: Tensor) -> Tensor:
        turns: Tensor = tensor.unflatten(-2, (-1, step))
        return turns.transpose(-3, -2).flatten(-3, -2)

    fine = weight.reblock(weight.spec.map_blocks(0, 1))
    return fine._map_levels(
        lambda level, t: t if level.block[0] == ALL else split(t),
        stored=fine.stored.split_rows(step) if isinstance(fine.stored, Nibbles) else split(fine.stored),
        bias=None if fine.bias is None else split(fine.bias.unsqueeze(-1)).squeeze(-1),
    )


def stack_experts(weights: Sequence[LogicalWeight]) -> LogicalWeight:
    """The same matrix of several experts as one value, with a leading expert dimension.

    If only some experts have an act-order, the others get the natural order.
    """
    first = weights[0]
    if len(weights) == 1:
        return first._map_tensors(lambda t: t.unsqueeze(0))
    for weight in weights:
        if (weight.spec, weight.stored.shape) != (first.spec, first.stored.shape):
            raise WrongShape(
                "experts of a layer must agree",
                expected=f"{first.spec} {list(first.stored.shape)}",
                got=f"{weight.spec} {list(weight.stored.shape)}",
            )
    perms = [w.perm for w in weights]
    if any(perm is not None for perm in perms):
        natural = torch.arange(first.k, dtype=torch.int32, device=first.device)
        perms = [natural if perm is None else perm for perm in perms]
    return LogicalWeight(
        first.spec,
        _join_codes(torch.stack, [w.stored for w in weights], 0),
        tuple(torch.stack(ts) for ts in zip(*(w.scales for w in weights))),
        _join_optional(torch.stack, [w.zero for w in weights], 0),
        tuple(torch.stack(ts) for ts in zip(*(w.minimum for w in weights))),
        bias=_join_optional(torch.stack, [w.bias for w in weights], 0),
        perm=_join_optional(torch.stack, perms, 0),
        inputs={role: torch.stack([w.inputs[role] for w in weights]) for role in first.inputs},
    )


def expert_of(weights: LogicalWeight, index: int | slice) -> LogicalWeight:
    """One expert's matrix, or some experts', out of several: views."""
    return weights._map_tensors(lambda t: t[index])


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal dtype, shape and bytes: NaNs compare by their bits, and the signs of zeros must match."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))


def same_or_none(a: Tensor | None, b: Tensor | None) -> bool:
    """`same_bits` of two tensors, or two that are not there."""
    return a is b or (a is not None and b is not None and same_bits(a, b))


def _expect(what: str, tensor: Tensor | Nibbles, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(tensor.shape) != shape:
        raise WrongShape(f"{what} of a weight", expected=list(shape), got=list(tensor.shape))
    if tensor.dtype != dtype:
        raise WrongDtype(f"{what} of a weight", expected=dtype, got=tensor.dtype)


def _cut_codes(stored: Tensor | Nibbles, rows: tuple[int, int], columns: tuple[int, int]) -> Tensor | Nibbles:
    if isinstance(stored, Nibbles) and (columns[0] % 2 or columns[1] % 2):
        stored = stored.unpack()  # the cut separates two codes of a byte
    return stored.narrow(-2, rows[0], rows[1] - rows[0]).narrow(-1, columns[0], columns[1] - columns[0]).contiguous()


def _cut_level(level: Level, tensor: Tensor, rows: tuple[int, int], columns: tuple[int, int]) -> Tensor:
    for axis, (low, high) in ((-2, rows), (-1, columns)):
        side = level.block[axis]
        if side == ALL:
            continue
        if low % side:
            raise BadValue("a cut starts inside a block", expected=f"a multiple of {side}", got=low)
        tensor = tensor.narrow(axis, low // side, blocks_along(high - low, side))
    return tensor.contiguous()


Join = Callable[[list[Tensor], int], Tensor]  # torch.cat or torch.stack


def _join_codes(join: Join, parts: Sequence[Tensor | Nibbles], axis: int) -> Tensor | Nibbles:
    """Stays two codes per byte if all parts are."""
    dense = [part.data for part in parts if isinstance(part, Nibbles)]
    if len(dense) == len(parts):
        return Nibbles(join(dense, axis))
    return join([part.unpack() if isinstance(part, Nibbles) else part for part in parts], axis)


def _join_optional(join: Join, tensors: Sequence[Tensor | None], axis: int) -> Tensor | None:
    present = [t for t in tensors if t is not None]
    if not present:
        return None
    if len(present) != len(tensors):
        raise BadValue("a tensor is present for one of the joined matrices and absent for another")
    return join(present, axis)
