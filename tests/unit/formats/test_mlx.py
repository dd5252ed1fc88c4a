"""MLX checkpoints: by the definition of its bit stream, and against the library itself where it is installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from lancebill.checkpoint.read.files import Checkpoint
from lancebill.cli.verify import examine
from lancebill.errors import UnsupportedFormat
from lancebill.formats.base import Module
from lancebill.formats.mlx import BITS, FLOAT_MODES, FORMAT, affine_scheme
from lancebill.formats.stored import DTYPE_NAMES, Config, Stored
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.numbers.codec import dequantize
from lancebill.numbers.dtypes import F32

N, K = 6, 128


def stream(codes: np.ndarray, bits: int) -> np.ndarray:
    """Each row as one long number, code j at bit j * bits, cut into 32-bit words."""
    rows = [sum(int(code) << (j * bits) for j, code in enumerate(row)) for row in codes]
    count = codes.shape[1] * bits // 32
    return np.array([[(row >> (32 * i)) & 0xFFFFFFFF for i in range(count)] for row in rows], dtype=np.uint32)


@pytest.mark.parametrize("bits", BITS)
def test_affine_by_definition(bits: int) -> None:
    rng = np.random.default_rng(bits)
    codes = rng.integers(0, 1 << bits, (N, K))
    scale, bias = rng.normal(size=(2, N, K // 64)).astype(np.float32)
    stored = {
        "codes": torch.from_numpy(stream(codes, bits)),
        "scale": torch.from_numpy(scale),
        "minimum": torch.from_numpy(bias),
    }
    got = dequantize(affine_scheme(bits, 64, F32, "F32").decode(stored, N, K))
    want = codes.astype(np.float32) * scale.repeat(64, 1) + bias.repeat(64, 1)
    assert torch.equal(got, torch.from_numpy(want))


@pytest.mark.parametrize(
    ("mode", "bits"), [*(("affine", bits) for bits in BITS), *((mode, s.dtype.bits) for mode, s in FLOAT_MODES.items())]
)
def test_equal_to_mlx(mode: str, bits: int) -> None:
    mx = pytest.importorskip("mlx.core")
    weights = mx.array(np.random.default_rng(0).normal(size=(N, K)).astype(np.float32))
    settings: dict[str, Any] = {
        "bits": bits,
        "mode": mode,
        "group_size": FLOAT_MODES[mode].group if mode in FLOAT_MODES else 32,
    }
    parts = mx.quantize(weights, **settings)
    want = torch.from_numpy(np.array(mx.dequantize(*parts, **settings).astype(mx.float32)))
    tensors = [torch.from_numpy(np.array(part)) for part in parts]
    headers = {
        s: Stored(DTYPE_NAMES[t.dtype], tuple(t.shape)) for s, t in zip((".weight", ".scales", ".biases"), tensors)
    }
    scheme = FORMAT.scheme(Config(quant=settings, method="mlx"), Module("m", headers))
    got = dequantize(scheme.decode(dict(zip(("codes", "scale", "minimum"), tensors)), N, K))
    assert torch.equal(got, want)


@pytest.mark.parametrize(("key", "family", "home"), [
    ("quantization", "qwen3_moe", "model.layers.0.mlp.switch_mlp"),
    ("quantization_config", "mixtral", "model.layers.0.block_sparse_moe.switch_mlp"),
])  # fmt: skip
def test_a_checkpoint_of_mlx_lm(key: str, family: str, home: str, tmp_path: Path) -> None:
    """Stacked experts, one of them with settings of its own, and a router that is not quantised."""
    own = f"{home}.down_proj"
    section = {"group_size": 64, "bits": 4, own: {"group_size": 32, "bits": 8}, "model.layers.0.mlp.gate": False}
    model = {
        "model_type": family, "hidden_size": 64, "moe_intermediate_size": 128, "intermediate_size": 128,
        "num_hidden_layers": 1, "num_experts": 2, "num_experts_per_tok": 1, "quantization": section, key: section,
    }  # fmt: skip
    if key == "quantization":
        model = {**model, "norm_topk_prob": True}
    tensors: dict[str, torch.Tensor] = {"model.layers.0.mlp.gate.weight": torch.randn(2, 64)}
    for name, n, k, bits, size in (
        ("gate_proj", 128, 64, 4, 64),
        ("up_proj", 128, 64, 4, 64),
        ("down_proj", 64, 128, 8, 32),
    ):
        words = torch.randint(0, 1 << 31, (2, n, k * bits // 32), dtype=torch.int64)
        tensors[f"{home}.{name}.weight"] = words.to(torch.int32).view(torch.uint32)
        for part in ("scales", "biases"):
            tensors[f"{home}.{name}.{part}"] = torch.randn(2, n, k // size, dtype=torch.bfloat16)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(model))
    report = examine(tmp_path, strict=True)
    assert report.ok and report.layers == 1, [p.render() for p in report.problems]
    with Checkpoint.open(tmp_path) as checkpoint:
        layer = RoutedExperts.from_checkpoint(checkpoint, 0, backend="reference", dtype=torch.float32)
    assert layer.report is not None
    assert layer.report.kept == {"w13": "uint4-g64-min.g64:bf16", "w2": "uint8-g32-min.g32:bf16"}
    out = layer(torch.randn(3, 64), topk_ids=torch.zeros(3, 1, dtype=torch.int32), topk_weights=torch.ones(3, 1))
    assert out.isfinite().all()


def test_unknown_settings_are_refused() -> None:
    for quant in ({"mode": "spline"}, {"bits": 7}, {"mode": "mxfp4", "group_size": 64}, {"m": {"bits": 4, "extra": 1}}):
        with pytest.raises(UnsupportedFormat):
            FORMAT.scheme(Config(quant=quant, method="mlx"), Module("m", {".scales": Stored("BF16", (1,))}))
