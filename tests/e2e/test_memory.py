"""Peak memory of loading a quantised checkpoint, measured in a fresh process, stays close to the checkpoint's size."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")

from benchmarks import loading

FIXED = 40 << 20  # growth at any size: code pages, Python objects, and the slices that two threads pack


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc/self/status")
def test_peak_of_loading(tmp_path: Path) -> None:
    source = loading.write_source(tmp_path / "source", 2, 32, hidden=1024, intermediate=768)
    found = loading.load_in_process(loading.OURS, loading.convert_to(source, tmp_path / "packed", "int4-g128"))
    assert found["held_bytes"] <= 1.01 * found["checkpoint_bytes"], "something was expanded"
    assert found["peak_resident_bytes"] <= loading.BOUND * found["checkpoint_bytes"] + FIXED
