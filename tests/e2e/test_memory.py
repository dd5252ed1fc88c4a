"""Peak memory of loading a quantised checkpoint, measured in a fresh process, stays close to the checkpoint's size."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "old" / "load_memory.py"
FIXED = 40 << 20  # growth at any size: code pages, Python objects, and the slices that two threads pack


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc/self/status")
def test_peak_of_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARK.parent)
    spec = importlib.util.spec_from_file_location("memory_benchmark", BENCHMARK)
    assert spec is not None and spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    source = benchmark.write_source(tmp_path / "source", 2, 32, hidden=1024, intermediate=768)
    packed = benchmark.convert_to(source, tmp_path / "packed", "int4-g128")
    process = subprocess.run(
        [sys.executable, str(BENCHMARK), "--load", benchmark.OURS, str(packed)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    figures = json.loads(process.stdout.splitlines()[-1])
    assert figures["computes"]
    assert figures["held_bytes"] <= 1.01 * figures["checkpoint_bytes"], "something was expanded"
    assert figures["peak_resident_bytes"] <= benchmark.BOUND * figures["checkpoint_bytes"] + FIXED
