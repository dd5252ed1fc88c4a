"""Which quantisation section takes precedence, and how its method is normalised."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lancebill.checkpoint.read.config import UNSTATED, read_config
from lancebill.errors import UnsupportedFormat

GPTQ = {"bits": 4, "group_size": 128, "desc_act": False}
AWQ = {"w_bit": 4, "q_group_size": 128, "zero_point": True, "version": "GEMM"}
MODELOPT = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}

CASES: dict[str, tuple[dict[str, Any], str | None, str, dict[str, Any]]] = {
    "nothing": ({}, None, "config.json", {}),
    "no section": ({"config.json": {"model_type": "mixtral"}}, None, "config.json", {}),
    "published without one": (
        {"config.json": {"model_type": "inkling2"}}, "fp8", "config.json", UNSTATED["inkling2"],
    ),
    "saved by transformers without one": (
        {"config.json": {"model_type": "inkling2", "transformers_version": "5.23.0"}}, None, "config.json", {},
    ),
    "published without one, then quantised": (
        {"config.json": {"model_type": "inkling2"}, "hf_quant_config.json": MODELOPT},
        "modelopt", "hf_quant_config.json", MODELOPT["quantization"],
    ),
    "a type that is no text": ({"config.json": {"model_type": ["inkling2"]}}, None, "config.json", {}),
    "null section": ({"config.json": {"quantization_config": None}}, None, "config.json", {}),
    "named, in capitals": (
        {"config.json": {"quantization_config": {"quant_method": " FP8 "}}},
        "fp8", "config.json", {"quant_method": " FP8 "},
    ),
    "nested": (
        {"config.json": {"text_config": {"quantization_config": {"quant_method": "mxfp4"}}}},
        "mxfp4", "config.json", {"quant_method": "mxfp4"},
    ),
    "top before nested": (
        {"config.json": {"quantization_config": GPTQ, "text_config": {"quantization_config": AWQ}}},
        "gptq", "config.json", GPTQ,
    ),
    "compression_config": (
        {"config.json": {"compression_config": {"format": "pack-quantized"}}},
        "compressed-tensors", "config.json", {"format": "pack-quantized"},
    ),
    "sparseml": (
        {"config.json": {"quantization_config": {"quant_method": "sparseml"}}},
        "compressed-tensors", "config.json", {"quant_method": "sparseml"},
    ),
    "quant_algo": (
        {"config.json": {"quantization_config": {"quant_algo": "FP8"}}},
        "modelopt", "config.json", {"quant_algo": "FP8"},
    ),
    "load_in_4bit": (
        {"config.json": {"quantization_config": {"load_in_4bit": True}}},
        "bitsandbytes", "config.json", {"load_in_4bit": True},
    ),
    "load_in_8bit": (
        {"config.json": {"quantization_config": {"load_in_8bit": True}}},
        "bitsandbytes", "config.json", {"load_in_8bit": True},
    ),
    "auto_round": (
        {"config.json": {"quantization_config": {"quant_method": "auto_round"}}},
        "auto_round", "config.json", {"quant_method": "auto_round"},
    ),
    "hf_quant_config": (
        {"hf_quant_config.json": MODELOPT}, "modelopt", "hf_quant_config.json", MODELOPT["quantization"],
    ),
    "quantize_config": ({"quantize_config.json": GPTQ}, "gptq", "quantize_config.json", GPTQ),
    "quantize_config without desc_act": (
        {"quantize_config.json": {"bits": 4}}, "gptq", "quantize_config.json", {"bits": 4},
    ),
    "quant_config": ({"quant_config.json": AWQ}, "awq", "quant_config.json", AWQ),
    "config.json before files": (
        {"config.json": {"quantization_config": {"quant_method": "fp8"}}, "hf_quant_config.json": MODELOPT},
        "fp8", "config.json", {"quant_method": "fp8"},
    ),
    "AutoRound's copy": (
        {"quantization_config.json": {"quant_method": "auto-round"}}, "auto-round", "quantization_config.json",
        {"quant_method": "auto-round"},
    ),
    "files in order": (
        {"hf_quant_config.json": MODELOPT, "quantize_config.json": GPTQ, "quant_config.json": AWQ},
        "modelopt", "hf_quant_config.json", MODELOPT["quantization"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_quantisation_section_is_detected(tmp_path: Path, name: str) -> None:
    files, method, source, quant = CASES[name]
    for file, content in files.items():
        (tmp_path / file).write_text(json.dumps(content))
    config = read_config(tmp_path)
    assert (config.method, config.source, config.quant) == (method, source, quant)
    assert config.model == files.get("config.json", {})


def test_an_unrecognised_section_is_reported_with_its_keys(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"group_size": 64, "bits": 4}}))
    with pytest.raises(UnsupportedFormat, match="'bits', 'group_size'"):
        read_config(tmp_path)
