"""Tiny mixtures for the tools, and our reading of the checkpoints that they write.

The tool makes a checkpoint and dequantises it itself. Nothing of lancebill takes part in either.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lancebill.checkpoint.load.load_experts import load_projection
from lancebill.checkpoint.read.files import Checkpoint
from lancebill.checkpoint.resolve import manifest as manifests
from lancebill.cli.verify import examine
from lancebill.numbers.codec import dequantize

EXPERTS, HIDDEN, INTERMEDIATE = 2, 256, 128
PROJECTIONS = [(expert, name) for expert in range(EXPERTS) for name in ("gate", "up", "down")]
Matrices = dict[tuple[int, str], Tensor]  # by expert and projection: gate, up, down


def tiny_qwen3_moe(dtype: torch.dtype = torch.bfloat16) -> Any:
    """A random model of one layer, as transformers defines it."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, moe_intermediate_size=INTERMEDIATE, num_hidden_layers=1,
        num_experts=EXPERTS, num_experts_per_tok=EXPERTS, num_attention_heads=2, num_key_value_heads=1, head_dim=64,
        vocab_size=64, architectures=["Qwen3MoeForCausalLM"],
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config).to(dtype)


def linear_experts(dtype: torch.dtype = torch.float32) -> torch.nn.ModuleList:
    """The experts of one layer as linear modules, which most tools quantise: gate_proj, up_proj and down_proj."""
    torch.manual_seed(0)
    sizes = {
        "gate_proj": (HIDDEN, INTERMEDIATE),
        "up_proj": (HIDDEN, INTERMEDIATE),
        "down_proj": (INTERMEDIATE, HIDDEN),
    }

    def expert() -> torch.nn.ModuleDict:
        return torch.nn.ModuleDict({name: torch.nn.Linear(*size, bias=False).to(dtype) for name, size in sizes.items()})

    return torch.nn.ModuleList(expert() for _ in range(EXPERTS))


def by_projection(experts: torch.nn.ModuleList) -> Iterator[tuple[tuple[int, str], Any]]:
    """The modules of `linear_experts`, by expert and projection."""
    return ((at, experts.get_submodule(f"{at[0]}.{at[1]}_proj")) for at in PROJECTIONS)


def write_config(folder: Path, section: Mapping[str, Any]) -> None:
    """config.json of a model that has these experts, with the tool's quantisation section."""
    model = {
        "model_type": "qwen3_moe", "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_hidden_layers": 1,
        "moe_intermediate_size": INTERMEDIATE, "num_experts": EXPERTS, "num_experts_per_tok": EXPERTS,
        "norm_topk_prob": True, "quantization_config": dict(section),
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(model, default=str))


def read_experts(folder: Path) -> Matrices:
    """Every expert of the first layer, dequantised to fp32; `verify --strict` must find nothing wrong."""
    report = examine(folder, strict=True)
    assert report.ok, [problem.render() for problem in report.problems]
    with Checkpoint.open(folder) as checkpoint:
        manifest = manifests.build(checkpoint.config, checkpoint.headers)
        manifest.check(str(folder))
        stored = manifest.layers[0].projections
        return {at: dequantize(load_projection(checkpoint.read, projection)) for at, projection in stored.items()}


def assert_equal(got: Matrices, want: Matrices, *, rounding: float = 0.0) -> None:
    """The same experts with the same numbers; `rounding`: relative, where the tool multiplies in another order."""
    assert got.keys() == want.keys()
    for at, matrix in want.items():
        expected = matrix.float()
        assert float(expected.abs().max()) > 0, f"{at} is zero: nothing was compared"
        assert torch.allclose(got[at], expected, rtol=rounding, atol=0), (
            f"{at}: {int((got[at] != expected).sum())} of {expected.numel()} numbers differ"
        )
