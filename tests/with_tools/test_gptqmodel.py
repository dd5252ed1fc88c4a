"""Checkpoints of GPTQModel, judged by the modules that it loads them into."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from judge import (
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
from typer.testing import CliRunner

from lancebill.cli.main import app
from lancebill.cli.verify import examine
from lancebill.numbers.bit_packing import unpack_bits

os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # its default on two cores is one, with which it does not start
gptqmodel = pytest.importorskip("gptqmodel")
configs = pytest.importorskip("gptqmodel.quantization.config")

GPTQ: dict[str, dict[str, Any]] = {
    **{f"int{bits}": {"bits": bits} for bits in (2, 3, 4, 8)},
    "int4-zp": {"sym": False},
    "int4-zp-v2": {"sym": False, "format": "gptq_v2"},
    "int4-v2": {"format": "gptq_v2"},
    "int3-zp-v2": {"bits": 3, "sym": False, "format": "gptq_v2"},
    "int4-order-of-activations": {"desc_act": True, "act_group_aware": False},
    "int4-order-within-groups": {"desc_act": False, "act_group_aware": True},
    **{f"int4-g{size}": {"group_size": size} for size in (16, 32, 128)},
    "int4-channel": {"group_size": -1, "act_group_aware": False},
    "int4-down-8-bits": {"dynamic": {r"+:.*\.down_proj": {"bits": 8, "group_size": 32}}},
    "int4-without-attention": {"dynamic": {r"-:.*self_attn.*": {}}},
}
# Zero points of 0, which it stores as a difference of whole words: a zero borrows from its neighbour.
ZEROS: dict[str, dict[str, Any]] = {
    "int2-g16": {"bits": 2, "group_size": 16},
    **{f"int{bits}-positive": {"bits": bits} for bits in (2, 3, 4, 8)},
}
FP8: dict[str, dict[str, Any]] = {
    "row": {},
    "tensor": {"weight_scale_method": "tensor"},
    "block": {"weight_scale_method": "block", "weight_block_size": [64, 64]},
}
FAILING = ("gpt_oss", "mixtral", "glm4_moe")  # in this release
LEFT_OUT = ("minimax_m2", "granitemoe")


@pytest.fixture(autouse=True)
def _logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes a folder of logs into the current one."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", GPTQ)
def test_gptq(name: str, tmp_path: Path) -> None:
    settings = configs.QuantizeConfig(**{"bits": 4, "group_size": 64, "desc_act": False, **GPTQ[name]})
    assert_judged(_written(tmp_path, settings), _judged(tmp_path))


@pytest.mark.parametrize("name", ZEROS)
def test_zero_points_of_0(name: str, tmp_path: Path) -> None:
    settings = configs.QuantizeConfig(**{"group_size": 64, "desc_act": False, "sym": False, **ZEROS[name]})
    model = tiny_model("qwen3_moe")
    folder = _written(tmp_path, settings, with_positive_weights(model) if "positive" in name else model)
    assert _has_codes_of_all_ones(folder, settings.bits), "no zero point is 0: nothing was tested"
    assert_judged(folder, _judged(tmp_path))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("zero_point", ["", "-zp"])
def test_it_reads_what_convert_writes(bits: int, zero_point: str, tmp_path: Path) -> None:
    plain, written = tmp_path / "plain", tmp_path / "quantised"
    _save(with_positive_weights(tiny_model("qwen3_moe")), plain)
    arguments = ["convert", str(plain), str(written), "--to", f"int{bits}-g64:fp16{zero_point}", "--format", "gptq"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert_judged(written, _judged(tmp_path))


def test_rounding_to_nearest(tmp_path: Path) -> None:
    assert_judged(_written(tmp_path, configs.RTNConfig(bits=4, group_size=64)), _judged(tmp_path))


@pytest.mark.parametrize("name", FP8)
def test_fp8(name: str, tmp_path: Path) -> None:
    """Its scales divide."""
    assert_judged(_written(tmp_path, configs.FP8Config(**FP8[name])), _judged(tmp_path, torch.float32))


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("qwen3_moe", *FAILING, *LEFT_OUT)])
def test_family(family: str, tmp_path: Path) -> None:
    settings = configs.QuantizeConfig(bits=4, group_size=64, desc_act=False)
    assert_judged(_written(tmp_path, settings, tiny_model(family)), _judged(tmp_path))


@pytest.mark.parametrize("family", LEFT_OUT)
def test_experts_that_were_left_out_are_reported(family: str, tmp_path: Path) -> None:
    """It quantises the attention of these families only, and the config does not say so."""
    settings = configs.QuantizeConfig(bits=4, group_size=64, desc_act=False)
    report = examine(_written(tmp_path, settings, tiny_model(family)))
    assert len(report.problems) == 1 and "not quantised" in report.problems[0].render(), report


def _has_codes_of_all_ones(folder: Path, bits: int) -> bool:
    stored = (tensor for name, tensor in stored_tensors(folder).items() if name.endswith(".qzeros"))
    codes = (unpack_bits(words, bits, words.shape[1] * 32 // bits) for words in stored)
    return any(bool((found == (1 << bits) - 1).any()) for found in codes)


def _written(folder: Path, settings: Any, original: Any = None) -> Path:
    plain, quantised = folder / "plain", folder / "quantised"
    _save(original or tiny_model("qwen3_moe"), plain)
    model = gptqmodel.GPTQModel.load(str(plain), settings, device="cpu")
    rows = [batch["input_ids"][0].tolist() for batch in calibration()]
    model.quantize([{"input_ids": row, "attention_mask": [1] * len(row)} for row in rows], batch_size=1)
    model.save(str(quantised))
    return quantised


def _save(model: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


def _judged(folder: Path, dtype: torch.dtype = torch.float16) -> Layers:
    """Loaded in the dtype of the stored scales; GPTQ's modules would compute in it, too."""
    model = gptqmodel.GPTQModel.load(
        str(folder / "quantised"), backend=gptqmodel.BACKEND.TORCH, device="cpu", dtype=dtype
    )
    found = {}
    for name, module in model.model.named_modules():
        if hasattr(module, "weight_scale_inv"):
            found[f"{name}.weight"] = module.dequantize_weight(dtype=torch.float32).T
        elif hasattr(module, "dequantize_weight"):
            module.scales = module.scales.float()
            found[f"{name}.weight"] = module.dequantize_weight().T
    return named_experts(found)
