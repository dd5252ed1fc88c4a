"""Tensors of every dtype and a bitwise comparison, for the tests that read and write files."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from lancebill.checkpoint.read.file_bytes import bytes_of
from lancebill.formats.stored import DTYPE_NAMES, TORCH_DTYPES, Stored


def random_bytes(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype == torch.bool else 256
    data = torch.randint(0, high, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).reshape(shape) if data.numel() else torch.empty(shape, dtype=dtype)


def same(a: Tensor, b: Tensor) -> bool:
    """Bitwise equality, including NaNs."""
    return a.dtype == b.dtype and a.shape == b.shape and bytes_of(a) == bytes_of(b)


def stored(tensors: Mapping[str, Tensor]) -> dict[str, Stored]:
    return {name: Stored(DTYPE_NAMES[t.dtype], tuple(t.shape)) for name, t in tensors.items()}


def every_dtype() -> dict[str, Tensor]:
    tensors = {name: random_bytes(dtype, (3, 5, 7)) for name, dtype in TORCH_DTYPES.items()}
    return tensors | {
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(4, 0, 3),
        "odd": torch.ones(3, dtype=torch.int8),
    }
