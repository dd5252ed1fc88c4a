"""Checkpoints of ModelOpt, judged by its own quantisers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from judge import PROJECTIONS, assert_equal, read_experts, tiny_qwen3_moe
from safetensors.torch import load_file
from torch import Tensor

mtq = pytest.importorskip("modelopt.torch.quantization")
export = pytest.importorskip("modelopt.torch.export.unified_export_hf")
quant_utils = pytest.importorskip("modelopt.torch.export.quant_utils")
layers = pytest.importorskip("modelopt.torch.export.layer_utils")
qtensor = pytest.importorskip("modelopt.torch.quantization.qtensor")

INVERTED = {"INT8_WEIGHT_ONLY_CFG": "int8_wo", "INT8_SMOOTHQUANT_CFG": "int8_sq", "FP8_DEFAULT_CFG": "fp8"}


@pytest.mark.parametrize("name", INVERTED)
def test_inverted(name: str, tmp_path: Path) -> None:
    """ModelOpt can invert these itself."""
    _export(_quantized(name), tmp_path)
    stored = load_file(tmp_path / "model.safetensors")

    def value(module: str) -> Tensor:
        weight, scale = (stored[f"{module}.{suffix}"] for suffix in ("weight", "weight_scale"))
        return quant_utils.from_quantized_weight(weight, scale, INVERTED[name], torch.float32)

    home = "model.layers.0.mlp.experts"
    assert_equal(read_experts(tmp_path), {at: value(f"{home}.{at[0]}.{at[1]}_proj") for at in PROJECTIONS})


@pytest.mark.parametrize("name", ["MXFP4_DEFAULT_CFG", "W4A8_MXFP4_FP8_CFG"])
def test_mxfp4(name: str, tmp_path: Path) -> None:
    model = _quantized(name)
    want = {at: _mxfp4(_linear(model, at).weight) for at in PROJECTIONS}
    _export(model, tmp_path)
    assert_equal(read_experts(tmp_path), want)


def test_awq(tmp_path: Path) -> None:
    """Simulated by the quantised model, which divides by 7/amax and so rounds once more."""
    model = _quantized("INT4_AWQ_CFG")
    want = {at: _linear(model, at).weight_quantizer(_linear(model, at).weight).clone() for at in PROJECTIONS}
    _export(model, tmp_path)
    assert_equal(read_experts(tmp_path), want, rounding=2**-20)


def _quantized(name: str) -> Any:
    """A quantised model in which gate and up have common scales, as the exporter gives them."""
    model = tiny_qwen3_moe(torch.float32)
    mtq.quantize(model, getattr(mtq, name), lambda m: m(torch.arange(64)[None]))
    with torch.inference_mode():
        export.requantize_resmooth_fused_llm_layers(model)
        layers.sync_moe_gate_up_amax(model)
    return model


def _export(model: Any, folder: Path) -> None:
    with torch.inference_mode():
        export.export_hf_checkpoint(model, export_dir=folder)


def _linear(model: Any, at: tuple[int, str]) -> Any:
    return model.model.layers[0].mlp.experts[at[0]].get_submodule(f"{at[1]}_proj")


def _mxfp4(weight: Tensor) -> Tensor:
    quantized, scale = qtensor.MXFP4QTensor.quantize(weight.detach(), block_size=32)
    return quantized.dequantize(dtype=torch.float32, scale=scale, block_sizes={-1: 32})
