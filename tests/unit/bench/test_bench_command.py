"""The output of `lancebill bench`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_problems import FINE, PROBLEM, SHAPE, USAGE, lancebill, problem_of

from lancebill.backends import oracle

pytestmark = pytest.mark.usefixtures("quick")


WORDS = ("bench", "--device", "cpu", "--shape", "4,64,64,2", "--weights", "mxfp4", "--tokens", "1,4", "--repeats", 3)
ROW = {"shape", "weights", "activations", "tokens", "routing", "part", "us", "spread", "tflops", "gbs", "roofline"}


def test_bench_writes_json(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    file = tmp_path / "bench.json"
    result = lancebill(*WORDS, "--peers", "torch-grouped,torch-loop", "--threads", 1, "--json", file)
    assert result.exit_code == FINE, result.output
    assert "torch-loop" in result.stdout
    assert "4 tokens" in result.stderr
    assert torch.get_num_threads() == threads
    found: dict[str, Any] = json.loads(file.read_text())
    meta = found["meta"]
    assert (meta["device"], meta["threads"], meta["repeats"], meta["evicted_bytes"]) == ("cpu", 1, 3, 2 << 20)
    assert {"versions", "commit", "command", "ceilings", "date", "machine", "problem"} <= set(meta)
    assert meta["versions"]["torch"] == torch.__version__
    assert meta["ceilings"]["read_gbs"] > 0
    assert [(r["tokens"], r["part"]) for r in found["rows"]] == [
        (tokens, part) for tokens in (1, 4) for part in ("layer", "dispatch", "combine")
    ]
    for row in found["rows"]:
        assert ROW | {"backend", "peers"} <= set(row)
        assert row["us"] > 0 and row["spread"][0] <= row["us"] <= row["spread"][1]
        assert row["roofline"] == pytest.approx(row["floor_us"] / row["us"])
        timed = {"torch-grouped", "torch-grouped, sorted", "torch-loop"}
        assert set(row["peers"]) == (timed if row["part"] == "layer" else set())
    assert found["rows"][0]["backend"] == oracle.select(problem_of(), oracle.Device("cpu")).backend.name
    assert 0 <= found["rows"][0]["error"] < 1e-2


def test_bench_takes_batch_invariant_order(tmp_path: Path) -> None:
    result = lancebill(*WORDS, "--order", "batch-invariant", "--json", tmp_path / "bench.json")
    assert result.exit_code == FINE, result.output
    assert json.loads((tmp_path / "bench.json").read_text())["meta"]["problem"]["order"] == "batch-invariant"


@pytest.mark.parametrize(
    ("option", "name", "says"),
    [
        ("--plot", "x.xyz", "no plot has this suffix"),
        ("--json", "no/x", "cannot be written"),
        ("--json", ".", "cannot be written"),
    ],
)
def test_outputs_are_checked_before_the_measurement(option: str, name: str, says: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = lancebill(*WORDS, option, tmp_path / name)
    assert result.exit_code == USAGE and says in result.output and "measuring" not in result.output


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_figures_that_cannot_be_shown_are_written_and_the_reverse(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "lancebill", *map(str, WORDS), "--json", str(tmp_path / "bench.json")]
    with Path("/dev/full").open("w") as full:
        assert subprocess.run(words, stdout=full, stderr=subprocess.PIPE, check=False).returncode == PROBLEM
    assert json.loads((tmp_path / "bench.json").read_text())["rows"]
    done = lancebill(*WORDS, "--json", "/dev/full")
    assert done.exit_code == PROBLEM and "4 experts" in done.stdout and "No space left" in done.stderr


def test_bench_writes_a_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for file in (tmp_path / "bench.png", tmp_path / "bench.SVG"):
        result = lancebill(*WORDS, "--peers", "torch-loop-fp32", "--routing", "zipf", "--plot", file)
        assert result.exit_code == FINE, result.output
        assert file.stat().st_size > 10_000
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_nothing_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = lancebill(*WORDS, "--plot", tmp_path / "bench.png")
    assert result.exit_code == PROBLEM
    assert "pip install matplotlib" in result.stderr
    assert "measuring" not in result.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("--tokens", "1,x"),
        ("--tokens", "0"),
        ("--tokens", ""),
        ("--routing", "wild"),
        ("--order", "slow"),
        ("--moves", "recency"),
        ("--split", "99"),
        ("--split", "99", "--moves", "recency"),
        ("--cpu-threads", "1"),
        ("--split", "1", "--cpu-threads", "5000"),
        ("--split", "1", "--cpu-threads", "1"),
        ("--first-forward", "--split", "1"),
        ("--first-forward", "--split", "1", "--moves", "nonsense"),
        ("--peers", "vllm"),
        ("--shape", "large"),
        ("--weights", "int40"),
        ("--device", "abacus"),
        ("--device", "sm_90"),
        ("--backend", "none"),
        ("--first-forward", "--backend", "none"),
        ("--first-forward", "--peers", "none"),
        ("--first-forward", "--routing", "wild"),
        ("--json", "no/such/folder/file"),
    ],
)
def test_usage_errors(words: tuple[str, ...]) -> None:
    result = lancebill(*WORDS, *words)
    assert result.exit_code == USAGE
    assert "measuring" not in result.stderr


def test_the_text_says_what_is_split() -> None:
    text = lancebill(*WORDS, "--split", "1").output
    assert f"1 experts on the device, {SHAPE.experts - 1} in host memory" in " ".join(text.split()), text
    assert "in host memory" not in lancebill(*WORDS).output
