"""Which CPUs compute the experts in host memory.

By default one thread for each physical core of one socket but two: a second thread of a core reads memory no faster,
and memory of another socket is slower. Two cores stay free because the thread that launches kernels or waits for the
GPU spins, too, and the system needs one. Threads stay on the socket, but the system chooses the core: on a core of its
own, a thread would wait for others that land there. More threads than one socket has cores may run on all CPUs.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from lancebill.errors import SpecError

TOPOLOGY, QUOTA = Path("/sys/devices/system/cpu"), Path("/sys/fs/cgroup/cpu.max")
SPIN_US = 200
_FREE, _MANY = 2, 8  # cores that stay free, if there are more than so many; else one


@dataclass(frozen=True)
class HostThreads:
    """The number of threads, the CPUs they may run on (none: all), and how long they spin before they sleep."""

    count: int
    cpus: tuple[int, ...] = ()
    spin_us: int = SPIN_US

    @classmethod
    def choose(cls, count: int | None = None) -> HostThreads:
        """`count` threads of this machine; by default one for each physical core of a socket but two."""
        if count is not None:
            check_threads(count)
        cpus = physical_cores(TOPOLOGY, _allowed())
        most = min(len(cpus), allowed_by_quota(QUOTA) or len(cpus))
        chosen = max(1, most - (_FREE if most > _MANY else 1)) if count is None else count
        return cls(chosen, cpus if chosen <= len(cpus) else ())

    def __str__(self) -> str:
        where = "the cores of one socket" if self.cpus else "all CPUs"
        return f"{self.count} thread{'s' * (self.count != 1)} on {where}"


def check_threads(count: int) -> None:
    """Raise if experts in host memory cannot have so many threads. Does not read which CPUs are cores."""
    most = len(_allowed())
    if type(count) is not int or not 1 <= count <= most:
        what = "the CPU's part needs a thread, and not more than there are CPUs"
        raise SpecError(what, where="cpu_threads", expected=f"1 to {most}", got=repr(count))


def physical_cores(topology: Path, allowed: Collection[int]) -> tuple[int, ...]:
    """One CPU for each physical core of the socket with most of them, among those that this process may use."""
    sockets: dict[int, dict[int, int]] = defaultdict(dict)
    for cpu in sorted(allowed):
        folder = topology / f"cpu{cpu}" / "topology"
        socket, core = _number(folder / "physical_package_id", 0), _number(folder / "core_id", cpu)
        sockets[socket].setdefault(core, cpu)
    largest = max(sockets, key=lambda socket: (len(sockets[socket]), -socket))
    return tuple(sorted(sockets[largest].values()))


def allowed_by_quota(path: Path) -> int | None:
    """Whole CPUs that the control group of this process may use; None: no limit is set."""
    try:
        quota, period = path.read_text(encoding="ascii").split()
        return max(1, int(quota) // int(period))
    except (OSError, ValueError):
        return None


def _allowed() -> Collection[int]:
    try:
        return os.sched_getaffinity(0)
    except AttributeError:  # not on Linux
        return range(os.cpu_count() or 1)


def _number(path: Path, default: int) -> int:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return default
