"""A content-addressed store of compiled kernels.

An entry is one file named by its key: a hash of the rest of the file, a line of JSON metadata, the cubin. Entries are
written to a temporary file and renamed, so readers never see a partial entry. A lock per key keeps two processes from
compiling the same kernel. Every read checks the hash; a damaged entry is compiled again. If the folder cannot be
written, kernels are compiled in every process instead.

Kernels shipped with the package are looked up first. Their keys name the compiler that made them, not the one
installed now: running a cubin needs no compiler.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from threading import Lock

from lancebill.errors import CacheError, MissingKernel
from lancebill.jit import private_folder as private
from lancebill.jit.compile import Binary, KernelSource, compiler_version

log = logging.getLogger("lancebill")

ENV_FOLDER = "LANCEBILL_CACHE"
ENV_FORBID = "LANCEBILL_NO_COMPILE"
SUFFIX = ".kernel"
MADE_BY = "compiler.txt"  # in the folder of shipped kernels: the compiler version in their keys


def default_folder() -> Path:
    """`$LANCEBILL_CACHE`, else `~/.cache/lancebill/kernels`."""
    named = os.environ.get(ENV_FOLDER)
    return Path(named) if named else Path.home() / ".cache" / "lancebill" / "kernels"


def shipped_folder() -> Path:
    """Where the package's precompiled kernels are."""
    return Path(__file__).parent / "prebuilt"


def made_by(folder: Path) -> str | None:
    """The compiler version of a folder of shipped kernels; None if nothing was shipped."""
    try:
        return (folder / MADE_BY).read_text(encoding="utf-8").strip()
    except OSError:
        return None


class Cache:
    """One writable folder, and the read-only folder of shipped kernels.

    `must_keep`: raise, instead of warning, if a compiled kernel cannot be stored.
    """

    def __init__(self, folder: Path | None = None, shipped: Path | None = None, *, must_keep: bool = False) -> None:
        self.folder = folder or default_folder()
        self.shipped = shipped or shipped_folder()
        self.must_keep = must_keep

    def find(self, source: KernelSource) -> Binary | None:
        """The entry, verified; None if it is missing or damaged."""
        compiler = made_by(self.shipped)
        shipped = None if compiler is None else read_entry(self.shipped, _key(source, compiler), installed=True)
        return shipped or self._find_writable(source)

    def get(self, source: KernelSource, build: Callable[[], Binary]) -> Binary:
        """The entry; the first process that needs it calls `build`, others wait for its result."""
        binary = self.find(source)
        if binary is not None:
            return binary
        if os.environ.get(ENV_FORBID, "") not in ("", "0"):
            raise MissingKernel(
                f"kernel {source.label} is not in the cache and {ENV_FORBID} forbids compiling it",
                where=str(self.folder),
                hint="`lancebill kernels build` fills the cache on any machine with Triton",
            )
        key = _key(source, compiler_version())
        with ExitStack() as stack:
            locked = self._lock(key, stack)
            binary = self._find_writable(source) if locked else None  # another process may have built it meanwhile
            if binary is None:
                binary = build()
                if locked:
                    self._store(key, binary)
        return binary

    def prepare(self) -> bool:
        """Create the folder with mode 700; False if that fails."""
        try:
            private.make_private(self.folder)
        except OSError as error:
            self._report_unwritable(error)
            return False
        return True

    def keys(self) -> list[str]:
        """Keys of the writable folder."""
        return sorted(path.name[: -len(SUFFIX)] for path in self.folder.glob(f"*{SUFFIX}"))

    def _find_writable(self, source: KernelSource) -> Binary | None:
        """The entry in the writable folder for the installed compiler."""
        private.require_private(self.folder)
        return read_entry(self.folder, _key(source, compiler_version()))

    def _lock(self, key: str, stack: ExitStack) -> bool:
        """Take the lock of a key until `stack` closes; False if the folder cannot be written."""
        if not self.prepare():
            return False
        try:
            stack.enter_context(private.locked(self.folder / f"{key}.lock"))
        except OSError as error:
            self._report_unwritable(error)
            return False
        return True

    def _store(self, key: str, binary: Binary) -> None:
        """Write a temporary file and rename it. The caller holds the key's lock, so nobody else writes these files."""
        part = self.folder / f"{key}.part"
        try:
            private.write_private(part, render_entry(key, binary))
            part.replace(self.folder / f"{key}{SUFFIX}")
        except OSError as error:
            part.unlink(missing_ok=True)
            self._report_unwritable(error)

    def _report_unwritable(self, error: OSError) -> None:
        """Raise if kernels must be kept, else warn."""
        reason = error.strerror or str(error)
        if self.must_keep:
            raise CacheError("compiled kernels cannot be stored", where=str(self.folder), got=reason) from error
        log.warning(
            "compiled kernels cannot be stored in %s (%s): every process compiles them again", self.folder, reason
        )


_hashing = Lock()


def _key(source: KernelSource, compiler: str) -> str:
    """The key parses source files, and Python 3.11 may raise SystemError if two threads parse at the same time."""
    with _hashing:
        return source.key(compiler)


def read_entry(folder: Path, key: str, *, installed: bool = False) -> Binary | None:
    """An entry of a folder; None if it is missing, unreadable, damaged, or others could have written it."""
    try:
        data = private.read_private(folder / f"{key}{SUFFIX}", installed=installed)
        return None if data is None else parse_entry(key, data)
    except (OSError, ValueError):
        return None


def render_entry(key: str, binary: Binary) -> bytes:
    """The bytes of an entry's file: the hash of the rest, metadata on one line, the cubin."""
    content = json.dumps({**binary.facts(), "key": key}, sort_keys=True).encode() + b"\n" + binary.cubin
    return hashlib.sha256(content).hexdigest().encode() + b"\n" + content


def parse_entry(key: str, data: bytes) -> Binary:
    """The inverse of `render_entry`; ValueError if the data is damaged or belongs to another key."""
    digest, _, content = data.partition(b"\n")
    if hashlib.sha256(content).hexdigest().encode() != digest:
        raise ValueError("damaged entry")
    head, _, cubin = content.partition(b"\n")
    facts = json.loads(head)
    if facts.pop("key") != key:
        raise ValueError("the entry belongs to another key")
    facts["descs"] = tuple(facts["descs"])
    return Binary(cubin, **facts)
