"""A wheel made by `make wheel` carries the shipped kernels: a process that has only the wheel compiles nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

DIST = Path(__file__).parents[2] / "dist"

# Runs on the unpacked wheel alone, with an empty cache and no leave to compile.
SCRIPT = """
import sys
from pathlib import Path
import colibri
from colibri.backends.hopper.shipped import shipped
from colibri.jit.build import binary
from colibri.jit.cache import Cache
assert Path(colibri.__file__).is_relative_to(sys.argv[1]), colibri.__file__
sources = list(shipped())
size = sum(len(binary(source).cubin) for source in sources)
assert 100 < len(sources) <= 200 and size <= 20 << 20, (len(sources), size)
assert not Cache().folder.exists() and "triton" not in sys.modules
print(len(sources), "kernels", size, "bytes")
"""


def test_a_wheel_carries_the_shipped_set(tmp_path: Path) -> None:
    wheels = sorted(DIST.glob("colibri_moe-*.whl"), key=lambda path: path.stat().st_mtime)
    if not wheels:
        pytest.skip("there is no wheel; `make wheel` builds one")
    root, empty = tmp_path / "root", tmp_path / "cache"
    with zipfile.ZipFile(wheels[-1]) as archive:
        archive.extractall(root)
    environment = {**os.environ, "PYTHONPATH": str(root), "COLIBRI_CACHE": str(empty), "COLIBRI_NO_COMPILE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(root)], capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
