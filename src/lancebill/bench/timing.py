"""Clocks for single calls, and timing of several implementations in turns.

Before every timed call a buffer larger than the caches is read to evict their contents, because a model's layer also
finds its weights in memory and not in the cache. Implementations alternate call by call, so that noise on the
machine affects all of them alike.
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
from lancebill.moe.device import Device

Call = Callable[[], object]

WARM_UP = 2
COOL_DOWN = 5  # evictions before the first timed call: caches hold on to lines that the warm-up used more than once
DEFAULT_CACHE = 128 << 20  # if the cache size is unknown
GRAPH, EVENTS, WALL = "graph", "events", "wall"
_SLEEP_CYCLES = 200_000  # about 0.1 ms: the host queues the launch before the GPU reaches it
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
        """The 25th and 75th percentile."""
        if len(self.us) < 2:
            return self.us[0], self.us[0]
        low, _, high = statistics.quantiles(self.us, n=4, method="inclusive")
        return low, high


class Clock(ABC):
    """Times single calls on one device with cold caches."""

    def __init__(self, device: torch.device, cache: int) -> None:
        # Twice the cache size, because replacement is not strictly LRU.
        self.buffer = torch.ones(2 * cache // 4, dtype=torch.float32, device=device)

    def evict(self) -> Tensor:
        return self.buffer.sum()

    @abstractmethod
    def prepare(self, calls: Sequence[Call]) -> tuple[list[Call], str]:
        """Warm up; returns the callables to time (graph replays if possible) and the name of the timing method."""

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
    """CUDA events around a graph replay, or around the eager call if it cannot be captured."""

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
            # A failed capture may leave the stream and the pool unusable.
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
    """Time implementations in turns, call by call; `contestants` maps each to its calls, one for each batch.

    The order is shuffled in each round, so that no implementation always runs after one that heats the cores.
    """
    prepared = {name: clock.prepare(calls) for name, calls in contestants.items()}
    taken: dict[str, list[float]] = {name: [] for name in prepared}
    names, order = list(prepared), random.Random(0)
    for _ in range(COOL_DOWN):
        clock.evict()
    for turn in range(repeats):
        order.shuffle(names)
        for name in names:
            calls, _ = prepared[name]
            taken[name].append(clock.time(calls[turn % len(calls)]))
    return {name: Times(tuple(us), prepared[name][1]) for name, us in taken.items()}


def host_time(calls: Sequence[Call], device: torch.device, batches: int = 15, each: int = 40) -> float:
    """Median host microseconds of one eager call, without waiting for the GPU.

    Synchronises after every `each` calls: a full launch queue would make the host wait for the GPU.
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
    """Total bytes of all caches of the highest level; 0 if the kernel does not report them."""
    sizes: dict[tuple[int, str], int] = {}  # by level and the CPUs that share the cache
    for index in root.glob("cpu[0-9]*/cache/index[0-9]*"):
        try:
            level, size = int((index / "level").read_text()), (index / "size").read_text().strip()
            sizes[level, (index / "shared_cpu_list").read_text().strip()] = _bytes(size)
        except (OSError, ValueError):
            continue
    highest = max((level for level, _ in sizes), default=0)
    return sum(size for (level, _), size in sizes.items() if level == highest)


def _bytes(size: str) -> int:
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return int(size[:-1]) * units[size[-1:]] if size[-1:] in units else int(size)
