"""A quantised matrix in the place of a plain one while transformers loads a model.

transformers renames tensors and puts them into modules; it does not look at the values of most of them. Those arrive
where they belong as they were stored. Where transformers computes (fused or split tensors), the matrix is dequantised.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lancebill.numbers.codec import dequantize, plain_matrix, requantize
from lancebill.numbers.spec import QuantSpec
from lancebill.numbers.weight import LogicalWeight, stack


class StoredMatrix(Tensor):
    """Looks like a dense [N, K] tensor; has only the quantised numbers."""

    stored: LogicalWeight
    name: str | None = None  # of the module that it was read for, if transformers has it from a checkpoint

    @staticmethod
    def __new__(cls, stored: LogicalWeight, dtype: torch.dtype) -> StoredMatrix:
        made: StoredMatrix = Tensor._make_wrapper_subclass(cls, (stored.n, stored.k), dtype=dtype)
        made.stored = stored
        return made

    def plain(self) -> Tensor:
        """The dequantised matrix."""
        return plain_matrix(self.stored).to(self.dtype)

    def again(self) -> StoredMatrix:
        return StoredMatrix(self.stored, self.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:  # `nn.Parameter` calls this
            again = args[0].again()
            again.name = args[0].name
            return again
        plain = tree_map(lambda value: value.plain() if isinstance(value, cls) else value, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


@dataclass(frozen=True)
class MixedRows:
    """Matrices of different specs that are one in the model. Row i of it is row `order[i]` of all, one over another."""

    parts: tuple[LogicalWeight, ...]
    order: Tensor | None = None

    def requantized(self, spec: QuantSpec) -> LogicalWeight:
        """One matrix of one spec."""
        joined = stack([requantize(part, spec)[0] for part in self.parts])
        return joined if self.order is None else joined.rows(self.order)


class StoredMixture(StoredMatrix):
    """As a `StoredMatrix`, with rows of different specs."""

    rows: MixedRows

    @staticmethod
    def __new__(cls, rows: MixedRows, dtype: torch.dtype) -> StoredMixture:
        size = (sum(part.n for part in rows.parts), rows.parts[0].k)
        made: StoredMixture = Tensor._make_wrapper_subclass(cls, size, dtype=dtype)
        made.rows = rows
        return made

    def plain(self) -> Tensor:
        values = torch.cat([dequantize(part).to(self.dtype) for part in self.rows.parts])
        return values if self.rows.order is None else values[self.rows.order]

    def again(self) -> StoredMixture:
        return StoredMixture(self.rows, self.dtype)
