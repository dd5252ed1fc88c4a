"""Tiny random models of the families with routed experts in the installed transformers.

A tiny config is the family's default config with its sizes replaced, so a family that is new in transformers needs no
line here unless its sizes depend on each other in a way of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from initialised import initialised
from transformers import PretrainedConfig
from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from lancebill.checkpoint.resolve import naming as names
from lancebill.integrations.transformers.pretrained import class_of
from lancebill.testing.families import judged_types

# The value of a key, wherever a section of a config has it. Limits are small, so that they matter.
SIZES: dict[str, Any] = {
    "hidden_size": 32, "d_model": 32, "intermediate_size": 24, "ffn_hidden_size": 24, "moe_intermediate_size": 16,
    "expert_ffn_hidden_size": 16, "shared_expert_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16, "share_expert_dim": 16, "num_hidden_layers": 2, "n_layers": 2, "num_layers": 2,
    "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "moe_num_experts": 8, "num_experts_per_tok": 3,
    "num_experts_per_token": 3, "moe_topk": 3, "moe_top_k": 3, "moe_k": 3, "top_k_experts": 3, "zero_expert_num": 3,
    "n_group": 1, "num_expert_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_dense_layers": 1,
    "swiglu_limit": 0.5, "mlp_gate_softcap": 0.8, "mlp_up_softcap": 0.6, "router_hidden_size": 8, "vocab_size": 64,
    "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8, "max_position_embeddings": 64,
    "n_positions": 64, "max_seq_len": 64,
    # attention
    "num_attention_heads": 4, "n_heads": 4, "num_heads": 4, "num_key_value_heads": 4, "kv_channels": 8, "head_dim": 8,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "qk_head_dim": 16, "index_head_dim": 8, "index_n_heads": 2,
    # state spaces and linear attention
    "mamba_n_heads": 8, "mamba_num_heads": 8, "mamba_head_dim": 8, "mamba_d_head": 8, "mamba_d_state": 8,
    "mamba_expand": 2, "n_groups": 1, "ssm_state_size": 8, "chunk_size": 8, "linear_num_key_heads": 2,
    "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_head_dim": 8,
    "linear_num_heads": 4,
    # towers for images and sound
    "depth": 2, "out_hidden_size": 32, "encoder_layers": 1, "encoder_attention_heads": 4, "encoder_ffn_dim": 16,
    "output_dim": 32, "text_hidden_size": 32, "adapter_in_dim": 32, "adapter_input_size": 32, "adapter_out_dim": 32,
    "downsample_hidden_size": 8, "audio_hidden_size": 32,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_SPARSE = {"mlp_layer_types": ["dense", "sparse"]}
_GEMMA = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 16}
CHANGES: dict[str, dict[str, Any]] = {
    "beam": _SPARSE,
    "dbrx": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0}},
    "deepseek_ocr2": {"text_config": {"num_experts_per_tok": 3, **_SPARSE}},
    "deepseek_v2": {"num_experts_per_tok": 3},
    "deepseek_v3": {"n_group": 4, "topk_group": 2},
    "deepseek_v4": {"num_hash_layers": 1},
    "diffusion_gemma": {"text_config": _GEMMA},
    "doge": {"is_moe": True, "num_experts": 16},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 1},
    "dots3_note": {"vision_config": {"pyramid_num_routed": [-1, 8]}},
    "dots3_note_text": {"n_group": 4, "topk_group": 2},
    "ernie4_5_vl_moe": {
        "text_config": {
            "moe_intermediate_size": [16, 24],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
        }
    },
    "flint": {"mlp_only_layers": [0]},
    "gemma4": {"text_config": _GEMMA},
    "gemma4_text": _GEMMA,
    "glm4v_moe": {"text_config": {"head_dim": 128}},
    "glm5_next": {"text_config": {"qk_rope_head_dim": 0, **_SPARSE}},
    "hunyuan_v1_moe": {"head_dim": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "llama4": {"text_config": {"num_experts_per_tok": 1}},
    "llama4_text": {"num_experts_per_tok": 1},
    "mimo_v2_flash": {"num_key_value_heads": 2},
    "mistral4": {"head_dim": 16},
    "muse_spark": {
        "audio_config": {"num_hidden_layers": 4},
        "text_config": {"moe_hidden_size": 32, "num_experts_per_tok": 3},
    },
    "nemotron_h": {"moe_latent_size": 16},
    "phimoe": {"num_experts_per_tok": 2},
    "qwen3_omni_moe": {
        "talker_config": {
            "thinker_hidden_size": 32,
            "spatial_merge_size": 2,
            "text_config": {"shared_expert_intermediate_size": 16},
        },
        "code2wav_config": {"decoder_dim": 32},
    },
    "qwen3_vl_moe": {"text_config": {"moe_intermediate_size": 24}},  # transformers tells orientations by their shapes
    "step3p7": {"text_config": {"sliding_window": 8, "swiglu_limits": [None, 0.05], **_SPARSE}},
    "zaya": {"num_experts_per_tok": 1},
}
# Wrappers that cannot run on text alone.
JUDGED_WITHIN = {
    "nemo_speechlm": "nemotron_h",  # behind an encoder of speech
    "qwen3_omni_moe": "qwen3_omni_moe_thinker",  # which its talker follows
}
NEEDS = {"inkling_mm_model": "scipy"}  # packages that transformers imports to make the model
UNWRITABLE_NAMES = ("kimi_k25",)  # in the hub's names transformers writes `blocks` for `layers`
PER_LAYER = "per_layer_config"  # settings of single layers of the full size


def language_models() -> tuple[str, ...]:
    """The model types of transformers' causal and multimodal language models."""
    mappings = (
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    )
    return tuple(dict.fromkeys(name for mapping in mappings for name in mapping))


