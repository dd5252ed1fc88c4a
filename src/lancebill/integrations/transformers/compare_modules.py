"""Compare a replacement with a module of a model. Only the names of the module's children are known."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lancebill.errors import LancebillError

MOST_ERROR = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}  # of the largest value
# What a module raises that is called in another way, and what we raise for projections that cannot be joined.
UNSUITABLE = (TypeError, ValueError, RuntimeError, AttributeError, LookupError, LancebillError)


def random_rows(*shape: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    return torch.randn(shape, dtype=dtype, device=device, generator=torch.Generator(device).manual_seed(0))


def is_close(want: Tensor, got: Tensor) -> bool:
    alike = want.shape == got.shape and want.dtype == got.dtype
    return alike and bool((want - got).abs().max() <= MOST_ERROR[want.dtype] * want.abs().max())


def rotary_angles(model: Any) -> nn.Module | None:
    """The module that gives cosines and sines of positions."""
    return next((part for part in model.modules() if "inv_freq" in dict(part.named_buffers(recurse=False))), None)
