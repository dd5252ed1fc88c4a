"""Checkpoints of HQQ, judged by its own `dequantize`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from judge import assert_equal, by_projection, linear_experts, read_experts, write_config
from safetensors.torch import save_file

from lancebill.errors import LancebillError

hqq = pytest.importorskip("hqq.core.quantize")
transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize(("bits", "size"), [(8, 64), (4, 64), (4, None), (3, 64), (2, 16), (1, 64)])
def test_experts(bits: int, size: int | None, tmp_path: Path) -> None:
    want = _quantized(tmp_path, bits, size, axis=1)
    assert_equal(read_experts(tmp_path), want)


def test_axis_0_is_refused(tmp_path: Path) -> None:
    _quantized(tmp_path, 4, 64, axis=0)
    with pytest.raises((LancebillError, AssertionError), match="axis"):
        read_experts(tmp_path)


def _quantized(folder: Path, bits: int, size: int | None, axis: int) -> dict[tuple[int, str], torch.Tensor]:
    settings = hqq.BaseQuantizeConfig(nbits=bits, group_size=size, axis=axis)
    state, want = {}, {}
    for (expert, name), linear in by_projection(linear_experts()):
        layer = hqq.HQQLinear(linear, settings, compute_dtype=torch.float32, device="cpu")
        home = f"model.layers.0.mlp.experts.{expert}.{name}_proj"
        state |= {f"{home}.{key}": tensor.contiguous() for key, tensor in layer.state_dict().items()}
        want[expert, name] = layer.dequantize()
    save_file(state, folder / "model.safetensors")
    write_config(folder, transformers.HqqConfig(nbits=bits, group_size=size, axis=axis).to_dict())
    return want
