"""Models of which every number is known, also those that transformers does not initialise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

STD = 0.3


def initialised(build: Callable[[], Any], seed: int = 11) -> Any:
    """The model that `build` makes. What it leaves as memory happens to be gets random numbers, or zeros if integer.

    The experts of Qwen3-Omni's talker are such tensors: whether two copies of them are equal is chance, as NaN is not
    equal to NaN.
    """
    with _marked_memory():
        model = build()
    generator = torch.Generator().manual_seed(seed)
    for tensor in (*model.parameters(), *model.buffers()):
        if _is_marked(tensor.data):
            numbers = torch.randn(tensor.shape, generator=generator) * STD
            tensor.data.copy_(numbers if tensor.is_floating_point() else torch.zeros_like(tensor))
    return model


@contextmanager
def _marked_memory() -> Iterator[None]:
    """New memory is NaN, or the largest integer; torch does it in its deterministic mode only."""
    enabled, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warns)
        torch.utils.deterministic.fill_uninitialized_memory = fills


def _is_marked(tensor: Tensor) -> bool:
    if tensor.is_floating_point():
        return bool(tensor.isnan().any())
    return tensor.dtype is torch.int64 and bool((tensor == torch.iinfo(torch.int64).max).any())
