"""Checkpoints of llm-compressor, judged by the dequantiser of compressed-tensors.

Its AWQ needs an accelerator, and this release no longer writes groups in the order of activations.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed import ROUNDING, judged_by_compressed_tensors
from judge import (
    FAMILIES,
    assert_judged,
    calibration,
    named_experts,
    stored_tensors,
    tiny_model,
    tiny_tokenizer,
)

llmcompressor = pytest.importorskip("llmcompressor")
modifiers = pytest.importorskip("llmcompressor.modifiers.quantization")
transforms = pytest.importorskip("llmcompressor.modifiers.transform")
schemes = pytest.importorskip("compressed_tensors.quantization.quant_scheme")
transformers = pytest.importorskip("transformers")

PRESETS = sorted(schemes.PRESET_SCHEMES.keys() - {"UNQUANTIZED"})
IGNORE = ["lm_head", "re:.*mlp.gate$", "re:.*router$"]


FP4 = ("NVFP4", "NVFP4A16")


def _weights(**changes: Any) -> dict[str, Any]:
    """A group for all linear modules: 4-bit integers in groups of 64, and what is different."""
    arguments = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 64, **changes}
    return {"targets": ["Linear"], "weights": {key: value for key, value in arguments.items() if value is not None}}


def _groups(*groups: dict[str, Any], modifier: Any = modifiers.QuantizationModifier, **options: Any) -> Any:
    named = {f"group_{index}": schemes.QuantizationScheme(**group) for index, group in enumerate(groups)}
    return modifier(config_groups=named, ignore=IGNORE, **options)


def _inputs(kind: str, **changes: Any) -> dict[str, Any]:
    return {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "tensor", "dynamic": False, **changes}


def _preset(name: str, *targets: str) -> dict[str, Any]:
    return schemes.preset_name_to_scheme(name, list(targets)).model_dump()


INT8_STATIC = _weights(num_bits=8, strategy="channel", group_size=None)
FP8 = {"type": "float", "num_bits": 8, "group_size": None}
RECIPES: dict[str, Callable[[], Any]] = {
    "int4-g32": lambda: _groups(_weights(group_size=32)),
    "int3-g64-zp": lambda: _groups(_weights(num_bits=3, symmetric=False)),
    "int5-channel": lambda: _groups(_weights(num_bits=5, strategy="channel", group_size=None)),
    "int6-channel-zp": lambda: _groups(_weights(num_bits=6, strategy="channel", group_size=None, symmetric=False)),
    "int8-tensor": lambda: _groups(_weights(num_bits=8, strategy="tensor", group_size=None)),
    "int2-g16-zp": lambda: _groups(_weights(num_bits=2, group_size=16, symmetric=False)),
    "int8-static-inputs": lambda: _groups({**INT8_STATIC, "input_activations": _inputs("int")}),
    "int8-asymmetric-inputs": lambda: _groups({**INT8_STATIC, "input_activations": _inputs("int", symmetric=False)}),
    "fp8-blocks-64": lambda: _groups(_weights(**FP8, strategy="block", block_structure=[64, 64])),
    "fp8-blocks-that-are-cut": lambda: _groups(_weights(**FP8, strategy="block", block_structure=[96, 80])),
    "fp8-groups": lambda: _groups(_weights(**{**FP8, "group_size": 32})),
    "fp8-tensor": lambda: _groups(_weights(**FP8, strategy="tensor")),
    "gptq": lambda: modifiers.GPTQModifier(targets="Linear", scheme="W4A16", ignore=IGNORE),
    "gptq-no-order-zp": lambda: _groups(_weights(symmetric=False), modifier=modifiers.GPTQModifier, actorder=None),
    "gptq-order-of-activations": lambda: _groups(_weights(), modifier=modifiers.GPTQModifier, actorder="weight"),
    "gptq-w8a8": lambda: modifiers.GPTQModifier(targets="Linear", scheme="W8A8", ignore=IGNORE),
    "gptq-nvfp4": lambda: modifiers.GPTQModifier(targets="Linear", scheme="NVFP4A16", ignore=IGNORE),
    "smoothquant": lambda: [
        transforms.SmoothQuantModifier(smoothing_strength=0.8),
        modifiers.GPTQModifier(targets="Linear", scheme="W8A8", ignore=IGNORE),
    ],
    "fp8-attention-int4-experts": lambda: _groups(
        _preset("FP8_DYNAMIC", "re:.*self_attn.*"), _preset("W4A16", "re:.*experts.*")
    ),
    "nvfp4-gate-up-fp8-down": lambda: _groups(
        _preset("NVFP4A16", r"re:.*experts\.\d+\.(gate|up)_proj"), _preset("FP8_DYNAMIC", "re:.*down_proj")
    ),
    "int4-and-int8": lambda: _groups(
        _preset("W4A16", r"re:.*experts\.\d+\.(gate|up)_proj"), _preset("W8A16", "re:.*down_proj")
    ),
    "experts-only": lambda: _groups(_preset("MXFP4A16", "re:.*experts.*")),
    "attention-only": lambda: _groups(_preset("FP8_DYNAMIC", "re:.*self_attn.*")),
    "fp8-kv-cache": lambda: modifiers.QuantizationModifier(
        targets="Linear", scheme="FP8_DYNAMIC", ignore=IGNORE, kv_cache_scheme=_inputs("float")
    ),
}


@pytest.mark.parametrize("name", PRESETS)
def test_preset(name: str, tmp_path: Path) -> None:
    recipe = modifiers.QuantizationModifier(targets="Linear", scheme=name, ignore=IGNORE)
    assert_judged(
        _written(tmp_path, recipe),
        judged_by_compressed_tensors(tmp_path / "quantised"),
        rounding=ROUNDING if name in FP4 else 0.0,
    )


@pytest.mark.parametrize("name", RECIPES)
def test_recipe(name: str, tmp_path: Path) -> None:
    rounding = ROUNDING if "nvfp4" in name else 0.0
    assert_judged(
        _written(tmp_path, RECIPES[name]()), judged_by_compressed_tensors(tmp_path / "quantised"), rounding=rounding
    )


@pytest.mark.parametrize("preset", ["W4A16_ASYM", "FP8_DYNAMIC", "NVFP4A16"])
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "qwen3_moe"])
def test_family(family: str, preset: str, tmp_path: Path) -> None:
    recipe = modifiers.QuantizationModifier(targets="Linear", scheme=preset, ignore=IGNORE)
    folder = _written(tmp_path, recipe, family)
    biases = named_experts(stored_tensors(folder), "bias")
    assert_judged(
        folder,
        judged_by_compressed_tensors(tmp_path / "quantised"),
        rounding=ROUNDING if preset in FP4 else 0.0,
        biases=biases,
    )


def test_shards_layers_and_tied_embeddings(tmp_path: Path) -> None:
    recipe = modifiers.QuantizationModifier(targets="Linear", scheme="W4A16", ignore=[*IGNORE, "re:.*layers.1.*"])
    folder = _written(tmp_path, recipe, shard="100KB", num_hidden_layers=3, tie_word_embeddings=True)
    assert len(list(folder.glob("*.safetensors"))) > 2
    assert_judged(folder, judged_by_compressed_tensors(tmp_path / "quantised"))


@pytest.mark.parametrize("preset", ["FP8_BLOCK", "FP8_DYNAMIC", "NVFP4A16", "MXFP4A16", "MXFP8A16", "W4A16"])
def test_without_loading_the_model(preset: str, tmp_path: Path) -> None:
    """`model_free_ptq` quantises the files themselves."""
    tiny_model("qwen3_moe").save_pretrained(tmp_path / "plain")
    llmcompressor.model_free_ptq(
        model_stub=tmp_path / "plain", save_directory=tmp_path / "quantised", scheme=preset,
        ignore=[*IGNORE, "re:.*norm", "model.embed_tokens"], max_workers=1, device="cpu",
    )  # fmt: skip
    rounding = ROUNDING if preset in FP4 else 0.0
    assert_judged(tmp_path / "quantised", judged_by_compressed_tensors(tmp_path / "quantised"), rounding=rounding)


def _written(folder: Path, recipe: Any, family: str = "qwen3_moe", shard: str = "1GB", **changes: Any) -> Path:
    """A checkpoint of a tiny model, quantised and saved as llm-compressor's users do it."""
    plain, quantised = folder / "plain", folder / "quantised"
    tiny_model(family, **changes).save_pretrained(plain)
    tiny_tokenizer().save_pretrained(plain)
    model = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
    data = torch.utils.data.DataLoader(calibration(), batch_size=None)
    llmcompressor.oneshot(model=model, tokenizer=tiny_tokenizer(), dataset=data, recipe=recipe, pipeline="basic")
    model.save_pretrained(quantised, save_compressed=True, max_shard_size=shard)
    return quantised
