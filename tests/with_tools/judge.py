"""Tiny mixtures for the tools, and our reading of the checkpoints that they write.

The tool makes a checkpoint and dequantises it itself. Nothing of lancebill takes part in either.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear, silu

from lancebill.checkpoint.load.projections import load_projection
from lancebill.checkpoint.read.files import Checkpoint
from lancebill.checkpoint.resolve import manifest as manifests
from lancebill.cli.verify import examine
from lancebill.layer.routed_experts import RoutedExperts
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
    "qwen2_moe": {
        "moe_intermediate_size": INTERMEDIATE, "shared_expert_intermediate_size": INTERMEDIATE,
        "intermediate_size": INTERMEDIATE, "num_experts": EXPERTS, "num_experts_per_tok": EXPERTS,
    },
    "olmoe": {"intermediate_size": INTERMEDIATE, "num_experts": EXPERTS, "num_experts_per_tok": EXPERTS},
    "glm4_moe": {
        "moe_intermediate_size": INTERMEDIATE, "intermediate_size": INTERMEDIATE, "n_routed_experts": EXPERTS,
        "num_experts_per_tok": EXPERTS, "n_shared_experts": 1, "first_k_dense_replace": 0, "head_dim": 64,
    },
    "minimax_m2": {
        "intermediate_size": INTERMEDIATE, "num_local_experts": EXPERTS, "num_experts_per_tok": EXPERTS,
        "head_dim": 64, "rotary_dim": 32,
    },
    "granitemoe": {"intermediate_size": INTERMEDIATE, "num_local_experts": EXPERTS, "num_experts_per_tok": EXPERTS},
    "deepseek_v3": {
        "moe_intermediate_size": INTERMEDIATE, "intermediate_size": INTERMEDIATE, "n_routed_experts": EXPERTS,
        "num_experts_per_tok": EXPERTS, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
        "first_k_dense_replace": 0, "kv_lora_rank": 128, "q_lora_rank": 128, "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 64, "v_head_dim": 64, "num_key_value_heads": 2,
    },
    "gpt_oss": {
        "intermediate_size": INTERMEDIATE, "num_local_experts": EXPERTS, "num_experts_per_tok": EXPERTS, "head_dim": 64,
        "num_hidden_layers": 2,
    },
}  # fmt: skip
Matrices = dict[tuple[int, str], Tensor]  # by expert and projection: gate, up, down
Layers = dict[int, Matrices]
READ: list[str] = []  # the formats of the checkpoints that were read, for the reports
# How files name the matrices of experts that are stored one by one.
EXPERT = re.compile(r".*\blayers\.(\d+)\..*\bexperts\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w3|w2)\.(\w+)")
NAMES = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}


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


def tiny_model(family: str, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Any:
    """A random model of one layer of experts, which `FAMILIES` names; `changes` of its config."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    size = {"hidden_size": HIDDEN, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = AutoConfig.for_model(family, **{**size, "vocab_size": VOCABULARY, **FAMILIES[family], **changes})
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    for parameter in model.parameters():  # some families leave their experts as they were allocated
        torch.nn.init.normal_(parameter, std=0.1)
    return model


def with_positive_weights(model: Any) -> Any:
    """Of which asymmetric rounding gives zero points of 0."""
    for parameter in model.parameters():
        parameter.data.abs_()
    return model


def calibration(batches: int = 4) -> list[dict[str, Tensor]]:
    """A few random tokens for the tools that calibrate."""
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(0, VOCABULARY, (1, 32), generator=generator)} for _ in range(batches)]


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


def stored_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint's files, for a judge."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def named_experts(tensors: Mapping[str, Tensor], kind: str = "weight") -> Layers:
    """A judge's dequantised matrices, or the biases, sorted by their names."""
    layers: Layers = {}
    for name, tensor in tensors.items():
        if (match := EXPERT.fullmatch(name)) is not None and match[4] == kind:
            layers.setdefault(int(match[1]), {})[int(match[2]), NAMES[match[3]]] = tensor
    return layers


def assert_judged(folder: Path, want: Layers, *, rounding: float = 0.0, biases: Layers | None = None) -> None:
    """Every expert of every layer has the judge's numbers, and layers compute what these numbers do."""
    assert want, "the judge found no experts"
    got = read_layers(folder)
    assert got.keys() == want.keys()
    for index, matrices in want.items():
        assert_equal(got[index], matrices, rounding=rounding)
        assert_computes(folder, index, matrices, biases[index] if biases else {})


def assert_computes(folder: Path, index: int, matrices: Matrices, biases: Matrices) -> None:
    """A layer against a dense computation. Those with biases are gpt-oss's, which has an activation of its own."""
    experts, hidden = 1 + max(expert for expert, _ in matrices), matrices[0, "gate"].shape[1]
    x = torch.randn(5, hidden, generator=torch.Generator().manual_seed(0))
    weights = torch.rand(5, experts, generator=torch.Generator().manual_seed(1))
    want = torch.zeros_like(x, dtype=torch.float64)
    for e in range(experts):

        def project(rows: Tensor, name: str, e: int = e) -> Tensor:
            return linear(rows, matrices[e, name].double(), biases[e, name].double() if biases else None)

        gate, up = (project(x.double(), name) for name in ("gate", "up"))
        hidden_rows = _clamped_swiglu(gate, up) if biases else silu(gate) * up
        want += weights[:, e : e + 1] * project(hidden_rows, "down")
    layer = RoutedExperts.from_checkpoint(folder, index, backend="reference", dtype=torch.float32, top_k=experts)
    got = layer(x, topk_ids=torch.arange(experts).expand(5, experts), topk_weights=weights)
    error = float((got - want).norm() / want.norm())
    assert error < 1e-6, f"layer {index} differs by {error:.1e} from a dense computation"


def _clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    gate = gate.clamp(max=7.0)
    return (up.clamp(-7.0, 7.0) + 1) * gate * torch.sigmoid(1.702 * gate)


def read_layers(folder: Path) -> Layers:
    """Every expert of every layer in fp32; `verify --strict` and `verify --values` must find nothing wrong."""
    for report in (examine(folder, strict=True), examine(folder, values=True)):
        assert report.ok, [problem.render() for problem in report.problems]
    with Checkpoint.open(folder) as checkpoint:
        manifest = manifests.build(checkpoint.config, checkpoint.headers)
        manifest.check(str(folder))
        READ.append(manifest.format.name)
        return {
            index: {at: dequantize(load_projection(checkpoint.read, one)) for at, one in layer.projections.items()}
            for index, layer in manifest.layers.items()
        }


def read_experts(folder: Path) -> Matrices:
    """Every expert of the first layer."""
    return read_layers(folder)[0]


def assert_equal(got: Matrices, want: Matrices, *, rounding: float = 0.0) -> None:
    """The same experts with the same numbers; `rounding`: relative, where the tool multiplies in another order."""
    assert got.keys() == want.keys()
    for at, matrix in want.items():
        expected = matrix.float()
        assert float(expected.abs().max()) > 0, f"{at} is zero: nothing was compared"
        assert torch.allclose(got[at], expected, rtol=rounding, atol=0), (
            f"{at}: {int((got[at] != expected).sum())} of {expected.numel()} numbers differ"
        )
