"""A wheel from `make wheel` contains the compiled kernels: a process with only the wheel compiles nothing."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from project import ROOT

DIST = ROOT / "dist"

# Runs with only the unpacked wheel, an empty cache, and compilation disabled.
SCRIPT = """
import sys
from pathlib import Path
import lancebill
from lancebill.backends.shipped import all_shipped
from lancebill.jit.build import get_binary
from lancebill.jit.cache import Cache
from lancebill.jit.ship import MOST_BYTES, MOST_KERNELS
assert Path(lancebill.__file__).is_relative_to(sys.argv[1]), lancebill.__file__
sources = list(all_shipped())
size = sum(len(get_binary(source).cubin) for source in sources)
assert 250 < len(sources) <= MOST_KERNELS and size <= MOST_BYTES, (len(sources), size)
assert not Cache().folder.exists() and "triton" not in sys.modules
print(len(sources), "kernels", size, "bytes")
"""


def _newest_wheel() -> Path:
    wheels = sorted(DIST.glob("lancebill-*.whl"), key=lambda path: path.stat().st_mtime)
    if not wheels:
        pytest.skip("no wheel in dist; `make wheel` builds one")
    return wheels[-1]


def test_a_wheel_contains_the_shipped_kernels(tmp_path: Path) -> None:
    wheel = _newest_wheel()
    root, empty = tmp_path / "root", tmp_path / "cache"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(root)
    environment = {**os.environ, "PYTHONPATH": str(root), "LANCEBILL_CACHE": str(empty), "LANCEBILL_NO_COMPILE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(root)], capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr


def test_a_wheel_lists_its_binaries_with_their_hashes() -> None:
    wheel = _newest_wheel()
    with zipfile.ZipFile(wheel) as archive:
        (sbom,) = [name for name in archive.namelist() if name.endswith(".dist-info/sboms/lancebill.cdx.json")]
        files = [part for part in json.loads(archive.read(sbom))["components"] if part["type"] == "file"]
        listed = {part["name"]: part["hashes"][0]["content"] for part in files}
        binaries = [name for name in archive.namelist() if name.endswith((".so", ".kernel"))]
        assert listed == {name: hashlib.sha256(archive.read(name)).hexdigest() for name in binaries}
