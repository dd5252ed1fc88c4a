"""Tests of the commands: output, JSON and exit codes; no command prints a traceback."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from lancebill.checkpoint.read.files import Checkpoint
from lancebill.checkpoint.resolve import naming as names
from lancebill.cli import console as ui
from lancebill.cli import engines
from lancebill.cli.main import app
from lancebill.errors import BadValue, CheckpointProblems, LaunchError, SpecError, ranges
from lancebill.formats import registry
from lancebill.formats.base import Example
from lancebill.testing.checkpoints import Geometry, generate, save
from lancebill.testing.gguf import write_gguf
from lancebill.testing.models import write_model

SIZE = Geometry(experts=4, hidden=256, intermediate=256, layers=2)
FINE, PROBLEM, USAGE = 0, 1, 2


def example_of(fmt: str, name: str) -> Example:
    return next(e for e in registry()[fmt].examples() if e.name == name)


def checkpoint(folder: Path, fmt: str = "dense", name: str = "bf16", family: str = "qwen3_moe") -> Path:
    row = next(row for row in names.TABLE if row.family == family)
    return save(generate(example_of(fmt, name), row, row.forms[0], SIZE), folder / f"{fmt}-{family}")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return checkpoint(tmp_path)


def call(*words: object) -> Result:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output
    return result


def parsed(result: Result) -> dict[str, Any]:
    """The one JSON object on stdout."""
    value = json.loads(result.stdout)
    assert isinstance(value, dict)
    return value


# inspect ---------------------------------------------------------------------------------------------


def test_inspect_describes_a_checkpoint(tmp_path: Path) -> None:
    source = checkpoint(tmp_path, "compressed-tensors", "mxfp4-pack-quantized-mxfp4")
    summary = parsed(call("inspect", source, "--json"))
    assert (summary["format"], summary["family"]) == ("compressed-tensors", "qwen3_moe")
    assert (summary["layers"], summary["experts"], summary["hidden"], summary["intermediate"]) == (
        2,
        4,
        256,
        256,
    )
    (group,) = summary["groups"]
    assert group["layers"] == "0-1"
    assert group["w13"]["spec"] == group["w2"]["spec"] == "mxfp4"
    assert group["w13"]["bits_per_weight"] == summary["bits_per_weight"] == 4.25
    assert summary["bytes"]["experts"] == 2 * 4 * 3 * 256 * 256 * 17 // 32
    assert summary["problems"] == 0
    text = call("inspect", source)
    assert text.exit_code == FINE
    for word in ("compressed-tensors", "2 layers x 4 experts", "mxfp4", "4.250", "835.58 kB"):
        assert word in text.stdout


def test_inspect_groups_layers_by_spec(tmp_path: Path) -> None:
    row = names.find_family({"model_type": "qwen3_moe"})
    example = example_of("gptq", "int4-g64:fp16-gptq")
    generated = generate(example, row, row.forms[0], replace(SIZE, layers=3))
    other = generate(example_of("dense", "bf16"), row, row.forms[0], replace(SIZE, layers=3))
    tensors = {n: t for n, t in generated.tensors.items() if ".layers.1." not in n}
    tensors |= {n: t for n, t in other.tensors.items() if ".layers.1." in n}
    quant = {**generated.config.quant, "dynamic": {r"-:model\.layers\.1\.": {}}}
    source = save(
        replace(generated, tensors=tensors, config=replace(generated.config, quant=quant)), tmp_path / "mixed"
    )
    groups = parsed(call("inspect", source, "--json"))["groups"]
    assert [(g["layers"], g["w2"]["spec"]) for g in groups] == [("0, 2", "int4-g64:fp16"), ("1", "bf16")]


def test_inspect_plans_memory_and_lists_a_layer(model: Path) -> None:
    summary = parsed(call("inspect", model, "--memory", "--tp", 2, "--ep", 4, "--layer", 1, "--json"))
    assert [(r["tp_rank"], r["ep_rank"]) for r in summary["memory"]["ranks"]] == [
        (t, e) for e in range(4) for t in (0, 1)
    ]
    assert sum(rank["final"] for rank in summary["memory"]["ranks"]) == summary["bytes"]["experts"]
    assert summary["layer"]["tensors"][0]["tensor"] == "model.layers.1.mlp.experts.0.gate_proj.weight"
    text = call("inspect", model, "--tp", 2, "--layer", 0).stdout
    assert "peak while loading" in text and "model.layers.0.mlp.experts.0.down_proj.weight" in text


def test_inspect_says_what_a_gpu_holds(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lancebill.bench import ceilings

    monkeypatch.setattr(ceilings, "read_rate", lambda device: 2.0)
    whole = parsed(call("inspect", model, "--gpu", "1GiB", "--json"))
    split, experts = whole["split"], whole["experts"]
    assert set(split["gpu_experts"].values()) == {experts} and split["most_tokens_per_second"] is None
    split_bytes = split["gpu_expert_bytes"]
    each = split_bytes // (whole["layers"] * experts)
    held = split["other_bytes"] + each * (whole["layers"] + 1)
    split = parsed(call("inspect", model, "--gpu", f"{held}B", "--json"))["split"]
    assert list(split["gpu_experts"].values()) == [2] + [1] * (whole["layers"] - 1)
    missing = whole["layers"] * experts - whole["layers"] - 1
    assert split["host_expert_bytes"] == missing * each
    assert split["most_tokens_per_second"] == pytest.approx(2e9 / split["cpu_bytes_per_token"], rel=1e-2)
    assert "in host memory" in call("inspect", model, "--gpu", f"{held}B").stdout
    for ranks, cut, kept in ((("--tp", 2), 2, 1), (("--ep", 2), 1, 2), (("--tp", 2, "--ep", 2), 2, 2)):
        whole_rank = parsed(call("inspect", model, "--gpu", "1GiB", *ranks, "--json"))["split"]
        assert set(whole_rank["gpu_experts"].values()) == {experts // kept}
        assert whole_rank["gpu_expert_bytes"] == split_bytes // (cut * kept)
        none = call("inspect", model, "--gpu", f"{split['other_bytes']}B", *ranks)
        reads = parsed(call("inspect", model, "--gpu", f"{split['other_bytes']}B", "--json"))["split"]
        told = parsed(call("inspect", model, "--gpu", f"{split['other_bytes']}B", *ranks, "--json"))["split"]
        assert "rank 0 of tp" in none.stdout and told["cpu_bytes_per_token"] == reads["cpu_bytes_per_token"]


def test_inspect_says_that_a_gpu_is_too_small(tmp_path: Path) -> None:
    write_model(tmp_path / "model", SIZE)
    told = call("inspect", tmp_path / "model", "--gpu", "10B")
    assert "too small: these tensors do not fit" in told.stdout and "tokens/s" not in told.stdout
    split = parsed(call("inspect", tmp_path / "model", "--gpu", "10B", "--json"))["split"]
    assert split["other_bytes"] > 10 and split["most_tokens_per_second"] is None
    assert told.exit_code == 1 and not split["fits"]
    refused = call("inspect", tmp_path / "model", "--gpu", 24)
    assert refused.exit_code == 2 and "24GiB" in refused.output


def test_inspect_rejects_impossible_shards_and_layers(model: Path) -> None:
    result = call("inspect", model, "--memory", "--tp", 3, "--json")
    assert result.exit_code == PROBLEM
    assert parsed(result)["error"]["error"] == "ShardError"
    result = call("inspect", model, "--layer", 9)
    assert result.exit_code == PROBLEM
    assert "0-1" in result.stderr


# verify ----------------------------------------------------------------------------------------------


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


BROKEN = {
    "header": lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 40),
    "cut": lambda folder: (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-9]),
    "config": lambda folder: (folder / "config.json").write_text("{"),
    "no config": lambda folder: (folder / "config.json").unlink(),
    "family": lambda folder: (folder / "config.json").write_text('{"model_type": "poem"}'),
    "method": lambda folder: (folder / "config.json").write_text(
        '{"model_type": "qwen3_moe", "quantization_config": {"quant_method": "magic"}}'
    ),
    "no tensors": lambda folder: (folder / "model.safetensors").unlink(),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_every_command_reports_a_broken_file(kind: str, model: Path, tmp_path: Path) -> None:
    BROKEN[kind](model)
    for words in (("verify", model), ("inspect", model), ("convert", model, tmp_path / "out", "--to", "mxfp4")):
        result = call(*words, "--json")
        assert result.exit_code == PROBLEM, words
        summary = parsed(result)
        assert summary["problems"] if words[0] == "verify" else summary["error"]
        text = call(*words)
        assert text.exit_code == PROBLEM
        assert "problem" in text.output or "error" in text.output
    assert not (tmp_path / "out").exists()


# convert ---------------------------------------------------------------------------------------------


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


# Other ----------------------------------------------------------------------------------------------


def test_env_describes_this_machine() -> None:
    summary = parsed(call("env", "--json"))
    assert summary["packages"]["torch"] == torch.__version__
    assert {"gptq", "compressed-tensors", "dense"} <= set(summary["formats"])
    assert summary["cpu"]["cores"] >= 1
    assert "formats" in call("env").stdout


@pytest.mark.parametrize("words", [("verify",), ("inspect",), ("convert", "--to", "mxfp4")])
def test_missing_paths_are_usage_errors(words: tuple[str, ...], tmp_path: Path) -> None:
    paths = [tmp_path / "nowhere", *([tmp_path / "out"] if words[0] == "convert" else [])]
    result = call(words[0], *paths, *words[1:], "--json")
    assert result.exit_code == USAGE
    assert parsed(result)["error"]["what"] == "no such file or folder"
    assert parsed(result)["error"]["hint"] == "a model on the hub is written owner/name"
    assert call(words[0]).exit_code == USAGE


def test_a_model_on_the_hub(model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    asked = []

    def download(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, revision))
        if name != "some/model":
            raise OSError("the network is unreachable")
        return str(model)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, ["inspect", "some/model", "--revision", "v2", "--json"]).exit_code == 0
    assert asked == [("some/model", "v2")]
    offline = CliRunner().invoke(app, ["verify", "other/model"])
    assert offline.exit_code == 1 and "unreachable" in offline.output and "pass the folder" in offline.output
    assert CliRunner().invoke(app, ["inspect", str(model), "--revision", "v2"]).exit_code == 2


def test_a_missing_config_is_named(model: Path, tmp_path: Path) -> None:
    lone = tmp_path / "lone"
    shutil.copytree(model, lone)
    (lone / "config.json").unlink()
    done = CliRunner().invoke(app, ["inspect", str(lone)])
    assert done.exit_code == 1 and "no config.json" in done.output


@pytest.mark.parametrize(
    ("model_type", "says"),
    [
        (None, "the config does not say which model this is"),
        ("qwen3", "such as qwen3_moe"),
        ("mixtrall", "such as mixtral"),
        ("\u00e9", "one of"),
    ],
)
def test_a_family_that_is_not_known(model: Path, tmp_path: Path, model_type: str | None, says: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": model_type}))
    result = call("inspect", folder)
    assert result.exit_code == 1 and says in result.output


@pytest.mark.parametrize("size", [0, 100, -1])
def test_a_file_that_is_cut_off(model: Path, tmp_path: Path, size: int) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    (file,) = folder.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:size])
    result = call("verify", folder)
    assert result.exit_code == 1 and "the file is not complete: download it again" in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_conversion_on_a_gpu_needs_one(model: Path, tmp_path: Path) -> None:
    result = call("convert", model, tmp_path / "out", "--to", "mxfp4", "--device", "cuda", "--json")
    assert result.exit_code == USAGE and parsed(result)["error"]["what"] == "no CUDA device is available"


@contextmanager
def handled_by(number: signal.Signals, handler: signal.Handlers) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_end_a_block_as_an_exception_does(number: signal.Signals) -> None:
    with handled_by(number, signal.SIG_DFL):  # under `nohup` it would be ignored
        with pytest.raises(SystemExit) as stopped, ui.cleans_up_when_stopped():
            signal.raise_signal(number)
        assert stopped.value.code == 128 + number


def test_an_ignored_signal_stays_ignored() -> None:
    """As under `nohup`."""
    with handled_by(signal.SIGHUP, signal.SIG_IGN):
        with ui.cleans_up_when_stopped():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


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


OUTPUT = """
import os, sys
from lancebill.cli.main import main
os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
sys.argv = ["lancebill", "env"]
main()
"""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_an_output_that_cannot_be_written_is_no_traceback() -> None:
    full = subprocess.run([sys.executable, "-c", OUTPUT], capture_output=True, text=True, check=False)
    assert full.returncode == 1 and full.stderr == "error: cannot write the output: No space left on device\n"
    closed = 'exec "$0" -m lancebill.cli.main env >&-'
    done = subprocess.run(["sh", "-c", closed, sys.executable], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_server_that_does_not_start_or_answer_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpecError, match="refuses its options"), engines.running_server(["nowhere"]):
        pass
    monkeypatch.setattr(engines, "USAGE", -1)
    with pytest.raises(LaunchError, match="did not start"), engines.running_server(["nowhere"]):
        pass
    monkeypatch.setattr(engines, "START_LIMIT", 0.0)
    with pytest.raises(LaunchError, match="does not answer"), engines.running_server(["nowhere"]):
        pass


def test_markup_in_error_texts_is_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from lancebill.errors import MalformedFile

    ui.print_error(MalformedFile("[bold]x[/bold] [/nonsense]", where="[red]"), ui.console())
    assert "[bold]x[/bold] [/nonsense]" in capsys.readouterr().out


def test_many_problems_are_cut_and_progress_is_shown_in_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    problems = [BadValue(f"problem {i}") for i in range(CheckpointProblems.SHOWN + 2)]
    ui.print_error(CheckpointProblems(problems, where="here"), ui.console())
    assert "... and 2 more" in capsys.readouterr().out
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with ui.progress("experts", 4) as advance:
        advance(1)
    with ui.bytes_loaded("loading") as update:
        update(10, 20)
    shown = capsys.readouterr().err
    assert "experts" in shown and "loading" in shown


def test_sizes_and_ranges_as_text() -> None:
    assert [ui.size(n) for n in (0, 999, 1500, 2_000_000_000)] == ["0 B", "999 B", "1.50 kB", "2.00 GB"]
    assert ranges([3, 1, 2, 7]) == "1-3, 7"


def test_a_command_in_its_own_process(model: Path) -> None:
    command = [sys.executable, "-m", "lancebill.cli.main", "inspect", str(model), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == FINE and done.stderr == ""
    assert json.loads(done.stdout)["experts"] == 4


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_unknown_ways_to_move_experts_are_refused_before_loading(command: str, model: Path) -> None:
    """Also on a CPU, where nothing moves."""
    refused = call(command, model, *["hello"][: command == "generate"], "--moves", "sometimes")
    assert refused.exit_code == USAGE
    assert "off or recency" in refused.output and "sometimes" in refused.output
