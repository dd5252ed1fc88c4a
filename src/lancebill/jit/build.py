"""Kernels from the cache or the compiler, one or many at once; needs no GPU."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor, as_completed
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from threading import Lock

from lancebill.errors import LancebillError
from lancebill.jit.cache import Cache
from lancebill.jit.compile import Binary, KernelSource, build

log = logging.getLogger("lancebill")
_compiling = Lock()  # the compiler's settings, and where it prints, are the whole process's


def binary(source: KernelSource, held: Cache | None = None) -> Binary:
    """The compiled kernel, from the cache or built now, with a word about it."""

    def compile_now() -> Binary:
        _announce()
        log.info("compiling %s", source.label)
        with _compiling:
            return build(source)

    return (held or Cache()).get(source, compile_now)


@cache
def _announce() -> None:
    log.warning("compiling kernels that are in no cache; they are kept (`lancebill kernels build` does this ahead)")


def build_all(
    sources: Iterable[KernelSource], folder: Path | None = None, jobs: int | None = None,
    progress: Callable[[KernelSource, str | None], None] = lambda source, error: None,
) -> dict[KernelSource, str]:  # fmt: skip
    """Compile what the cache lacks, on all cores; returns what failed and why.

    `progress` hears of each kernel as it ends, those that were there first.
    """
    held = Cache(folder, must_keep=True)
    held.prepare()
    wanted = list(dict.fromkeys(sources))
    missing = [source for source in wanted if held.find(source) is None]
    for source in wanted:
        if source not in missing:
            progress(source, None)
    failed: dict[KernelSource, str] = {}
    if not missing:
        return failed
    workers = min(jobs or os.cpu_count() or 1, len(missing))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(_build, source, folder): source for source in missing}
        for future in as_completed(futures):
            source, error = futures[future], _outcome(future)
            if error is not None:
                failed[source] = error
            progress(source, error)
    return failed


def _outcome(future: Future[str | None]) -> str | None:
    try:
        return future.result()
    except BrokenExecutor:
        return "the process that compiled it died, for want of memory perhaps"


def _build(source: KernelSource, folder: Path | None) -> str | None:
    """In a process of its own; the reason instead of an error, which might not travel."""
    log.setLevel(logging.ERROR)
    try:
        binary(source, Cache(folder, must_keep=True))
    except LancebillError as error:
        return str(error)
    return None
