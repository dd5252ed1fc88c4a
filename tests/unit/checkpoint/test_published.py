"""Checkpoints as people publish them, in spellings that differ from those of the formats' own examples.

Each is read exactly, and nothing about it is suspicious; what cannot be read is refused with a reason.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import published as p
import pytest
import torch
from published import EXPERTS, HIDDEN, INTER
from torch import Tensor

from lancebill.checkpoint.load.projections import load_projection
from lancebill.checkpoint.read.files import Checkpoint
from lancebill.checkpoint.resolve.manifest import build
from lancebill.cli.convert import run_conversion, target_of
from lancebill.cli.verify import examine
from lancebill.errors import MixedSpecs
from lancebill.numbers.codec import dequantize

OPTIONS = {"device": "cpu", "mx_rule": "floor", "search": False, "overwrite": False, "experts_only": False}
MLP, ROUTER = "model.layers.0.mlp.experts.", "model.layers.0.mlp.gate.weight"


@dataclass(frozen=True)
class Published:
    """config.json, the experts and what they stand for, the other tensors, and files next to config.json."""

    config: dict[str, Any]
    experts: tuple[p.Stored, p.Truth]
    others: p.Stored = field(default_factory=lambda: {ROUTER: torch.randn(EXPERTS, HIDDEN)})
    files: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        return p.write(folder, {"config.json": self.config, **self.files}, self.experts[0] | self.others)


def unsloth_gpt_oss() -> Published:
    """Lists of linear modules, because bitsandbytes quantises only those; their rows alternate as in gpt-oss."""
    tensors, truth = {}, {}
    for expert in range(EXPERTS):
        for name, n, k in (("gate_up_projs", 2 * INTER, HIDDEN), ("down_projs", HIDDEN, INTER)):
            stored, matrix = p.nf4(n, k)
            tensors |= {f"{MLP}{name}.{expert}{suffix}": tensor for suffix, tensor in stored.items()}
            tensors[f"{MLP}{name}.{expert}.bias"] = torch.randn(n).bfloat16()
            found = {"gate": matrix[0::2], "up": matrix[1::2]} if k == HIDDEN else {"down": matrix}
            truth |= {(expert, projection): rows for projection, rows in found.items()}
    router = "model.layers.0.mlp.router.linear."
    others = {router + "weight": torch.randn(EXPERTS, HIDDEN), router + "bias": torch.randn(EXPERTS)}
    quant = {
        "_load_in_4bit": True, "_load_in_8bit": False, "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "uint8", "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": False,
        "llm_int8_enable_fp32_cpu_offload": False, "llm_int8_has_fp16_weight": False,
        "llm_int8_skip_modules": ["router", "lm_head"], "llm_int8_threshold": 6.0, "load_in_4bit": True,
        "load_in_8bit": False, "quant_method": "bitsandbytes",
    }  # fmt: skip
    config = p.model("gpt_oss", num_local_experts=EXPERTS, num_experts=..., swiglu_limit=7.0)
    return Published(config | {"quantization_config": quant}, (tensors, truth), others)


def llama4_fp8() -> Published:
    """Transposed matrices; the scales of one are a row, those of the other a column."""
    home, tensors, truth = "language_model.model.layers.0.feed_forward.experts.", {}, {}
    made = {name: [p.fp8_rows(*size) for _ in range(EXPERTS)] for name, size in (
        ("gate_up_proj", (2 * INTER, HIDDEN)), ("down_proj", (HIDDEN, INTER)),
    )}  # fmt: skip
    for name, matrices in made.items():
        tensors[home + name] = torch.stack([codes.view(torch.uint8).t() for codes, _, _ in matrices])
        scales = torch.stack([scales for _, scales, _ in matrices])
        tensors[f"{home}{name}_scale"] = scales.mT if name == "gate_up_proj" else scales
    tensors = {k: t.contiguous().view(torch.float8_e4m3fn) if t.dtype == torch.uint8 else t for k, t in tensors.items()}
    for expert in range(EXPERTS):
        gate_up, down = made["gate_up_proj"][expert][2], made["down_proj"][expert][2]
        truth |= {(expert, "gate"): gate_up[:INTER], (expert, "up"): gate_up[INTER:], (expert, "down"): down}
    text = p.model("llama4_text", num_local_experts=EXPERTS, num_experts=..., moe_intermediate_size=...)
    quant = {"activation_scale_ub": 1200.0, "modules_to_not_convert": ["router"], "quant_method": "fbgemm_fp8"}
    config = {"model_type": "llama4", "text_config": text, "quantization_config": quant}
    return Published(config, (tensors, truth), {
        "language_model.model.layers.0.feed_forward.router.weight": torch.randn(EXPERTS, HIDDEN)
    })  # fmt: skip


def modelopt_gpt_oss() -> Published:
    """NVFP4 by ModelOpt: codes and scales are transposed like the matrices, and all experts share one factor."""
    tensors, truth = {}, {}
    for name, n, k in (("gate_up_proj", 2 * INTER, HIDDEN), ("down_proj", HIDDEN, INTER)):
        made = [p.nvfp4(n, k) for _ in range(EXPERTS)]
        tensors[MLP + name] = torch.stack([stored[".weight"] for stored, _ in made]).mT
        scales = torch.stack([stored[".weight_scale"].view(torch.uint8) for stored, _ in made])
        tensors[f"{MLP}{name}_weight_scale"] = scales.mT.contiguous().view(torch.float8_e4m3fn)
        factor = tensors[f"{MLP}{name}_weight_scale_2"] = torch.tensor(0.5)
        tensors[f"{MLP}{name}_bias"] = torch.randn(EXPERTS, n).bfloat16()
        for expert, (stored, matrix) in enumerate(made):
            matrix = matrix / stored[".weight_scale_2"] * factor
            found = {"gate": matrix[0::2], "up": matrix[1::2]} if k == HIDDEN else {"down": matrix}
            truth |= {(expert, projection): rows for projection, rows in found.items()}
    router = "model.layers.0.mlp.router."
    others = {router + "weight": torch.randn(EXPERTS, HIDDEN), router + "bias": torch.randn(EXPERTS)}
    config = p.model("gpt_oss", num_local_experts=EXPERTS, num_experts=..., swiglu_limit=7.0)
    quant = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["*router*"]}
    return Published(config | {"quantization_config": quant}, (tensors, truth), others)


def modelopt_qwen3_vl() -> Published:
    """A list of modules for each projection: the number of the expert comes last."""
    home = "model.language_model.layers.0.mlp.experts."
    tensors, truth = p.experts(p.nvfp4, home)
    turned = {}
    for name, tensor in tensors.items():
        expert, projection, part = name.removeprefix(home).split(".")
        turned[f"{home}{projection}.{expert}.{part}"] = tensor
    quant = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["*gate"]}
    text = p.model("qwen3_vl_moe_text", norm_topk_prob=True)
    config = {"model_type": "qwen3_vl_moe", "text_config": text, "quantization_config": quant}
    gate = {"model.language_model.layers.0.mlp.gate.weight": torch.randn(EXPERTS, HIDDEN)}
    return Published(config, (turned, truth), gate)


QWEN = p.model("qwen3_moe", norm_topk_prob=True)
LAYERS = {f"{MLP}{e}.{name}_proj": {"quant_algo": "NVFP4"} for e in range(EXPERTS) for name in ("gate", "up", "down")}
MIXED = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None}
PRODUCER = {"name": "modelopt", "version": "0.33.0"}


def modelopt(section: dict[str, Any] | None, files: dict[str, Any]) -> Callable[[], Published]:
    """NVFP4, with the algorithms of the layers in one of several places."""
    config = QWEN if section is None else QWEN | {"quantization_config": {"quant_method": "modelopt", **section}}
    return lambda: Published(config, p.experts(p.nvfp4, MLP), files=files)


def recast_nvfp4() -> Published:
    """Codes as signed bytes, and the factor of the matrix in 16 bits."""
    tensors, truth = p.experts(p.nvfp4, MLP)
    for name in [name for name in tensors if name.endswith(".weight_scale_2")]:
        wide, tensors[name] = tensors[name], tensors[name].bfloat16()
        expert, projection = name.removeprefix(MLP).split(".")[:2]
        truth[int(expert), projection.removesuffix("_proj")] *= tensors[name].float() / wide
    tensors |= {name: tensor.view(torch.int8) for name, tensor in tensors.items() if tensor.dtype == torch.uint8}
    quant = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": []}
    return Published(QWEN | {"quantization_config": quant}, (tensors, truth))


M3_LAYER = "language_model.model.layers.0."
M3_HOME, M3_NAMES = M3_LAYER + "block_sparse_moe.experts.", ("w1", "w3", "w2")


def minimax_m3(packer: p.Packer, quant: dict[str, Any]) -> Callable[[], Published]:
    """Experts of some kind, and attention in MXFP8."""

    def make() -> Published:
        text = p.model(
            "minimax_m3_vl_text", num_local_experts=EXPERTS, num_experts=..., moe_intermediate_size=...,
            scoring_func="sigmoid", use_routing_bias=True, hidden_act="swigluoai", swiglu_limit=7.0, swiglu_alpha=1.702,
        )  # fmt: skip
        router = {"gate.weight": (EXPERTS, HIDDEN), "e_score_correction_bias": (EXPERTS,)}
        others = {f"{M3_LAYER}block_sparse_moe.{name}": torch.randn(size) for name, size in router.items()}
        others |= {f"{M3_LAYER}self_attn.q_proj{s}": tensor for s, tensor in p.mxfp8(HIDDEN, HIDDEN)[0].items()}
        config = {"model_type": "minimax_m3_vl", "text_config": text, "quantization_config": quant}
        return Published(config, p.experts(packer, M3_HOME, M3_NAMES), others)

    return make


M3_LAYERS = {
    f"{M3_HOME}{e}.{name}": {"quant_algo": "NVFP4", "group_size": 16} for e in range(EXPERTS) for name in M3_NAMES
}
M3_LAYERS[M3_LAYER + "self_attn.q_proj"] = {"quant_algo": "MXFP8"}


def mlx(**sections: Any) -> Callable[[], Published]:
    def make() -> Published:
        tensors, truth = p.experts(p.mlx, MLP)
        stacked = {
            f"model.layers.0.mlp.switch_mlp.{name}": torch.stack([tensors[f"{MLP}{e}.{name}"] for e in range(EXPERTS)])
            for name in (key.removeprefix(f"{MLP}0.") for key in tensors if key.startswith(f"{MLP}0."))
        }
        return Published(QWEN | sections, (stacked, truth))

    return make


V4_NAMES = ("w1", "w3", "w2")


def deepseek_v4_f4() -> Published:
    """The experts' codes in safetensors' own 4-bit type, whose shape counts codes and not bytes."""
    tensors, truth = p.experts(p.mxfp4, "layers.0.ffn.experts.", V4_NAMES)
    pairs = {k: t.view(torch.float4_e2m1fn_x2) if t.dtype == torch.uint8 else t for k, t in tensors.items()}
    return deepseek_v4((pairs, truth))


def deepseek_v4_nvfp4() -> Published:
    """NVIDIA's: NVFP4 experts, but for the layer that predicts a further token."""
    quant = {
        "moe_quant_algo": "NVFP4", "quant_algo": "MIXED_PRECISION", "group_size": 16, "producer": PRODUCER,
        "ignore": ["mtp.*"], "quantized_layers": {"layers.0.ffn.experts": {"quant_algo": "NVFP4", "group_size": 16}},
    }  # fmt: skip
    further, _ = p.experts(p.mxfp4, "mtp.0.ffn.experts.", V4_NAMES)
    return deepseek_v4(p.experts(p.nvfp4, "layers.0.ffn.experts.", V4_NAMES), further, **quant)


