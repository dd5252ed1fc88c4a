"""An embedding whose table stays quantised: only the rows of the tokens at hand are dequantised."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from lancebill.moe.layout import as_integer
from lancebill.numbers.bit_packing import Nibbles
from lancebill.numbers.codec import dequantize
from lancebill.numbers.spec import ALL
from lancebill.numbers.weight import LogicalWeight


class PackedEmbedding(nn.Module):
    """Replaces an `nn.Embedding`. Parameters are integers, so that no `.to(dtype)` changes them."""

    def __init__(self, table: LogicalWeight, dtype: torch.dtype) -> None:
        super().__init__()
        table = replace(table.reblock(table.spec.map_blocks(0, 1)), inputs={})
        self.spec, self.dtype = table.spec, dtype
        self.num_embeddings, self.embedding_dim = table.n, table.k
        self.two_per_byte = isinstance(table.stored, Nibbles)
        self.codes = _parameter(table.stored.data if isinstance(table.stored, Nibbles) else table.stored)
        self.levels = nn.ParameterList(_parameter(tensor) for _, tensor in table.levels())
        self.order = None if table.perm is None else _parameter(table.perm)

    def forward(self, ids: Tensor) -> Tensor:
        rows = self._rows(ids.reshape(-1))
        return dequantize(rows).to(self.dtype).view(*ids.shape, self.embedding_dim)

    @property
    def weight(self) -> Tensor:
        """The whole table, dequantised anew in every access."""
        return self(torch.arange(self.num_embeddings, device=self.codes.device))

    def _rows(self, ids: Tensor) -> LogicalWeight:
        spec, codes = self.spec, self.codes.data[ids]
        levels = [tensor.data.view(level.dtype.storage) for level, tensor in zip(spec.levels, self.levels)]
        levels = [tensor if level.block[0] == ALL else tensor[ids] for level, tensor in zip(spec.levels, levels)]
        scales, rest = levels[: len(spec.scales)], levels[len(spec.scales) :]
        zero = None if spec.zero is None else rest.pop(0)
        stored = Nibbles(codes) if self.two_per_byte else codes.view(spec.dtype.storage)
        perm = None if self.order is None else self.order.data
        return LogicalWeight(spec, stored, tuple(scales), zero, tuple(rest), perm=perm)


def _parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(as_integer(tensor), requires_grad=False)
