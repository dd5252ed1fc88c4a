"""Checkpoints of AutoRound, judged by its own inference modules, or by the library whose format it exports to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed import ROUNDING, converters, judged_by_compressed_tensors
from judge import (
    EXPERT,
    FAMILIES,
    Layers,
    assert_judged,
    calibration,
    named_experts,
    stored_tensors,
    tiny_model,
    tiny_tokenizer,
    with_positive_weights,
)
from torch import Tensor

auto_round = pytest.importorskip("auto_round")
modules = pytest.importorskip("auto_round.experimental.qmodules")
gptq_v1 = pytest.importorskip("auto_round_extension.torch.qlinear_torch_zp")
gptq_v2 = pytest.importorskip("auto_round_extension.torch.qlinear_torch")
awq = pytest.importorskip("auto_round.export.export_to_awq.utils")
schemes = pytest.importorskip("auto_round.schemes")
transformers = pytest.importorskip("transformers")

# By name: the scheme, the format, and other options.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    **{f"int{bits}-auto_round": (f"W{bits}A16", "auto_round", {}) for bits in (2, 3, 4, 8)},
    **{f"int{bits}-auto_gptq": (f"W{bits}A16", "auto_gptq", {}) for bits in (2, 3, 4, 8)},
    **{f"int{bits}-gptqmodel": (f"W{bits}A16", "auto_round:gptqmodel", {}) for bits in (2, 4)},
    **{f"int{bits}-llm_compressor": (f"W{bits}A16", "llm_compressor", {}) for bits in (2, 3, 4, 5, 6, 7, 8)},
    "int4-auto_awq": ("W4A16", "auto_awq", {}),
    "int4-awq": ("W4A16", "auto_round:auto_awq", {}),
    "int4-zp-auto_round": ("W4A16", "auto_round", {"sym": False}),
    "int4-zp-auto_gptq": ("W4A16", "auto_gptq", {"sym": False}),
    "int4-zp-gptqmodel": ("W4A16", "auto_round:gptqmodel", {"sym": False}),
    "int4-zp-auto_awq": ("W4A16", "auto_awq", {"sym": False}),
    "int4-g32-auto_awq": ("W4A16", "auto_awq", {"group_size": 32}),
    "int4-g64-zp-auto_awq": ("W4A16", "auto_awq", {"group_size": 64, "sym": False}),
    "int4-g32": ("W4A16", "auto_round", {"group_size": 32}),
    "int2-g64-zp": ("W2A16", "auto_round", {"group_size": 64, "sym": False}),
    "int4-channel": ("W4A16", "auto_round", {"group_size": -1}),
    "int4-tuned": ("W4A16", "auto_round", {"iters": 2, "enable_torch_compile": False}),
    "int8-int8": ("INT8", "llm_compressor", {}),
    "mxfp4": ("MXFP4", "auto_round", {}),
    "mxfp4-rceil": ("MXFP4_RCEIL", "auto_round", {}),
    "mxfp4-llm_compressor": ("MXFP4", "llm_compressor", {}),
    "mxfp8": ("MXFP8", "auto_round", {}),
    "mxfp8-llm_compressor": ("MXFP8", "llm_compressor", {}),
    "nvfp4": ("NVFP4", "auto_round", {}),
    "nvfp4-llm_compressor": ("NVFP4", "llm_compressor", {}),
    "fp8-tensor": ("FPW8A16", "auto_round", {}),
    "fp8-static": ("FP8_STATIC", "auto_round", {}),
    "fp8-static-llm_compressor": ("FP8_STATIC", "llm_compressor", {}),
    "fp8-block": ("FP8_BLOCK", "auto_round", {}),
    "fp8-block-fp8": ("FP8_BLOCK", "fp8", {}),
    "fp8-block-llm_compressor": ("FP8_BLOCK", "llm_compressor", {}),
}
SCHEME_KEYS = ("bits", "group_size", "sym", "data_type", "act_bits", "act_group_size", "act_sym", "act_data_type")
FLOATS = {4: modules.MXFP4QuantLinear, 8: modules.MXFP8QuantLinear}
MIXED = {
    "down-8-bits": {"down_proj": {"bits": 8}},
}


@pytest.mark.parametrize("name", CASES)
def test_settings(name: str, tmp_path: Path) -> None:
    scheme, fmt, options = CASES[name]
    folder = _written(tmp_path, scheme, fmt, **options)
    assert_judged(folder, _judged(folder), rounding=ROUNDING if "NVFP4" in scheme else 0.0)


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("fmt", ["auto_gptq", "auto_round:auto_gptq", "auto_round"])
def test_positive_weights(fmt: str, bits: int, tmp_path: Path) -> None:
    """Their zero points are 0, which this release stores as 1 in version 1."""
    folder = _written(tmp_path, f"W{bits}A16", fmt, with_positive_weights(tiny_model("qwen3_moe")), sym=False)
    assert_judged(folder, _judged(folder))


@pytest.mark.parametrize("fmt", ["auto_round", "auto_gptq", "llm_compressor"])
@pytest.mark.parametrize("name", MIXED)
def test_mixed_precision(name: str, fmt: str, tmp_path: Path) -> None:
    folder = _written(tmp_path, "W4A16", fmt, layer_config=MIXED[name])
    assert_judged(folder, _judged(folder))


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("qwen3_moe", "gpt_oss")])
def test_family(family: str, tmp_path: Path) -> None:
    folder = _written(tmp_path, "W4A16", "auto_round", family=family)
    assert_judged(folder, _judged(folder))


def _written(
    folder: Path, scheme: str, fmt: str, original: Any = None, family: str = "qwen3_moe", iters: int = 0, **options: Any
) -> Path:
    (original or tiny_model(family)).save_pretrained(folder / "plain")
    tiny_tokenizer().save_pretrained(folder / "plain")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "plain", dtype=torch.bfloat16)
    data = torch.utils.data.DataLoader([batch["input_ids"][0] for batch in calibration()], batch_size=2)
    rounding = auto_round.AutoRound(
        model, tiny_tokenizer(), scheme=scheme, iters=iters, nsamples=4, seqlen=32, dataset=data, device_map="cpu",
        **options,
    )  # fmt: skip
    rounding.quantize_and_save(str(folder / "quantised"), format=fmt)
    return next((folder / "quantised").rglob("config.json")).parent


def _judged(folder: Path) -> Layers:
    quant = json.loads((folder / "config.json").read_text())["quantization_config"]
    if quant["quant_method"] == "compressed-tensors":
        return judged_by_compressed_tensors(folder)
    stored: dict[str, dict[str, Tensor]] = {}
    for name, tensor in stored_tensors(folder).items():
        if EXPERT.fullmatch(name):
            module, _, role = name.rpartition(".")
            stored.setdefault(module, {})[role] = tensor
    return named_experts({f"{module}.weight": _value(parts, quant) for module, parts in stored.items()})


def _value(parts: dict[str, Tensor], quant: dict[str, Any]) -> Tensor:
    """What AutoRound makes of one module; which of its decoders it takes depends on the packing."""
    packing = quant.get("packing_format", quant["quant_method"])
    if "qweight" in parts:
        return (_awq if "awq" in packing else _gptq)(parts, packing)
    if "weight_scale_inv" in parts:
        judge = converters.FP8BlockDequantizer(targets=["Linear"], dtype=torch.float32)
        given = {f"m.{role}": tensor for role, tensor in parts.items()}
        return judge.process(given)["m.weight"]
    if "weight_scale" not in parts:
        return parts["weight"]
    return _float(parts, quant)


def _gptq(parts: dict[str, Tensor], packing: str) -> Tensor:
    """A product with the identity. Only the packings of auto_gptq store zero points with an offset.

    g_idx is in natural order, and left out: with it this decoder fails where a matrix is not square.
    """
    natural = parts.pop("g_idx", None)
    assert natural is None or bool((natural.diff() >= 0).all())
    n = parts["scales"].shape[1]
    bits = parts["qzeros"].shape[1] * 32 // n
    k = parts["qweight"].shape[0] * 32 // bits
    kind = gptq_v2.QuantLinear if packing in ("auto_round", "auto_round:gptqmodel") else gptq_v1.QuantLinear
    module = kind(bits, k // parts["scales"].shape[0], k, n, bias=False)
    module.scales = module.scales.float()
    module.load_state_dict(parts)
    return module(torch.eye(k)).T


def _awq(parts: dict[str, Tensor], packing: str) -> Tensor:
    scales = parts["scales"].float()
    bits, k = parts["qweight"].shape[1] * 32 // scales.shape[1], parts["qweight"].shape[0]
    value: Tensor = awq.dequantize_gemm(parts["qweight"], parts["qzeros"], scales, bits, k // scales.shape[0])
    return value.T


def _float(parts: dict[str, Tensor], quant: dict[str, Any]) -> Tensor:
    codes = parts.get("weight_packed", parts.get("weight"))
    assert codes is not None
    n, k = codes.shape[0], codes.shape[1] * (2 if "weight_packed" in parts else 1)
    if quant["data_type"] == "fp":
        module = modules.WeightFP8ActFP8StaticQuantLinear(
            k, n, weight=codes, weight_scale=parts["weight_scale"], dtype=torch.float32
        )
        return module.dequant_weight_online()
    config = schemes.QuantizationScheme(**{key: quant[key] for key in SCHEME_KEYS})
    kind = modules.NVFP4QuantLinear if quant["data_type"].startswith("nv") else FLOATS[quant["bits"]]
    module = kind(k, n, config, dtype=torch.float32)
    module.load_state_dict(parts)
    return module.dequant_weight_online()
