"""Modules whose weights transformers keeps in fp32 inside a model of 16 bits: here they return their input's dtype.

Releases of transformers differ in that. The norms of DeepSeek-V4 return fp32 in 5.17, which the next plain matrix in
bf16 refuses; in fp16 some of its linear modules stay in fp32, and refuse rows of fp16. Nothing is known about a norm
but its weight, so each is tried on a row.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lancebill.integrations.transformers.compare_modules import UNSUITABLE


class WideLinear(nn.Linear):
    """A linear module whose matrix is wider than its inputs."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias).to(x.dtype)


@torch.no_grad()
def return_inputs_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """Let modules with weights in fp32 take rows of `dtype`, and return what they are given."""
    for module in model.modules() if dtype != torch.float32 else ():
        weight = module._parameters.get("weight")
        if weight is None or weight.dtype != torch.float32:
            continue
        if type(module).forward is nn.Linear.forward:
            module.__class__ = WideLinear
        elif weight.ndim == 1 and _widens(module, torch.zeros(1, len(weight), dtype=dtype, device=weight.device)):
            module.register_forward_hook(_narrowed)


def _widens(norm: Any, rows: Tensor) -> bool:
    """Whether a module such as a norm returns another dtype than it is given."""
    try:
        made = norm(rows)
    except UNSUITABLE:
        return False
    return isinstance(made, Tensor) and made.shape == rows.shape and made.dtype != rows.dtype


def _narrowed(module: nn.Module, given: Any, made: Tensor) -> Tensor:
    return made.to(given[0].dtype)
