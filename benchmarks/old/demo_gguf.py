"""The demo's MXFP4 model as a GGUF file with the same numbers, for llama.cpp.

    python benchmarks/demo_gguf.py MODEL SOURCE.gguf OUT.gguf

MODEL is the folder that `make demo` writes (`mxfp4`), SOURCE the GGUF file that it started from, whose vocabulary is
copied. Experts are MXFP4 blocks, all else is BF16; norms and routers are F32, as llama.cpp requires.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

BLOCK = 32
LENGTH = "llama.feed_forward_length"  # of an expert, not of the dense model
EXPERTS = {"w1": "ffn_gate_exps", "w3": "ffn_up_exps", "w2": "ffn_down_exps"}
ATTENTION = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    chosen = parser.parse_args()
    config = json.loads((chosen.model / "config.json").read_text())
    writer = gguf.GGUFWriter(chosen.out, "llama")
    copy_metadata(gguf.GGUFReader(chosen.source), writer)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_expert_count(config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    with safe_open(chosen.model / "model.safetensors", "pt") as stored:
        add_tensors(writer, stored, config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def copy_metadata(source: gguf.GGUFReader, writer: gguf.GGUFWriter) -> None:
    skipped = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version", LENGTH)
    for name, field in source.fields.items():
        if not name.startswith(skipped):
            kind = field.types[0]
            inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            value = field.contents()
            writer.add_key_value(name, value, kind, sub_type=inner)


def add_tensors(writer: gguf.GGUFWriter, stored: Any, config: dict[str, Any]) -> None:
    side, experts = config["head_dim"], config["num_local_experts"]
    add_wide(writer, "token_embd.weight", stored.get_tensor("model.embed_tokens.weight"))
    add_plain(writer, "output_norm.weight", stored.get_tensor("model.norm.weight"))
    for layer in range(config["num_hidden_layers"]):
        old, new = f"model.layers.{layer}", f"blk.{layer}"
        for theirs, ours in NORMS.items():
            add_plain(writer, f"{new}.{ours}.weight", stored.get_tensor(f"{old}.{theirs}.weight"))
        for theirs, ours in ATTENTION.items():
            matrix = stored.get_tensor(f"{old}.self_attn.{theirs}.weight")
            add_wide(writer, f"{new}.{ours}.weight", paired(matrix, side) if theirs in ("q_proj", "k_proj") else matrix)
        moe = f"{old}.block_sparse_moe"
        add_plain(writer, f"{new}.ffn_gate_inp.weight", stored.get_tensor(f"{moe}.gate.weight"))
        for theirs, ours in EXPERTS.items():
            parts = [f"{moe}.experts.{expert}.{theirs}" for expert in range(experts)]
            codes = torch.stack([stored.get_tensor(f"{part}.weight_packed") for part in parts])
            scales = torch.stack([stored.get_tensor(f"{part}.weight_scale") for part in parts])
            add_blocks(writer, f"{new}.{ours}.weight", mxfp4_blocks(codes, scales))


def paired(matrix: Tensor, side: int) -> Tensor:
    """llama.cpp's row order: rotary pairs in adjacent rows."""
    n, k = matrix.shape
    return matrix.view(n // side, 2, side // 2, k).transpose(1, 2).reshape(n, k)


def mxfp4_blocks(codes: Tensor, scales: Tensor) -> np.ndarray[Any, Any]:
    """Bytes of two codes, the first one low, as blocks of GGUF: a scale, then code i beside code i + 16."""
    single = torch.stack([codes & 15, codes >> 4], dim=-1).reshape(*scales.shape, 2, BLOCK // 2)
    both = single[..., 0, :] | single[..., 1, :] << 4
    return torch.cat([scales.unsqueeze(-1), both], dim=-1).flatten(-2).numpy()


def add_blocks(writer: gguf.GGUFWriter, name: str, blocks: np.ndarray[Any, Any]) -> None:
    writer.add_tensor(name, blocks, raw_dtype=gguf.GGMLQuantizationType.MXFP4)


def add_wide(writer: gguf.GGUFWriter, name: str, matrix: Tensor) -> None:
    numbers = matrix.to(torch.bfloat16).contiguous().view(torch.uint8).numpy()
    writer.add_tensor(name, numbers, raw_dtype=gguf.GGMLQuantizationType.BF16)


def add_plain(writer: gguf.GGUFWriter, name: str, numbers: Tensor) -> None:
    writer.add_tensor(name, numbers.float().numpy())


if __name__ == "__main__":
    main()
