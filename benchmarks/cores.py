"""The cores a benchmark is timed on: one processor of each, and those beside them that share their last cache."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path


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


def keep_to(cpus: list[int]) -> None:
    """Every thread of this process, those of the pool included."""
    for thread in Path("/proc/self/task").iterdir():
        _keep(int(thread.name), cpus)


def _keep(thread: int, cpus: list[int]) -> None:
    with suppress(ProcessLookupError):  # it has ended since
        os.sched_setaffinity(thread, cpus)


def keep_apart(cpus: list[int]) -> None:
    """The thread that calls on the first, its helpers on the others: two that once share a core may go on doing so.

    Only once pools have all their threads: new ones would start on the first core as well.
    """
    for thread in Path("/proc/self/task").iterdir():
        caller = int(thread.name) == threading.get_native_id()
        _keep(int(thread.name), cpus[:1] if caller else cpus[1:] or cpus)
