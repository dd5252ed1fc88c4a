"""Tiny random models of every GGUF architecture."""

from __future__ import annotations

from typing import Any
from unittest import SkipTest

import tiny
import torch
import transformers
from initialised import initialised
from tiny_gguf_deepseek import first_deepseek

GROUPED = {"n_routed_experts": 16, "moe_intermediate_size": 32, "intermediate_size": 64, "n_shared_experts": 1}
GROUPED |= {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
LATENT = GROUPED | {"kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
LATENT |= {"n_group": 4, "topk_group": 2, "num_key_value_heads": 4}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 16}
YARN |= {"mscale": 1.0, "mscale_all_dim": 1.0}
INDEXER = {"index_n_heads": 2, "index_head_dim": 32, "index_topk": 4}
SCALES = {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.25, "logits_scaling": 2.0}
LOCAL = {"num_local_experts": 8, "intermediate_size": 32}
MOE = {"num_experts": 8, "moe_intermediate_size": 32}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
DELTA = {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4}
DELTA |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
MAMBA = {"layer_types": ["mamba", "attention"], "mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 16}
FACTORS = {"rope_type": "longrope", "rope_theta": 5e5, "original_max_position_embeddings": 64, "attention_factor": 1.0}
FACTORS |= {key: [1.0, 1.0, 1.0, 2.5, 4.0, 8.0, 8.0, 8.0] for key in ("short_factor", "long_factor")}
COMMON = {**tiny.COMMON, "num_key_value_heads": 2, "intermediate_size": 64, "tie_word_embeddings": False}
# Architecture, transformers' model type, and config.
MODELS: list[tuple[str, str, dict[str, Any]]] = [
    ("qwen3moe", "qwen3_moe", {**MOE, "norm_topk_prob": True}),
    ("qwen3next", "qwen3_next", {**MOE, **DELTA, "shared_expert_intermediate_size": 96}),
    ("qwen35moe", "qwen3_5_moe_text", {**MOE, **DELTA, "shared_expert_intermediate_size": 96}),
    ("qwen2moe", "qwen2_moe", {**MOE, "shared_expert_intermediate_size": 96}),
    # Half of a head's columns are rotated, a bias corrects the routing.
    ("minimax-m2", "minimax_m2", {**LOCAL, "rotary_dim": 8}),
    ("llama", "mixtral", LOCAL),
    ("mistral3", "mixtral", LOCAL),
    ("llama4", "llama4_text", {**LOCAL, "intermediate_size_mlp": 64, "interleave_moe_layer_step": 2,
                               "num_hidden_layers": 4, "num_experts_per_tok": 1, "rope_parameters": FACTORS}),
    ("olmoe", "olmoe", {"num_experts": 8, "intermediate_size": 32, "num_key_value_heads": 4}),
    ("glm4moe", "glm4_moe", {**GROUPED, "use_qk_norm": True, "attention_bias": True}),
    ("bailingmoe2", "glm4_moe", {**GROUPED, "use_qk_norm": True, "n_group": 4, "topk_group": 2,
                                 "score_function": "sigmoid",
                                 "rope_parameters": {"rope_type": "default", "rope_theta": 6e5,
                                                     "partial_rotary_factor": 0.5}}),
    ("dots1", "dots1", GROUPED),
    ("deepseek2", "deepseek_v3", {**LATENT, "q_lora_rank": 32, "rope_parameters": YARN}),
    ("deepseek2", "deepseek_v2", {**LATENT, "q_lora_rank": None, "topk_method": "group_limited_greedy"}),
    ("deepseek", "ernie4_5_moe", {**GROUPED, "n_shared_experts": 2}),
    ("deepseek32", "deepseek_v32", {**LATENT, **INDEXER, "q_lora_rank": 32, "rope_parameters": YARN}),
    ("deepseek4", "deepseek_v4", {
        **INDEXER, "n_routed_experts": 8, "moe_intermediate_size": 32, "num_key_value_heads": 1, "q_lora_rank": 32,
        "num_hidden_layers": 3, "num_hash_layers": 1, "compress_ratios": [0, 4, 128], "sliding_window": 4,
        "head_dim": 32, "qk_rope_head_dim": 16, "o_groups": 2, "o_lora_rank": 32, "hc_sinkhorn_iters": 3,
        "compress_rope_theta": 4e4, "swiglu_limit": 0.05,
        "rope_parameters": {**YARN, "factor": 4.0},
    }),
    ("gpt-oss", "gpt_oss", {**LOCAL, **SLIDING}),
    ("granitemoe", "granitemoe", {**LOCAL, **SCALES}),
    ("granitemoe", "granitemoeshared", {**LOCAL, **SCALES, "shared_intermediate_size": 96}),
    ("granitehybrid", "granitemoehybrid", {**LOCAL, **SCALES, **MAMBA, "shared_intermediate_size": 96}),
    ("nemotron_h_moe", "nemotron_h", {
        **GROUPED, "layers_block_type": ["mamba", "moe", "attention"], "mamba_num_heads": 4, "mamba_head_dim": 16,
        "n_groups": 2, "ssm_state_size": 16, "moe_shared_expert_intermediate_size": 96, "moe_latent_size": 32,
        "num_hidden_layers": 3,
    }),
    ("jamba", "jamba", {
        "num_experts": 8, "intermediate_size": 32, "num_hidden_layers": 4, "attn_layer_period": 3,
        "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1, "mamba_d_state": 16,
        "mamba_dt_rank": 32,
    }),
    ("phimoe", "phimoe", {**LOCAL, "num_experts_per_tok": 2, "attention_bias": True, "lm_head_bias": True,
                          "rope_parameters": {**FACTORS, "short_mscale": 1.1, "long_mscale": 1.1,
                                              "original_max_position_embeddings": 32, "attention_factor": 1.1}}),
    ("dbrx", "dbrx", {
        "d_model": 64, "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.5, "rope_theta": 5e5},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 8, "moe_top_k": 3},
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    }),
    ("qwen3vlmoe", "qwen3_moe", {**MOE, "norm_topk_prob": True}),
    ("ernie4_5-moe", "ernie4_5_moe", {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 32,
                                      "moe_num_shared_experts": 2, "moe_layer_start_index": 1}),
    ("exaone-moe", "exaone_moe", {**MOE, **SLIDING, "first_k_dense_replace": 1, "num_shared_experts": 1}),
    ("afmoe", "afmoe", {**MOE, "num_dense_layers": 1, "num_shared_experts": 1, "mup_enabled": True,
                        "num_hidden_layers": 4, "sliding_window": 4}),
    ("hunyuan-moe", "hunyuan_v1_moe", {"num_experts": 8, "intermediate_size": 32, "moe_topk": 3}),
    ("lfm2moe", "lfm2_moe", {**MOE, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"],
                             "tie_word_embeddings": True}),
]  # fmt: skip


def reference_of(architecture: str, family: str, more: dict[str, Any]) -> Any:
    """transformers' model of one of `MODELS`; `write` gives it the values that a file then has."""
    return first_deepseek({**COMMON, **more}) if architecture == "deepseek" else dense(family, more)


def dense(family: str, more: dict[str, Any]) -> Any:
    """A random model in fp32."""
    try:
        config = transformers.AutoConfig.for_model(family, **{**COMMON, **more})
    except (ValueError, KeyError):
        raise SkipTest(f"transformers {transformers.__version__} has no {family}") from None
    torch.manual_seed(3)
    model = initialised(lambda: transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval())
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("tid2eid"):
                tensor.copy_(torch.rand(len(tensor), config.n_routed_experts).topk(tensor.shape[1]).indices)
            elif "norm" in name:
                tensor += 0.1 * torch.randn(tensor.shape)
            elif tensor.ndim < 2 or "correction" in name or "position_bias" in name:
                tensor.normal_()  # else zero
    return model
