"""Checkpoints of torchao, saved by transformers, judged by torchao's own `dequantize`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from judge import (
    EXPERTS,
    INTERMEDIATE,
    Matrices,
    assert_equal,
    by_projection,
    linear_experts,
    read_experts,
    tiny_qwen3_moe,
    write_config,
)
from safetensors.torch import save_file

ao = pytest.importorskip("torchao.quantization")
support = pytest.importorskip("torchao.prototype.safetensors.safetensors_support")
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


@pytest.mark.parametrize("name", STACKED | EACH)
def test_an_expert_at_a_time(name: str, tmp_path: Path) -> None:
    """Linear modules, quantised and flattened by torchao, as transformers 4 saves them."""
    config = (STACKED | EACH)[name]()
    experts = linear_experts()
    ao.quantize_(experts, config)
    state = {f"model.layers.0.mlp.experts.{at}": tensor.data for at, tensor in experts.state_dict().items()}
    tensors, metadata = support.flatten_tensor_state_dict(state)
    save_file({at: tensor.contiguous() for at, tensor in tensors.items()}, tmp_path / "model.safetensors", metadata)
    write_config(tmp_path, transformers.TorchAoConfig(quant_type=config).to_dict())
    assert_equal(read_experts(tmp_path), {at: _exact(linear.weight) for at, linear in by_projection(experts)})


def _exact(weight: Any) -> torch.Tensor:
    return weight.dequantize() if weight.dtype == torch.float32 else weight.dequantize(torch.float32)
