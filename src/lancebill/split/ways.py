"""Which experts of a large batch the CPU computes, and which are copied to the GPU for the batch. Pure functions.

The CPU's time for an expert grows with its tokens, a copy's does not: the experts with the fewest tokens are the CPU's.
"""

from __future__ import annotations

import math
from bisect import bisect
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
    call_us: float = 20.0  # to the CPU and back
    wait_us: float = 250.0  # until the host knows which experts are used, and the first copies are queued
    sums_gbs: float = 5.5  # sums of all rows, however few of the CPU's experts they use: fitted to recorded runs
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


def choose_ways(
    counts: Mapping[int, float], tokens: int, size: ExpertSize, rates: Rates, worth: float = BOTH_WORTH
) -> Ways:
    """The fastest division of experts, given the tokens of each. Experts without tokens go neither way.

    Both ways together must take at most `worth` of the time of the better one alone.
    """
    order = sorted((expert for expert, count in counts.items() if count > 0), key=lambda e: (counts[e], e))
    rows = [expected_rows(tokens, slots) for slots in accumulate((counts[e] for e in order), initial=0.0)]
    rows[-1] = tokens if order else 0.0  # a batch of which nothing is copied is not divided
    # Rows come back over the same wire as the copies, so they delay both ways.
    rows_us = [count * size.row_bytes / rates.copy_gbs / 1e3 for count in rows]
    compute_us = rates.wave_us + tokens * rates.token_us
    pack_us = size.bytes / rates.pack_gbs / 1e3
    each = max(size.bytes / rates.copy_gbs / 1e3, pack_us + compute_us / rates.wave_experts)
    last = pack_us + compute_us  # the last wave, of one expert, is computed when all copies have ended
    cpu_us = _cpu_times([counts[e] for e in order], rows, size, rates)
    stream_us = [rates.wait_us + (len(order) - i) * each + last + us for i, us in enumerate(rows_us)]
    stream_us[-1] = 0.0
    found = [max(times) for times in zip(cpu_us, stream_us)]  # by the number of the CPU's experts
    first = min((0, len(order)), key=lambda count: (found[count], -count))
    both = min(range(len(found)), key=lambda count: (found[count], -count))
    if found[both] <= worth * found[first]:
        first = both
    ways = tuple(order[:first]), tuple(sorted(order[first:]))
    return Ways(*ways, cpu_us[first], stream_us[first], cpu_us[-1], stream_us[0], rows[first])


def _cpu_times(counts: Sequence[float], rows: Sequence[float], size: ExpertSize, rates: Rates) -> list[float]:
    """The CPU's time for no expert, for the first one, for the first two ...; `rows` of the batch are sent then."""
    pieces = [max(1, math.ceil(count / MOST_ROWS)) for count in rows]

    def on_cpu(count: float, most: int) -> float:
        parts = max(1.0, min(most, count))  # pieces that read the expert
        return parts * rates.cpu_us(size, count / parts)

    experts = {most: [0.0, *accumulate(on_cpu(count, most) for count in counts)] for most in set(pieces)}
    start_us = rates.wait_us + rates.call_us
    row_us = size.row_bytes / rates.copy_gbs / 1e3 + size.row_bytes / rates.sums_gbs / 1e3
    times = [experts[most][i] + start_us + rows[i] * row_us for i, most in enumerate(pieces)]
    return [0.0, *times[1:]]


def expected_ways(experts: int, tokens: int, top_k: int, global_experts: int, size: ExpertSize, rates: Rates) -> Ways:
    """The division if a router chooses all experts equally often; `experts` of them are in host memory."""
    used = 1 - (1 - min(1.0, top_k / global_experts)) ** tokens
    active = round(experts * used)
    each = tokens * top_k / global_experts / used if used else 0.0
    return choose_ways(dict.fromkeys(range(active), max(1.0, each)), tokens, size, rates)
