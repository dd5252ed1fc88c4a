"""Assembles PTX that we wrote ourselves, without a GPU."""

from __future__ import annotations

import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

TARGETS = ("sm_80", "sm_90a", "sm_120")


def assert_assembles(ptx: str, target: str, folder: Path) -> None:
    """With the assembler that comes with Triton, or the machine's; skips where there is none."""
    spec = find_spec("triton")
    own = Path(spec.origin).parent / "backends/nvidia/bin/ptxas" if spec is not None and spec.origin else None
    tool = str(own) if own is not None and own.exists() else shutil.which("ptxas")
    if tool is None:
        pytest.skip("no assembler")
    (folder / "k.ptx").write_text(ptx)
    command = [tool, f"-arch={target}", str(folder / "k.ptx"), "-o", str(folder / "k.cubin")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
