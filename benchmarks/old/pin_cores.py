"""Which cores a CPU benchmark is timed on, and pinning threads to them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

ROUNDS = 3  # of a few milliseconds on each core
SPIN_SECONDS = 0.1  # after this long our own threads no longer spin


def quietest_cores(cores: Sequence[int], count: int) -> list[int]:
    """The cores that are fastest right now: on a shared machine another tenant may use a core's other hyperthread."""
    slowest = dict.fromkeys(cores, 0.0)
    time.sleep(SPIN_SECONDS)
    for _ in range(ROUNDS):
        for core in cores:
            os.sched_setaffinity(0, [core])  # this thread only
            start = time.perf_counter()
            sum(range(300_000))
            slowest[core] = max(slowest[core], time.perf_counter() - start)
    os.sched_setaffinity(0, cores)
    return sorted(cores, key=slowest.__getitem__)[:count]


def physical_cores(cpus: list[int]) -> list[int]:
    """One logical CPU of each physical core."""
    by_core: dict[str, int] = {}
    for cpu in cpus:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        by_core.setdefault(siblings.read_text().strip() if siblings.exists() else str(cpu), cpu)
    return list(by_core.values())


def cache_neighbours(timed: list[int], cores: list[int]) -> list[int]:
    """Other cores that share the last-level cache of the timed ones."""
    caches = sorted(Path(f"/sys/devices/system/cpu/cpu{timed[0]}/cache").glob("index[0-9]*/shared_cpu_list"))
    shared = parse_cpu_list(caches[-1].read_text()) if caches else set()
    return [core for core in cores if core in shared and core not in timed]


def parse_cpu_list(text: str) -> set[int]:
    """The kernel's notation: `0-3,8`."""
    ranges = [[int(end) for end in part.split("-")] for part in text.strip().split(",")]
    return {cpu for ends in ranges for cpu in range(ends[0], ends[-1] + 1)}


def process_threads(process: int | None = None) -> set[int]:
    """Ids of all threads of a process, by default of this one, thread pools included."""
    return {int(thread.name) for thread in Path(f"/proc/{process or 'self'}/task").iterdir()}


def pin(threads: Iterable[int], cpus: Sequence[int]) -> None:
    for thread in threads:
        with suppress(ProcessLookupError):  # the thread has ended
            os.sched_setaffinity(thread, cpus)


def are_within(threads: Iterable[int], cpus: Sequence[int]) -> bool:
    """Whether these threads may run on these cores only."""
    allowed: set[int] = set()
    for thread in threads:
        with suppress(ProcessLookupError):  # the thread has ended
            allowed |= os.sched_getaffinity(thread)
    return allowed <= set(cpus)


def pin_apart(threads: Iterable[int], cpus: Sequence[int]) -> None:
    """Pin the calling thread to the first core and all others to the rest.

    Threads that once share a core may stay together otherwise. Call this after the pools have started all their
    threads: a new thread starts on its creator's core.
    """
    caller = threading.get_native_id()
    pin([caller], cpus[:1])
    pin(set(threads) - {caller}, cpus[1:] or cpus)
