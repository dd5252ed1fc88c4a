"""Copies compiled kernels from the cache into the package's folder, to be shipped in a wheel."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from lancebill.errors import CacheError
from lancebill.jit.cache import MADE_BY, SUFFIX, Cache, read_entry, render_entry, shipped_folder
from lancebill.jit.compile import KernelSource, compiler_version

MOST_KERNELS, MOST_BYTES = 1000, 60 << 20


def ship_kernels(sources: Iterable[KernelSource], cache: Cache, folder: Path | None = None) -> int:
    """Replace the shipped kernels by these, which must be in the cache; returns their total size in bytes."""
    folder, compiler = folder or shipped_folder(), compiler_version()
    entries: dict[str, bytes] = {}
    for source in sources:
        key = source.key(compiler)
        binary = read_entry(cache.folder, key)
        if binary is None:
            raise CacheError(f"{source.label} is not compiled", where=str(cache.folder), hint="compile it first")
        entries[key] = render_entry(key, binary)
    size = sum(map(len, entries.values()))
    if len(entries) > MOST_KERNELS or size > MOST_BYTES:
        limit, got = f"{MOST_KERNELS} kernels and {MOST_BYTES} bytes", f"{len(entries)} kernels and {size} bytes"
        raise CacheError("the kernels are too large for a wheel", expected=f"at most {limit}", got=got)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for key, entry in entries.items():
        (folder / f"{key}{SUFFIX}").write_bytes(entry)
    # Written last: without this file the cache ignores the folder.
    (folder / MADE_BY).write_text(f"{compiler}\n", encoding="utf-8")
    return size
