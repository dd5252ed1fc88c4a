"""A linear module whose rows are stored in blocks of different types."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lancebill.layer.quantized_linear import QuantizedLinear


class MixedLinear(nn.Module):
    """One packed matrix for each type; the outputs are put in the model's order."""

    def __init__(self, parts: Sequence[QuantizedLinear], order: Tensor | None, bias: Tensor | None) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.order = None if order is None else nn.Buffer(order, persistent=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.cat([part(x) for part in self.parts], dim=-1)
        out = out if self.order is None else out.index_select(-1, self.order)
        return out if self.bias is None else out + self.bias
