"""Process many matrices, a few at a time: I/O and arithmetic overlap, and memory stays bounded."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

MAX_WORKERS = 4  # by default: each keeps a whole matrix in memory

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_in_order(
    work: Callable[[Item], Result], items: Iterable[Item], workers: int | None = None, ahead: int = 0
) -> Iterator[tuple[Item, Result]]:
    """(item, work(item)) in the order of `items`, with a few (`workers`) in flight.

    Up to `ahead` items, if that is more, are begun before the first is taken: no worker waits for a slow one.
    Each worker gets its own share of torch's threads: one matrix per core scales better than all cores on one matrix,
    whose operations are short.
    """
    threads = torch.get_num_threads()
    workers = workers or max(2, min(MAX_WORKERS, threads))
    if workers == 1:
        yield from ((item, work(item)) for item in items)
        return
    pending: deque[tuple[Item, Future[Result]]] = deque()
    torch.set_num_threads(max(1, threads // workers))
    try:
        with ThreadPoolExecutor(workers) as pool:
            for item in items:
                pending.append((item, pool.submit(work, item)))
                if len(pending) >= max(workers, ahead):
                    yield _result(pending)
            while pending:
                yield _result(pending)
    finally:
        torch.set_num_threads(threads)


def _result(pending: deque[tuple[Item, Future[Result]]]) -> tuple[Item, Result]:
    item, future = pending.popleft()
    return item, future.result()
