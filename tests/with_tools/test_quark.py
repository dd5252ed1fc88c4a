"""Checkpoints of Quark, judged by the model that Quark imports from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from judge import FAMILIES, Layers, assert_judged, calibration, named_experts, tiny_model
from torch import Tensor

quark = pytest.importorskip("quark.torch")
templates = pytest.importorskip("quark.torch.quantization.config.template")
preparation = pytest.importorskip("quark.torch.utils.llm.model_preparation")
transformers = pytest.importorskip("transformers")

NOT_EXPORTED = {"mx6", "mx9", "bfp16", "amdfp4_global16", "amdfp4_global32"}  # this release fails to write or import
NVFP4 = ("nvfp4", "fp4_block16_scale_e4m3")
ROUNDING = 2**-22  # with two scales the last bits depend on the order of multiplication
SCHEMES = [name for name in templates.LLMTemplate.get_supported_schemes() if name not in NOT_EXPORTED]


@pytest.mark.parametrize("name", SCHEMES)
def test_scheme(name: str, tmp_path: Path) -> None:
    rounding = ROUNDING if name in NVFP4 else 0.0
    assert_judged(_written(tmp_path, name), _judged(tmp_path), rounding=rounding)


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "glm4_moe", "minimax_m2", "deepseek_v3", "gpt_oss"])
def test_family(family: str, tmp_path: Path) -> None:
    assert family in FAMILIES
    folder = _written(tmp_path, "fp8", family)
    assert_judged(folder, _judged(tmp_path), biases=_judged(tmp_path, "bias"))


def _model(folder: Path) -> Any:
    """The float model with its experts taken apart, as Quark needs it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "plain", dtype=torch.float32)
    preparation.preprocess_for_quantization(model)
    return model


def _written(folder: Path, scheme: str, family: str = "qwen3_moe") -> Path:
    tiny_model(family, torch.float32).save_pretrained(folder / "plain")
    quantizer = quark.ModelQuantizer(templates.LLMTemplate.get(family).get_config(scheme=scheme))
    model = quantizer.quantize_model(_model(folder), [batch["input_ids"] for batch in calibration()])
    with torch.no_grad():
        quark.export_safetensors(quantizer.freeze(model), str(folder / "quantised"))
    return folder / "quantised"


def _judged(folder: Path, kind: str = "weight") -> Layers:
    model = quark.import_model_from_safetensors(_model(folder), str(folder / "quantised"))
    found: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if hasattr(module, "_get_qweight"):
            tensor = module._get_qweight(module.weight) if kind == "weight" else module.bias
            found |= {} if tensor is None else _separate(name, kind, tensor.detach())
    return named_experts(found, kind)


def _separate(name: str, kind: str, tensor: Tensor) -> dict[str, Tensor]:
    """gpt-oss's rows alternate gate, up, gate, up."""
    home, fused, _ = name.partition("gate_up_proj")
    if not fused:
        return {f"{name}.{kind}": tensor}
    return {f"{home}gate_proj.{kind}": tensor[0::2], f"{home}up_proj.{kind}": tensor[1::2]}
