"""Checkpoints of bitsandbytes, judged by its own dequantisation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from judge import Matrices, assert_equal, by_projection, linear_experts, read_experts, tiny_qwen3_moe, write_config
from safetensors.torch import save_file

from lancebill.cli.verify import examine

bnb = pytest.importorskip("bitsandbytes")
transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_4_bit(kind: str, nested: bool, tmp_path: Path) -> None:
    def linear(k: int, n: int) -> Any:
        return bnb.nn.Linear4bit(k, n, bias=False, quant_type=kind, compress_statistics=nested)

    def value(module: Any) -> torch.Tensor:
        dequantized: torch.Tensor = bnb.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
        return dequantized

    settings = {"load_in_4bit": True, "bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": nested}
    want = _written(tmp_path, linear, value, settings)
    # Nested absmax is restored as code * absmax + offset: the library adds in another order.
    assert_equal(read_experts(tmp_path), want, rounding=2**-20 if nested else 0.0)


def test_8_bit(tmp_path: Path) -> None:
    def linear(k: int, n: int) -> Any:
        return bnb.nn.Linear8bitLt(k, n, bias=False, has_fp16_weights=False)

    def value(module: Any) -> torch.Tensor:
        dequantized: torch.Tensor = bnb.functional.int8_vectorwise_dequant(module.weight.data, module.weight.SCB)
        return dequantized

    want = _written(tmp_path, linear, value, {"load_in_8bit": True})
    assert_equal(read_experts(tmp_path), want)


def test_experts_that_were_left_out_are_reported(tmp_path: Path) -> None:
    """transformers keeps all experts of a layer in one parameter, which is no linear module."""
    tiny_qwen3_moe().save_pretrained(tmp_path / "plain")
    settings = transformers.BitsAndBytesConfig(load_in_4bit=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", quantization_config=settings, dtype=torch.bfloat16, device_map="cpu"
    )
    model.save_pretrained(tmp_path / "quantised")
    report = examine(tmp_path / "quantised")
    assert len(report.problems) == 1 and "not quantised" in report.problems[0].render(), report


def _written(folder: Path, linear: Any, value: Any, settings: dict[str, Any]) -> Matrices:
    state: dict[str, torch.Tensor] = {}
    want: Matrices = {}
    for (expert, name), plain in by_projection(linear_experts(torch.float16)):
        n, k = plain.weight.shape
        module = linear(k, n)
        module.load_state_dict(plain.state_dict())
        module = module.to("cpu")
        want[expert, name] = value(module)
        home = f"model.layers.0.mlp.experts.{expert}.{name}_proj"
        state |= {f"{home}.{key}": tensor for key, tensor in module.state_dict().items() if torch.is_tensor(tensor)}
    save_file({at: tensor.contiguous() for at, tensor in state.items()}, folder / "model.safetensors")
    write_config(folder, transformers.BitsAndBytesConfig(**settings).to_dict())
    return want
