"""Writes whole transformers models as GGUF files with the gguf library, and changes what llama.cpp changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import torch
from tiny_gguf_changes import add_factors, changed, delta_heads, flat_config, layer_types, merged, tiled_heads
from tiny_gguf_deepseek import KNOWN, add_own_metadata, own_name
from torch import Tensor

EXPERTS = {"gate": "ffn_gate_exps", "up": "ffn_up_exps", "down": "ffn_down_exps"}
# The library's methods for metadata, and the config keys of which a model has one or none.
METADATA = {
    "block_count": ["num_hidden_layers"],
    "context_length": ["max_position_embeddings"],
    "embedding_length": ["hidden_size"],
    "feed_forward_length": ["intermediate_size_mlp", "intermediate_size"],
    "head_count": ["num_attention_heads"],
    "vocab_size": ["vocab_size"],
    "layer_norm_rms_eps": ["rms_norm_eps", "norm_eps", "layer_norm_epsilon"],
    "layer_norm_eps": ["layer_norm_eps"],
    "expert_count": ["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"],
    "expert_used_count": ["moe_top_k", "num_experts_per_tok", "moe_k", "moe_topk"],
    "expert_shared_count": ["n_shared_experts", "num_shared_experts", "moe_num_shared_experts"],
    "expert_shared_feed_forward_length": [
        "shared_expert_intermediate_size",
        "shared_intermediate_size",
        "moe_shared_expert_intermediate_size",
    ],
    "expert_group_count": ["n_group"],
    "expert_group_used_count": ["topk_group"],
    "expert_weights_scale": ["routed_scaling_factor", "route_scale"],
    "expert_weights_norm": ["norm_topk_prob"],
    "leading_dense_block_count": ["first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"],
    "interleave_moe_layer_step": ["moe_layer_interval", "interleave_moe_layer_step"],
    "sliding_window": ["sliding_window"],
    "attention_scale": ["attention_multiplier"],
    "embedding_scale": ["embedding_multiplier"],
    "residual_scale": ["residual_multiplier"],
    "logit_scale": ["logits_scaling"],
    "clamp_kqv": ["clip_qkv"],
    "q_lora_rank": ["q_lora_rank"],
    "kv_lora_rank": ["kv_lora_rank"],
    "value_length_mla": ["v_head_dim"],
    "shortconv_l_cache": ["conv_L_cache"],
    "ssm_conv_kernel": ["linear_conv_kernel_dim", "mamba_d_conv", "conv_kernel"],
    "ssm_state_size": ["linear_key_head_dim", "mamba_d_state", "ssm_state_size"],
    "ssm_group_count": ["linear_num_key_heads", "mamba_n_groups", "n_groups"],
    "ssm_time_step_rank": ["linear_num_value_heads", "mamba_n_heads", "mamba_num_heads", "mamba_dt_rank"],
    "moe_latent_size": ["moe_latent_size"],
    "attn_temperature_scale": ["llama_4_scaling_beta"],
}
# Where the library knows only the names of published files.
RENAMED = {"moe.router": "moe.router.layer", "gate.moe_statics": "moe_statics"}
RECURRENT = ("conv", "mamba")
UNQUANTISED = ("ffn_gate_inp", "ffn_gate_tid2eid", "shortconv.conv", "ssm_conv1d", "ssm_norm")


def write(
    model: Any,
    architecture: str,
    path: Path,
    extra: str | None = None,
    stated: Mapping[str, Any] | None = None,
    kinds: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Matrices become Q8_0, or what `kinds` says, and the model's own tensors get the values that were written.

    `extra` is the name of a further tensor, `stated` are values of the config that the metadata state wrongly.
    """
    config = model.config
    out = gguf.GGUFWriter(path, architecture)
    stated = {"num_hidden_layers": config.num_hidden_layers, **(stated or {})}
    _add_metadata(out, {**flat_config(config.to_dict()), **stated})
    _add_vocabulary(out, config.vocab_size)
    add_own_metadata(out, architecture, config.to_dict())
    known_as = KNOWN.get(architecture, architecture)
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == known_as)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    paired = architecture in ("llama", "mistral3", "deepseek", "granitemoe", "granitehybrid")
    own = {"model.": "backbone."} if architecture == "nemotron_h_moe" else {}
    for name, tensor in merged(model.state_dict(), architecture):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for part, suffix, view, shape in _parts(name, tensor, config, paired):
            for new, published in {**RENAMED, **own}.items():
                part = part.replace(new, published)
            known = own_name(architecture, part) or (part if part.startswith("blk.") else names.get_name(part))
            assert known is not None, part
            kind = kinds.get(known.rpartition(".")[2], "Q8_0")
            written = add(out, known + suffix, changed(architecture, known, view).reshape(shape), kind)
            if written is not None:
                view.copy_(written.reshape(view.shape))
    if extra is not None:
        add(out, extra, torch.ones(4))
    add_factors(out, config)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def _add_metadata(out: Any, values: dict[str, Any]) -> None:
    for method, keys in METADATA.items():
        found = [values[key] for key in keys if values.get(key) is not None]
        if found:
            getattr(out, f"add_{method}")(found[0])
    if "score_function" in values:
        out.add_expert_gating_func(gguf.ExpertGatingFuncType[values["score_function"].upper()])
    inner = values.get("moe_intermediate_size")
    out.add_expert_feed_forward_length(inner if isinstance(inner, int) else values["intermediate_size"])
    kinds, heads = layer_types(values), values["num_key_value_heads"]
    if "mamba_num_heads" in values:
        out.add_ssm_inner_size(values["mamba_num_heads"] * values["mamba_head_dim"])
    if "mamba_expand" in values:
        out.add_ssm_inner_size(values["mamba_expand"] * values["hidden_size"])
        out.add_rope_scaling_finetuned(values.get("position_embedding_type") == "rope")
    if any(kind in RECURRENT for kind in kinds):
        out.add_head_count_kv([0 if kind in RECURRENT else heads for kind in kinds])
    else:
        out.add_head_count_kv(1 if "kv_lora_rank" in values else heads)
    if "sliding_attention" in kinds:
        out.add_sliding_window_pattern([kind == "sliding_attention" for kind in kinds])
    _add_rotary(out, values)


