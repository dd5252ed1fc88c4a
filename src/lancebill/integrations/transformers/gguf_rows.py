"""GGUF architectures with experts as models of transformers: names, config keys, and what llama.cpp changes.

One row for each architecture. What most of them share is in `NAMES` and `KEYS`; a row adds to it and replaces it.
Names are those of modules below a layer; keys are those of the metadata below the architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lancebill.integrations.transformers.gguf_changes import (
    PAIRS,
    QUERIES_KEYS_VALUES,
    Change,
    Order,
    delta_heads,
    log_of_negated,
    minus_one,
)

EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"
WHOLE = {
    "token_embd": "model.embed_tokens",
    "token_embd_norm": "model.embedding_norm",
    "output_norm": "model.norm",
    "output": "lm_head",
}
NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
KEYS = {
    "hidden_size": "embedding_length",
    "max_position_embeddings": "context_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "num_experts_per_tok": "expert_used_count",
}
# Not sizes of tensors, so that the largest tensor is no limit for them.
UNBOUNDED = {"context_length", "attention.sliding_window", "rope.scaling.original_context_length"}


@dataclass(frozen=True)
class GgufRow:
    """How one architecture is a model of transformers.

    `whole` are single tensors with their suffixes, `joined` modules whose matrices are stored apart, `divided` matrices
    that several modules share. `orders` and `values` say by the name of a tensor or of a joined module what llama.cpp
    changes about it (`gguf_changes.py`).

    `fixed` are config values that the metadata may not have; `present` are true where a tensor of any layer is stored;
    `ratios` are quotients of two numbers of the metadata; `choices` have a key of the metadata, and the values for 0
    and for anything else. `required` are metadata without which the model would compute something else. `variant` is
    another model type, and the tensor of the last layer that tells it apart. `layer_tensors` tell the type of a layer
    by a tensor that only layers of that type have.
    """

    model_type: str
    names: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, object] = field(default_factory=dict)
    whole: Mapping[str, str] = field(default_factory=dict)
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    divided: Mapping[str, Mapping[str, Order]] = field(default_factory=dict)
    present: Mapping[str, str] = field(default_factory=dict)
    ratios: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    choices: Mapping[str, tuple[str, object, object]] = field(default_factory=dict)
    rotary: Mapping[str, object] = field(default_factory=dict)  # as `fixed`, of the rotary positions
    required: Mapping[str, object] = field(default_factory=dict)
    variant: tuple[str, str] | None = None
    orders: Mapping[str, Order] = field(default_factory=dict)
    values: Mapping[str, Change] = field(default_factory=dict)
    latent: bool = False  # keys and values are projected from a latent vector (MLA)
    partial: bool = False  # only some columns of a head may be rotated
    layer_tensors: Mapping[str, str] = field(default_factory=dict)
    kinds: tuple[str, str, str] | None = None  # a value for each layer: its key, the layer type if it is 0, and if not


def _shared(module: str) -> dict[str, str]:
    return {f"ffn_{part}_shexp": f"mlp.{module}.{part}_proj" for part in ("gate", "up", "down")}


def _mamba(module: str) -> dict[str, str]:
    """Layers with a state instead of attention."""
    names = {"ssm_in": "in_proj", "ssm_conv1d": "conv1d", "ssm_norm": "norm", "ssm_out": "out_proj"}
    return {stem: f"{module}.{name}" for stem, name in names.items()}


def _mamba_whole(module: str) -> dict[str, str]:
    return {"ssm_a": f"{module}.A_log", "ssm_d": f"{module}.D", "ssm_dt.bias": f"{module}.dt_bias"}


_EXPERTS, _LOCAL, _ROUTED = (
    {name: "expert_count"} for name in ("num_experts", "num_local_experts", "n_routed_experts")
)
_INNER = {"moe_intermediate_size": "expert_feed_forward_length"}
_CORRECTION = {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
# Experts in groups, the first layers dense.
_GROUPS = {
    **_INNER,
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
}
_GROUPED = {**_ROUTED, **_GROUPS, "n_shared_experts": "expert_shared_count"}
_ONE_GROUP = {"n_group": 1, "topk_group": 1}
_SHARED = _shared("shared_experts")
_LATENT = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    **_SHARED,
}
_LATENT_KEYS = {
    **_GROUPED,
    "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank",
    "qk_rope_head_dim": "rope.dimension_count",
}
_GRANITE = {
    **_LOCAL,
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "shared_intermediate_size": "expert_shared_feed_forward_length",
}
_GRANITE_NAMES = {"ffn_gate_inp": "block_sparse_moe.router", "ffn_down_shexp": "shared_mlp.output_linear"}
_GRANITE_JOINED = {"shared_mlp.input_linear": ("ffn_gate_shexp", "ffn_up_shexp")}
_QWEN2_SHARED = {**_shared("shared_expert"), "ffn_gate_inp_shexp": "mlp.shared_expert_gate"}
_QWEN2_SHARED_KEYS = {"shared_expert_intermediate_size": "expert_shared_feed_forward_length"}
# Layers of linear attention (gated delta nets) between others. Norms are stored with the 1 that the model adds.
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

ROWS: dict[str, GgufRow] = {
    "llama": GgufRow("mixtral", keys=_LOCAL, orders=PAIRS),
    "qwen2moe": GgufRow(
        "qwen2_moe",
        _QWEN2_SHARED,
        {**_EXPERTS, **_INNER, **_QWEN2_SHARED_KEYS},
        {"norm_topk_prob": False},
    ),
    "qwen3next": GgufRow(
        "qwen3_next",
        {
            **_QWEN2_SHARED,
            "post_attention_norm": "post_attention_layernorm",
            "ssm_in": "linear_attn.in_proj_qkvz",  # in old files
            "ssm_ba": "linear_attn.in_proj_ba",
            "ssm_conv1d": "linear_attn.conv1d",
            "ssm_norm": "linear_attn.norm",
            "ssm_out": "linear_attn.out_proj",
        },
        {**_EXPERTS, **_INNER, **_QWEN2_SHARED_KEYS, **_DELTA_KEYS},
        {"norm_topk_prob": True},
        whole=_DELTA_WHOLE,
        joined={_DELTA_JOINED: ("attn_qkv", "attn_gate")},
        orders={_DELTA_JOINED: delta_heads},
        values=_DELTA_VALUES,
        layer_tensors=_DELTA_LAYERS,
        partial=True,
    ),
    "qwen3moe": GgufRow("qwen3_moe", keys={**_EXPERTS, **_INNER}, fixed={"norm_topk_prob": True}),
    "olmoe": GgufRow("olmoe", keys=_EXPERTS, fixed={"norm_topk_prob": False}),
    "minimax-m2": GgufRow(
        "minimax_m2",
        keys={**_LOCAL, "intermediate_size": "expert_feed_forward_length", "rotary_dim": "rope.dimension_count"},
        whole={"exp_probs_b.bias": "mlp.e_score_correction_bias"},
        partial=True,
    ),
    "glm4moe": GgufRow(
        "glm4_moe",
        {**_SHARED, "post_attention_norm": "post_attention_layernorm"},
        _GROUPED,
        _ONE_GROUP,
        whole=_CORRECTION,
        present={"use_qk_norm": "attn_q_norm.weight", "attention_bias": "attn_q.bias"},
        partial=True,
    ),
    # Ling 2.0: in transformers' own code the same computation as GLM-4.5.
    "bailingmoe2": GgufRow(
        "glm4_moe",
        _SHARED,
        _GROUPED,
        {**_ONE_GROUP, "use_qk_norm": True, "attention_bias": False},
        whole=_CORRECTION,
        divided={"attn_qkv": QUERIES_KEYS_VALUES},
        required={"expert_gating_func": 2},  # sigmoid
        partial=True,
    ),
    "dots1": GgufRow("dots1", _SHARED, _GROUPED, _ONE_GROUP, whole=_CORRECTION),
    "deepseek2": GgufRow(
        "deepseek_v2",
        _LATENT,
        _LATENT_KEYS,
        {"q_lora_rank": None, "norm_topk_prob": False, "routed_scaling_factor": 1.0, **_ONE_GROUP},
        whole=_CORRECTION,
        joined={"self_attn.kv_b_proj": ("attn_k_b", "attn_v_b")},
        variant=("exp_probs_b.bias", "deepseek_v3"),
        latent=True,
    ),
    "gpt-oss": GgufRow(
        "gpt_oss",
        {"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"},
        {**_LOCAL, "sliding_window": "attention.sliding_window"},
        whole={"attn_sinks.weight": "self_attn.sinks"},
        rotary={"truncate": False},
    ),
    "granitemoe": GgufRow(
        "granitemoe",
        _GRANITE_NAMES,
        _GRANITE,
        joined=_GRANITE_JOINED,
        variant=("ffn_gate_shexp.weight", "granitemoeshared"),
        orders=PAIRS,
    ),
    "granitehybrid": GgufRow(
        "granitemoehybrid",
        {**_GRANITE_NAMES, **_mamba("mamba")},
        {
            **_GRANITE,
            "mamba_n_heads": "ssm.time_step_rank",
            "mamba_n_groups": "ssm.group_count",
            "mamba_d_state": "ssm.state_size",
            "mamba_d_conv": "ssm.conv_kernel",
        },
        whole=_mamba_whole("mamba"),
        joined=_GRANITE_JOINED,
        orders=PAIRS,
        values={"ssm_a": log_of_negated},
        present={"mamba_conv_bias": "ssm_conv1d.bias"},
        ratios={"mamba_expand": ("ssm.inner_size", "embedding_length")},
        choices={"position_embedding_type": ("rope.scaling.finetuned", None, "rope")},
        layer_tensors={"ssm_a": "mamba", "attn_q.weight": "attention"},
    ),
    "ernie4_5-moe": GgufRow(
        "ernie4_5_moe",
        _SHARED,
        {
            **_INNER,
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
        _SHARED,
        {
            **_EXPERTS,
            **_GROUPS,
            "num_shared_experts": "expert_shared_count",
            "sliding_window": "attention.sliding_window",
        },
        _ONE_GROUP,
        whole=_CORRECTION,
        kinds=("attention.sliding_window_pattern", "full_attention", "sliding_attention"),
    ),
    "afmoe": GgufRow(
        "afmoe",
        {
            **_SHARED,
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_mlp_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "attn_gate": "self_attn.gate_proj",
            "ffn_gate_inp": "mlp.router.gate",
        },
        {
            **_EXPERTS,
            **_INNER,
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
            **_shared("shared_mlp"),
            "ffn_gate_inp": "mlp.gate.wg",
            "attn_q_norm": "self_attn.query_layernorm",
            "attn_k_norm": "self_attn.key_layernorm",
        },
        {**_EXPERTS, "moe_topk": "expert_used_count", "intermediate_size": "expert_feed_forward_length"},
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
            **_EXPERTS,
            **_INNER,
            "num_dense_layers": "leading_dense_block_count",
            "conv_L_cache": "shortconv.l_cache",
            "norm_eps": "attention.layer_norm_rms_epsilon",
        },
        whole={"exp_probs_b.bias": "feed_forward.expert_bias"},
        kinds=("attention.head_count_kv", "conv", "full_attention"),
    ),
}
