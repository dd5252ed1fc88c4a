"""The record of `make test-gpu`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from project import ROOT

SCRIPT = ROOT / "tests" / "gpu" / "gpu_record.py"


def run(folder: Path, outcome: str, share: float) -> tuple[int, dict[str, Any]]:
    """Join a run in which one cell was timed."""
    found = {"outcome": outcome, "notes": {"times": {"a x 1": {"share": share}}}, "reason": f"slower: {share}"}
    kept: dict[str, Any] = {"outcome": "passed", "notes": None}
    for part, cells in ((1, {"format a": kept}), (2, {"timed a": found})):
        whole = {"commit": "c", "gpu": "NVIDIA H200, 570", "versions": {}, "seconds": 1, "cells": cells}
        (folder / f"part-{part}.json").write_text(json.dumps(whole))
    done = subprocess.run([sys.executable, str(SCRIPT), str(folder), "--to", str(folder)], capture_output=True)
    return done.returncode, json.loads((folder / "h200.json").read_text())


def test_a_slower_run_is_not_what_the_next_one_is_compared_with(tmp_path: Path) -> None:
    code, record = run(tmp_path, "passed", 0.8)
    assert code == 0 and record["times"] == {"a x 1": {"share": 0.8}} and record["passed"] == 2
    code, record = run(tmp_path, "failed", 0.5)
    assert code == 1 and record["times"] == {"a x 1": {"share": 0.8}}
    assert record["failed"] == 1 and record["failures"] == {"timed a": "slower: 0.5"}
    code, record = run(tmp_path, "passed", 0.9)
    assert code == 0 and record["times"] == {"a x 1": {"share": 0.9}}
