"""Which experts of a large batch the CPU computes, and which are copied to the GPU for the batch. Pure functions.

The CPU's time for an expert grows with its tokens, a copy's does not: the experts with the fewest tokens are the CPU's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lancebill.moe.problem import Problem
from lancebill.split.cpu_rows import expected_rows
from lancebill.split.waves import WaveCosts, last_waves

Numbers = NDArray[np.float64]
_FAR = 1e7  # tokens


@dataclass(frozen=True)
class ExpertSize:
    """One expert: bytes in host memory, operations for a token; and bytes of a token's sums from the CPU."""

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
    wave_us: float = 0.0  # that the GPU computes a wave of one expert, of no tokens
    token_us: float = 0.0  # and for each token of the batch
    expert_us: float = 0.0  # for each further expert of the wave, likewise
    expert_token_us: float = 0.0
    wave_experts: int = 1
    call_us: float = 100.0  # to the CPU and back
    wait_us: float = 300.0  # until the first copies are queued
    divide_us: float = 500.0  # from then until the CPU has its rows, if it has only some experts
    run_us: float = 0.0  # that copies take longer for every piece of neighbouring experts but the first
    # Tokens of an expert, ascending, and the us that the CPU takes, if each row has only one expert of the CPU.
    cpu_points: tuple[tuple[float, float], ...] = ()

    def cpu_us(self, size: ExpertSize, tokens: Numbers) -> Numbers:
        """The CPU's time for experts with so many tokens: on the line through the two nearest points.

        Without points it reads the expert and then computes: the two hardly overlap.
        """
        if len(self.cpu_points) < 2:
            read: Numbers = size.bytes / self.cpu_gbs + tokens * size.flops / self.cpu_gflops
            return read / 1e3
        us: Numbers = np.interp(tokens, *self._lines)
        return us

    @cached_property
    def _lines(self) -> tuple[Numbers, Numbers]:
        """The points, and one so far away on the last line that no expert has more tokens."""
        at, taken = np.array(self.cpu_points, dtype=np.float64).T
        slope = (taken[-1] - taken[-2]) / (at[-1] - at[-2])
        return np.append(at, at[-1] + _FAR), np.append(taken, taken[-1] + slope * _FAR)

    def wave_costs(self, size: ExpertSize, tokens: int) -> WaveCosts:
        """Of waves of a batch with so many tokens."""
        copy, pack = (size.bytes / gbs / 1e3 for gbs in (self.copy_gbs, self.pack_gbs))
        each = self.expert_us + tokens * self.expert_token_us
        return WaveCosts(copy, pack + each, self.wave_us + tokens * self.token_us - each)


MOST_ROWS = 2048  # of one call of the CPU: more are computed piece by piece, and each piece reads the experts again
LATE = 1.05  # by so much the CPU may take longer than estimated: one expert too many costs more than one too few
BOTH_WORTH = 0.95  # of the better of both ways alone, by estimate: it must not become slower
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

    def __init__(self, counts: Numbers, tokens: int, size: ExpertSize, rates: Rates) -> None:
        """`counts` are the tokens of each expert, in the order in which the CPU would take them."""
        self.counts, self.tokens, self.size, self.rates = counts, tokens, size, rates
        self.rows = expected_rows(tokens, _sums(self.counts))  # that are sent to the CPU
        self.rows[-1] = tokens  # a batch of which nothing is copied is sent whole
        self.cpu_us, self.stream_us = self._cpu_us(), self._stream_us()
        self.us = np.maximum(self.cpu_us, self.stream_us)

    def _cpu_us(self) -> Numbers:
        rates, rows = self.rates, self.rows
        row_us = 1.5 * self.size.row_bytes / rates.copy_gbs / 1e3  # there in 16 bits, back in 32
        us = rates.call_us + rows * row_us
        us[:-1] += rates.wait_us + rates.divide_us
        if self.tokens <= MOST_ROWS:
            us += _sums(rates.cpu_us(self.size, self.counts))
        else:
            self._add_pieces(us)
        us[0] = 0.0
        return us

    def _add_pieces(self, us: Numbers) -> None:
        """The experts' time if rows go to the CPU in pieces, each of which reads the experts again."""
        for pieces in range(1, math.ceil(self.tokens / MOST_ROWS) + 1):
            first, last = self.rows.searchsorted(((pieces - 1) * MOST_ROWS, pieces * MOST_ROWS), side="right")
            parts = np.minimum(self.counts, pieces)  # pieces with the expert
            us[first:last] += _sums(parts * self.rates.cpu_us(self.size, self.counts / parts))[first:last]

    def _stream_us(self) -> Numbers:
        rates, most = self.rates, self.rates.wave_experts
        costs, copied = rates.wave_costs(self.size, self.tokens), np.arange(len(self.counts), -1, -1)
        gpu_us = costs.pack + costs.fixed / most  # for an expert
        last = costs.fixed + costs.pack * min([most, *last_waves(most, costs)])  # it comes after all copies
        # Rows come back over the same wire as the copies, so they delay both ways.
        rows_us = self.rows * self.size.row_bytes / rates.copy_gbs / 1e3
        # The CPU's experts lie anywhere among the others.
        runs_us = rates.run_us * copied * (len(self.counts) - copied) / max(1, len(self.counts))
        us: Numbers = rates.wait_us + last + rows_us + runs_us + copied * max(costs.copy, gpu_us)
        us[-1] = 0.0
        return us


def _sums(values: Numbers) -> Numbers:
    """Of no value, of the first one, of two ..."""
    sums = np.zeros(len(values) + 1)
    values.cumsum(out=sums[1:])
    return sums


def choose_ways(
    counts: Numbers,
    tokens: int,
    size: ExpertSize,
    rates: Rates,
    worth: float = BOTH_WORTH,
    begun: Sequence[int] = (),
) -> Ways:
    """The fastest division of experts, given the tokens of each. Experts without tokens go neither way.

    Both ways together must take at most `worth` of the time of the better one alone. Copies of `begun` have begun.
    """
    order = _order_of_cpu(counts, begun)
    batch = _Batch(counts[order], tokens, size, rates)
    number = 0 if batch.us[0] < batch.us[-1] else len(order)
    both = int(np.maximum(LATE * batch.cpu_us, batch.stream_us).argmin())
    if batch.us[both] <= worth * batch.us[number]:
        number = both
    ways = tuple(order[:number].tolist()), tuple(sorted(order[number:].tolist()))
    taken = batch.cpu_us[number], batch.stream_us[number], batch.cpu_us[-1], batch.stream_us[0], batch.rows[number]
    return Ways(*ways, *map(float, taken))


def _order_of_cpu(counts: Numbers, begun: Sequence[int]) -> NDArray[np.intp]:
    """Used experts as the CPU would take them: those that are being copied last, and those with few tokens first."""
    used, late = np.flatnonzero(counts), np.zeros(len(counts), dtype=np.bool_)
    late[list(begun)] = True
    return used[np.lexsort((counts[used], late[used]))]


def used_share(tokens: int, top_k: int, global_experts: int) -> float:
    """The share of all experts that a batch uses, if a router chooses all equally often."""
    return 1 - (1 - min(1.0, top_k / global_experts)) ** tokens


def expected_ways(experts: int, tokens: int, top_k: int, global_experts: int, size: ExpertSize, rates: Rates) -> Ways:
    """The division if a router chooses all experts equally often; `experts` of them are in host memory."""
    used = used_share(tokens, top_k, global_experts)
    active = round(experts * used)
    each = tokens * top_k / global_experts / used if used else 0.0
    return choose_ways(np.full(active, max(1.0, each)), tokens, size, rates)