MODELS = set(language_models()) - JUDGED_WITHIN.keys()
JUDGED = [name for row in names.TABLE for name in judged_types(row) if name in MODELS]


def mixtures() -> Iterator[str]:
    """The language models whose config counts experts."""
    for model_type in language_models():
        if any("expert" in key for key in _keys(CONFIG_MAPPING[model_type])):
            yield model_type


def _keys(config: type[PretrainedConfig]) -> Iterator[str]:
    """Every key of a default config and its sections."""
    yield from config.attribute_map
    try:
        sections = [config().to_dict()]
    except Exception:  # a default config that its own validators refuse: whatever they raise
        sections = [dict.fromkeys(config.__dataclass_fields__)]
    while sections:
        section = sections.pop()
        yield from map(str, section)
        sections += [value for value in section.values() if isinstance(value, dict)]


def tiny_config(model_type: str) -> PretrainedConfig:
    config = CONFIG_MAPPING[model_type]
    made: PretrainedConfig = config.from_dict(_shrunk(config().to_dict(), CHANGES.get(model_type, {})))
    return made


def _shrunk(section: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    layers = section.get("num_hidden_layers", section.get("n_layers"))
    small: dict[str, Any] = {}
    for key, value in section.items():
        if isinstance(value, dict) and key.endswith("_config") and key != PER_LAYER:
            small[key] = _shrunk(value, changes.get(key, {}))
        elif key in changes:
            small[key] = changes[key]
        elif key in SIZES and value is not None and not isinstance(value, list):
            small[key] = SIZES[key]
        elif key != PER_LAYER and not (isinstance(value, list | tuple) and len(value) == layers):
            small[key] = value  # what has one entry for each layer is left out: the config derives it again
    return {**{key: value for key, value in changes.items() if key not in section}, **small}


def tiny_model(model_type: str) -> Any:
    """A tiny model in fp32. Its experts and routers are random, with every bias, correction and table."""
    config = tiny_config(model_type)
    model = plain_model(config)
    rows = names.find_family(config.to_dict()).mixtures
    gates = {name for row in rows for layer in range(2) for name in row.router.gates(layer)}
    generator = torch.Generator().manual_seed(7)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in gates or any(row.claim(name) is not None for row in rows):
            _fill(tensor.data, generator)
    return model


def plain_model(config: PretrainedConfig) -> Any:
    """transformers' model of a config, in fp32."""
    return initialised(lambda: class_of(config)._from_config(config, dtype=torch.float32).eval())


def _fill(tensor: torch.Tensor, generator: torch.Generator) -> None:
    """Random numbers, or a table of different experts for each token."""
    if tensor.is_floating_point():
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3)
    else:
        order = torch.rand(len(tensor), SIZES["num_experts"], generator=generator).argsort(dim=1)
        tensor.copy_(order[:, : tensor.shape[1]])
