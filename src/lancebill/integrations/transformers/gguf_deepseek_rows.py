"""The GGUF architectures of DeepSeek's mixtures: the first one, latent attention, an indexer, compressed attention."""

from __future__ import annotations

from lancebill.integrations.transformers.gguf_attention_rows import CORRECTION, GROUPED, INNER, ONE_GROUP, SHARED
from lancebill.integrations.transformers.gguf_row import GgufRow

_LATENT = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    **SHARED,
}
_LATENT_KEYS = {
    **GROUPED,
    "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank",
    "qk_rope_head_dim": "rope.dimension_count",
}
_LATENT_JOINED = {"self_attn.kv_b_proj": ("attn_k_b", "attn_v_b")}
_UNSCALED = {"norm_topk_prob": False, "routed_scaling_factor": 1.0, **ONE_GROUP}
# The indexer chooses the positions that a query attends to.
_INDEXER_KEYS = {
    "index_n_heads": "attention.indexer.head_count",
    "index_head_dim": "attention.indexer.key_length",
    "index_topk": "attention.indexer.top_k",
}


def _compressor(stem: str, module: str) -> dict[str, str]:
    """Keys and values of several positions become those of one."""
    parts = {"kv": "kv_proj", "gate": "gate_proj", "ape": "position_bias", "norm": "kv_norm"}
    return {f"{stem}_{part}": f"{module}.{name}" for part, name in parts.items()}


def _streams(stem: str, module: str) -> dict[str, str]:
    """What mixes the streams that replace the residual."""
    return {f"{stem}_{part}": f"{module}{part}" for part in ("fn", "base", "scale")}


DEEPSEEK_ROWS: dict[str, GgufRow] = {
    # transformers has no class of its own for the first DeepSeek. ERNIE 4.5 computes the same: rotary columns are
    # neighbours, as in the file. Its epsilon does not matter, because the sum of the scores is at most 1.
    "deepseek": GgufRow(
        "ernie4_5_moe",
        SHARED,
        {
            **INNER,
            "moe_num_experts": "expert_count",
            "moe_k": "expert_used_count",
            "moe_num_shared_experts": "expert_shared_count",
            "moe_layer_start_index": "leading_dense_block_count",
        },
        {"moe_norm_min": 1.0},
        zeros=("mlp.gate.moe_statics.e_score_correction_bias",),
        required={"expert_weights_scale": 1.0},
        stated=True,
    ),
    "deepseek2": GgufRow(
        "deepseek_v2",
        _LATENT,
        _LATENT_KEYS,
        {"q_lora_rank": None, **_UNSCALED},
        whole=CORRECTION,
        joined=_LATENT_JOINED,
        variant=("exp_probs_b.bias", "deepseek_v3"),
        required={"attention.temperature_scale": 0},  # Mistral Large 3 scales its queries by position
        latent=True,
    ),
    "deepseek32": GgufRow(
        "deepseek_v32",
        {
            **_LATENT,
            "indexer.k_norm": "self_attn.indexer.k_norm",
            "indexer.proj": "self_attn.indexer.weights_proj",
            "indexer.attn_k": "self_attn.indexer.wk",
            "indexer.attn_q_b": "self_attn.indexer.wq_b",
        },
        {**_LATENT_KEYS, **_INDEXER_KEYS},
        _UNSCALED,
        whole=CORRECTION,
        joined=_LATENT_JOINED,
        required={"expert_gating_func": 2},  # sigmoid
        latent=True,
        stated=True,
    ),
    "deepseek4": GgufRow(
        "deepseek_v4",
        {
            **SHARED,
            "attn_q_a": "self_attn.q_a_proj",
            "attn_q_a_norm": "self_attn.q_a_norm",
            "attn_q_b": "self_attn.q_b_proj",
            "attn_kv": "self_attn.kv_proj",
            "attn_kv_a_norm": "self_attn.kv_norm",
            "attn_output_a": "self_attn.o_a_proj",
            "attn_output_b": "self_attn.o_b_proj",
            "attn_sinks": "self_attn.sinks",
            **_compressor("attn_compressor", "self_attn.compressor"),
            "indexer.proj": "self_attn.compressor.indexer.scorer.weights_proj",
            "indexer.attn_q_b": "self_attn.compressor.indexer.q_b_proj",
            **_compressor("indexer_compressor", "self_attn.compressor.indexer"),
            **_streams("hc_attn", "attn_hc."),
            **_streams("hc_ffn", "ffn_hc."),
            "ffn_gate_tid2eid": "mlp.gate.tid2eid",
        },
        {
            **dict.fromkeys(("moe_intermediate_size", "intermediate_size"), "expert_feed_forward_length"),
            **_INDEXER_KEYS,
            "n_routed_experts": "expert_count",
            "n_shared_experts": "expert_shared_count",
            "routed_scaling_factor": "expert_weights_scale",
            "swiglu_limit": "swiglu_clamp_exp",
            "num_hash_layers": "hash_layer_count",
            "sliding_window": "attention.sliding_window",
            "q_lora_rank": "attention.q_lora_rank",
            "qk_rope_head_dim": "rope.dimension_count",
            "rope_theta": "rope.freq_base",
            "compress_rope_theta": "attention.compress_rope_freq_base",
            "o_groups": "attention.output_group_count",
            "o_lora_rank": "attention.output_lora_rank",
            "hc_mult": "hyper_connection.count",
            "hc_sinkhorn_iters": "hyper_connection.sinkhorn_iterations",
            "hc_eps": "hyper_connection.epsilon",
        },
        whole=CORRECTION,
        outside=_streams("output_hc", "model.hc_head.hc_"),
        required={"expert_gating_func": 4, "expert_weights_norm": True},  # the root of softplus
        kinds=(
            "attention.compress_ratios",
            {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"},
            None,
        ),
        plain=("hc_attn_fn", "hc_ffn_fn", "output_hc_fn", "attn_compressor_ape", "indexer_compressor_ape"),
        stated=True,
    ),
}
