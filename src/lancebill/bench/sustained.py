"""Back-to-back windows on a GPU: what a layer costs when calls follow each other, as they do in a model.

Each contestant is a CUDA graph of many calls with different routings, replayed for the same window (about 40 ms)
as everyone else, one after another, in rounds; who starts changes from round to round. The spread between rounds
is the noise of the figure. Short bursts would flatter: the card lowers its clocks within milliseconds of full load.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lancebill.bench.timing import EVENTS, GRAPH, Call
from lancebill.errors import LancebillError

WINDOW_US = 40_000.0
ROUNDS = 3
PRODUCT = 8192  # a side of the dense products that are timed
_MOST_CALLS = 512  # in one graph
_SLEEP_CYCLES = 1_000_000  # the GPU stays busy while the host queues the replays


@dataclass(frozen=True)
class Steady:
    """Microseconds a call, one figure a round."""

    us: tuple[float, ...]
    method: str = GRAPH

    @property
    def median(self) -> float:
        return statistics.median(self.us)

    @property
    def noise(self) -> float:
        """Between the slowest and the fastest round, relative."""
        return (max(self.us) - min(self.us)) / self.median

    def describe(self) -> dict[str, object]:
        return {
            "us": round(self.median, 3),
            "rounds": [round(us, 3) for us in self.us],
            "noise": round(self.noise, 4),
            "timed_by": self.method,
        }


@dataclass(frozen=True)
class _Ready:
    """What is replayed `times` times in a window, and how many calls one replay makes."""

    replay: Call
    calls: int
    times: int
    method: str


class Windows:
    """Times contestants on one stream: their graphs share its scratch memory."""

    def __init__(
        self, device: torch.device, window_us: float = WINDOW_US, rounds: int = ROUNDS, pause: float = 0.0
    ) -> None:
        self.device, self.window_us, self.rounds = device, window_us, rounds
        self.pause = pause  # seconds of rest before a window: everyone then starts from a cool card
        self.stream = torch.cuda.Stream(device)

    def measure(self, contestants: Mapping[str, Sequence[Call]]) -> dict[str, Steady]:
        """Each contestant has one call for each routing."""
        ready = {name: self._prepare(list(calls)) for name, calls in contestants.items()}
        taken: dict[str, list[float]] = {name: [] for name in ready}
        names = list(ready)
        for turn in range(self.rounds):
            first = turn % max(len(names), 1)
            for name in names[first:] + names[:first]:
                taken[name].append(self._time(ready[name]))
        return {name: Steady(tuple(us), ready[name].method) for name, us in taken.items()}

    def _prepare(self, calls: list[Call]) -> _Ready:
        with torch.cuda.stream(self.stream):
            for call in calls:
                call()
        torch.cuda.synchronize(self.device)
        try:
            first = _Ready(self._capture(calls, len(calls)), len(calls), 2, GRAPH)
        except (RuntimeError, LancebillError):  # cannot be captured: timed as it is, host and all
            self.stream = torch.cuda.Stream(self.device)
            return self._eager(calls)
        us = min(self._time(first) for _ in range(2))
        count = int(self.window_us / 4 / us) // len(calls) * len(calls)
        count = max(len(calls), min(count, _MOST_CALLS // len(calls) * len(calls)))
        times = max(1, round(self.window_us / (count * us)))
        replay = first.replay if count == len(calls) else self._capture(calls, count)
        return _Ready(replay, count, times, GRAPH)

    def _eager(self, calls: list[Call]) -> _Ready:
        def replay() -> None:
            for call in calls:
                call()

        us = self._time(_Ready(replay, len(calls), 2, EVENTS))
        return _Ready(replay, len(calls), max(1, round(self.window_us / (len(calls) * us))), EVENTS)

    def _capture(self, calls: list[Call], count: int) -> Call:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            for i in range(count):
                calls[i % len(calls)]()
        graph.replay()
        torch.cuda.synchronize(self.device)
        return graph.replay

    def _time(self, ready: _Ready) -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self.device)
        time.sleep(self.pause)
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(_SLEEP_CYCLES)
            start.record()
            for _ in range(ready.times):
                ready.replay()
            stop.record()
        stop.synchronize()
        return 1e3 * float(start.elapsed_time(stop)) / (ready.times * ready.calls)


def dense_products(device: torch.device, size: int = PRODUCT) -> dict[str, Call]:
    """Square products of random numbers, by the type of their inputs."""
    wide = [torch.randn(size, size, device=device).bfloat16() for _ in range(2)]
    narrow = [matrix.to(torch.float8_e4m3fn) for matrix in wide]
    one = torch.ones((), device=device)
    return {
        "bf16": lambda: wide[0] @ wide[1].t(),
        "fp8": lambda: torch._scaled_mm(narrow[0], narrow[1].t(), one, one, out_dtype=torch.bfloat16),
    }


def window_rates(windows: Windows, sizes: Mapping[str, int]) -> dict[str, float]:
    """What the card can do over the same window: GB/s of reads, TFLOP/s of dense bf16 and fp8 products."""
    device = windows.device
    size = sizes.get("product", PRODUCT)
    buffer = torch.ones(sizes.get("read", 4 << 30) // 4, device=device)
    calls: dict[str, Sequence[Call]] = {
        **{name: [call] for name, call in dense_products(device, size).items()},
        "sum": [buffer.sum],
        "amax": [buffer.amax],
        "read": [lambda: _reader(buffer)],
    }
    found: dict[str, Steady] = {}
    for name, call in calls.items():
        try:
            found |= windows.measure({name: call})
        except (RuntimeError, ImportError):  # no such product on this card, or no Triton
            continue
    flops, read = 2.0 * size**3, buffer.numel() * buffer.element_size()
    rates = {name: flops / found[name].median / 1e6 for name in ("bf16", "fp8") if name in found}
    fastest = min(found[name].median for name in ("sum", "amax", "read") if name in found)
    return rates | {"read_gbs": read / fastest / 1e3}


def _reader(buffer: Tensor) -> Tensor:
    from lancebill.bench.read_kernel import reader

    return reader(buffer)
