"""`lancebill verify`."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from commands import FINE, PROBLEM, SIZE, call, checkpoint, example_of, parsed

from lancebill.checkpoint.read.files import Checkpoint
from lancebill.checkpoint.resolve import naming as names
from lancebill.testing.checkpoints import generate, save


def test_verify_passes_an_intact_checkpoint(model: Path) -> None:
    result = call("verify", model, "--values", "--json")
    assert result.exit_code == FINE
    summary = parsed(result)
    assert summary["ok"] and not summary["problems"] and not summary["warnings"]
    assert summary["checked"] == {"layers": 2, "tensors": 24, "matrices": 24}
    assert "fine" in call("verify", model).stdout


def test_verify_lists_all_problems(tmp_path: Path) -> None:
    row = names.find_family({"model_type": "qwen3_moe"})
    generated = generate(example_of("fp8", "block-F32"), row, row.forms[0], SIZE)
    home = "model.layers.1.mlp.experts"
    del generated.tensors[f"{home}.0.up_proj.weight"]
    generated.tensors[f"{home}.2.down_proj.weight"] = torch.zeros(3, 4).to(torch.float8_e4m3fn)
    generated.tensors[f"{home}.7.extra"] = torch.zeros(1)
    generated.tensors[f"{home}.3.up_proj.weight_scale_inv"] = torch.zeros(1, 1, dtype=torch.int32)
    result = call("verify", save(generated, tmp_path / "bad"), "--values", "--json")
    assert result.exit_code == PROBLEM
    kinds = {problem["error"] for problem in parsed(result)["problems"]}
    assert {"MissingTensor", "WrongShape", "WrongDtype", "UnexpectedTensor"} <= kinds
    text = call("verify", tmp_path / "bad").stdout
    assert "layer 1, expert 2, down" in text and "problems" in text
    assert "got      I32" in text and "('" not in text


def test_verify_values_names_the_damaged_tensor(model: Path) -> None:
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    with Checkpoint.open(model) as opened:
        info = opened.tensors[name]
    with info.file.open("r+b") as file:
        file.seek(info.start)
        file.write(b"\xc0\x7f")
    assert call("verify", model).exit_code == FINE
    result = call("verify", model, "--values", "--json")
    assert result.exit_code == PROBLEM
    (problem,) = parsed(result)["problems"]
    assert problem["where"] == f"layer 1, expert 3, up ({name})"


def test_unknown_config_keys_warn_and_fail_when_strict(tmp_path: Path) -> None:
    source = checkpoint(tmp_path, "fp8", "block-F32")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"]["moonphase"] = 3
    (source / "config.json").write_text(json.dumps(config))
    relaxed = call("verify", source, "--json")
    assert relaxed.exit_code == FINE
    assert "moonphase" in parsed(relaxed)["warnings"][0]["what"]
    assert call("verify", source, "--strict").exit_code == PROBLEM


def test_verify_names_an_activation_that_is_not_known(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "hidden_act": "sillu"}))
    result = call("verify", model)
    assert result.exit_code == PROBLEM and result.stdout.count("unknown value of 'hidden_act'") == 1
