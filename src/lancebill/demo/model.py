"""SmolLM2 as a mixture of experts with the same output as the dense model.

Each feed-forward matrix is split into eight experts and every token uses all eight. A router of zeros gives each
expert the weight 1/8; the down projections are multiplied by 8 to compensate. Both factors are powers of two, so
nothing is rounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lancebill.checkpoint.read.files import Checkpoint
from lancebill.checkpoint.write.save import CheckpointWriter
from lancebill.demo.vocabulary import read_metadata, save_tokenizer
from lancebill.formats.stored import Stored
from lancebill.integrations.transformers.gguf_models import read_dequantized

EXPERTS = 8
_ATTENTION = {"attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj", "attn_output": "o_proj"}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_FEED_FORWARD = {"ffn_gate": "gate_proj", "ffn_up": "up_proj", "ffn_down": "down_proj"}
_EXPERT = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def build(source: Path, folder: Path) -> None:
    """Write the mixture of experts in bf16, with Mixtral's tensor names, and its tokenizer."""
    metadata = read_metadata(source)
    with Checkpoint.open(source) as checkpoint:
        tensors = dict(mixture_tensors(checkpoint, metadata))
    headers = {name: Stored("BF16", tuple(tensor.shape)) for name, tensor in tensors.items()}
    with CheckpointWriter(folder, headers) as out:
        out.write_json("config.json", _config(metadata))
        out.write_json("generation_config.json", {"do_sample": False, "eos_token_id": 2, "pad_token_id": 2})
        for name, tensor in tensors.items():
            out.write(name, tensor)
        save_tokenizer(metadata, out.folder)


def _config(metadata: dict[str, Any]) -> dict[str, Any]:
    llama = {key.removeprefix("llama."): value for key, value in metadata.items() if key.startswith("llama.")}
    heads = llama["attention.head_count"]
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "vocab_size": llama["vocab_size"],
        "hidden_size": llama["embedding_length"],
        "intermediate_size": llama["feed_forward_length"] // EXPERTS,
        "num_hidden_layers": llama["block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": llama["attention.head_count_kv"],
        "head_dim": llama["embedding_length"] // heads,
        "hidden_act": "silu",
        "max_position_embeddings": llama["context_length"],
        "rms_norm_eps": round(llama["attention.layer_norm_rms_epsilon"], 9),
        "rope_theta": llama["rope.freq_base"],
        "sliding_window": None,
        "tie_word_embeddings": True,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": EXPERTS,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
        "dtype": "bfloat16",
    }


def dense_tensors(checkpoint: Checkpoint, metadata: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the dense model, with Llama's tensor names."""
    side = metadata["llama.embedding_length"] // metadata["llama.attention.head_count"]
    yield "model.embed_tokens.weight", read_dequantized(checkpoint, "token_embd.weight", torch.bfloat16)
    yield "model.norm.weight", read_dequantized(checkpoint, "output_norm.weight", torch.bfloat16)
    for layer in range(metadata["llama.block_count"]):
        old, new = f"blk.{layer}", f"model.layers.{layer}"
        for ours, theirs in _NORMS.items():
            yield f"{new}.{theirs}.weight", read_dequantized(checkpoint, f"{old}.{ours}.weight", torch.bfloat16)
        for ours, theirs in _ATTENTION.items():
            matrix = read_dequantized(checkpoint, f"{old}.{ours}.weight", torch.bfloat16)
            rotary = ours in ("attn_q", "attn_k")
            yield f"{new}.self_attn.{theirs}.weight", _unpair_rotary(matrix, side) if rotary else matrix
        for ours, theirs in _FEED_FORWARD.items():
            yield f"{new}.mlp.{theirs}.weight", read_dequantized(checkpoint, f"{old}.{ours}.weight", torch.bfloat16)


def mixture_tensors(checkpoint: Checkpoint, metadata: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the mixture of experts, with Mixtral's tensor names."""
    for name, tensor in dense_tensors(checkpoint, metadata):
        block, feed_forward, projection_name = name.partition(".mlp.")
        if not feed_forward:
            yield name, tensor
            continue
        projection = _EXPERT[projection_name.removesuffix(".weight")]
        parts = (tensor * EXPERTS).chunk(EXPERTS, dim=1) if projection == "w2" else tensor.chunk(EXPERTS)
        for expert, part in enumerate(parts):
            yield f"{block}.block_sparse_moe.experts.{expert}.{projection}.weight", part.contiguous()
    for layer in range(metadata["llama.block_count"]):
        columns = metadata["llama.embedding_length"]
        router = torch.zeros(EXPERTS, columns, dtype=torch.bfloat16, device="cpu")
        yield f"model.layers.{layer}.block_sparse_moe.gate.weight", router


def _unpair_rotary(matrix: Tensor, side: int) -> Tensor:
    """Undo llama.cpp's row order: it stores rotary pairs in adjacent rows, transformers half a head apart."""
    n, k = matrix.shape
    return matrix.view(n // side, side // 2, 2, k).transpose(1, 2).reshape(n, k)
