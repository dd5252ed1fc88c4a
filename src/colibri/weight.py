"""One matrix in canonical form: where formats and kernels meet.

A `LogicalWeight` is transient: one expert's matrix at a time, one byte a code. Every operation here
is exact; rounding lives in `codec`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from colibri.errors import BadValue, WrongDtype, WrongShape
from colibri.quant import ALL, Block, QuantSpec, Scale, Zero, blocks_along

# Activation-side facts a checkpoint may carry for a projection.
INPUT_ROLES = ("input_scale", "input_global_scale", "input_zero_point", "pre_quant_scale")


@dataclass(frozen=True, eq=False)
class LogicalWeight:
    """codes [N, K], and per level of the spec a tensor of one number for each block.

    With `perm` (act-order) the columns are stored in sorted order: column j belongs to input
    feature perm[j], so that groups are contiguous. `dequantize` gives natural order.
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
        held = self.scales + ((self.zero,) if self.zero is not None else ()) + self.minimum
        if len(held) != len(self.spec.levels):
            raise WrongShape(
                "a weight holds one tensor for each level of its spec",
                where=str(self.spec),
                expected=len(self.spec.levels),
                got=len(held),
            )
        for level, tensor in zip(self.spec.levels, held):
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
        """Bit for bit, spec and activation-side tensors included."""
        mine, theirs = self._tensors(), other._tensors()
        return (
            self.spec == other.spec
            and mine.keys() == theirs.keys()
            and all(same_bits(mine[name], theirs[name]) for name in mine)
        )

    def _tensors(self) -> dict[str, Tensor]:
        held = {"codes": self.codes, "zero": self.zero, "bias": self.bias, "perm": self.perm}
        held |= {f"scale{i}": s for i, s in enumerate(self.scales)}
        held |= {f"minimum{i}": s for i, s in enumerate(self.minimum)}
        held |= {f"input.{role}": t for role, t in self.inputs.items()}
        return {name: t for name, t in held.items() if t is not None}

    def rows(self, index: Tensor) -> LogicalWeight:
        """Rows `index`, in that order; block scales along N are spread to single rows first."""
        spec = self.spec.map_blocks(0, 1)
        fine = self.reblock(spec)
        return replace(
            fine,
            codes=fine.codes[index],
            scales=tuple(_take_rows(s, t, index) for s, t in zip(spec.scales, fine.scales)),
            zero=None if spec.zero is None or fine.zero is None else _take_rows(spec.zero, fine.zero, index),
            minimum=tuple(_take_rows(s, t, index) for s, t in zip(spec.minimum, fine.minimum)),
            bias=None if fine.bias is None else fine.bias[index],
        )

    def cut(self, rows: tuple[int, int], columns: tuple[int, int]) -> LogicalWeight:
        """The sub-matrix [rows, columns). A cut starts on block edges: `reblock` first if needed.

        Columns of an act-ordered weight are cut only after its order is folded away.
        """
        assert self.perm is None or columns == (0, self.k), "fold the act-order before cutting columns"
        spec = self.spec
        return replace(
            self,
            codes=self.codes[rows[0] : rows[1], columns[0] : columns[1]].contiguous(),
            scales=tuple(_cut_level(s, t, rows, columns) for s, t in zip(spec.scales, self.scales)),
            zero=None if spec.zero is None or self.zero is None else _cut_level(spec.zero, self.zero, rows, columns),
            minimum=tuple(_cut_level(s, t, rows, columns) for s, t in zip(spec.minimum, self.minimum)),
            bias=None if self.bias is None else self.bias[rows[0] : rows[1]],
        )

    def reblock(self, spec: QuantSpec) -> LogicalWeight:
        """The same numbers with finer blocks: each scale repeated over the blocks it covered."""
        if spec == self.spec:
            return self
        n, k = self.n, self.k

        def refine(old: Scale | Zero, new: Scale | Zero, tensor: Tensor) -> Tensor:
            return spread(tensor, old.block, new.block, n, k)

        return replace(
            self,
            spec=spec,
            scales=tuple(refine(o, s, t) for o, s, t in zip(self.spec.scales, spec.scales, self.scales)),
            zero=None
            if self.zero is None or spec.zero is None or self.spec.zero is None
            else refine(self.spec.zero, spec.zero, self.zero),
            minimum=tuple(refine(o, s, t) for o, s, t in zip(self.spec.minimum, spec.minimum, self.minimum)),
        )


def stack(weights: Sequence[LogicalWeight]) -> LogicalWeight:
    """Matrices of equal spec and size stacked along N: gate over up. Exact for unequal scales."""
    first = weights[0]
    spec = first.spec.stacked(first.n)
    for weight in weights:
        if weight.spec != first.spec or weight.k != first.k or weight.n != first.n:
            raise WrongShape(
                "stacked projections must agree",
                expected=f"{first.spec} [{first.n}, {first.k}]",
                got=f"{weight.spec} [{weight.n}, {weight.k}]",
            )
        if (weight.perm is None) != (first.perm is None) or (
            first.perm is not None and weight.perm is not None and not torch.equal(weight.perm, first.perm)
        ):
            raise BadValue("gate and up have different act-orders, but they share one input")
    fine = [w.reblock(w.spec.map_blocks(0, w.n)) for w in weights]
    return LogicalWeight(
        spec,
        torch.cat([w.codes for w in fine]),
        tuple(torch.cat(ts) for ts in zip(*(w.scales for w in fine))),
        _cat_optional([w.zero for w in fine]),
        tuple(torch.cat(ts) for ts in zip(*(w.minimum for w in fine))),
        bias=_cat_optional([w.bias for w in fine]),
        perm=first.perm,
        inputs=dict(first.inputs),
    )


def spread(tensor: Tensor, old: Block, new: Block, n: int, k: int) -> Tensor:
    """One number per `old` block to one per `new` block, where each new block lies inside an old."""
    for axis, size in ((0, n), (1, k)):
        if old[axis] == new[axis]:
            continue
        if new[axis] == ALL or (old[axis] != ALL and old[axis] % new[axis]):
            raise WrongShape("blocks can only be refined", expected=f"a divisor of {old[axis]}", got=new[axis])
        count = blocks_along(size, new[axis])
        start = torch.arange(count, device=tensor.device) * new[axis]
        index = start // old[axis] if old[axis] != ALL else torch.zeros_like(start)
        tensor = tensor.index_select(axis, index)
    return tensor


def expand(tensor: Tensor, block: Block, n: int, k: int) -> Tensor:
    """One number per block to a view that broadcasts against [n, k] where it can."""
    for axis, size in ((0, n), (1, k)):
        side = block[axis]
        if side not in (ALL, 1):
            tensor = tensor.repeat_interleave(side, dim=axis).narrow(axis, 0, size)
    return tensor


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal dtype, shape and bytes: NaNs compare by their bits, zeros by their signs."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))


def _expect(what: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(tensor.shape) != shape:
        raise WrongShape(f"{what} of a weight", expected=list(shape), got=list(tensor.shape))
    if tensor.dtype != dtype:
        raise WrongDtype(f"{what} of a weight", expected=dtype, got=tensor.dtype)


def _take_rows(level: Scale | Zero, tensor: Tensor, index: Tensor) -> Tensor:
    return tensor if level.block[0] == ALL else tensor[index]


def _cut_level(level: Scale | Zero, tensor: Tensor, rows: tuple[int, int], columns: tuple[int, int]) -> Tensor:
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
