"""Checkpoints of mlx-lm, judged by MLX's own `dequantize` on the model that mlx-lm loads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from judge import EXPERTS, FAMILIES, INTERMEDIATE, Layers, Matrices, assert_judged, tiny_model, tiny_tokenizer
from safetensors.torch import load_file, save_file

mx = pytest.importorskip("mlx.core")
mlx_lm = pytest.importorskip("mlx_lm")

# Keys of models on the hub, which mlx-lm needs and this transformers no longer writes.
HUB_KEYS = {
    "rope_theta": 10000.0, "rope_scaling": None, "partial_rotary_factor": 0.5, "num_experts": EXPERTS,
    "shared_intermediate_size": INTERMEDIATE,
}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    **{f"{bits}-bit": {"q_bits": bits} for bits in (2, 3, 4, 5, 6, 8)},
    "groups-of-32": {"q_group_size": 32},
    "groups-of-128": {"q_group_size": 128, "q_bits": 3},
    "fp16": {"dtype": "float16"},
    "fp32": {"dtype": "float32", "q_bits": 8},
    **{mode: {"q_mode": mode} for mode in ("mxfp4", "nvfp4", "mxfp8")},
    **{recipe: {"quant_predicate": recipe} for recipe in ("mixed_2_6", "mixed_3_4", "mixed_3_6", "mixed_4_6")},
}


def _only_down(path: str, module: Any, *_: Any) -> bool | dict[str, Any]:
    return {"group_size": 32, "bits": 8} if path.endswith("down_proj") else False


def _mixed_modes(path: str, module: Any, *_: Any) -> bool | dict[str, Any]:
    return {"group_size": 32, "bits": 4, "mode": "mxfp4"} if "experts" in path or "switch_mlp" in path else True


GPT_OSS: list[dict[str, Any]] = [{}, {"num_hidden_layers": 4}, {"num_local_experts": 4, "num_experts_per_tok": 4}]
PREDICATES: dict[str, Callable[..., bool | dict[str, Any]]] = {"only-down": _only_down, "mixed-modes": _mixed_modes}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings(name: str, tmp_path: Path) -> None:
    assert_judged(_converted(tmp_path, **SETTINGS[name]), _judged(tmp_path))


@pytest.mark.parametrize("name", PREDICATES)
def test_settings_of_modules(name: str, tmp_path: Path) -> None:
    assert_judged(_converted(tmp_path, quant_predicate=PREDICATES[name]), _judged(tmp_path))


@pytest.mark.parametrize("mode", ["affine", "mxfp4"])
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("qwen3_moe", "gpt_oss")])
def test_family(family: str, mode: str, tmp_path: Path) -> None:
    assert_judged(_converted(tmp_path, family, q_mode=mode), _judged(tmp_path))


@pytest.mark.parametrize("changes", GPT_OSS, ids=str)
def test_gpt_oss(changes: dict[str, Any], tmp_path: Path) -> None:
    """mlx-lm reads the hub's MXFP4 experts, keeps them, and quantises the rest. Both checkpoints have its numbers."""
    plain = tmp_path / "plain"
    tiny_model("gpt_oss", **changes).save_pretrained(plain)
    tensors = load_file(plain / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        words, scales = mx.quantize(mx.array(tensors.pop(name).mT.float().numpy()), mode="mxfp4")
        rows = torch.from_numpy(np.array(words).view(np.uint8))
        tensors[f"{name}_blocks"] = rows.unflatten(-1, (-1, 16)).contiguous()
        tensors[f"{name}_scales"] = torch.from_numpy(np.array(scales))
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    folder = _from_plain(tmp_path, {"quantization_config": {"quant_method": "mxfp4"}})
    for each in (folder, plain):
        assert_judged(each, _judged(tmp_path), biases=_judged(tmp_path, "bias"))


def test_layers_and_tied_embeddings(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe", num_hidden_layers=3, tie_word_embeddings=True, mlp_only_layers=[1])
    model.save_pretrained(tmp_path / "plain")
    assert_judged(_from_plain(tmp_path, {}), _judged(tmp_path))


def _converted(folder: Path, family: str = "qwen3_moe", **settings: Any) -> Path:
    tiny_model(family).save_pretrained(folder / "plain")
    return _from_plain(folder, {}, **settings)


def _from_plain(folder: Path, keys: dict[str, Any], **settings: Any) -> Path:
    """Convert the saved model, with more `keys` in its config."""
    tiny_tokenizer().save_pretrained(folder / "plain")
    config = folder / "plain" / "config.json"
    config.write_text(json.dumps({**HUB_KEYS, **json.loads(config.read_text()), **keys}))
    mlx_lm.convert(str(folder / "plain"), mlx_path=str(folder / "quantised"), quantize=True, **settings)
    return folder / "quantised"


def _judged(folder: Path, kind: str = "weight") -> Layers:
    """Every stack of experts of the loaded model, by the names of its modules."""
    model, _ = mlx_lm.load(str(folder / "quantised"))
    layers: Layers = {}
    for path, module in model.named_modules():
        words = path.split(".")
        if words[-1] in ("gate_proj", "up_proj", "down_proj") and words[-2] in ("switch_mlp", "experts"):
            values = _values(module) if kind == "weight" else module["bias"]
            stacked = torch.from_numpy(np.array(values.astype(mx.float32)))
            matrices: Matrices = layers.setdefault(int(words[words.index("layers") + 1]), {})
            matrices |= {(e, words[-1].removesuffix("_proj")): matrix for e, matrix in enumerate(stacked)}
    return layers


def _values(module: Any) -> Any:
    """In fp32, where MLX would take the dtype of the scales."""
    if "scales" not in module:
        return module["weight"]
    scales, biases = module["scales"], module.get("biases")
    if biases is not None:
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    settings = {"group_size": module.group_size, "bits": module.bits, "mode": module.mode}
    return mx.dequantize(module["weight"], scales, biases, **settings, dtype=mx.float32)
