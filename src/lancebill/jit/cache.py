"""A content-addressed store of compiled kernels.

An entry is one file named by its key: the hash of all that follows, a line of JSON facts, the code. Entries are
written beside their place and renamed into it, so readers see all or nothing; a lock for each key keeps two
processes from compiling the same thing; every read checks the hash, and an entry that fails is built again. A
folder that cannot be written costs time, not results.

Kernels that came with the package are looked for first. They are named for the compiler that made them, whatever
is installed now: a binary runs without its compiler.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from lancebill.errors import CacheError, MissingKernel
from lancebill.jit import private_folder as private
from lancebill.jit.compile import Binary, KernelSource, compiler_version

log = logging.getLogger("lancebill")

ENV_FOLDER = "LANCEBILL_CACHE"
ENV_FORBID = "LANCEBILL_NO_COMPILE"
SUFFIX = ".kernel"
MADE_BY = "compiler.txt"  # beside shipped kernels: the compiler their keys name


def default_folder() -> Path:
    """`$LANCEBILL_CACHE`, else `~/.cache/lancebill/kernels`."""
    named = os.environ.get(ENV_FOLDER)
    return Path(named) if named else Path.home() / ".cache" / "lancebill" / "kernels"


def shipped_folder() -> Path:
    """Kernels that came with the package."""
    return Path(__file__).parent / "prebuilt"


def made_by(folder: Path) -> str | None:
    """The compiler of a shipped folder; None where nothing was shipped."""
    try:
        return (folder / MADE_BY).read_text(encoding="utf-8").strip()
    except OSError:
        return None


class Cache:
    """One writable folder, and one that is only read (the package's own).

    `must_keep`: a kernel that is built and cannot be stored is an error, not a warning.
    """

    def __init__(self, folder: Path | None = None, shipped: Path | None = None, *, must_keep: bool = False) -> None:
        self.folder = folder or default_folder()
        self.shipped = shipped or shipped_folder()
        self.must_keep = must_keep

    def find(self, source: KernelSource) -> Binary | None:
        """The entry, checked; None where there is none or it is damaged."""
        shipper = made_by(self.shipped)
        found = None if shipper is None else read(self.shipped, source.key(shipper))
        return found or self._own(source)

    def get(self, source: KernelSource, build: Callable[[], Binary]) -> Binary:
        """The entry, built by the first that asks for it."""
        found = self.find(source)
        if found is not None:
            return found
        if os.environ.get(ENV_FORBID, "") not in ("", "0"):
            raise MissingKernel(
                f"kernel {source.label} is not in the cache and {ENV_FORBID} forbids compiling it",
                where=str(self.folder),
                hint="`lancebill kernels build` fills the cache on any machine with Triton",
            )
        key = source.key(compiler_version())
        with ExitStack() as stack:
            alone = self._lock(key, stack)
            found = self._own(source) if alone else None
            if found is None:
                found = build()
                if alone:
                    self._publish(key, found)
        return found

    def prepare(self) -> bool:
        """Make the folder, private; False where that cannot be."""
        try:
            private.make(self.folder)
        except OSError as error:
            self._lost(error)
            return False
        return True

    def keys(self) -> list[str]:
        """Keys of the writable folder."""
        return sorted(path.name[: -len(SUFFIX)] for path in self.folder.glob(f"*{SUFFIX}"))

    def _own(self, source: KernelSource) -> Binary | None:
        private.require(self.folder)
        return read(self.folder, source.key(compiler_version()))

    def _lock(self, key: str, stack: ExitStack) -> bool:
        """Hold the lock of a key; False where the folder cannot have one."""
        if not self.prepare():
            return False
        try:
            stack.enter_context(private.locked(self.folder / f"{key}.lock"))
        except OSError as error:
            self._lost(error)
            return False
        return True

    def _publish(self, key: str, binary: Binary) -> None:
        """Whole or not at all. Only the holder of the key's lock writes its file."""
        part = self.folder / f"{key}.part"
        try:
            with part.open("wb") as file:
                file.write(render(key, binary))
                file.flush()
                os.fsync(file.fileno())
            part.replace(self.folder / f"{key}{SUFFIX}")
        except OSError as error:
            part.unlink(missing_ok=True)
            self._lost(error)

    def _lost(self, error: OSError) -> None:
        why = error.strerror or str(error)
        if self.must_keep:
            raise CacheError("compiled kernels cannot be stored", where=str(self.folder), got=why) from error
        log.warning("compiled kernels cannot be stored in %s (%s): they will be compiled again", self.folder, why)


def read(folder: Path, key: str) -> Binary | None:
    """An entry of a folder; None where it is absent, unreadable or damaged."""
    try:
        return parse(key, (folder / f"{key}{SUFFIX}").read_bytes())
    except (OSError, ValueError):
        return None


def render(key: str, binary: Binary) -> bytes:
    """The hash of the rest, facts on one line, the code."""
    rest = json.dumps({**binary.facts(), "key": key}, sort_keys=True).encode() + b"\n" + binary.cubin
    return hashlib.sha256(rest).hexdigest().encode() + b"\n" + rest


def parse(key: str, data: bytes) -> Binary:
    """The inverse; ValueError where it is not what was rendered under this key."""
    digest, _, rest = data.partition(b"\n")
    if hashlib.sha256(rest).hexdigest().encode() != digest:
        raise ValueError("damaged entry")
    head, _, cubin = rest.partition(b"\n")
    facts = json.loads(head)
    if facts.pop("key") != key:
        raise ValueError("an entry under another's name")
    facts["descs"] = tuple(facts["descs"])
    return Binary(cubin, **facts)
