"""Times back-to-back calls on a GPU over windows of about 40 ms, as calls follow each other in a model.

Each implementation is a CUDA graph of many calls with different routings, replayed for one window per round. The
order of implementations rotates from round to round, and the spread between rounds is the noise. Shorter windows
would give too good times: the GPU lowers its clocks within milliseconds of full load.
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
GEMM_SIZE = 8192  # side of the square dense GEMMs
READ_BYTES = 4 << 30  # size of the buffer whose reads are timed
_MOST_CALLS = 512  # in one graph
_SLEEP_CYCLES = 1_000_000  # keeps the GPU busy while the host queues the replays


@dataclass(frozen=True)
class Steady:
    """Microseconds per call, one value for each round."""

    us: tuple[float, ...]
    method: str = GRAPH

    @property
    def median(self) -> float:
        return statistics.median(self.us)

    @property
    def noise(self) -> float:
        """(slowest - fastest round) / median."""
        return (max(self.us) - min(self.us)) / self.median

    def describe(self) -> dict[str, object]:
        return {
            "us": round(self.median, 3),
            "rounds": [round(us, 3) for us in self.us],
            "noise": round(self.noise, 4),
            "timed_by": self.method,
        }


@dataclass(frozen=True)
class _Replay:
    """`replay` runs `calls` calls; a window runs it `times` times."""

    replay: Call
    calls: int
    times: int
    method: str


class Windows:
    """Times implementations on one stream, so that their graphs share its scratch memory."""

    def __init__(
        self, device: torch.device, window_us: float = WINDOW_US, rounds: int = ROUNDS, pause: float = 0.0
    ) -> None:
        self.device, self.window_us, self.rounds = device, window_us, rounds
        self.pause = pause  # seconds to idle before each window, so that all start from a cool GPU
        self.stream = torch.cuda.Stream(device)

    def measure(self, contestants: Mapping[str, Sequence[Call]]) -> dict[str, Steady]:
        """`contestants` maps each implementation to its calls, one for each routing."""
        replays = {name: self._prepare(list(calls)) for name, calls in contestants.items()}
        taken: dict[str, list[float]] = {name: [] for name in replays}
        names = list(replays)
        for turn in range(self.rounds):
            start = turn % max(len(names), 1)
            for name in names[start:] + names[:start]:
                taken[name].append(self._time(replays[name]))
        return {name: Steady(tuple(us), replays[name].method) for name, us in taken.items()}

    def _prepare(self, calls: list[Call]) -> _Replay:
        with torch.cuda.stream(self.stream):
            for call in calls:
                call()
        torch.cuda.synchronize(self.device)
        try:
            short = _Replay(self._capture(calls, len(calls)), len(calls), 2, GRAPH)
        except (RuntimeError, LancebillError):  # cannot be captured: time eager calls, including their host time
            self.stream = torch.cuda.Stream(self.device)
            return self._eager(calls)
        us = min(self._time(short) for _ in range(2))
        count = int(self.window_us / 4 / us) // len(calls) * len(calls)
        count = max(len(calls), min(count, _MOST_CALLS // len(calls) * len(calls)))
        times = max(1, round(self.window_us / (count * us)))
        replay = short.replay if count == len(calls) else self._capture(calls, count)
        return _Replay(replay, count, times, GRAPH)

    def _eager(self, calls: list[Call]) -> _Replay:
        def replay() -> None:
            for call in calls:
                call()

        us = self._time(_Replay(replay, len(calls), 2, EVENTS))
        return _Replay(replay, len(calls), max(1, round(self.window_us / (len(calls) * us))), EVENTS)

    def _capture(self, calls: list[Call], count: int) -> Call:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            for i in range(count):
                calls[i % len(calls)]()
        graph.replay()
        torch.cuda.synchronize(self.device)
        return graph.replay

    def _time(self, replay: _Replay) -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self.device)
        time.sleep(self.pause)
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(_SLEEP_CYCLES)
            start.record()
            for _ in range(replay.times):
                replay.replay()
            stop.record()
        stop.synchronize()
        return 1e3 * float(start.elapsed_time(stop)) / (replay.times * replay.calls)


def dense_gemms(device: torch.device) -> dict[str, Call]:
    """Square GEMMs of random numbers, by input type."""
    bf16 = [torch.randn(GEMM_SIZE, GEMM_SIZE, dtype=torch.float32, device=device).bfloat16() for _ in range(2)]
    fp8 = [matrix.to(torch.float8_e4m3fn) for matrix in bf16]
    one = torch.ones((), dtype=torch.float32, device=device)
    return {
        "bf16": lambda: bf16[0] @ bf16[1].t(),
        "fp8": lambda: torch._scaled_mm(fp8[0], fp8[1].t(), one, one, out_dtype=torch.bfloat16),
    }


def window_rates(windows: Windows) -> dict[str, float]:
    """The GPU's limits over the same window: GB/s of reads, TFLOP/s of dense bf16 and fp8 GEMMs."""
    device = windows.device
    buffer = torch.ones(READ_BYTES // 4, dtype=torch.float32, device=device)
    calls: dict[str, Sequence[Call]] = {
        **{name: [call] for name, call in dense_gemms(device).items()},
        "sum": [buffer.sum],
        "amax": [buffer.amax],
        "read": [lambda: _read(buffer)],
    }
    times: dict[str, Steady] = {}
    for name, call in calls.items():
        try:
            times |= windows.measure({name: call})
        except (RuntimeError, ImportError):  # this GPU has no such GEMM, or Triton is not installed
            continue
    flops, read = 2.0 * GEMM_SIZE**3, buffer.numel() * buffer.element_size()
    rates = {name: flops / times[name].median / 1e6 for name in ("bf16", "fp8") if name in times}
    fastest = min(times[name].median for name in ("sum", "amax", "read") if name in times)
    return rates | {"read_gbs": read / fastest / 1e3}


def _read(buffer: Tensor) -> Tensor:
    from lancebill.bench.read_kernel import read_tensor  # needs Triton

    return read_tensor(buffer)
