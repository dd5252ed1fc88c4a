"""Which experts of a large batch the CPU computes, and which are copied to the GPU for the batch. Pure functions.

The CPU's time for an expert grows with its tokens, a copy's does not: the experts with the fewest tokens are the CPU's.
"""

from __future__ import annotations

import math
from bisect import bisect, bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from lancebill.moe.problem import Problem
from lancebill.split.cpu_rows import expected_rows


@dataclass(frozen=True)
class ExpertSize:
    """One expert: bytes in host memory, operations for a token; and bytes of a token's row to the CPU and back."""

    bytes: int
    flops: int
    row_bytes: int


@dataclass(frozen=True)
class Rates:
    """What this machine does in a second, measured while the CPU computes and copies run."""

    copy_gbs: float  # host to device
    cpu_gbs: float  # bytes of experts with one token
    cpu_gflops: float  # experts with many tokens
    pack_gbs: float  # bytes that the GPU brings into its own layout
    wave_us: float = 0.0  # that the GPU computes the experts of one wave, of no tokens
    token_us: float = 0.0  # and for each token of the batch
    wave_experts: int = 1
    call_us: float = 100.0  # to the CPU and back
    wait_us: float = 300.0  # until the host knows which experts are used, and the first copies are queued
    divide_us: float = 800.0  # from then until the CPU has its rows, if it has only some experts
    sums_gbs: float = 20.0  # sums of rows, however few of the CPU's experts they use: fitted to measured calls
    cpu_points: tuple[tuple[float, float], ...] = ()  # tokens of an expert, ascending, and the us that the CPU takes

    def cpu_us(self, size: ExpertSize, tokens: float) -> float:
        """The CPU's time for an expert with so many tokens: on the line through the two nearest points.

        Without points it reads the expert and then computes: the two hardly overlap.
        """
        if len(self.cpu_points) < 2:
            return (size.bytes / self.cpu_gbs + tokens * size.flops / self.cpu_gflops) / 1e3
        points = self.cpu_points
        tokens = max(tokens, points[0][0])
        place = min(max(bisect(points, (tokens, 0.0)), 1), len(points) - 1)
        (low, before), (high, after) = points[place - 1], points[place]
        return before + (tokens - low) * (after - before) / (high - low)


MOST_ROWS = 2048  # of one call of the CPU: more are computed piece by piece, and each piece reads the experts again
BOTH_WORTH = 0.85  # of the better of both ways alone: estimates are as wrong as that, and it must not become slower
ASSUMED = Rates(copy_gbs=50.0, cpu_gbs=120.0, cpu_gflops=4000.0, pack_gbs=200.0)  # PCIe 5 x16, 16 cores with AMX


@dataclass(frozen=True)
class Ways:
    """The experts that each way takes, and how long it takes them."""

    cpu: tuple[int, ...]
    streamed: tuple[int, ...]
    cpu_us: float
    stream_us: float
    cpu_alone_us: float  # if nothing were copied
    copied_us: float  # if all were
    rows: float = math.inf  # that are sent to the CPU, as expected; all, if not fewer

    @property
    def estimate_us(self) -> float:
        return max(self.cpu_us, self.stream_us)

    def __str__(self) -> str:
        return (
            f"the CPU computes {len(self.cpu)} experts ({self.cpu_us:,.0f} us), "
            f"{len(self.streamed)} are copied to the GPU ({self.stream_us:,.0f} us); "
            f"the CPU alone: {self.cpu_alone_us:,.0f} us, all copied: {self.copied_us:,.0f} us"
        )


def size_of(problem: Problem) -> ExpertSize:
    """An expert as its specs store it; rows come back in fp32."""
    shapes = problem.matrices.values()
    stored = sum(shape.n * shape.k * shape.spec.bits_per_weight(shape.n, shape.k) / 8 for shape in shapes)
    return ExpertSize(round(stored), 2 * sum(shape.n * shape.k for shape in shapes), problem.hidden * 4)


