"""Clocks, and measuring several ways to compute in turns.

Before every timed call the caches are emptied by reading a buffer larger than they are: a layer of a
model finds its weights in memory, not in a cache that the previous call left warm. Contestants take
turns call by call, so that whatever disturbs the machine disturbs them alike.
"""

from __future__ import annotations

import random
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lancebill.errors import LancebillError
from lancebill.moe.problem import Device

Call = Callable[[], object]

WARM_UP = 2
COOL_DOWN = 5  # sweeps before the first timed call: caches keep longest what was used more than once, as in a warm-up
DEFAULT_CACHE = 128 << 20  # where the machine does not tell
GRAPH, EVENTS, WALL = "graph", "events", "wall"
_SLEEP_CYCLES = 200_000  # about 0.1 ms: the launch is queued before the GPU gets to it
_CPU_CACHES = Path("/sys/devices/system/cpu")


@dataclass(frozen=True)
class Times:
    """Microseconds of single calls."""

    us: tuple[float, ...]
    method: str = WALL

    @property
    def median(self) -> float:
        return statistics.median(self.us)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Where the middle half of the calls lies."""
        if len(self.us) < 2:
            return self.us[0], self.us[0]
        low, _, high = statistics.quantiles(self.us, n=4, method="inclusive")
        return low, high


class Clock(ABC):
    """Times single calls on one device with cold caches."""

    def __init__(self, device: torch.device, cache: int) -> None:
        # Twice the cache: replacement is not strictly by age.
        self.buffer = torch.ones(2 * cache // 4, dtype=torch.float32, device=device)

    def evict(self) -> Tensor:
        return self.buffer.sum()

    @abstractmethod
    def prepare(self, calls: Sequence[Call]) -> tuple[list[Call], str]:
        """Warm up; the calls in the form that is timed, and what that form is."""

    @abstractmethod
    def time(self, call: Call) -> float:
        """Microseconds of one call."""


class CpuClock(Clock):
    """The wall clock around a call."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), last_level_cache() or DEFAULT_CACHE)

    def prepare(self, calls: Sequence[Call]) -> tuple[list[Call], str]:
        for call in list(calls)[:WARM_UP]:
            call()
        return list(calls), WALL

    def time(self, call: Call) -> float:
        self.evict()
        start = time.perf_counter_ns()
        call()
        return (time.perf_counter_ns() - start) / 1e3


class CudaClock(Clock):
    """Device events around a graph's replay; around the call itself where it cannot be captured."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, torch.cuda.get_device_properties(device).L2_cache_size or DEFAULT_CACHE)
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()

    def evict(self) -> Tensor:
        with torch.cuda.stream(self.stream):
            return super().evict()

    def prepare(self, calls: Sequence[Call]) -> tuple[list[Call], str]:
        with torch.cuda.stream(self.stream):
            for call in [*calls, *list(calls)[:WARM_UP]]:
                call()
        torch.cuda.synchronize(self.device)
        try:
            return [self._capture(call) for call in calls], GRAPH
        except (RuntimeError, LancebillError):
            # A stream and a pool whose capture failed are not used again.
            self.stream, self.pool = torch.cuda.Stream(self.device), torch.cuda.graph_pool_handle()
            with torch.cuda.stream(self.stream):
                for call in calls:
                    call()
            torch.cuda.synchronize(self.device)
            return list(calls), EVENTS

    def _capture(self, call: Call) -> Call:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
            call()
        graph.replay()
        return graph.replay

    def time(self, call: Call) -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self.stream):
            self.evict()
            torch.cuda._sleep(_SLEEP_CYCLES)
            start.record()
            call()
            stop.record()
        stop.synchronize()
        return 1e3 * float(start.elapsed_time(stop))


def make_clock(device: Device) -> Clock:
    return CpuClock() if device.kind == "cpu" else CudaClock(device.torch)


def measure(clock: Clock, contestants: Mapping[str, Sequence[Call]], repeats: int) -> dict[str, Times]:
    """Median and spread of each, call by call in turns; every contestant has one call for each batch.

    Each round has an order of its own: to come right after someone who leaves the cores hot and slow is no one's fate.
    """
    ready = {name: clock.prepare(calls) for name, calls in contestants.items()}
    taken: dict[str, list[float]] = {name: [] for name in ready}
    names, order = list(ready), random.Random(0)
    for _ in range(COOL_DOWN):
        clock.evict()
    for turn in range(repeats):
        order.shuffle(names)
        for name in names:
            calls, _ = ready[name]
            taken[name].append(clock.time(calls[turn % len(calls)]))
    return {name: Times(tuple(us), ready[name][1]) for name, us in taken.items()}


def host_time(calls: Sequence[Call], device: torch.device, batches: int = 15, each: int = 40) -> float:
    """Microseconds of the host for one call that is not waited for: what eager mode costs beside the GPU's work.

    Few calls in a row, so that the launch queue never fills and the host never waits for the GPU.
    """
    taken = []
    for call in list(calls)[:WARM_UP]:
        call()
    for _ in range(batches):
        torch.cuda.synchronize(device)
        start = time.perf_counter_ns()
        for i in range(each):
            calls[i % len(calls)]()
        taken.append((time.perf_counter_ns() - start) / each / 1e3)
    torch.cuda.synchronize(device)
    return statistics.median(taken)


def last_level_cache(root: Path = _CPU_CACHES) -> int:
    """Bytes of all caches of the highest level together; 0 where the kernel does not tell."""
    found: dict[tuple[int, str], int] = {}
    for index in root.glob("cpu[0-9]*/cache/index[0-9]*"):
        try:
            level, size = int((index / "level").read_text()), (index / "size").read_text().strip()
            found[level, (index / "shared_cpu_list").read_text().strip()] = _bytes(size)
        except (OSError, ValueError):
            continue
    highest = max((level for level, _ in found), default=0)
    return sum(size for (level, _), size in found.items() if level == highest)


def _bytes(size: str) -> int:
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return int(size[:-1]) * units[size[-1:]] if size[-1:] in units else int(size)
