"""Many matrices, a few at a time: reading, arithmetic and writing overlap, and memory stays small."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

MOST = 4  # matrices in work: each is held whole

Item = TypeVar("Item")
Result = TypeVar("Result")


def ordered(work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[tuple[Item, Result]]:
    """Items and their results in order, no more than a few in work at once.

    Each worker has its share of torch's threads to itself: a matrix to a core scales better than
    all cores on one matrix, whose steps are short.
    """
    threads = torch.get_num_threads()
    workers = max(2, min(MOST, threads))
    pending: deque[tuple[Item, Future[Result]]] = deque()
    torch.set_num_threads(max(1, threads // workers))
    try:
        with ThreadPoolExecutor(workers) as pool:
            for item in items:
                pending.append((item, pool.submit(work, item)))
                if len(pending) == workers:
                    yield _result(pending)
            while pending:
                yield _result(pending)
    finally:
        torch.set_num_threads(threads)


def _result(pending: deque[tuple[Item, Future[Result]]]) -> tuple[Item, Result]:
    item, future = pending.popleft()
    return item, future.result()
