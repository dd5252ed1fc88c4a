"""What files say, before anyone has decided what it means: tensors' headers and configurations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

# Stored dtypes go by the names safetensors gives them.
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
    """What a file says of one tensor."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Config:
    """A checkpoint's configuration: the model's, and the quantisation section wherever it was.

    `method` is the normalised `quant_method`; None means nothing is quantised. One is equal only to itself, so that
    what a format has read in it for one module is known for the next.
    """

    model: Mapping[str, Any] = field(default_factory=dict)
    quant: Mapping[str, Any] = field(default_factory=dict)
    method: str | None = None
    source: str = "config.json"
