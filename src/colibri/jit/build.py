"""Many kernels at once: every core compiles, the cache keeps the results."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

from colibri.jit.cache import Cache
from colibri.jit.compile import CompileError, Source
from colibri.jit.load import binary


def build_all(
    sources: Iterable[Source], folder: Path | None = None, jobs: int | None = None,
    progress: Callable[[Source, str | None], None] = lambda source, error: None,
) -> dict[Source, str]:  # fmt: skip
    """Compile what the cache lacks; returns what failed and why. `progress` hears of each as it ends."""
    cache = Cache(folder)
    wanted = list(dict.fromkeys(sources))
    missing = [source for source in wanted if cache.find(source.key) is None]
    for source in wanted:
        if source not in missing:
            progress(source, None)
    failed: dict[Source, str] = {}
    if not missing:
        return failed
    workers = min(jobs or os.cpu_count() or 1, len(missing))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(_build, source, folder): source for source in missing}
        for future in as_completed(futures):
            source, error = futures[future], future.result()
            if error is not None:
                failed[source] = error
            progress(source, error)
    return failed


def _build(source: Source, folder: Path | None) -> str | None:
    try:
        binary(source, Cache(folder))
    except CompileError as error:
        return str(error)
    return None
