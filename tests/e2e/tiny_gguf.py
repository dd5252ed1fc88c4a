"""Writes whole transformers models as GGUF files with the gguf library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import torch

EXPERTS = {"gate": "ffn_gate_exps", "up": "ffn_up_exps", "down": "ffn_down_exps"}


def write(model: Any, architecture: str, path: Path, extra: str | None = None) -> None:
    config = model.config
    out = gguf.GGUFWriter(path, architecture)
    out.add_block_count(config.num_hidden_layers)
    out.add_context_length(config.max_position_embeddings)
    out.add_embedding_length(config.hidden_size)
    out.add_feed_forward_length(config.intermediate_size)
    out.add_head_count(config.num_attention_heads)
    out.add_head_count_kv(config.num_key_value_heads)
    out.add_key_length(config.hidden_size // config.num_attention_heads)
    out.add_value_length(config.hidden_size // config.num_attention_heads)
    out.add_layer_norm_rms_eps(config.rms_norm_eps)
    out.add_rope_freq_base(config.rope_parameters["rope_theta"])
    out.add_vocab_size(config.vocab_size)
    values = config.to_dict()
    out.add_expert_count(values.get("num_experts") or values["num_local_experts"])
    out.add_expert_used_count(config.num_experts_per_tok)
    out.add_expert_feed_forward_length(values.get("moe_intermediate_size") or config.intermediate_size)
    if "rotary_dim" in values:
        out.add_rope_dimension_count(values["rotary_dim"])
        out.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    out.add_tokenizer_model("gpt2")
    letters = [chr(code) for code in range(ord("!"), ord("!") + 90)]
    out.add_token_list([*letters, "ab", "cd", *(f"<{i}>" for i in range(config.vocab_size - 92))])
    out.add_token_types([1] * config.vocab_size)
    out.add_token_merges(["a b", "c d"])
    out.add_eos_token_id(config.vocab_size - 1)
    out.add_bos_token_id(config.vocab_size - 2)
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if ".experts." in name:
            layer = name.split(".")[2]
            parts = zip(("gate", "up"), tensor.chunk(2, 1)) if "gate_up" in name else [("down", tensor)]
            for part, matrix in parts:
                add(out, f"blk.{layer}.{EXPERTS[part]}.weight", matrix)
            continue
        if "e_score_correction_bias" in name:
            add(out, f"blk.{name.split('.')[2]}.exp_probs_b.bias", tensor)
            continue
        stem, _, suffix = name.rpartition(".")
        add(out, f"{names.get_name(stem)}.{suffix}", tensor.squeeze(0) if "shared_expert_gate" in name else tensor)
    if extra is not None:
        add(out, extra, torch.ones(4))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def add(out: Any, name: str, tensor: torch.Tensor) -> None:
    """Write matrices as Q8_0, vectors and the router unquantised. `tensor` is set to the values written."""
    values = tensor.contiguous().numpy()
    if tensor.ndim < 2 or "ffn_gate_inp" in name:
        out.add_tensor(name, values)
    else:
        kind = gguf.GGMLQuantizationType.Q8_0
        codes = gguf.quants.quantize(values, kind)
        out.add_tensor(name, codes, raw_dtype=kind)
        tensor.copy_(torch.from_numpy(gguf.quants.dequantize(codes, kind)))
