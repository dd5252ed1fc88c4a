"""What llama.cpp changes about tensors when it converts a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import gguf
import torch
from torch import Tensor

WITH_ONE = ("qwen3next", "qwen35moe")  # architectures whose norms are stored with the 1 that the model adds


def changed(architecture: str, name: str, tensor: Tensor) -> Tensor:
    """The values that are stored."""
    if name.endswith("ssm_a"):
        return -torch.exp(tensor)
    if not tensor.is_floating_point():
        return tensor.int()
    is_norm = name.endswith("norm") and not name.endswith("ssm_norm")
    return tensor + 1 if architecture in WITH_ONE and is_norm else tensor


def flat_config(values: dict[str, Any]) -> dict[str, Any]:
    """DBRX has sections and names of its own, DeepSeek-V4 two kinds of rotary positions, of which one may be scaled."""
    if values["model_type"] == "deepseek_v4":
        rotary = values["rope_parameters"]
        return {**values, "rope_parameters": {**rotary["compress"], "rope_theta": rotary["main"]["rope_theta"]}}
    if values["model_type"] != "dbrx":
        return values
    names = {"d_model": "hidden_size", "n_heads": "num_attention_heads", "max_seq_len": "max_position_embeddings"}
    renamed = {new: values[old] for old, new in names.items()}
    inner = {"intermediate_size": values["ffn_config"]["ffn_hidden_size"], "layer_norm_eps": 1e-5}
    return {**values["attn_config"], **values["ffn_config"], **values, **renamed, **inner}


def add_factors(out: Any, config: Any) -> None:
    """Factors of the frequencies of rotary positions are tensors."""
    rotary = config.to_dict().get("rope_parameters") or {}
    if config.model_type == "phimoe":
        out.add_rope_scaling_orig_ctx_len(rotary["original_max_position_embeddings"])
        out.add_rope_scaling_attn_factors(rotary["attention_factor"])
    for key in [key for key in ("short_factor", "long_factor") if key in rotary]:
        name = f"rope_factors_{key.removesuffix('_factor')}" if config.model_type == "phimoe" else "rope_freqs"
        if name != "rope_freqs" or key == "long_factor":
            out.add_tensor(f"{name}.weight", torch.tensor(rotary[key]).numpy())


def layer_types(values: Mapping[str, Any]) -> list[str]:
    if "attn_layer_period" not in values:
        return values.get("layer_types") or []
    period, first = values["attn_layer_period"], values["attn_layer_offset"]
    return ["attention" if i % period == first else "mamba" for i in range(values["num_hidden_layers"])]


def merged(state: Mapping[str, Tensor], architecture: str) -> Iterator[tuple[str, Tensor]]:
    """The model's tensors; queries, keys and values as one where the published model has one."""
    for name, tensor in state.items():
        if architecture == "bailingmoe2" and name.endswith("q_proj.weight"):
            parts = [rounded(state[name.replace("q_proj", part)]) for part in ("q_proj", "k_proj", "v_proj")]
            yield name.replace("q_proj", "query_key_value"), torch.cat(parts)
        elif architecture != "bailingmoe2" or not name.endswith(("k_proj.weight", "v_proj.weight")):
            yield name, tensor


def rounded(tensor: Tensor) -> Tensor:
    """Round the rows of a matrix to Q8_0 in place: copies of them can then be stored in any order."""
    kind = gguf.GGMLQuantizationType.Q8_0
    return tensor.copy_(torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(tensor.numpy(), kind), kind)))


def delta_heads(tensor: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    """Queries, keys and values of all heads, and the gates, from a matrix that has all of them head by head."""
    heads, keys = config.linear_num_key_heads, config.linear_key_head_dim
    values = config.linear_num_value_heads // heads * config.linear_value_head_dim
    parts = rounded(tensor).view(heads, -1, tensor.shape[-1]).split([keys, keys, values, values], dim=1)
    yield "attn_qkv", torch.cat([part.flatten(0, 1) for part in parts[:3]])
    yield "attn_gate", parts[3]


def tiled_heads(stem: str, tensor: Tensor, config: Any) -> Tensor:
    """Value heads of qwen35moe in turns: the first of each key head, then the second. A view where it can be one."""
    heads, keys = config.linear_num_key_heads, 2 * config.linear_num_key_heads * config.linear_key_head_dim
    each = config.linear_num_value_heads // heads
    if stem.endswith("out_proj"):
        return tensor.view(tensor.shape[0], heads, each, -1).transpose(1, 2)
    if stem.endswith("in_proj_qkv"):
        tensor = rounded(tensor)
    if stem.endswith(("in_proj_qkv", "conv1d")):
        values = tensor[keys:].unflatten(0, (heads, each, -1)).transpose(0, 1)
        return torch.cat([tensor[:keys], values.reshape(tensor[keys:].shape)])
    return tensor.unflatten(0, (heads, each, -1)).transpose(0, 1)
