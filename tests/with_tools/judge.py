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

EXPERTS, HIDDEN, INTERMEDIATE, VOCABULARY = 2, 256, 128, 64
PROJECTIONS = [(expert, name) for expert in range(EXPERTS) for name in ("gate", "up", "down")]
# By model type: the sizes that the families name differently.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "moe_intermediate_size": INTERMEDIATE, "intermediate_size": INTERMEDIATE, "num_experts": EXPERTS,
        "num_experts_per_tok": EXPERTS, "head_dim": 64,
    },
    "mixtral": {"intermediate_size": INTERMEDIATE, "num_local_experts": EXPERTS, "num_experts_per_tok": EXPERTS},
    "deepseek_v3": {
        "moe_intermediate_size": INTERMEDIATE, "intermediate_size": INTERMEDIATE, "n_routed_experts": EXPERTS,
        "num_experts_per_tok": EXPERTS, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
        "first_k_dense_replace": 0, "kv_lora_rank": 64, "q_lora_rank": 64, "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 64, "v_head_dim": 64,
    },
    "gpt_oss": {
        "intermediate_size": INTERMEDIATE, "num_local_experts": EXPERTS, "num_experts_per_tok": EXPERTS, "head_dim": 64,
    },
}  # fmt: skip
Matrices = dict[tuple[int, str], Tensor]  # by expert and projection: gate, up, down


def tiny_qwen3_moe(dtype: torch.dtype = torch.bfloat16) -> Any:
    """A random model of one layer, as transformers defines it."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, moe_intermediate_size=INTERMEDIATE, num_hidden_layers=1,
        num_experts=EXPERTS, num_experts_per_tok=EXPERTS, num_attention_heads=2, num_key_value_heads=1, head_dim=64,
        vocab_size=VOCABULARY, architectures=["Qwen3MoeForCausalLM"],
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config).to(dtype)


def tiny_model(family: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A random model of one layer of experts, which `FAMILIES` names."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    size = {"hidden_size": HIDDEN, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = AutoConfig.for_model(family, **size, vocab_size=VOCABULARY, **FAMILIES[family])
    return AutoModelForCausalLM.from_config(config).to(dtype)


def tiny_tokenizer() -> Any:
    """Tools that calibrate ask for a tokenizer."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {str(number): number for number in range(VOCABULARY)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="0")), unk_token="0", pad_token="0", eos_token="0"
    )


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
