"""What is recorded of tests with vLLM, if they end before the last one too."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from project import ROOT

sys.path.insert(0, str(ROOT / "tests" / "with_vllm"))

import record

from benchmarks import machine, runner
from benchmarks.runner import Case, Record, Row


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
    monkeypatch.setattr(runner, "result_path", lambda subject: tmp_path / f"{subject}.json")
    run_two_tests(tmp_path, record.Recorder(seconds, frozenset(without)))
    found = Record.read(tmp_path / "vllm-cpu.json")
    assert (found.facts["collected"], found.facts.get("stopped")) == (2, stopped)
    assert [(row["test"], row["outcome"]) for row in found.rows] == [
        (f"test_two.py::test_{name}", "passed") for name in ran
    ]


def test_a_run_without_tests_is_not_recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(runner, "result_path", lambda subject: tmp_path / f"{subject}.json")
    run_two_tests(tmp_path, record.Recorder(), "--collect-only")
    assert not (tmp_path / "vllm-cpu.json").exists()


def test_what_passed_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(runner, "RESULTS", tmp_path)
    monkeypatch.setattr(machine, "machine_name", lambda device: device)
    monkeypatch.setattr(machine, "package_version", lambda name: "2")
    runs = {"a": ("2", "passed"), "b": ("2", "failed"), "c": ("1", "passed")}
    for name, (version, outcome) in runs.items():
        row = Row(Case.of(test=name), {"outcome": outcome})
        Record(tmp_path / "vllm-cpu" / "cpu" / f"{name}.json", {"vllm": version}, [row]).write()
    assert record.passed_before() == {"a"}
