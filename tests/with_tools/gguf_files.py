"""GGUF files of a small qwen3moe, written and dequantised by llama.cpp's `gguf` package."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from judge import EXPERTS, HIDDEN, VOCABULARY, Matrices

gguf = pytest.importorskip("gguf")

# By projection and matrix: the bytes to store, and their type.
Quantise = Callable[[str, Any], tuple[Any, Any]]


def write_qwen3moe(path: Path, intermediate: int, quantise: Quantise | None = None) -> None:
    """A random model of one layer in fp32, in which the experts may be quantised."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(intermediate)
    writer.add_expert_feed_forward_length(intermediate)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(EXPERTS)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_key_length(128)
    writer.add_value_length(128)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    for name, shape in _shapes(intermediate).items():
        floats, projection = rng.standard_normal(shape, dtype=np.float32), name.removeprefix("blk.0.ffn_").split("_")
        if quantise is not None and projection[-1] == "exps.weight":
            stored, kind = quantise(projection[0], floats)
            writer.add_tensor(name, stored, raw_dtype=kind)
        else:
            writer.add_tensor(name, floats)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _shapes(intermediate: int) -> dict[str, tuple[int, ...]]:
    block = "blk.0"
    return {
        "token_embd.weight": (VOCABULARY, HIDDEN), "output.weight": (VOCABULARY, HIDDEN),
        "output_norm.weight": (HIDDEN,),
        f"{block}.attn_norm.weight": (HIDDEN,), f"{block}.ffn_norm.weight": (HIDDEN,),
        f"{block}.attn_q_norm.weight": (128,), f"{block}.attn_k_norm.weight": (128,),
        **{f"{block}.attn_{each}.weight": (HIDDEN, HIDDEN) for each in ("q", "k", "v", "output")},
        f"{block}.ffn_gate_inp.weight": (EXPERTS, HIDDEN),
        f"{block}.ffn_gate_exps.weight": (EXPERTS, intermediate, HIDDEN),
        f"{block}.ffn_up_exps.weight": (EXPERTS, intermediate, HIDDEN),
        f"{block}.ffn_down_exps.weight": (EXPERTS, HIDDEN, intermediate),
    }  # fmt: skip


def dequantised(path: Path) -> Matrices:
    """The experts of the first layer."""
    found: Matrices = {}
    for tensor in gguf.GGUFReader(path).tensors:
        for name in ("gate", "up", "down"):
            if tensor.name == f"blk.0.ffn_{name}_exps.weight":
                values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
                found |= {(e, name): torch.from_numpy(np.array(values[e], dtype=np.float32)) for e in range(EXPERTS)}
    return found
