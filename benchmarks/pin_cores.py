"""The cores a benchmark is timed on: a processor of each, the quietest; and those beside them that share a cache."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

LOOKS = 3  # at every core, for a few milliseconds each
REST = 0.1  # seconds after which no thread of our own spins any more


def quietest(cores: Sequence[int], wanted: int) -> list[int]:
    """Those that compute fastest just now: on a shared machine a neighbour may have the other half of a core."""
    slowest = dict.fromkeys(cores, 0.0)
    time.sleep(REST)
    for _ in range(LOOKS):
        for core in cores:
            os.sched_setaffinity(0, [core])  # of this thread alone
            start = time.perf_counter()
            sum(range(300_000))
            slowest[core] = max(slowest[core], time.perf_counter() - start)
    os.sched_setaffinity(0, cores)
    return sorted(cores, key=slowest.__getitem__)[:wanted]


def physical(cpus: list[int]) -> list[int]:
    """One processor of each physical core."""
    seen: dict[str, int] = {}
    for cpu in cpus:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        seen.setdefault(siblings.read_text().strip() if siblings.exists() else str(cpu), cpu)
    return list(seen.values())


def beside(timed: list[int], cores: list[int]) -> list[int]:
    """Other cores that share the last cache of those that are timed."""
    caches = sorted(Path(f"/sys/devices/system/cpu/cpu{timed[0]}/cache").glob("index[0-9]*/shared_cpu_list"))
    shared = cpu_list(caches[-1].read_text()) if caches else set()
    return [core for core in cores if core in shared and core not in timed]


def cpu_list(text: str) -> set[int]:
    """`0-3,8` as the kernel writes it."""
    ends = [[int(end) for end in part.split("-")] for part in text.strip().split(",")]
    return {cpu for end in ends for cpu in range(end[0], end[-1] + 1)}


def threads() -> set[int]:
    """Those of this process, the pools' included."""
    return {int(thread.name) for thread in Path("/proc/self/task").iterdir()}


def keep(which: Iterable[int], cpus: Sequence[int]) -> None:
    for thread in which:
        with suppress(ProcessLookupError):  # it has ended since
            os.sched_setaffinity(thread, cpus)


def keep_apart(which: Iterable[int], cpus: Sequence[int]) -> None:
    """The thread that calls on the first, its helpers on the others: two that once share a core may go on doing so.

    Only once pools have all their threads: new ones would start on the first core as well.
    """
    caller = threading.get_native_id()
    keep([caller], cpus[:1])
    keep(set(which) - {caller}, cpus[1:] or cpus)
