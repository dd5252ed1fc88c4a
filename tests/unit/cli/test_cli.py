"""Tests of all commands: output, JSON and exit codes; no command prints a traceback."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from commands import FINE, PROBLEM, USAGE, call, parsed
from typer.testing import CliRunner

from lancebill.cli import console as ui
from lancebill.cli import engines
from lancebill.cli.main import app
from lancebill.errors import BadValue, CheckpointProblems, LaunchError, SpecError, ranges

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

    def info(name: str, *, revision: str | None) -> SimpleNamespace:
        asked.append((name, revision))
        if name != "some/model":
            raise OSError("the network is unreachable")
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=file.name) for file in model.iterdir()])

    def download(name: str, *, revision: str | None, **_: object) -> str:
        if name != "some/model":
            raise OSError("not in the cache")
        return str(model)

    monkeypatch.setattr(huggingface_hub, "model_info", info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, ["inspect", "some/model", "--revision", "v2", "--json"]).exit_code == 0
    assert asked == [("some/model", "v2")]
    for words in (["verify"], ["inspect"], ["explain"], ["convert", "out", "--to", "mxfp4"]):
        offline = CliRunner().invoke(app, [words[0], "other/model", *words[1:]])
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
