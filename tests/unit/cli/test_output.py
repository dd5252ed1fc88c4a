"""What commands print for people, where tests of their JSON do not look."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conversion import find_example, find_row
from typer.testing import CliRunner

from lancebill.bench import ceilings, timing
from lancebill.cli import bench, console, env, verify
from lancebill.cli.engines import Engine, chosen_engine
from lancebill.cli.main import app
from lancebill.errors import BadValue, CheckpointProblems, MissingTensor
from lancebill.formats.base import Example
from lancebill.testing.checkpoints import Generated, Geometry, generate, save

SIZE = Geometry(experts=4, hidden=256, intermediate=256, layers=1)
HOME = "model.layers.0.mlp.experts"


def generated(fmt: str = "dense", name: str = "bf16") -> Generated:
    row = find_row("qwen3_moe")
    return generate(find_example(fmt, name), row, row.forms[0], SIZE)


def printed(*words: object, code: int = 0) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == code and "Traceback" not in done.output, done.output
    return done.output


# Checkpoints -----------------------------------------------------------------------------------------


def test_one_mistake_in_every_expert_is_printed_once(tmp_path: Path) -> None:
    made = generated()
    for expert in range(SIZE.experts):
        del made.tensors[f"{HOME}.{expert}.up_proj.weight"]
    source = save(made, tmp_path / "model")
    text = printed("verify", source, code=1)
    assert "and 3 more like it, the last in layer 0, expert 3, up" in text and "4 problems: " in text
    inspected = printed("inspect", source, code=1)
    assert "4 problems: see `lancebill verify`" in inspected
    assert "None" not in inspected


def test_a_few_kinds_of_mistakes_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    kinds = [BadValue("found " + "x" * i) for i in range(1, verify.SHOWN + 3)]
    verify.show(verify.VerifyReport("here", problems=kinds), console.console())
    text = capsys.readouterr().out
    assert text.count("problem: ") == verify.SHOWN and "... and 2 other kinds" in text


def test_a_stored_size_is_checked_without_values(tmp_path: Path) -> None:
    made = generated("compressed-tensors", "pack-quantized-int2")
    name = f"{HOME}.1.up_proj.weight_shape"
    made.tensors[name] = made.tensors[name] + 1
    text = printed("verify", save(made, tmp_path / "model"), code=1)
    assert "1 problem: " in text and name in text


def test_tensors_outside_the_experts_are_checked(tmp_path: Path) -> None:
    made = generated()
    made.tensors["model.scale"], made.tensors["model.table"] = torch.tensor(torch.nan), torch.tensor([1, 2])
    made.tensors["model.norm.weight"] = torch.tensor([1.0, torch.inf])
    text = printed("verify", save(made, tmp_path / "model"), "--values", code=1)
    assert "model.scale" in text and "model.norm.weight" in text and "2 problems: " in text


def test_inspect_says_whether_all_experts_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "read_rate", lambda device: 2.0)
    made = generated()
    source = save(made, tmp_path / "model")
    assert "all experts fit" in printed("inspect", source, "--gpu", "1GiB")
    assert "tokens/s one by one" in printed("inspect", source, "--gpu", "1MB")
    model = {key: value for key, value in made.config.model.items() if key != "num_experts_per_tok"}
    unknown = save(replace(made, config=replace(made.config, model=model)), tmp_path / "unknown")
    text = printed("inspect", unknown, "--gpu", "1MB")
    assert "in host memory" in text and "tokens/s" not in text  # how many experts a token reads is not known


@pytest.mark.parametrize("to", ["mxfp4", "bf16", "fp8-g128"])
def test_convert_names_what_it_changed_outside_the_experts(to: str, tmp_path: Path) -> None:
    """Dequantised, because the target would round, holds no quantised modules, or has other groups."""
    example = find_example("fp8", "block-F32")
    made = generated("fp8", "block-F32")
    for i in range(4):
        made.tensors |= encoded(example, f"model.layers.0.self_attn.{'qkvo'[i]}_proj", 320)
    text = printed("convert", save(made, tmp_path / "model"), tmp_path / "out", "--to", to)
    assert "4 modules outside the experts dequantised: model.layers.0.self_attn" in text and "and 1 more" in text


def test_convert_counts_the_scales_of_inputs_that_it_drops(tmp_path: Path) -> None:
    text = printed(
        "convert", save(generated("fp8", "tensor-static"), tmp_path / "model"), tmp_path / "out", "--to", "bf16"
    )
    assert "12 input_scale tensors dropped" in text


def encoded(example: Example, module: str, size: int) -> dict[str, torch.Tensor]:
    from lancebill.numbers.codec import quantize

    stored = example.scheme.encode(quantize(torch.randn(size, size), example.scheme.spec))
    return {module + part.suffix[0]: stored[part.role] for part in example.scheme.parts if part.role in stored}


def test_all_problems_are_in_the_json_of_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    import typer

    error = CheckpointProblems([MissingTensor("one"), BadValue("two")], where="here")
    with pytest.raises(typer.Exit):
        console.fail(error, True, 1)
    listed = json.loads(capsys.readouterr().out)["error"]["problems"]
    assert [problem["what"] for problem in listed] == ["one", "two"]


def test_sizes_have_units() -> None:
    sizes = {0: "0 B", 999: "999 B", 1000: "1.00 kB", 10**6: "1.00 MB", 10**9: "1.00 GB", 10**15: "1000.00 TB"}
    assert {count: console.size(count) for count in sizes} == sizes


# Machines --------------------------------------------------------------------------------------------


def test_env_lists_gpus_and_says_why_kernels_are_missing(capsys: pytest.CaptureFixture[str]) -> None:
    machine = env.describe()
    gpu = {"name": "Some GPU", "capability": "90", "memory": 80 * 10**9}
    machine["cuda"] = {"version": "13.0", "devices": [gpu], "why_not": None}
    machine["native"] = {"level": None, "levels": [], "why": "they are not built", "hint": "build them"}
    env.show(machine, console.console())
    text = " ".join(capsys.readouterr().out.split())
    assert "Some GPU, sm_90, 80.00 GB" in text and "they are not built: torch is used instead (build them)" in text


def test_a_device_decides_the_engine() -> None:
    engine, why = chosen_engine(None, "cpu")
    assert engine is Engine.transformers and "--device is given" in why


def test_a_benchmark_shows_host_times_and_absent_peers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ceilings, "_READ_BYTES", {"cpu": 1 << 20})  # this machine is not what is tested
    monkeypatch.setattr(ceilings, "_LARGEST", {"cpu": 128})
    monkeypatch.setattr(timing, "last_level_cache", lambda: 1 << 20)
    words = ["--shape", "4,64,64,2", "--weights", "mxfp4", "--device", "cpu", "--backend", "reference", "--tokens", "1"]
    figures = measured(tmp_path, *words)
    figures["rows"][0]["host_us"] = {"reference": 12.5}
    figures["meta"]["absent_peers"] = {"other": "it is [not] installed"}
    bench.show(figures, console.console())
    text = capsys.readouterr().out
    assert "host time of an eager call, 1 tokens, us: reference 12.5" in text
    assert "other was not measured: it is [not] installed" in text


def measured(folder: Path, *words: str) -> dict[str, Any]:
    printed("bench", *words, "--repeats", 1, "--json", folder / "figures.json")
    figures: dict[str, Any] = json.loads((folder / "figures.json").read_text())
    return figures