def _add_rotary(out: Any, values: dict[str, Any]) -> None:
    rotary = values.get("rope_parameters") or {"rope_type": "default", "rope_theta": 1e4}
    out.add_rope_freq_base(rotary["rope_theta"])
    head = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
    if "kv_lora_rank" in values:
        rotated = values["qk_rope_head_dim"]
        out.add_key_length(values["kv_lora_rank"] + rotated)
        out.add_value_length(values["kv_lora_rank"])
        out.add_key_length_mla(values["qk_nope_head_dim"] + rotated)
    else:
        rotated = int(head * rotary.get("partial_rotary_factor", 1))
        out.add_key_length(head)
        out.add_value_length(head)
    out.add_rope_dimension_count(rotated)
    if rotary["rope_type"] == "yarn":
        out.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        out.add_rope_scaling_factor(rotary["factor"])
        out.add_rope_scaling_orig_ctx_len(rotary["original_max_position_embeddings"])
        if "mscale_all_dim" in rotary:
            out.add_rope_scaling_yarn_log_mul(0.1 * rotary["mscale_all_dim"])


def _add_vocabulary(out: Any, size: int) -> None:
    out.add_tokenizer_model("gpt2")
    letters = [chr(code) for code in range(ord("!"), ord("!") + 90)]
    out.add_token_list([*letters, "ab", "cd", *(f"<{i}>" for i in range(size - 92))])
    out.add_token_types([1] * size)
    out.add_token_merges(["a b", "c d"])
    out.add_eos_token_id(size - 1)
    out.add_bos_token_id(size - 2)


