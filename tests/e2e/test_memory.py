"""Loading a packed checkpoint takes little more memory than it holds: measured in a fresh process."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "load_memory.py"
FIXED = 48 << 20  # what the process grows by whatever the size: code that is used first, allocators, Python's objects


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the kernel tells no memory by kind")
def test_peak_of_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARK.parent)
    spec = importlib.util.spec_from_file_location("memory_benchmark", BENCHMARK)
    assert spec is not None and spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    source = benchmark.write(tmp_path / "source", 2, 32, hidden=1024, intermediate=768)
    packed = benchmark.pack(source, tmp_path / "packed", "int4-g128")
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "--load", benchmark.OURS, str(packed)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["computes"]
    assert found["held_bytes"] <= 1.01 * found["checkpoint_bytes"], "something was expanded"
    assert found["peak_resident_bytes"] <= benchmark.BOUND * found["checkpoint_bytes"] + FIXED
