"""One matrix in canonical form: the interface between formats and kernel layouts.

A `LogicalWeight` is transient: it holds one expert's matrix, one byte per code. Every operation here
is exact; `codec` does the rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lancebill.errors import BadValue, WrongDtype, WrongShape
from lancebill.numbers.blocks import expand as expand
from lancebill.numbers.blocks import spread as spread
from lancebill.numbers.spec import ALL, TENSOR, Level, QuantSpec, blocks_along

# Activation-side tensors that a checkpoint may store for a projection.
INPUT_ROLES = ("input_scale", "input_global_scale", "input_zero_point", "pre_quant_scale")


@dataclass(frozen=True, eq=False)
class LogicalWeight:
    """Codes [N, K], and for each level of the spec a tensor with one number per block.

    With `perm` (act-order) the columns are sorted by group, so that groups are contiguous: column j
    belongs to input feature perm[j]. `dequantize` restores the natural order.
    """

    spec: QuantSpec
    codes: Tensor
    scales: tuple[Tensor, ...] = ()
    zero: Tensor | None = None
    minimum: tuple[Tensor, ...] = ()
    bias: Tensor | None = None
    perm: Tensor | None = None
    inputs: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        n, k = self.n, self.k
        _expect("codes", self.codes, (n, k), self.spec.dtype.storage)
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
            _expect(f"level {level}", tensor, level.shape(n, k), level.dtype.storage)
        if self.bias is not None:
            _expect("bias", self.bias, (n,), self.bias.dtype)
        if self.perm is not None:
            _expect("perm", self.perm, (k,), torch.int32)

    @property
    def n(self) -> int:
        return int(self.codes.shape[0])

    @property
    def k(self) -> int:
        return int(self.codes.shape[1])

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

    def rows(self, index: Tensor) -> LogicalWeight:
        """Rows `index`, in that order. Blocks along N are refined to single rows first."""
        fine = self.reblock(self.spec.map_blocks(0, 1))
        bias = None if fine.bias is None else fine.bias[index]
        return fine._map_levels(
            lambda level, t: t if level.block[0] == ALL else t[index], codes=fine.codes[index], bias=bias
        )

    def cut(self, rows: tuple[int, int], columns: tuple[int, int]) -> LogicalWeight:
        """The sub-matrix [rows, columns). Cuts must start on block edges: call `reblock` first if needed.

        The act-order must be undone before columns are cut.
        """
        assert self.perm is None or columns == (0, self.k), "undo the act-order before cutting columns"
        for (low, high), size in ((rows, self.n), (columns, self.k)):
            if not 0 <= low <= high <= size:
                raise BadValue("a cut outside the matrix", expected=f"within 0 to {size}", got=f"{low} to {high}")
        inputs = dict(self.inputs)
        if "pre_quant_scale" in inputs:  # the only input role with one number per column
            inputs["pre_quant_scale"] = inputs["pre_quant_scale"][..., columns[0] : columns[1]]
        return self._map_levels(
            lambda level, t: _cut_level(level, t, rows, columns),
            codes=self.codes[rows[0] : rows[1], columns[0] : columns[1]].contiguous(),
            bias=None if self.bias is None else self.bias[rows[0] : rows[1]],
            inputs=inputs,
        )

    def reblock(self, spec: QuantSpec) -> LogicalWeight:
        """The same numbers with finer blocks: each scale is repeated over the new blocks inside its block."""
        if spec == self.spec:
            return self
        if spec.with_blocks(lambda _: TENSOR) != self.spec.with_blocks(lambda _: TENSOR):
            raise WrongShape("only blocks can be refined", expected=self.spec, got=spec)
        finer = iter(spec.levels)
        n, k = self.n, self.k
        return self._map_levels(lambda level, t: spread(t, level.block, next(finer).block, n, k), spec=spec)


def stack(weights: Sequence[LogicalWeight]) -> LogicalWeight:
    """Matrices of equal spec and size stacked along N: gate over up. Exact even if their scales differ.

    Activation-side tensors are kept only if all projections agree on them.
    """
    first = weights[0]
    for weight in weights:
        if weight.spec != first.spec or weight.k != first.k or weight.n != first.n:
            raise WrongShape(
                "stacked projections must agree",
                expected=f"{first.spec} [{first.n}, {first.k}]",
                got=f"{weight.spec} [{weight.n}, {weight.k}]",
            )
        if not _same_optional(weight.perm, first.perm):
            raise BadValue("gate and up have different act-orders, but they share one input")
    fine = [w.reblock(w.spec.map_blocks(0, w.n)) for w in weights]
    return LogicalWeight(
        first.spec.stacked(first.n),
        torch.cat([w.codes for w in fine]),
        tuple(torch.cat(ts) for ts in zip(*(w.scales for w in fine))),
        _cat_optional([w.zero for w in fine]),
        tuple(torch.cat(ts) for ts in zip(*(w.minimum for w in fine))),
        bias=_cat_optional([w.bias for w in fine]),
        perm=first.perm,
        inputs={r: t for r, t in first.inputs.items() if all(_same_optional(w.inputs.get(r), t) for w in weights)},
    )


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal dtype, shape and bytes: NaNs compare by their bits, and the signs of zeros must match."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))


def _same_optional(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and same_bits(a, b))


def _expect(what: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(tensor.shape) != shape:
        raise WrongShape(f"{what} of a weight", expected=list(shape), got=list(tensor.shape))
    if tensor.dtype != dtype:
        raise WrongDtype(f"{what} of a weight", expected=dtype, got=tensor.dtype)


def _cut_level(level: Level, tensor: Tensor, rows: tuple[int, int], columns: tuple[int, int]) -> Tensor:
    for axis, (low, high) in ((0, rows), (1, columns)):
        side = level.block[axis]
        if side == ALL:
            continue
        if low % side:
            raise BadValue("a cut starts inside a block", expected=f"a multiple of {side}", got=low)
        tensor = tensor.narrow(axis, low // side, blocks_along(high - low, side))
    return tensor.contiguous()


def _cat_optional(tensors: Sequence[Tensor | None]) -> Tensor | None:
    present = [t for t in tensors if t is not None]
    if not present:
        return None
    if len(present) != len(tensors):
        raise BadValue("a tensor is present for one stacked projection and absent for another")
    return torch.cat(present)
