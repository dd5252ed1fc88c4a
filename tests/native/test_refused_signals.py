"""Workers of the CPU kernels in a sandbox that refuses signals: they count as living."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lancebill.native import build


@pytest.mark.skipif(build.compiler() is None or sys.platform != "linux", reason="no C++ compiler, or no Linux")
def test_a_worker_that_cannot_be_asked_is_waited_for(tmp_path: Path) -> None:
    cxx, folder, program = build.compiler(), build.KERNELS.folder, tmp_path / "refused"
    assert cxx is not None
    sources = [str(Path(__file__).parent / "refused_signals.cpp"), str(folder / "parallel.cpp")]
    subprocess.run([cxx, "-std=c++17", "-pthread", f"-I{folder}", *sources, "-o", str(program)], check=True)
    said = subprocess.run([str(program)], check=True, capture_output=True, text=True, timeout=60).stdout.strip()
    if said == "no filters":
        pytest.skip("this system has no filters of system calls")
    assert said == "status 0, ended 1"
