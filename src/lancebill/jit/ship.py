"""Compiled kernels for a wheel: a set, copied from the cache to the folder that the package carries."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from lancebill.errors import CacheError
from lancebill.jit.cache import MADE_BY, SUFFIX, Cache, read, render, shipped_folder
from lancebill.jit.compile import KernelSource, compiler_version

MOST_KERNELS, MOST_BYTES = 200, 20 << 20


def ship(sources: Iterable[KernelSource], held: Cache, folder: Path | None = None) -> int:
    """Replace the shipped set by these kernels, all of which the cache has; returns their bytes."""
    folder, compiler = folder or shipped_folder(), compiler_version()
    entries: dict[str, bytes] = {}
    for source in sources:
        key = source.key(compiler)
        binary = read(held.folder, key)
        if binary is None:
            raise CacheError(f"{source.label} is not compiled", where=str(held.folder), hint="build it first")
        entries[key] = render(key, binary)
    size = sum(map(len, entries.values()))
    if len(entries) > MOST_KERNELS or size > MOST_BYTES:
        limit, got = f"{MOST_KERNELS} kernels of {MOST_BYTES} bytes", f"{len(entries)} of {size}"
        raise CacheError("the set is too large for a wheel", expected=f"at most {limit}", got=got)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for key, entry in entries.items():
        (folder / f"{key}{SUFFIX}").write_bytes(entry)
    (folder / MADE_BY).write_text(f"{compiler}\n", encoding="utf-8")  # last: without it nothing there counts
    return size
