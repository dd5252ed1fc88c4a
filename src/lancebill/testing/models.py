"""Writes an unquantised model with the tensor names of Qwen3-MoE, for demos and benchmarks.

It is written tensor by tensor, so that a large model does not need much memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from lancebill.checkpoint.write.save import CheckpointWriter
from lancebill.formats.stored import Stored
from lancebill.testing.checkpoints import Geometry

VOCABULARY = 512


def write_model(
    folder: Path, size: Geometry, *, seed: int = 0, progress: Callable[[int], None] = lambda _: None
) -> None:
    """Write random bf16 weights with a distribution like that of trained weights, and the configs."""
    shapes = dict(_shapes(size))
    generator = torch.Generator().manual_seed(seed)
    with CheckpointWriter(folder, {name: Stored("BF16", shape) for name, shape in shapes.items()}) as out:
        out.write_json("config.json", config(size))
        out.write_json("generation_config.json", {"do_sample": False})
        for name, shape in shapes.items():
            tensor = torch.ones(shape) if len(shape) == 1 else _weights(shape, generator)
            out.write(name, tensor.bfloat16())
            progress(2 * tensor.numel())


def config(size: Geometry) -> dict[str, object]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": size.hidden,
        "moe_intermediate_size": size.intermediate,
        "intermediate_size": size.intermediate,
        "num_experts": size.experts,
        "num_experts_per_tok": size.top_k,
        "num_hidden_layers": size.layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": size.hidden // 4,
        "hidden_act": "silu",
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": VOCABULARY,
    }


def _shapes(size: Geometry) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inter = size.hidden, size.intermediate
    yield "model.embed_tokens.weight", (VOCABULARY, hidden)
    for layer in range(size.layers):
        prefix = f"model.layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield f"{prefix}.self_attn.{name}.weight", (hidden, hidden)
        for name in ("self_attn.q_norm", "self_attn.k_norm"):
            yield f"{prefix}.{name}.weight", (hidden // 4,)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}.{name}.weight", (hidden,)
        yield f"{prefix}.mlp.gate.weight", (size.experts, hidden)
        for expert in range(size.experts):
            for name, shape in (
                ("gate_proj", (inter, hidden)),
                ("up_proj", (inter, hidden)),
                ("down_proj", (hidden, inter)),
            ):
                yield f"{prefix}.mlp.experts.{expert}.{name}.weight", shape
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (VOCABULARY, hidden)


def _weights(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Normal values with one scale per row and a few outlier columns."""
    rows = torch.rand(shape[0], 1, generator=generator).mul_(0.02).add_(0.01)
    columns = torch.where(torch.rand(1, shape[1], generator=generator) < 0.01, 6.0, 1.0)
    return torch.randn(shape, generator=generator).mul_(rows).mul_(columns)
