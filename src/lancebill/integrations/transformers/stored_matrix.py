"""A quantised matrix in the place of a plain one while transformers loads a model.

transformers renames tensors and puts them into modules; it does not look at the values of most of them. Those arrive
where they belong as they were stored. Where transformers computes (fused or split tensors), the matrix is dequantised.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lancebill.checkpoint.load.input_scales import FACTORS
from lancebill.numbers.codec import dequantize
from lancebill.numbers.weight import LogicalWeight


class StoredMatrix(Tensor):
    """Looks like a dense [N, K] tensor; has only the quantised numbers."""

    stored: LogicalWeight

    @staticmethod
    def __new__(cls, stored: LogicalWeight, dtype: torch.dtype) -> StoredMatrix:
        made: StoredMatrix = Tensor._make_wrapper_subclass(cls, (stored.n, stored.k), dtype=dtype)
        made.stored = stored
        return made

    def plain(self) -> Tensor:
        """The dequantised matrix."""
        values, factors = dequantize(self.stored), self.stored.inputs.get(FACTORS)
        return (values if factors is None else values * factors.float().reshape(1, -1)).to(self.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:  # by which `nn.Parameter` takes a tensor
            return cls(args[0].stored, args[0].dtype)
        plain = tree_map(lambda value: value.plain() if isinstance(value, cls) else value, (args, kwargs or {}))
        return func(*plain[0], **plain[1])
