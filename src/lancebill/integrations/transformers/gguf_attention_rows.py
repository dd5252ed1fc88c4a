"""GGUF architectures with experts and attention in every layer, a row for each; `gguf_deepseek_rows.py` and
`gguf_recurrent_rows.py` have others."""

from __future__ import annotations

from lancebill.integrations.transformers.gguf_changes import PAIRS, QUERIES_KEYS_VALUES
from lancebill.integrations.transformers.gguf_row import GgufRow, StoredFactors


def shared_names(module: str) -> dict[str, str]:
    return {f"ffn_{part}_shexp": f"mlp.{module}.{part}_proj" for part in ("gate", "up", "down")}


EXPERTS, LOCAL, _ROUTED = ({name: "expert_count"} for name in ("num_experts", "num_local_experts", "n_routed_experts"))
INNER = {"moe_intermediate_size": "expert_feed_forward_length"}
CORRECTION = {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
# Experts in groups, the first layers dense.
_GROUPS = {
    **INNER,
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
}
GROUPED = {**_ROUTED, **_GROUPS, "n_shared_experts": "expert_shared_count"}
ONE_GROUP = {"n_group": 1, "topk_group": 1}
SHARED = shared_names("shared_experts")
GRANITE = {
    **LOCAL,
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "shared_intermediate_size": "expert_shared_feed_forward_length",
}
GRANITE_NAMES = {"ffn_gate_inp": "block_sparse_moe.router", "ffn_down_shexp": "shared_mlp.output_linear"}
GRANITE_JOINED = {"shared_mlp.input_linear": ("ffn_gate_shexp", "ffn_up_shexp")}
QWEN2_SHARED = {**shared_names("shared_expert"), "ffn_gate_inp_shexp": "mlp.shared_expert_gate"}
QWEN2_SHARED_KEYS = {"shared_expert_intermediate_size": "expert_shared_feed_forward_length"}

ATTENTION_ROWS: dict[str, GgufRow] = {
    "llama": GgufRow("mixtral", keys=LOCAL, orders=PAIRS),
    # Mixtral, but for queries that grow with their position, which no class with this attention and experts computes.
    "mistral3": GgufRow("mixtral", keys=LOCAL, orders=PAIRS, required={"attention.temperature_scale": 0}),
    "llama4": GgufRow(
        "llama4_text",
        {
            "ffn_gate_inp": "feed_forward.router",
            **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
            **{f"ffn_{part}_shexp": f"feed_forward.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
        },
        {
            **LOCAL,
            "intermediate_size": "expert_feed_forward_length",
            "intermediate_size_mlp": "feed_forward_length",
            "interleave_moe_layer_step": "interleave_moe_layer_step",
        },
        choices={"use_qk_norm": ("expert_count", {128: False}, True)},  # not in the metadata: Maverick has none
        factors=StoredFactors("rope_freqs.weight", "rope_freqs.weight"),
    ),
    "qwen2moe": GgufRow(
        "qwen2_moe",
        QWEN2_SHARED,
        {**EXPERTS, **INNER, **QWEN2_SHARED_KEYS},
        {"norm_topk_prob": False},
    ),
    "qwen3moe": GgufRow("qwen3_moe", keys={**EXPERTS, **INNER}, fixed={"norm_topk_prob": True}),
    # The language model: images have a file of their own. Without them it computes what Qwen3 does.
    "qwen3vlmoe": GgufRow("qwen3_moe", keys={**EXPERTS, **INNER}, fixed={"norm_topk_prob": True}),
    "phimoe": GgufRow(
        "phimoe",
        {"ffn_gate_inp": "mlp.router"},
        {**LOCAL, "sliding_window": "attention.sliding_window"},
        present={"attention_bias": "attn_q.bias", "lm_head_bias": "output.bias"},
        factors=StoredFactors("rope_factors_short.weight", "rope_factors_long.weight", ("short_mscale", "long_mscale")),
    ),
    "dbrx": GgufRow(
        "dbrx",
        {
            "attn_norm": "norm_attn_norm.norm_1",
            "attn_output_norm": "norm_attn_norm.norm_2",
            "attn_qkv": "norm_attn_norm.attn.Wqkv",
            "attn_output": "norm_attn_norm.attn.out_proj",
            "ffn_gate_inp": "ffn.router.layer",
        },
        {
            "d_model": "embedding_length",
            "n_heads": "attention.head_count",
            "max_seq_len": "context_length",
            "rms_norm_eps": "attention.layer_norm_epsilon",  # which the model has as a constant
            "attn_config.kv_n_heads": "attention.head_count_kv",
            "attn_config.clip_qkv": "attention.clamp_kqv",
            "attn_config.rope_theta": "rope.freq_base",
            "ffn_config.ffn_hidden_size": "feed_forward_length",
            "ffn_config.moe_num_experts": "expert_count",
            "ffn_config.moe_top_k": "expert_used_count",
        },
        outside={"token_embd": "transformer.wte", "output_norm": "transformer.norm_f"},
        layers="transformer.blocks",
    ),
    "olmoe": GgufRow("olmoe", keys=EXPERTS, fixed={"norm_topk_prob": False}),
    "minimax-m2": GgufRow(
        "minimax_m2",
        keys={**LOCAL, "intermediate_size": "expert_feed_forward_length", "rotary_dim": "rope.dimension_count"},
        whole={"exp_probs_b.bias": "mlp.e_score_correction_bias"},
        partial=True,
    ),
    "glm4moe": GgufRow(
        "glm4_moe",
        {**SHARED, "post_attention_norm": "post_attention_layernorm"},
        GROUPED,
        ONE_GROUP,
        whole=CORRECTION,
        present={"use_qk_norm": "attn_q_norm.weight", "attention_bias": "attn_q.bias"},
        partial=True,
    ),
    # Ling 2.0: in transformers' own code the same computation as GLM-4.5.
    "bailingmoe2": GgufRow(
        "glm4_moe",
        SHARED,
        GROUPED,
        {**ONE_GROUP, "use_qk_norm": True, "attention_bias": False},
        whole=CORRECTION,
        divided={"attn_qkv": QUERIES_KEYS_VALUES},
        required={"expert_gating_func": 2},  # sigmoid
        partial=True,
    ),
    "dots1": GgufRow("dots1", SHARED, GROUPED, ONE_GROUP, whole=CORRECTION),
    "gpt-oss": GgufRow(
        "gpt_oss",
        {"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"},
        {**LOCAL, "sliding_window": "attention.sliding_window"},
        whole={"attn_sinks.weight": "self_attn.sinks"},
        rotary={"truncate": False},
    ),
    "granitemoe": GgufRow(
        "granitemoe",
        GRANITE_NAMES,
        GRANITE,
        joined=GRANITE_JOINED,
        variant=("ffn_gate_shexp.weight", "granitemoeshared"),
        orders=PAIRS,
    ),
    "ernie4_5-moe": GgufRow(
        "ernie4_5_moe",
        SHARED,
        {
            **INNER,
            "moe_num_experts": "expert_count",
            "moe_k": "expert_used_count",
            "moe_num_shared_experts": "expert_shared_count",
            "moe_layer_interval": "interleave_moe_layer_step",
            "moe_layer_start_index": "leading_dense_block_count",
        },
        whole={"exp_probs_b.bias": "mlp.gate.moe_statics.e_score_correction_bias"},
    ),
    "exaone-moe": GgufRow(
        "exaone_moe",
        SHARED,
        {
            **EXPERTS,
            **_GROUPS,
            "num_shared_experts": "expert_shared_count",
            "sliding_window": "attention.sliding_window",
        },
        ONE_GROUP,
        whole=CORRECTION,
        kinds=("attention.sliding_window_pattern", {0: "full_attention"}, "sliding_attention"),
    ),
    "afmoe": GgufRow(
        "afmoe",
        {
            **SHARED,
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_mlp_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "attn_gate": "self_attn.gate_proj",
            "ffn_gate_inp": "mlp.router.gate",
        },
        {
            **EXPERTS,
            **INNER,
            "num_shared_experts": "expert_shared_count",
            "num_dense_layers": "leading_dense_block_count",
            "route_scale": "expert_weights_scale",
            "sliding_window": "attention.sliding_window",
        },
        {"mup_enabled": True, "global_attn_every_n_layers": 4},
        whole={"exp_probs_b.bias": "mlp.expert_bias"},
    ),
    "hunyuan-moe": GgufRow(
        "hunyuan_v1_moe",
        {
            **shared_names("shared_mlp"),
            "ffn_gate_inp": "mlp.gate.wg",
            "attn_q_norm": "self_attn.query_layernorm",
            "attn_k_norm": "self_attn.key_layernorm",
        },
        {**EXPERTS, "moe_topk": "expert_used_count", "intermediate_size": "expert_feed_forward_length"},
    ),
}
