"""The processes of a server: which cores they may use, and how much processor time they took.

A model of few layers decodes one sequence as fast as the server's Python does. Where the scheduler puts its processes
then decides by up to 40%, and it leaves them there: every server is put on the same cores when it is asked.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pin_cores import physical_cores, pin, quietest_cores

ENGINE_CORES, SERVER_CORES, CLIENT_CORES = 3, 2, 2
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Cores:
    """Where each part of a server runs while it is asked, and its client."""

    engine: Sequence[int]
    server: Sequence[int]
    client: Sequence[int]

    @classmethod
    def choose(cls) -> Cores | None:
        """Physical cores of their own, or nothing on a small machine."""
        physical = physical_cores(sorted(os.sched_getaffinity(0)))
        needed = ENGINE_CORES + SERVER_CORES + CLIENT_CORES
        if len(physical) < needed:
            return None
        chosen = quietest_cores(physical, needed)
        first, second = ENGINE_CORES, ENGINE_CORES + SERVER_CORES
        return cls(chosen[:first], chosen[first:second], chosen[second:])

    def put(self, server: int) -> None:
        """The server's own process, and the engine's, which it started."""
        own, *started = processes(server)
        pin(_threads(own), self.server)
        for process in started:
            pin(_threads(process), self.engine)


def processes(first: int) -> list[int]:
    """A process and all that it started, directly or not."""
    parents = {int(path.name): _stat(int(path.name)) for path in Path("/proc").glob("[0-9]*")}
    found = [first]
    for process in found:
        found += [child for child, stat in parents.items() if stat is not None and int(stat[1]) == process]
    return found


def processor_seconds(servers: Iterable[int]) -> float:
    """Of processes and all that they started, since each began."""
    stats = [_stat(process) for server in servers for process in processes(server)]
    return sum(int(stat[11]) + int(stat[12]) for stat in stats if stat is not None) / TICKS_PER_SECOND


def _threads(process: int) -> set[int]:
    return {int(path.name) for path in Path(f"/proc/{process}/task").glob("*")}


def _stat(process: int) -> list[str] | None:
    """What the kernel says after a process's name, which may hold spaces: state, parent ..., user and system time."""
    with suppress(OSError):  # it has ended
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    return None