def deepseek_v4(made: tuple[p.Stored, p.Truth], others: p.Stored | None = None, **keys: Any) -> Published:
    quant = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128], **keys}
    config = p.model(
        "deepseek_v4", n_routed_experts=EXPERTS, num_experts=..., scoring_func="sqrtsoftplus", norm_topk_prob=True,
        routed_scaling_factor=1.5, topk_method="noaux_tc", swiglu_limit=10.0, num_hash_layers=0,
    )  # fmt: skip
    gate = {"layers.0.ffn.gate.weight": torch.randn(EXPERTS, HIDDEN), "layers.0.ffn.gate.bias": torch.randn(EXPERTS)}
    return Published(config | {"quantization_config": quant}, made, gate | (others or {}))


ONE_LEVEL = {"bits": 4, "group_size": 16, "data_type": "nvfp4_v2", "act_bits": 4, "act_data_type": "nvfp4_v2"}


def auto_round(packing: str, **keys: Any) -> Callable[[], Published]:
    quant = {"quant_method": "auto-round", "packing_format": packing, "sym": True, "model_free": True, **keys}
    return lambda: Published(QWEN | {"quantization_config": quant}, p.experts(p.fp4_e5m3, MLP))


AFFINE = {"group_size": 64, "bits": 4}
PUBLISHED: dict[str, Callable[[], Published]] = {
    "unsloth gpt-oss": unsloth_gpt_oss,
    "llama4 fp8": llama4_fp8,
    "gpt-oss, nvfp4 by ModelOpt": modelopt_gpt_oss,
    "qwen3-vl, nvfp4 by ModelOpt": modelopt_qwen3_vl,
    "modelopt, layers in another file": modelopt(
        MIXED, {"hf_quant_config.json": {"producer": PRODUCER, "quantization": MIXED | {"quantized_layers": LAYERS}}}
    ),
    "modelopt, layers in a third file": modelopt(
        None, {"hf_quant_config.json": {"quantization": MIXED}, "quant_cfg.json": MIXED | {"quantized_layers": LAYERS}}
    ),
    "modelopt, one file in the other": modelopt(
        {"producer": PRODUCER, "quantization": MIXED | {"quantized_layers": LAYERS}}, {}
    ),
    "modelopt, arguments without a group": modelopt(
        {"quant_algo": "NVFP4", "weights": {"num_bits": 4, "type": "float", "group_size": 16}, "ignore": []}, {}
    ),
    "mlx, beside the section of its source": mlx(
        quantization=AFFINE, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]}
    ),
    "mlx, made by AutoRound": mlx(
        quantization=AFFINE, quantization_config={"quant_method": "auto-round", "packing_format": "mlx", **AFFINE}
    ),
    "auto-round, fp4 with e5m3": auto_round("auto_round:llm_compressor_nvfp4_e5m3", **ONE_LEVEL),
    "deepseek-v4, 4-bit type": deepseek_v4_f4,
    "deepseek-v4, nvfp4 by NVIDIA": deepseek_v4_nvfp4,
    "minimax-m3": minimax_m3(
        p.mxfp8, {"quant_method": "mxfp8", "activation_scheme": "dynamic", "weight_block_size": [1, 32]}
    ),
    "minimax-m3, the method alone": minimax_m3(p.mxfp8, {"quant_method": "mxfp8", "ignored_layers": ["lm_head"]}),
    "minimax-m3.1": minimax_m3(
        p.nvfp4_divided,
        {"quant_method": "mxfp8", "moe_quant_algo": "NVFP4", "moe_quant_format": "nvfp4-pack-quantized"},
    ),
    "minimax-m3, nvfp4 by NVIDIA": minimax_m3(p.nvfp4, MIXED | {"quantized_layers": M3_LAYERS}),
    "nvfp4, saved again in 16 bits": recast_nvfp4,
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_checkpoint_is_read_exactly(name: str, tmp_path: Path) -> None:
    made = PUBLISHED[name]()
    folder = made.write(tmp_path)
    report = examine(folder, strict=True)
    assert report.ok and report.layers == 1, [problem.render() for problem in report.problems]
    with Checkpoint.open(folder) as checkpoint:
        layer = build(checkpoint.config, checkpoint.headers).layers[0]
        for key, matrix in made.experts[1].items():
            assert same(dequantize(load_projection(checkpoint.read, layer.projections[key])), matrix), key


