"""Checkpoints as they are published where that differs from what transformers writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

pytest.importorskip("transformers")

from judge import EXACT, TOKENS
from tiny_models import CONFIG_MAPPING, SIZES, tiny_model

import lancebill
from lancebill.cli.verify import examine

GROUP = 32


@torch.no_grad()
def test_a_layer_that_predicts_further_tokens_is_not_loaded(tmp_path: Path) -> None:
    """DeepSeek-V3 stores it after the others; transformers has no module for it."""
    model = tiny_model("deepseek_v3")
    want = model(TOKENS, use_cache=False).logits
    model.save_pretrained(tmp_path, save_original_format=True)
    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    tensors = load_file(file)
    more = {n.replace(".layers.1.", ".layers.2."): t.clone() for n, t in tensors.items() if ".layers.1." in n}
    save_file({**tensors, **more, "model.layers.2.eh_proj.weight": torch.ones(32, 64)}, file, {"format": "pt"})
    config.write_text(json.dumps({**json.loads(config.read_text()), "num_nextn_predict_layers": 1}))
    report, calls = examine(tmp_path, strict=True), list[tuple[int, int]]()
    assert report.ok and report.layers == 2, [problem.render() for problem in report.problems]
    packed = lancebill.from_pretrained(tmp_path, progress=lambda done, total: calls.append((done, total)), **EXACT)
    assert (packed(TOKENS, use_cache=False).logits - want).norm() / want.norm() < 2e-6
    assert len(calls) == 1 and calls[0][0] == calls[0][1], "all that is loaded is counted, and nothing else"


def mxfp8(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, exponents and their product: e4m3 with a power of two for each 32 columns."""
    groups = weight.unflatten(-1, (-1, GROUP))
    exponents = torch.log2(groups.abs().amax(-1) / 448).ceil()
    codes = (groups / exponents.exp2().unsqueeze(-1)).to(torch.float8_e4m3fn)
    rounded = codes.float() * exponents.exp2().unsqueeze(-1)
    return codes.flatten(-2), (exponents + 127).to(torch.uint8), rounded.flatten(-2)


@pytest.mark.skipif("inkling2" not in CONFIG_MAPPING, reason="needs transformers 5.23")
@torch.no_grad()
def test_inkling2_has_mxfp8_experts_that_its_config_does_not_mention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SIZES, "moe_intermediate_size", GROUP)
    model = tiny_model("inkling2")
    for name, parameter in model.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            parameter.copy_(mxfp8(parameter)[2])
    want = model(TOKENS, use_cache=False).logits
    model.save_pretrained(tmp_path, save_original_format=True)

    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith(("w13_weight", "w2_weight"))]:
        tensors[name], exponents, _ = mxfp8(tensors[name])
        tensors[f"{name}_scale"] = exponents.view(torch.float8_e8m0fnu)
    save_file(tensors, file, {"format": "pt"})
    stated = json.loads(config.read_text())
    del stated["transformers_version"]
    config.write_text(json.dumps(stated))

    report = examine(tmp_path, strict=True)
    assert report.ok and report.layers == 2, [problem.render() for problem in report.problems]
    got = lancebill.from_pretrained(tmp_path, **EXACT)(TOKENS, use_cache=False).logits
    assert (got - want).norm() / want.norm() < 2e-6
