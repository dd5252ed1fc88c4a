"""Checkpoints of ModelOpt, judged by its own quantisers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from judge import (
    PROJECTIONS,
    Layers,
    assert_equal,
    assert_judged,
    read_experts,
    stored_tensors,
    tiny_qwen3_moe,
)
from torch import Tensor

mtq = pytest.importorskip("modelopt.torch.quantization")
export = pytest.importorskip("modelopt.torch.export.unified_export_hf")
quant_utils = pytest.importorskip("modelopt.torch.export.quant_utils")
layers = pytest.importorskip("modelopt.torch.export.layer_utils")
qtensor = pytest.importorskip("modelopt.torch.quantization.qtensor")

SIMULATED = [
    "INT4_AWQ_CFG", "INT4_BLOCKWISE_WEIGHT_ONLY_CFG", "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG",
    "FP8_PER_CHANNEL_PER_TOKEN_CFG",
]  # fmt: skip
NVFP4 = ["NVFP4_DEFAULT_CFG", "W4A16_NVFP4_CFG", "W4A8_NVFP4_FP8_CFG", "NVFP4_EXPERTS_ONLY_CFG"]
INVERTED = {
    "INT8_WEIGHT_ONLY_CFG": "int8_wo",
    "INT8_SMOOTHQUANT_CFG": "int8_sq",
    "INT8_DEFAULT_CFG": "int8_sq",
    "FP8_DEFAULT_CFG": "fp8",
}


@pytest.mark.parametrize("name", INVERTED)
def test_inverted(name: str, tmp_path: Path) -> None:
    """ModelOpt can invert these itself."""
    _export(_quantized(name), tmp_path)

    def value(parts: dict[str, Tensor]) -> Tensor:
        return quant_utils.from_quantized_weight(parts["weight"], parts["weight_scale"], INVERTED[name], torch.float32)

    _assert_equal(tmp_path, _stored(tmp_path, value), 0.0)


@pytest.mark.parametrize("name", ["MXFP4_DEFAULT_CFG", "W4A8_MXFP4_FP8_CFG"])
def test_mxfp4(name: str, tmp_path: Path) -> None:
    model = _quantized(name)
    want = {at: _mxfp4(_linear(model, at).weight) for at in PROJECTIONS}
    _export(model, tmp_path)
    assert_judged(tmp_path, {0: want})


@pytest.mark.parametrize("name", SIMULATED)
def test_simulated(name: str, tmp_path: Path) -> None:
    """The quantised model divides by the scale's inverse, and so rounds once more."""
    model = _quantized(name)
    want = {at: _linear(model, at).weight_quantizer(_linear(model, at).weight).clone() for at in PROJECTIONS}
    _export(model, tmp_path)
    _assert_equal(tmp_path, {0: want}, 2**-20)


def test_4_bit_integers_for_fp8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two quantisers in a row: integers, and the fp8 copy that a kernel multiplies.

    This release fails to give both of gate and up common scales, so that step is left out.
    """
    for module in (layers, export):
        monkeypatch.setattr(module, "sync_moe_gate_up_amax", lambda _: 0)
    model = _quantized("W4A8_AWQ_BETA_CFG")
    want = {at: _linear(model, at).weight_quantizer[0](_linear(model, at).weight).clone() for at in PROJECTIONS}
    _export(model, tmp_path)
    _assert_equal(tmp_path, {0: want}, 2**-20)


@pytest.mark.parametrize("name", NVFP4)
def test_nvfp4(name: str, tmp_path: Path) -> None:
    _export(_quantized(name), tmp_path)
    assert_judged(tmp_path, _stored(tmp_path, _nvfp4), rounding=2**-22)


def test_mxfp8(tmp_path: Path) -> None:
    _export(_quantized("MXFP8_DEFAULT_CFG"), tmp_path)
    assert_judged(tmp_path, _stored(tmp_path, _mxfp8))


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


def _assert_equal(folder: Path, want: Layers, rounding: float) -> None:
    """Layers whose inputs are multiplied by a `pre_quant_scale` compute something else than their numbers alone."""
    if any(name.endswith("pre_quant_scale") for name in stored_tensors(folder)):
        assert_equal(read_experts(folder), want[0], rounding=rounding)
    else:
        assert_judged(folder, want, rounding=rounding)


def _stored(folder: Path, value: Callable[[dict[str, Tensor]], Tensor]) -> Layers:
    """What `value` makes of the tensors of each module."""
    tensors, home = stored_tensors(folder), "model.layers.0.mlp.experts"

    def parts(at: tuple[int, str]) -> dict[str, Tensor]:
        module = f"{home}.{at[0]}.{at[1]}_proj."
        return {name.removeprefix(module): tensor for name, tensor in tensors.items() if name.startswith(module)}

    return {0: {at: value(parts(at)) for at in PROJECTIONS}}


def _nvfp4(parts: dict[str, Tensor]) -> Tensor:
    codes, scale = parts["weight"], parts["weight_scale"]
    shape = torch.Size((codes.shape[0], codes.shape[1] * 2))
    settings = {
        "scale": scale,
        "double_scale": parts["weight_scale_2"],
        "block_sizes": {-1: shape[1] // scale.shape[1]},
    }
    return qtensor.NVFP4QTensor(shape, torch.float32, codes).dequantize(dtype=torch.float32, **settings)


def _mxfp8(parts: dict[str, Tensor]) -> Tensor:
    codes = parts["weight"]
    packed = qtensor.MXFP8QTensor(codes.shape, torch.float32, codes)
    return packed.dequantize(dtype=torch.float32, scale=parts["weight_scale"])


def _mxfp4(weight: Tensor) -> Tensor:
    quantized, scale = qtensor.MXFP4QTensor.quantize(weight.detach(), block_size=32)
    return quantized.dequantize(dtype=torch.float32, scale=scale, block_sizes={-1: 32})
