"""Teams of threads of the CPU kernels, in programs of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lancebill.native import build

pytestmark = pytest.mark.skipif(
    build.compiler() is None or sys.platform != "linux", reason="no C++ compiler, or no Linux"
)


def output_of(source: str, tmp_path: Path) -> str:
    cxx, folder, program = build.compiler(), build.KERNELS.folder, tmp_path / "program"
    assert cxx is not None
    sources = [str(Path(__file__).parent / source), str(folder / "parallel.cpp"), str(folder / "openmp.cpp")]
    subprocess.run([cxx, "-std=c++17", "-pthread", f"-I{folder}", *sources, "-o", str(program)], check=True)
    return subprocess.run([str(program)], check=True, capture_output=True, text=True, timeout=60).stdout.strip()


def test_a_worker_that_cannot_be_asked_is_waited_for(tmp_path: Path) -> None:
    """In a sandbox that refuses signals workers count as living."""
    said = output_of("refused_signals.cpp", tmp_path)
    if said == "no filters":
        pytest.skip("this system has no filters of system calls")
    assert said == "status 0, ended 1"


def test_a_call_with_fewer_threads_than_the_team_has_wakes_the_right_ones(tmp_path: Path) -> None:
    assert output_of("fewer_threads.cpp", tmp_path) == "20 of 20"
