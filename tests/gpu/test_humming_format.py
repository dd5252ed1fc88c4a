"""Humming's own checkpoint format, written and dequantised by its schema class, which needs a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lancebill.formats.base import Config, Module
from lancebill.formats.humming import FORMAT
from lancebill.formats.stored import DTYPE_NAMES, Stored
from lancebill.numbers.codec import dequantize

schema = pytest.importorskip("humming.schema")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SETTINGS: tuple[dict[str, Any], ...] = (
    {"dtype": "uint4", "group_size": 64},
    {"dtype": "uint4", "group_size": 64, "has_zero_point": True},
    {"dtype": "uint3"},
    {"dtype": "float4e2m1", "group_size": 32, "scale_dtype": "float8e8m0"},
    {"dtype": "float4e2m1", "group_size": 16, "scale_dtype": "float8e4m3", "scale_2_type": "tensor"},
    {"dtype": "float8e4m3"},
    {"dtype": "float8e4m3", "group_size": 128, "group_size_n": 128},
)


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(map(str, s.values())))
def test_equal_to_humming(settings: dict[str, Any]) -> None:
    section = {"quant_method": "humming", **settings}
    kind = schema.BaseWeightSchema.from_config(section)
    values = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16)
    tensors = kind.quant_tensor(values, kind, torch.bfloat16)
    want = kind.dequant_tensors(tensors)
    stored = {f".{name}": tensor.cpu() for name, tensor in tensors.items()}
    module = Module("m", {suffix: Stored(DTYPE_NAMES[t.dtype], tuple(t.shape)) for suffix, t in stored.items()})
    scheme = FORMAT.scheme(Config(quant=section, method="humming"), module)
    roles = {part.role: stored[suffix] for part in scheme.parts for suffix in part.suffix if suffix in stored}
    got = dequantize(scheme.decode(roles, 256, 512))
    rounding = 0.0 if want.dtype == torch.float32 else 2.0**-7
    torch.testing.assert_close(got, want.float().cpu(), rtol=rounding, atol=0)