def _parts(name: str, tensor: Tensor, config: Any, paired: bool) -> Iterator[tuple[str, str, Tensor, tuple[int, ...]]]:
    """(name without suffix, suffix, a view of the values, the stored shape) of each tensor that is stored."""
    if ".experts.mlp." in name:  # DBRX
        each = tensor.view(config.ffn_config.moe_num_experts, -1, tensor.shape[-1])
        part = {"w1": "gate", "v1": "up", "w2": "down"}[name.rpartition(".")[2]]
        view = each.transpose(1, 2) if part == "down" else each
        yield f"blk.{name.split('.')[2]}.{EXPERTS[part]}", ".weight", view, tuple(view.shape)
        return
    if ".experts." in name:
        for part, suffix, view in _experts(name.rpartition(".")[2], tensor, config.model_type):
            yield f"blk.{name.split('.')[2]}.{EXPERTS[part]}", suffix, view, tuple(view.shape)
        return
    stem, suffix = name, ".weight"
    for ending in (".weight", ".bias", "_bias"):
        if name.endswith(ending) and not name.endswith(".position_bias"):
            stem, suffix = name.removesuffix(ending), "." + ending[1:]
    stem += "_bias" if stem.endswith(".expert") else ""
    shape = tuple(size for size in tensor.shape if size > 1) if tensor.ndim > 1 else tuple(tensor.shape)
    if config.model_type == "qwen3_5_moe_text" and ".linear_attn." in name and not stem.endswith(".norm"):
        tensor = tiled_heads(stem, tensor, config)
    if name.endswith(".dt_bias"):
        yield stem.replace("dt", "dt_proj"), suffix, tensor, shape
    elif name.endswith((".A_log", ".D")):
        per_head = tensor.ndim == 1 and config.model_type in ("granitemoehybrid", "nemotron_h")
        yield stem, "", tensor, (*shape, 1) if per_head else shape
    elif name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        yield stem, suffix, tensor, (2, tensor.numel() // 2)  # in two groups
    elif stem.endswith("in_proj_qkvz"):
        for part, view in delta_heads(tensor, config):
            yield f"blk.{name.split('.')[2]}.{part}", suffix, view, (-1, tensor.shape[-1])
    elif paired and stem.endswith(("q_proj", "k_proj")):
        heads = config.num_attention_heads if stem.endswith("q_proj") else config.num_key_value_heads
        yield stem, suffix, tensor.view(heads, 2, -1, tensor.shape[-1]).swapaxes(1, 2), shape
    elif stem.endswith("kv_b_proj"):
        heads = tensor.view(config.num_attention_heads, -1, tensor.shape[-1])
        keys, values = heads.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
        keys = keys.transpose(1, 2)
        yield stem.replace("kv_b", "k_b"), suffix, keys, tuple(keys.shape)
        yield stem.replace("kv_b", "v_b"), suffix, values, tuple(values.shape)
    elif stem.endswith("shared_mlp.input_linear"):
        for part, half in zip(("gate", "up"), tensor.chunk(2)):
            yield f"blk.{name.split('.')[2]}.ffn_{part}_shexp", suffix, half, tuple(half.shape)
    else:
        yield stem, suffix, tensor, shape


def _experts(name: str, tensor: Tensor, family: str) -> Iterator[tuple[str, str, Tensor]]:
    """gpt-oss and Llama-4 have all matrices transposed, gpt-oss has gate and up in turns."""
    suffix = ".bias" if name.endswith("_bias") else ".weight"
    if family in ("gpt_oss", "llama4_text") and suffix == ".weight":
        tensor = tensor.transpose(1, 2)
    halves = (tensor[:, ::2], tensor[:, 1::2]) if family == "gpt_oss" else tensor.chunk(2, 1)
    if not name.startswith("gate_up"):
        yield name.partition("_")[0], suffix, tensor  # down, or up where there is no gate
        return
    for part, half in zip(("gate", "up"), halves):
        yield part, suffix, half


def add(out: Any, name: str, tensor: Tensor, kind: str = "Q8_0") -> Tensor | None:
    """Write a matrix in blocks and give the values that were written; anything else is written unquantised."""
    values = tensor.contiguous().numpy()
    is_small = tensor.ndim < 2 or tensor.shape[-1] == 1 or name.endswith(("ssm_a", ".bias"))
    if is_small or any(part in name for part in UNQUANTISED):
        out.add_tensor(name, values)
        return None
    blocks = gguf.GGMLQuantizationType[kind]
    codes = gguf.quants.quantize(values, blocks)
    out.add_tensor(name, codes, raw_dtype=blocks)
    return torch.from_numpy(gguf.quants.dequantize(codes, blocks))
