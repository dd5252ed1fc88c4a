"""Checkpoints that transformers quantises itself, judged by its own functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from judge import FAMILIES, Layers, Matrices, assert_judged, by_projection, linear_experts, tiny_model, write_config
from safetensors.torch import save_file

from lancebill.cli.verify import examine

transformers = pytest.importorskip("transformers")
bitnet = pytest.importorskip("transformers.integrations.bitnet")
floats = pytest.importorskip("transformers.integrations.finegrained_fp8")
fp8 = pytest.importorskip("transformers.quantizers.quantizer_finegrained_fp8")

BLOCKS = [(128, 128), (64, 64), (32, 128)]


@pytest.fixture
def _without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantising to FP8 needs no GPU, but transformers asks for one."""
    monkeypatch.setattr(fp8.FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None)


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.usefixtures("_without_gpu")
def test_fp8_blocks(block: tuple[int, int], tmp_path: Path) -> None:
    want = _fp8(tmp_path, block)
    assert_judged(tmp_path / "quantised", want)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("qwen3_moe", "gpt_oss")])
@pytest.mark.usefixtures("_without_gpu")
def test_family(family: str, tmp_path: Path) -> None:
    want = _fp8(tmp_path, (128, 128), family)
    assert_judged(tmp_path / "quantised", want)


@pytest.mark.usefixtures("_without_gpu")
def test_scales_that_were_left_behind_are_reported(tmp_path: Path) -> None:
    """With the hub's names this release saves the matrices of each expert, but their scales by layers."""
    _fp8(tmp_path, (128, 128), hub_names=True)
    problems = " ".join(problem.render() for problem in examine(tmp_path / "quantised").problems)
    assert "experts.gate_up_proj_scale_inv" in problems and "experts.0.gate_proj.weight_scale_inv" in problems


@pytest.mark.parametrize("scale", [3.0, 0.5, 1e-3], ids=str)
def test_bitnet(scale: float, tmp_path: Path) -> None:
    """Ternary digits, packed by transformers, and unpacked by the module that it computes with."""
    state, want = {}, {}
    for (expert, name), linear in by_projection(linear_experts()):
        n, k = linear.weight.shape
        module = bitnet.BitLinear(k, n, bias=False, dtype=torch.float32)
        ternary = bitnet.WeightQuant.apply(linear.weight.detach())
        module.weight = bitnet.pack_weights(ternary.sign())
        module.weight_scale = torch.tensor([scale])
        home = f"model.layers.0.mlp.experts.{expert}.{name}_proj"
        state |= {f"{home}.{key}": tensor.contiguous() for key, tensor in module.state_dict().items()}
        digits = bitnet.unpack_weights(module.weight, torch.float32)
        want[expert, name] = module.post_quant_process(digits, 1.0, module.weight_scale)
    save_file(state, tmp_path / "model.safetensors")
    write_config(tmp_path, transformers.BitNetQuantConfig().to_dict())
    assert_judged(tmp_path, {0: want})


def _fp8(folder: Path, block: tuple[int, int], family: str = "qwen3_moe", *, hub_names: bool = False) -> Layers:
    """Saved, and dequantised as it is in memory: all experts of a layer are one parameter."""
    tiny_model(family).save_pretrained(folder / "plain")
    settings = transformers.FineGrainedFP8Config(weight_block_size=block)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "plain", quantization_config=settings, dtype=torch.bfloat16
    )
    model.save_pretrained(folder / "quantised", save_original_format=hub_names)
    return {
        index: _experts(module, block)
        for index, layer in enumerate(model.model.layers)
        for module in layer.modules()
        if hasattr(module, "gate_up_proj_scale_inv")
    }


def _experts(module: Any, block: tuple[int, int]) -> Matrices:
    found: Matrices = {}
    for e in range(len(module.gate_up_proj)):
        fused, down = (
            floats._dequantize_fp8_weight(
                module.get_parameter(name)[e].detach(),
                module.get_parameter(f"{name}_scale_inv")[e],
                block,
                torch.float32,
            )
            for name in ("gate_up_proj", "down_proj")
        )
        half = len(fused) // 2
        found |= {(e, "gate"): fused[:half], (e, "up"): fused[half:], (e, "down"): down}
    return found
