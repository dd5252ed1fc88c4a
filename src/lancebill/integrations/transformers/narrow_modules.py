"""Matrices that stay in 16 bits where the CPU computes in fp32.

A CPU without arithmetic of 16-bit floats runs everything in fp32. Twice the memory would be read for every token; so
matrices whose numbers 16 bits hold exactly keep them, and are converted where they are used.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class NarrowLinear(nn.Linear):
    """A linear module whose matrix is narrower than its inputs."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), self.bias)


class NarrowEmbedding(nn.Embedding):
    """An embedding whose table is narrower than its results, which are fp32."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids).float()


# A subclass with a forward of its own computes something else.
_NARROW: dict[Any, type[nn.Module]] = {nn.Linear.forward: NarrowLinear, nn.Embedding.forward: NarrowEmbedding}


def keep_narrow(model: nn.Module, dtype: torch.dtype) -> int:
    """Store matrices of fp32 modules in `dtype` where that loses nothing; the bytes saved."""
    made: dict[int, nn.Parameter | None] = {}  # tied matrices stay tied
    saved = 0
    for module in model.modules():
        kind, weight = _NARROW.get(type(module).forward), module._parameters.get("weight")
        if kind is None or weight is None or weight.dtype != torch.float32:
            continue
        if id(weight) not in made:
            narrow = weight.detach().to(dtype)
            same = bool(torch.equal(narrow.float(), weight))
            made[id(weight)] = nn.Parameter(narrow, requires_grad=False) if same else None
            saved += narrow.nbytes if same else 0
        own = made[id(weight)]
        if own is not None:
            module.register_parameter("weight", own)
            module.__class__ = kind
    return saved