class _Batch:
    """The times of both ways, by the number of experts that the CPU has: those with the fewest tokens."""

    def __init__(self, counts: Sequence[float], tokens: int, size: ExpertSize, rates: Rates) -> None:
        """`counts` are the tokens of each expert, ascending."""
        self.counts, self.tokens, self.size, self.rates = counts, tokens, size, rates
        self._slots = list(accumulate(counts, initial=0.0))
        self._on_cpu_us: dict[int, list[float]] = {}  # by pieces: of no expert, of the first one, of two ...

    def rows(self, number: int) -> float:
        """That are sent to the CPU. A batch of which nothing is copied is sent whole."""
        return self.tokens if number == len(self.counts) else expected_rows(self.tokens, self._slots[number])

    def cpu_us(self, number: int) -> float:
        if number == 0:
            return 0.0
        rates, rows = self.rates, self.rows(number)
        pieces = max(1, math.ceil(rows / MOST_ROWS))
        row_us = self.size.row_bytes * (1 / rates.copy_gbs + 1 / rates.sums_gbs) / 1e3
        if pieces not in self._on_cpu_us:
            taken = {count: self._expert_us(count, pieces) for count in set(self.counts)}
            self._on_cpu_us[pieces] = list(accumulate((taken[count] for count in self.counts), initial=0.0))
        wait_us = rates.wait_us + rates.divide_us if number < len(self.counts) else 0.0
        return wait_us + rates.call_us + rows * row_us + self._on_cpu_us[pieces][number]

    def _expert_us(self, count: float, pieces: int) -> float:
        parts = max(1.0, min(pieces, count))  # pieces that read the expert
        return parts * self.rates.cpu_us(self.size, count / parts)

    def stream_us(self, number: int) -> float:
        if number == len(self.counts):
            return 0.0
        rates, size = self.rates, self.size
        compute_us = rates.wave_us + self.tokens * rates.token_us
        pack_us = size.bytes / rates.pack_gbs / 1e3
        each = max(size.bytes / rates.copy_gbs / 1e3, pack_us + compute_us / rates.wave_experts)
        last = pack_us * rates.wave_experts + compute_us  # the last wave is computed when all copies have ended
        # Rows come back over the same wire as the copies, so they delay both ways.
        rows_us = self.rows(number) * size.row_bytes / rates.copy_gbs / 1e3
        return rates.wait_us + (len(self.counts) - number) * each + last + rows_us

    def us(self, number: int) -> float:
        return max(self.cpu_us(number), self.stream_us(number))

    def best(self) -> int:
        """The number with which both ways end at about the same time."""
        later = bisect_left(range(len(self.counts)), True, key=lambda n: self.cpu_us(n) >= self.stream_us(n))
        return min(range(max(0, later - 1), later + 1), key=lambda n: (self.us(n), -n))


def choose_ways(
    counts: Mapping[int, float], tokens: int, size: ExpertSize, rates: Rates, worth: float = BOTH_WORTH
) -> Ways:
    """The fastest division of experts, given the tokens of each. Experts without tokens go neither way.

    Both ways together must take at most `worth` of the time of the better one alone.
    """
    order = sorted((expert for expert, count in counts.items() if count > 0), key=lambda e: (counts[e], e))
    batch = _Batch([counts[expert] for expert in order], tokens, size, rates)
    first = min((0, len(order)), key=lambda number: (batch.us(number), -number))
    both = batch.best()
    if batch.us(both) <= worth * batch.us(first):
        first = both
    ways = tuple(order[:first]), tuple(sorted(order[first:]))
    alone = batch.cpu_us(len(order)), batch.stream_us(0)
    return Ways(*ways, batch.cpu_us(first), batch.stream_us(first), *alone, batch.rows(first))


def expected_ways(experts: int, tokens: int, top_k: int, global_experts: int, size: ExpertSize, rates: Rates) -> Ways:
    """The division if a router chooses all experts equally often; `experts` of them are in host memory."""
    used = 1 - (1 - min(1.0, top_k / global_experts)) ** tokens
    active = round(experts * used)
    each = tokens * top_k / global_experts / used if used else 0.0
    return choose_ways(dict.fromkeys(range(active), max(1.0, each)), tokens, size, rates)
