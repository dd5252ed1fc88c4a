"""GGUF architectures with experts whose layers are not all attention: linear attention, states, convolutions."""

from __future__ import annotations

from lancebill.integrations.transformers.gguf_attention_rows import (
    EXPERTS,
    GRANITE,
    GRANITE_JOINED,
    GRANITE_NAMES,
    GROUPED,
    INNER,
    ONE_GROUP,
    QWEN2_SHARED,
    QWEN2_SHARED_KEYS,
)
from lancebill.integrations.transformers.gguf_changes import (
    PAIRS,
    Change,
    delta_heads,
    log_of_negated,
    minus_one,
    values_of_heads,
    values_of_heads_below,
)
from lancebill.integrations.transformers.gguf_row import GgufRow


def _mamba(module: str) -> dict[str, str]:
    """Layers with a state instead of attention."""
    names = {"ssm_in": "in_proj", "ssm_conv1d": "conv1d", "ssm_norm": "norm", "ssm_out": "out_proj"}
    return {stem: f"{module}.{name}" for stem, name in names.items()}


def _mamba_whole(module: str) -> dict[str, str]:
    return {"ssm_a": f"{module}.A_log", "ssm_d": f"{module}.D", "ssm_dt.bias": f"{module}.dt_bias"}


# Layers of linear attention (gated delta nets) between others. Norms are stored with the 1 that the model adds.
_DELTA_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_DELTA_KEYS = {
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    "linear_key_head_dim": "ssm.state_size",
    "linear_value_head_dim": "ssm.state_size",
}
_DELTA_WHOLE = {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"}
_DELTA_JOINED = "linear_attn.in_proj_qkvz"
_NORMS = ("output_norm", "attn_norm", "post_attention_norm", "attn_q_norm", "attn_k_norm")
_DELTA_VALUES: dict[str, Change] = {"ssm_a": log_of_negated, **dict.fromkeys(_NORMS, minus_one)}
_DELTA_LAYERS = {"ssm_a": "linear_attention", "attn_q.weight": "full_attention"}

RECURRENT_ROWS: dict[str, GgufRow] = {
    "qwen3next": GgufRow(
        "qwen3_next",
        {
            **QWEN2_SHARED,
            **_DELTA_NAMES,
            "ssm_in": "linear_attn.in_proj_qkvz",  # in old files
            "ssm_ba": "linear_attn.in_proj_ba",
        },
        {**EXPERTS, **INNER, **QWEN2_SHARED_KEYS, **_DELTA_KEYS},
        {"norm_topk_prob": True},
        whole=_DELTA_WHOLE,
        joined={_DELTA_JOINED: ("attn_qkv", "attn_gate")},
        orders={_DELTA_JOINED: delta_heads},
        values=_DELTA_VALUES,
        layer_tensors=_DELTA_LAYERS,
        partial=True,
    ),
    "qwen35moe": GgufRow(  # the language model: images have a file of their own
        "qwen3_5_moe_text",
        {
            **QWEN2_SHARED,
            **_DELTA_NAMES,
            "attn_qkv": "linear_attn.in_proj_qkv",
            "attn_gate": "linear_attn.in_proj_z",
            "ssm_beta": "linear_attn.in_proj_b",
            "ssm_alpha": "linear_attn.in_proj_a",
        },
        {**EXPERTS, **INNER, **QWEN2_SHARED_KEYS, **_DELTA_KEYS},
        whole=_DELTA_WHOLE,
        orders={
            **dict.fromkeys(("attn_qkv", "ssm_conv1d"), values_of_heads_below),
            **dict.fromkeys(("attn_gate", "ssm_beta", "ssm_alpha", "ssm_a", "ssm_dt.bias"), values_of_heads),
        },
        columns={"ssm_out": values_of_heads},
        values=_DELTA_VALUES,
        layer_tensors=_DELTA_LAYERS,
        partial=True,
    ),
    "granitehybrid": GgufRow(
        "granitemoehybrid",
        {**GRANITE_NAMES, **_mamba("mamba")},
        {
            **GRANITE,
            "mamba_n_heads": "ssm.time_step_rank",
            "mamba_n_groups": "ssm.group_count",
            "mamba_d_state": "ssm.state_size",
            "mamba_d_conv": "ssm.conv_kernel",
        },
        whole=_mamba_whole("mamba"),
        joined=GRANITE_JOINED,
        orders=PAIRS,
        values={"ssm_a": log_of_negated},
        present={"mamba_conv_bias": "ssm_conv1d.bias"},
        ratios={"mamba_expand": ("ssm.inner_size", "embedding_length")},
        choices={"position_embedding_type": ("rope.scaling.finetuned", {0: None}, "rope")},
        layer_tensors={"ssm_a": "mamba", "attn_q.weight": "attention"},
    ),
    "jamba": GgufRow(
        "jamba",
        {
            **_mamba("mamba"),
            "ssm_x": "mamba.x_proj",
            "ssm_dt": "mamba.dt_proj",
            **{f"ssm_{part}_norm": f"mamba.{part}_layernorm" for part in ("dt", "b", "c")},
            "ffn_norm": "pre_ff_layernorm",
            "ffn_gate_inp": "feed_forward.router",
            **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
        },
        {
            **EXPERTS,
            "mamba_d_state": "ssm.state_size",
            "mamba_d_conv": "ssm.conv_kernel",
            "mamba_dt_rank": "ssm.time_step_rank",
        },
        whole={"ssm_a": "mamba.A_log", "ssm_d": "mamba.D"},
        values={"ssm_a": log_of_negated},
        present={"mamba_conv_bias": "ssm_conv1d.bias", "mamba_proj_bias": "ssm_in.bias"},
        ratios={"mamba_expand": ("ssm.inner_size", "embedding_length")},
        periods={
            "attn_q.weight": ("attn_layer_period", "attn_layer_offset"),
            "ffn_gate_inp.weight": ("expert_layer_period", "expert_layer_offset"),
        },
        outside={"output_norm": "model.final_layernorm"},
        plain=("ssm_dt",),
    ),
    "nemotron_h_moe": GgufRow(
        "nemotron_h",
        {
            **_mamba("mixer"),
            "attn_norm": "norm",
            **{f"attn_{part}": f"mixer.{part}_proj" for part in ("q", "k", "v")},
            "attn_output": "mixer.o_proj",
            "ffn_gate_inp": "mixer.gate",
            "ffn_up_shexp": "mixer.shared_experts.up_proj",
            "ffn_down_shexp": "mixer.shared_experts.down_proj",
            "ffn_latent_down": "mixer.fc1_latent_proj",
            "ffn_latent_up": "mixer.fc2_latent_proj",
        },
        {
            **GROUPED,
            "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
            "moe_latent_size": "moe_latent_size",
            "layer_norm_epsilon": "attention.layer_norm_rms_epsilon",
            "mamba_num_heads": "ssm.time_step_rank",
            "n_groups": "ssm.group_count",
            "ssm_state_size": "ssm.state_size",
            "conv_kernel": "ssm.conv_kernel",
        },
        ONE_GROUP,
        whole={**_mamba_whole("mixer"), "exp_probs_b.bias": "mixer.gate.e_score_correction_bias"},
        values={"ssm_a": log_of_negated},
        present={"use_conv_bias": "ssm_conv1d.bias"},
        ratios={"mamba_head_dim": ("ssm.inner_size", "ssm.time_step_rank")},
        layer_tensors={"ssm_a": "mamba", "attn_q.weight": "attention", "ffn_gate_inp.weight": "moe"},
        layer_key="layers_block_type",
        outside={"token_embd": "model.embeddings", "output_norm": "model.norm_f"},
    ),
    "lfm2moe": GgufRow(
        "lfm2_moe",
        {
            "attn_norm": "operator_norm",
            "ffn_norm": "ffn_norm",
            "attn_output": "self_attn.out_proj",
            "attn_q_norm": "self_attn.q_layernorm",
            "attn_k_norm": "self_attn.k_layernorm",
            "ffn_gate_inp": "feed_forward.gate",
            "ffn_gate": "feed_forward.w1",
            "ffn_up": "feed_forward.w3",
            "ffn_down": "feed_forward.w2",
            "shortconv.conv": "conv.conv",
            "shortconv.in_proj": "conv.in_proj",
            "shortconv.out_proj": "conv.out_proj",
        },
        {
            **EXPERTS,
            **INNER,
            "num_dense_layers": "leading_dense_block_count",
            "conv_L_cache": "shortconv.l_cache",
            "norm_eps": "attention.layer_norm_rms_epsilon",
        },
        whole={"exp_probs_b.bias": "feed_forward.expert_bias"},
        kinds=("attention.head_count_kv", {0: "conv"}, "full_attention"),
    ),
}
