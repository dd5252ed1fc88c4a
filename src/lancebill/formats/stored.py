"""Uninterpreted contents of a checkpoint: tensor headers and configurations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

# Stored dtypes have the names that safetensors uses.
TORCH_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


@dataclass(frozen=True)
class Stored:
    """The header of one tensor."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Config:
    """A checkpoint's configuration: the model's config, and the quantisation section, from any file.

    `method` is the normalised `quant_method`; None means that nothing is quantised. Compared by identity, so that
    functions that parse it can be cached.
    """

    model: Mapping[str, Any] = field(default_factory=dict)
    quant: Mapping[str, Any] = field(default_factory=dict)
    method: str | None = None
    source: str = "config.json"
