"""A content-addressed store of compiled kernels.

An entry is one file named by its key: a line of JSON facts (with the hash of the code), then the code.
Entries are written beside their place and renamed into it, so readers see all or nothing; a lock for
each key keeps two processes from compiling the same thing; every read checks the hash, and an entry
that fails is built again. The folder belongs to its owner alone: code from it is loaded and run.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from colibri.errors import ColibriError
from colibri.jit.compile import Binary

ENV_FOLDER = "COLIBRI_CACHE"
ENV_FORBID = "COLIBRI_NO_COMPILE"
SUFFIX = ".kernel"


class MissingKernel(ColibriError):
    """Compiling is forbidden and the kernel is in no cache."""


def default_folder() -> Path:
    """`$COLIBRI_CACHE`, else `~/.cache/colibri/kernels`."""
    named = os.environ.get(ENV_FOLDER)
    return Path(named) if named else Path.home() / ".cache" / "colibri" / "kernels"


def shipped_folder() -> Path:
    """Kernels that came with the package."""
    return Path(__file__).parent / "prebuilt"


class Cache:
    """One writable folder, and folders that are only read (the package's own)."""

    def __init__(self, folder: Path | None = None, also: tuple[Path, ...] | None = None) -> None:
        self.folder = folder or default_folder()
        self.also = (shipped_folder(),) if also is None else also

    def find(self, key: str) -> Binary | None:
        """The entry, checked; None where there is none or it is damaged."""
        for folder in (*self.also, self.folder):
            path = folder / f"{key}{SUFFIX}"
            try:
                return parse(path.read_bytes())
            except FileNotFoundError:
                continue
            except (ValueError, KeyError, TypeError):
                if folder == self.folder:
                    path.unlink(missing_ok=True)
        return None

    def get(self, key: str, label: str, build: Callable[[], Binary]) -> Binary:
        """The entry, built by the first that asks for it."""
        found = self.find(key)
        if found is not None:
            return found
        if os.environ.get(ENV_FORBID, "") not in ("", "0"):
            raise MissingKernel(
                f"kernel {label} is not in the cache and {ENV_FORBID} forbids compiling it",
                where=str(self.folder),
                hint="`colibri kernels build` fills the cache on any machine with Triton",
            )
        with self._locked(key):
            found = self.find(key)
            return found if found is not None else self._publish(key, build())

    def keys(self) -> list[str]:
        """Keys of the writable folder."""
        return sorted(p.name[: -len(SUFFIX)] for p in self.folder.glob(f"*{SUFFIX}")) if self.folder.is_dir() else []

    def _publish(self, key: str, binary: Binary) -> Binary:
        handle, name = tempfile.mkstemp(dir=self.folder, suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(render(binary))
                file.flush()
                os.fsync(file.fileno())
            Path(name).replace(self.folder / f"{key}{SUFFIX}")
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        return binary

    @contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self.folder.stat().st_uid == os.getuid():
            self.folder.chmod(0o700)
        with (self.folder / f"{key}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def render(binary: Binary) -> bytes:
    """Facts on one line, then the code."""
    facts = {**binary.facts(), "sha256": hashlib.sha256(binary.cubin).hexdigest()}
    return json.dumps(facts, sort_keys=True).encode() + b"\n" + binary.cubin


def parse(data: bytes) -> Binary:
    """The inverse; ValueError where the code is not what the facts say."""
    head, _, cubin = data.partition(b"\n")
    facts = json.loads(head)
    if hashlib.sha256(cubin).hexdigest() != facts.pop("sha256"):
        raise ValueError("damaged entry")
    facts["descs"] = tuple(facts["descs"])
    return Binary(cubin, **facts)