def same(got: Tensor, matrix: Tensor) -> bool:
    """Equal but for the order in which two scales were multiplied."""
    return torch.allclose(got.float(), matrix, rtol=3e-7, atol=0)


@pytest.mark.parametrize(
    "name",
    [
        "mlx, beside the section of its source",
        "modelopt, layers in a third file",
        "minimax-m3, nvfp4 by NVIDIA",
        "deepseek-v4, nvfp4 by NVIDIA",
    ],
)
def test_a_conversion_leaves_no_section_of_its_source(name: str, tmp_path: Path) -> None:
    source = PUBLISHED[name]().write(tmp_path / "source")
    run_conversion(source, tmp_path / "out", target_of("mxfp4"), OPTIONS)
    report = examine(tmp_path / "out", strict=True)
    assert report.ok, [problem.render() for problem in report.problems]
    assert "quantization" not in json.loads((tmp_path / "out/config.json").read_text())
    assert not (tmp_path / "out/quant_cfg.json").exists()


FP8 = {"quant_method": "mxfp8", "activation_scheme": "dynamic"}


@pytest.mark.parametrize("listed, found", [
    (["model.layers.0"], 0), (["language_model.model.layers.0.mlp.experts"], 0), (["model.layers.10"], 1), ([], 1),
], ids=str)  # fmt: skip
def test_a_layer_that_is_left_out_under_another_prefix_is_no_problem(
    listed: list[str], found: int, tmp_path: Path
) -> None:
    """Engines have classes of their own for a model, and so names of their own for its modules."""
    layer = "model.language_model.layers.{}.mlp."
    tensors = p.experts(p.bf16, layer.format(0) + "experts.")[0] | p.experts(p.mxfp8, layer.format(1) + "experts.")[0]
    tensors |= {layer.format(i) + "gate.weight": torch.randn(EXPERTS, HIDDEN) for i in range(2)}
    text = p.model("qwen3_5_moe_text", num_hidden_layers=2)
    config = {"model_type": "qwen3_5_moe", "text_config": text}
    quant = FP8 | {"modules_to_not_convert": listed}
    report = examine(p.write(tmp_path, {"config.json": config | {"quantization_config": quant}}, tensors))
    assert report.layers == 2 and len(report.problems) == found, [problem.render() for problem in report.problems]


