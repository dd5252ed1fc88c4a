"""Tiny models of DeepSeek for GGUF files, and their names and metadata, which the gguf library does not have yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from gguf import ExpertGatingFuncType

KNOWN = {"deepseek32": "deepseek2", "deepseek4": "deepseek2"}  # architectures of the library with most of the names
_INDEXER = {"indexer.wk": "indexer.attn_k", "indexer.wq_b": "indexer.attn_q_b", "indexer.k_norm": "indexer.k_norm"}
_COMPRESSOR = {"kv_proj": "kv", "gate_proj": "gate", "position_bias": "ape", "kv_norm": "norm"}
_RATIOS = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
NAMES = {
    "deepseek32": {**_INDEXER, "indexer.weights_proj": "indexer.proj"},
    "deepseek4": {
        **{f"self_attn.compressor.{name}": f"attn_compressor_{new}" for name, new in _COMPRESSOR.items()},
        **{f"compressor.indexer.{name}": f"indexer_compressor_{new}" for name, new in _COMPRESSOR.items()},
        **{f"attn_hc.{name}": f"hc_attn_{name}" for name in ("fn", "base", "scale")},
        **{f"ffn_hc.{name}": f"hc_ffn_{name}" for name in ("fn", "base", "scale")},
        **{f"hc_head.hc_{name}": f"output_hc_{name}" for name in ("fn", "base", "scale")},
        "indexer.q_b_proj": "indexer.attn_q_b",
        "indexer.scorer.weights_proj": "indexer.proj",
        "self_attn.q_a_norm": "attn_q_a_norm",
        "self_attn.kv_proj": "attn_kv",
        "self_attn.kv_norm": "attn_kv_a_norm",
        "self_attn.o_a_proj": "attn_output_a",
        "self_attn.o_b_proj": "attn_output_b",
        "self_attn.sinks": "attn_sinks",
        "mlp.gate.tid2eid": "ffn_gate_tid2eid",
    },
}


def own_name(architecture: str, name: str) -> str | None:
    """The name in llama.cpp of a tensor that the library does not name."""
    found = [new for old, new in NAMES.get(architecture, {}).items() if name.endswith(f".{old}")]
    if not found:
        return None
    return found[0] if "layers." not in name else f"blk.{name.split('.')[2]}.{found[0]}"


def add_own_metadata(out: Any, architecture: str, values: Mapping[str, Any]) -> None:
    """What llama.cpp's converter writes for these architectures."""
    if architecture in NAMES:
        out.add_uint32(f"{architecture}.attention.indexer.head_count", values["index_n_heads"])
        out.add_uint32(f"{architecture}.attention.indexer.key_length", values["index_head_dim"])
        out.add_uint32(f"{architecture}.attention.indexer.top_k", values["index_topk"])
        kind = 4 if architecture == "deepseek4" else ExpertGatingFuncType.SIGMOID.value
        out.add_uint32(f"{architecture}.expert_gating_func", kind)
    if architecture != "deepseek4":
        return
    layers = values["num_hidden_layers"]
    for key, name in {"output_group_count": "o_groups", "output_lora_rank": "o_lora_rank"}.items():
        out.add_uint32(f"deepseek4.attention.{key}", values[name])
    for key, name in {"count": "hc_mult", "sinkhorn_iterations": "hc_sinkhorn_iters"}.items():
        out.add_uint32(f"deepseek4.hyper_connection.{key}", values[name])
    out.add_float32("deepseek4.hyper_connection.epsilon", values["hc_eps"])
    out.add_uint32("deepseek4.hash_layer_count", values["mlp_layer_types"].count("hash_moe"))
    out.add_array("deepseek4.swiglu_clamp_exp", [values["swiglu_limit"]] * layers)
    out.add_array("deepseek4.swiglu_clamp_shexp", [values["swiglu_limit"]] * layers)
    out.add_array("deepseek4.attention.compress_ratios", [_RATIOS[kind] for kind in values["layer_types"]])
    out.add_float32("deepseek4.attention.compress_rope_freq_base", values["compress_rope_theta"])


def first_deepseek(common: Mapping[str, Any]) -> Any:
    """The first DeepSeek, for which transformers has no class: the attention of Llama, and V2's mixtures."""
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe

    values = {**common, "topk_method": "greedy", "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}
    torch.manual_seed(3)
    config = transformers.LlamaConfig(**values, num_experts=values["n_routed_experts"])
    model = transformers.LlamaForCausalLM(config)
    for layer in model.model.layers[config.first_k_dense_replace :]:
        layer.mlp = DeepseekV2Moe(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02 if parameter.ndim > 1 else 1.0)
    return model.eval()
