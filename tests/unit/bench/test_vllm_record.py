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


@pytest.mark.parametrize(("seconds", "ran", "stopped"), [(None, 2, None), (0.0, 1, "stopped by time")])
def test_tests_that_ran_and_tests_there_are(
    seconds: float | None, ran: int, stopped: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(machine, "result_path", lambda table: tmp_path / f"{table}.json")
    (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    (tmp_path / "test_two.py").write_text("def test_a(): pass\ndef test_b(): pass\n", encoding="utf-8")
    options = ["-n", "0", "-p", "no:cacheprovider", "--import-mode", "importlib", "-c", str(tmp_path / "pytest.ini")]
    pytest.main([*options, str(tmp_path)], plugins=[record.Recorder(seconds)])
    found = json.loads((tmp_path / "vllm-cpu.json").read_text(encoding="utf-8"))
    assert (found["collected"], found["counts"], found["stopped"]) == (2, {"passed": ran}, stopped)