@pytest.mark.parametrize("quant, files, reason", [
    ({"quantization": "wint2", "moe_quant_type": "w4w2"}, {}, "PaddlePaddle"),
    ({"quant_method": "slimquant_w4a8"}, {}, "one of these formats"),
    ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, {}, "hf_quant_config.json"),
    (None, {"params.json": {"dim": HIDDEN}}, "Mistral's own layout"),
], ids=["paddle", "unknown", "modelopt without layers", "mistral"])  # fmt: skip
def test_what_cannot_be_read_is_refused_with_a_reason(
    quant: dict[str, Any] | None, files: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    made = Published(QWEN | {"quantization_config": quant}, p.experts(p.int4_words, MLP))
    folder = made.write(tmp_path)
    if files:
        (tmp_path / "config.json").unlink()
        p.write(folder, files, made.experts[0])
    report = examine(folder)
    assert len(report.problems) == 1 and reason in report.problems[0].render()


def test_gate_and_up_of_different_types_can_be_converted(tmp_path: Path) -> None:
    """As tools choose bits for each matrix: no layer can hold them, but each matrix is read by itself."""
    packed, plain = p.experts(p.mlx, MLP), p.experts(p.bf16, MLP)
    chosen = {name: tensor for name, tensor in packed[0].items() if "up_proj" not in name}
    chosen |= {name: tensor for name, tensor in plain[0].items() if "up_proj" in name}
    source = Published(QWEN | {"quantization": AFFINE}, (chosen, packed[1])).write(tmp_path / "source")
    report = examine(source)
    assert {type(problem) for problem in report.problems} == {MixedSpecs}
    assert all("lancebill convert" in str(problem.hint) for problem in report.problems)
    run_conversion(source, tmp_path / "out", target_of("fp32"), OPTIONS)
    truth = packed[1] | {key: matrix for key, matrix in plain[1].items() if key[1] == "up"}
    with Checkpoint.open(tmp_path / "out") as checkpoint:
        layer = build(checkpoint.config, checkpoint.headers).layers[0]
        for key, matrix in truth.items():
            assert same(dequantize(load_projection(checkpoint.read, layer.projections[key])), matrix), key


def test_a_config_without_a_section_is_named_as_the_reason(tmp_path: Path) -> None:
    report = examine(Published(QWEN, p.experts(p.int4_words, MLP)).write(tmp_path))
    assert report.problems and all("'quantization_config'" in str(problem.hint) for problem in report.problems)


@pytest.mark.parametrize("targets", [["Qwen3MoeMLP"], ["model.layers.0.mlp.experts"], []], ids=str)
def test_a_config_that_leaves_out_quantised_experts_is_named_as_the_reason(targets: list[str], tmp_path: Path) -> None:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    quant = {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": targets, "weights": weights}},
    }  # fmt: skip
    made = Published(QWEN | {"quantization_config": quant}, p.experts(p.int4_words, MLP))
    report = examine(made.write(tmp_path))
    assert len(report.problems) == 3 * EXPERTS
    assert {problem.what for problem in report.problems} == {
        "the tensors are quantised, but the config says that the module is not"
    }
    assert ".weight_packed" in str(report.problems[0].got) and "config.json targets" in str(report.problems[0].hint)
