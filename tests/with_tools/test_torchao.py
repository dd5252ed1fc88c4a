"""Checkpoints of torchao, saved by transformers, judged by torchao's own `dequantize`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from judge import EXPERTS, INTERMEDIATE, Matrices, assert_equal, read_experts, tiny_qwen3_moe

ao = pytest.importorskip("torchao.quantization")
transformers = pytest.importorskip("transformers")

STACKED = {
    "int8": lambda: ao.Int8WeightOnlyConfig(),
    "int8-int8": lambda: ao.Int8DynamicActivationInt8WeightConfig(version=2),
    "fp8": lambda: ao.Float8WeightOnlyConfig(),
}
EACH = {
    "int4-g32": lambda: ao.IntxWeightOnlyConfig(torch.int4, ao.PerGroup(32)),
    "int3-g64-zp": lambda: ao.IntxWeightOnlyConfig(torch.int3, ao.PerGroup(64), ao.MappingType.ASYMMETRIC),
    "int8-int4-g32": lambda: ao.Int8DynamicActivationIntxWeightConfig(torch.int4, ao.PerGroup(32)),
}


@pytest.mark.parametrize("name", STACKED)
def test_stacked_experts(name: str, tmp_path: Path) -> None:
    """transformers keeps all experts of a layer in one parameter."""
    tiny_qwen3_moe().save_pretrained(tmp_path / "plain")
    entries = {f"re:.*experts.{projection}": STACKED[name]() for projection in ("gate_up_proj", "down_proj")}
    settings = transformers.TorchAoConfig(quant_type=ao.FqnToConfig(entries))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", quantization_config=settings, dtype=torch.bfloat16
    )
    model.save_pretrained(tmp_path / "quantised")
    experts = model.model.layers[0].mlp.experts
    fused, down = (_exact(experts.get_parameter(each)) for each in ("gate_up_proj", "down_proj"))
    want: Matrices = {}
    for e in range(EXPERTS):
        want |= {(e, "gate"): fused[e, :INTERMEDIATE], (e, "up"): fused[e, INTERMEDIATE:], (e, "down"): down[e]}
    assert_equal(read_experts(tmp_path / "quantised"), want)


def _exact(weight: Any) -> torch.Tensor:
    return weight.dequantize(torch.float32)
