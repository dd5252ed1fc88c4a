"""`lancebill convert`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from commands import FINE, PROBLEM, USAGE, call, parsed
from conversion import dense_source

from lancebill.checkpoint.read.files import Checkpoint
from lancebill.testing.gguf import write_gguf


def test_convert_reports_format_and_loss(model: Path, tmp_path: Path) -> None:
    result = call("convert", model, tmp_path / "out", "--to", "nvfp4", "--json")
    assert result.exit_code == FINE
    summary = parsed(result)
    assert (summary["spec"], summary["format"]) == ("nvfp4-div", "compressed-tensors")
    assert [row["layer"] for row in summary["loss"]["layers"]] == [0, 1]
    assert 0 < summary["loss"]["total"]["rms_error"] < 0.2
    assert call("verify", tmp_path / "out", "--values").exit_code == FINE
    back = call("convert", tmp_path / "out", tmp_path / "back", "--to", "bf16")
    assert back.exit_code == FINE
    assert "RMS error" in back.stdout and "all" in back.stdout
    assert parsed(call("inspect", tmp_path / "back", "--json"))["format"] == "dense"


def test_convert_says_what_transformers_cannot_load(tmp_path: Path) -> None:
    """It has names for stacked experts of Gemma 4, and none for quantised ones."""
    source, out = dense_source(tmp_path, "gemma4"), tmp_path / "out"
    unread = parsed(call("convert", source, out, "--to", "int8", "--json"))["unread_by_transformers"]
    assert "model_type 'gemma4'" in unread and "compressed-tensors" in unread
    shown = call("convert", source, out, "--to", "int8", "--overwrite").stdout
    assert f"transformers alone cannot load this: {unread}; lancebill does" in shown
    dense = call("convert", out, tmp_path / "dense", "--to", "bf16", "--json")
    assert parsed(dense)["unread_by_transformers"] is None


def test_convert_replaces_only_with_overwrite(model: Path, tmp_path: Path) -> None:
    assert call("convert", model, tmp_path / "out", "--to", "int8").exit_code == FINE
    refused = call("convert", model, tmp_path / "out", "--to", "mxfp4", "--json")
    assert refused.exit_code == PROBLEM
    assert "--overwrite" in parsed(refused)["error"]["hint"]
    assert call("convert", model, tmp_path / "out", "--to", "mxfp4", "--overwrite").exit_code == FINE
    assert parsed(call("inspect", tmp_path / "out", "--json"))["groups"][0]["w2"]["spec"] == "mxfp4"


@pytest.mark.parametrize(
    ("to", "fmt", "hint"),
    [
        ("mxfp5", None, "int4-g128"),
        ("int4-x128", None, "g<size>"),
        ("nf4", None, "bitsandbytes"),
        ("mxfp4", "awq", "compressed-tensors"),
        ("mxfp4", "nonsense", "gpt-oss"),
    ],
)
def test_convert_suggests_valid_targets(to: str, fmt: str | None, hint: str, model: Path, tmp_path: Path) -> None:
    words = ["convert", model, tmp_path / "out", "--to", to, *(["--format", fmt] if fmt else [])]
    result = call(*words)
    assert result.exit_code == USAGE
    assert hint in result.stderr
    assert parsed(call(*words, "--json"))["error"]["what"]


def test_scales_are_searched_unless_told_otherwise(model: Path, tmp_path: Path) -> None:
    words = ("convert", model, tmp_path / "out", "--to", "mxfp4", "--json", "--overwrite")
    ways = ((), ("--search",), ("--no-search",), ("--mx-rule", "floor"))
    default, searched, plain, by_rule = (parsed(call(*words, *more)) for more in ways)
    assert [each["search"] for each in (default, searched, plain, by_rule)] == [True, True, False, False]
    assert default["loss"] == searched["loss"] and by_rule["loss"] == plain["loss"]
    assert searched["loss"]["total"]["saturated"] < plain["loss"]["total"]["saturated"]
    assert "scales searched" in call(*words[:-2], "--overwrite").stdout


def test_the_mx_rule_changes_saturation(model: Path, tmp_path: Path) -> None:
    losses = {}
    for rule in ("floor", "ceil"):
        summary = parsed(call("convert", model, tmp_path / rule, "--to", "mxfp4", "--mx-rule", rule, "--json"))
        losses[rule] = summary["loss"]["total"]
    assert losses["floor"]["saturated"] > 0 == losses["ceil"]["saturated"]


def test_gguf_converts_only_with_experts_only(tmp_path: Path) -> None:
    metadata = {
        "general.architecture": "qwen3moe",
        "qwen3moe.block_count": 1,
        "qwen3moe.embedding_length": 256,
        "qwen3moe.expert_count": 2,
        "qwen3moe.expert_used_count": 1,
        "qwen3moe.expert_feed_forward_length": 128,
    }
    torch.manual_seed(0)
    tensors = {
        "blk.0.ffn_gate_exps.weight": ("F16", torch.randn(2, 128, 256).half()),
        "blk.0.ffn_up_exps.weight": ("F16", torch.randn(2, 128, 256).half()),
        "blk.0.ffn_down_exps.weight": ("F16", torch.randn(2, 256, 128).half()),
        "token_embd.weight": ("F16", torch.randn(16, 256).half()),
    }
    source = tmp_path / "model.gguf"
    write_gguf(source, metadata, tensors)
    assert parsed(call("inspect", source, "--json"))["format"] == "gguf"
    refused = call("convert", source, tmp_path / "out", "--to", "fp16")
    assert refused.exit_code == PROBLEM
    assert "--experts-only" in refused.stderr
    assert call("convert", source, tmp_path / "out", "--to", "fp16", "--experts-only").exit_code == FINE
    with Checkpoint.open(tmp_path / "out") as written:
        assert len(written.tensors) == 6
        down = written.read("model.layers.0.mlp.experts.1.down_proj.weight")
    assert torch.equal(down, tensors["blk.0.ffn_down_exps.weight"][1][1])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_conversion_on_a_gpu_needs_one(model: Path, tmp_path: Path) -> None:
    result = call("convert", model, tmp_path / "out", "--to", "mxfp4", "--device", "cuda", "--json")
    assert result.exit_code == USAGE and parsed(result)["error"]["what"] == "no CUDA device is available"


@pytest.mark.parametrize(
    ("to", "format_name", "says"),
    [
        ("gptq", None, "--format gptq selects it"),
        ("MXFP4", None, "names are in lower case: mxfp4"),
        ("INT4-g32", None, "names are in lower case: int4-g32"),
        ("Q4_K_M", None, "a spec such as bf16, mxfp4"),
        ("mxfp4", "hqqq", "for mxfp4: compressed-tensors, gpt-oss"),
    ],
)
def test_names_that_newcomers_try(model: Path, tmp_path: Path, to: str, format_name: str | None, says: str) -> None:
    words = [] if format_name is None else ["--format", format_name]
    result = call("convert", model, tmp_path / "out", "--to", to, *words)
    assert result.exit_code == USAGE and says in result.output
