"""Gets kernels from the cache or compiles them, one at a time or many in parallel. Needs no GPU."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor, as_completed
from contextlib import suppress
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from threading import Lock

from lancebill.errors import LancebillError
from lancebill.jit.cache import Cache
from lancebill.jit.compile import Binary, KernelSource, compile_kernel

log = logging.getLogger("lancebill")
_DIED = "the compiling process died, perhaps out of memory"
_compiling = Lock()  # Triton's settings and the redirected stdout are global to the process


def get_binary(source: KernelSource, kernels: Cache | None = None) -> Binary:
    """The compiled kernel from the cache; compiles and stores it if it is not there."""

    def compile_now() -> Binary:
        _warn_once()
        log.info("compiling %s", source.label)
        with _compiling:
            return compile_kernel(source)

    return (kernels or Cache()).get(source, compile_now)


@cache
def _warn_once() -> None:
    log.warning("compiling kernels that are not in the cache (`lancebill kernels build` does this ahead of time)")


def build_all(
    sources: Iterable[KernelSource], folder: Path | None = None, jobs: int | None = None,
    progress: Callable[[KernelSource, str | None], None] = lambda source, error: None,
) -> dict[KernelSource, str]:  # fmt: skip
    """Compile the kernels that are not in the cache, on all cores; returns the failed ones with their errors.

    `progress` is called once for each kernel: first for those in the cache, then for each one that was compiled.
    """
    kernels = Cache(folder, must_keep=True)
    kernels.prepare()
    distinct = list(dict.fromkeys(sources))
    missing = [source for source in distinct if kernels.find(source) is None]
    for source in distinct:
        if source not in missing:
            progress(source, None)
    failed: dict[KernelSource, str] = {}

    def report(source: KernelSource, error: str | None) -> None:
        if error is not None:
            failed[source] = error
        progress(source, error)

    lost = _build_together(missing, jobs or os.cpu_count() or 1, folder, report)
    while lost:  # with one process it is known which kernel it died of: the first without a result
        lost = _build_together(lost, 1, folder, report)
        if lost:
            report(lost.pop(0), _DIED)
    return failed


def _build_together(
    sources: Sequence[KernelSource], jobs: int, folder: Path | None, report: Callable[[KernelSource, str | None], None]
) -> list[KernelSource]:
    """Compile kernels in so many processes. If one dies, all end: returns the kernels without a result, in order."""
    lost = dict.fromkeys(sources)
    if not lost:
        return []
    with ProcessPoolExecutor(min(jobs, len(lost)), mp_context=get_context("spawn")) as pool:
        futures: dict[Future[str | None], KernelSource] = {}
        with suppress(BrokenExecutor):
            for source in sources:
                futures[pool.submit(_build, source, folder)] = source
        for future in as_completed(futures):
            if not isinstance(future.exception(), BrokenExecutor):
                del lost[futures[future]]
                report(futures[future], future.result())
    return list(lost)


def _build(source: KernelSource, folder: Path | None) -> str | None:
    """Runs in a worker process. Returns the error as text, because exceptions may not be picklable."""
    log.setLevel(logging.ERROR)
    try:
        get_binary(source, Cache(folder, must_keep=True))
    except LancebillError as error:
        return str(error)
    return None
