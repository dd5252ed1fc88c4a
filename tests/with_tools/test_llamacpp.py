"""GGUF files of llama.cpp's quantiser, judged by the `gguf` package of the same project."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from judge import EXPERTS, HIDDEN, INTERMEDIATE, VOCABULARY, Matrices, assert_equal, read_experts

gguf = pytest.importorskip("gguf")
llama = pytest.importorskip("cyllama.llama.llama_cpp")

# The numbers of llama.h's llama_ftype.
FILES = {"F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K_M": 12, "Q4_K_M": 15,
         "Q5_K_M": 17, "Q6_K": 18, "IQ4_NL": 25, "IQ3_S": 26, "IQ4_XS": 30, "BF16": 32, "TQ1_0": 36, "TQ2_0": 37,
         "MXFP4_MOE": 38}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_experts(name: str, tmp_path: Path) -> None:
    """Rows of 128 columns are too short for the types with blocks of 256: llama.cpp takes others for them."""
    _write_floats(tmp_path / "floats.gguf")
    settings = llama.LlamaModelQuantizeParams()
    settings.ftype, settings.nthread = FILES[name], 1
    quantised = tmp_path / "quantised" / "model.gguf"
    quantised.parent.mkdir()
    llama.model_quantize(str(tmp_path / "floats.gguf"), str(quantised), settings)
    assert_equal(read_experts(quantised), _dequantised(quantised))


def _write_floats(path: Path) -> None:
    """A random qwen3moe in fp32."""
    arch, rng = "qwen3moe", np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_expert_feed_forward_length(INTERMEDIATE)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(EXPERTS)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_key_length(128)
    writer.add_value_length(128)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    block = "blk.0"
    shapes = {
        "token_embd.weight": (VOCABULARY, HIDDEN), "output.weight": (VOCABULARY, HIDDEN),
        "output_norm.weight": (HIDDEN,),
        f"{block}.attn_norm.weight": (HIDDEN,), f"{block}.ffn_norm.weight": (HIDDEN,),
        f"{block}.attn_q_norm.weight": (128,), f"{block}.attn_k_norm.weight": (128,),
        **{f"{block}.attn_{each}.weight": (HIDDEN, HIDDEN) for each in ("q", "k", "v", "output")},
        f"{block}.ffn_gate_inp.weight": (EXPERTS, HIDDEN),
        f"{block}.ffn_gate_exps.weight": (EXPERTS, INTERMEDIATE, HIDDEN),
        f"{block}.ffn_up_exps.weight": (EXPERTS, INTERMEDIATE, HIDDEN),
        f"{block}.ffn_down_exps.weight": (EXPERTS, HIDDEN, INTERMEDIATE),
    }  # fmt: skip
    for name, shape in shapes.items():
        writer.add_tensor(name, rng.standard_normal(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _dequantised(path: Path) -> Matrices:
    found: Matrices = {}
    for tensor in gguf.GGUFReader(path).tensors:
        for name in ("gate", "up", "down"):
            if tensor.name == f"blk.0.ffn_{name}_exps.weight":
                values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
                found |= {(e, name): torch.from_numpy(np.array(values[e], dtype=np.float32)) for e in range(EXPERTS)}
    return found
