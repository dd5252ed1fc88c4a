"""Checkpoints of optimum-quanto, judged by its own `dequantize`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from judge import assert_equal, by_projection, linear_experts, read_experts, write_config
from safetensors.torch import save_file

quanto = pytest.importorskip("optimum.quanto")
QTYPES = {"qint8": quanto.qint8, "qint4": quanto.qint4, "qint2": quanto.qint2, "qfloat8": quanto.qfloat8}


@pytest.mark.parametrize("name", QTYPES)
def test_experts(name: str, tmp_path: Path) -> None:
    """The quantisation map is a file of its own; config.json does not mention quanto."""
    model = torch.nn.Module()
    model.experts = linear_experts()
    quanto.quantize(model, weights=QTYPES[name])
    quanto.freeze(model)
    home = "model.layers.0.mlp"
    save_file({f"{home}.{at}": t.contiguous() for at, t in model.state_dict().items()}, tmp_path / "model.safetensors")
    names = {f"{home}.{at}": entry for at, entry in quanto.quantization_map(model).items()}
    (tmp_path / "quanto_qmap.json").write_text(json.dumps(names))
    write_config(tmp_path, {})
    want = {at: linear.weight.dequantize() for at, linear in by_projection(model.experts)}
    assert_equal(read_experts(tmp_path), want)
