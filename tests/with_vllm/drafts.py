"""Tiny models with a block of experts that drafts tokens (multi-token prediction)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import torch
from torch import Tensor

# vLLM's CPU build computes linear attention in this size.
LINEAR = {
    "num_key_value_heads": 2,
    "shared_expert_intermediate_size": 128,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "partial_rotary_factor": 1.0,
}
FAMILIES = ("glm4_moe", "deepseek_v3", "qwen3_next")


def drafting_model(family: str, folder: Path) -> Path:
    """With one further block, like the last layer, of other numbers."""
    models.FAMILIES.setdefault("qwen3_next", models.QWEN | LINEAR)
    made = models.plain_model(family, folder / "drafting")
    facts = json.loads((made / "config.json").read_text())
    if "drafts" not in facts:
        from safetensors.torch import load_file, save_file

        tensors = load_file(made / "model.safetensors")
        further = _numbered_on(tensors) if family != "qwen3_next" else _apart(tensors)
        save_file(tensors | further, made / "model.safetensors", metadata={"format": "pt"})
        (made / "config.json").write_text(json.dumps(facts | {"num_nextn_predict_layers": 1, "drafts": 1}))
    return made


def _block(tensors: dict[str, Tensor], home: str, draw: Callable[..., Tensor]) -> dict[str, Tensor]:
    last = {name: tensor for name, tensor in tensors.items() if name.startswith("model.layers.1.")}
    return {
        name.replace("model.layers.1.", home): draw(*tensor.shape) if tensor.ndim > 1 else tensor.clone()
        for name, tensor in last.items()
    }


def _numbered_on(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """`model.layers.2`, as GLM-4.5 and DeepSeek-V3 number it."""
    home, draw, hidden = "model.layers.2.", _draw(), 128
    made: dict[str, Tensor] = {f"{home}eh_proj.weight": draw(hidden, 2 * hidden)}
    made |= {f"{home}{name}.weight": torch.ones(hidden).bfloat16() for name in ("enorm", "hnorm", "shared_head.norm")}
    made[f"{home}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    made[f"{home}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    return made | _block(tensors, home, draw)


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """`mtp.layers.0`, as Qwen3-Next numbers it."""
    draw, hidden = _draw(), 128
    made: dict[str, Tensor] = {"mtp.fc.weight": draw(hidden, 2 * hidden)}
    norms = ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")
    made |= {f"mtp.{name}.weight": torch.zeros(hidden).bfloat16() for name in norms}
    return made | _block(tensors, "mtp.layers.0.", draw)


def _draw() -> Any:
    generator = torch.Generator().manual_seed(3)
    return lambda *shape: (torch.randn(*shape, generator=generator) * 0.1).bfloat16()
