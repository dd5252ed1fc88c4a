"""Which experts of a large batch the CPU computes, and which are copied to the GPU for the batch. Pure functions.

The CPU's time for an expert grows with its tokens, a copy's does not: the experts with the fewest tokens are the CPU's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from lancebill.backends.cpu.native import Library, abi
from lancebill.moe.problem import Problem
from lancebill.split.cpu_rows import MOST_ROWS, expected_rows, most_chosen
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

    def cpu_lines(self, size: ExpertSize) -> tuple[Numbers, Numbers]:
        """Tokens of an expert and the CPU's time: the points, and one that no expert goes beyond, on the last line.

        Without points it reads the expert and then computes: the two hardly overlap.
        """
        points = self.cpu_points
        if len(points) < 2:
            read, token = size.bytes / self.cpu_gbs / 1e3, size.flops / self.cpu_gflops / 1e3
            points = (0.0, read), (1.0, read + token)
        at, taken = np.array(points, dtype=np.float64).T
        slope = (taken[-1] - taken[-2]) / (at[-1] - at[-2])
        return np.append(at, at[-1] + _FAR), np.append(taken, taken[-1] + slope * _FAR)

    def wave_costs(self, size: ExpertSize, tokens: int) -> WaveCosts:
        """Of waves of a batch with so many tokens."""
        copy, pack = (size.bytes / gbs / 1e3 for gbs in (self.copy_gbs, self.pack_gbs))
        each = self.expert_us + tokens * self.expert_token_us
        return WaveCosts(copy, pack + each, self.wave_us + tokens * self.token_us - each)


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


@dataclass(frozen=True, eq=False)
class BatchCosts:
    """Microseconds of a batch of so many tokens on either way, whichever experts its rows use."""

    tokens: float
    call: float  # fixed time of a CPU call
    begin: float  # until the CPU has its rows, if experts are also copied
    row: float  # one row to the CPU and back
    wait: float  # before the first copy and after the last one
    copy: float  # one expert
    run: float  # extra time of a copied expert that does not follow its predecessor in memory
    sums: float  # delay of copies by one row of the CPU, because its sums use PCIe too
    at: Numbers  # tokens of an expert
    taken: Numbers  # the CPU's time for them, interpolated linearly
    most_rows: float = MOST_ROWS
    most_chosen: float = math.inf  # rows of the CPU, if not all are sent

    def expert(self, tokens: Numbers) -> Numbers:
        """The CPU's time for experts with so many tokens."""
        us: Numbers = np.interp(tokens, self.at, self.taken)
        return us

    @cached_property
    def struct(self) -> abi.BatchCostsStruct:
        """For the library."""
        points = self.at.ctypes.data, self.taken.ctypes.data, len(self.at)
        numbers = self.tokens, self.call, self.begin, self.row, self.wait, self.copy, self.run, self.sums
        return abi.BatchCostsStruct(*numbers, self.most_rows, self.most_chosen, LATE, *points)


@lru_cache(64)
def batch_costs(tokens: int, size: ExpertSize, rates: Rates) -> BatchCosts:
    most, waves = rates.wave_experts, rates.wave_costs(size, tokens)
    last = waves.fixed + waves.pack * min([most, *last_waves(most, waves)])  # it comes after all copies
    sums = size.row_bytes / rates.copy_gbs / 1e3
    at, taken = rates.cpu_lines(size)
    return BatchCosts(
        tokens=tokens,
        call=rates.call_us,
        begin=rates.wait_us + rates.divide_us,
        row=1.5 * sums,  # there in 16 bits, back in 32
        wait=rates.wait_us + last,
        copy=max(waves.copy, waves.pack + waves.fixed / most),
        run=rates.run_us,
        sums=sums,
        at=at,
        taken=taken,
        most_chosen=most_chosen(tokens),
    )


class _Batch:
    """The times of both ways, by the number of experts that the CPU has: those with the fewest tokens."""

    def __init__(self, counts: Numbers, costs: BatchCosts) -> None:
        """`counts` are the tokens of each expert, in the order in which the CPU would take them."""
        self.counts, self.costs, self.slots = counts, costs, _sums(counts)
        self.rows = expected_rows(costs.tokens, self.slots)  # rows sent to the CPU
        self.rows[-1] = costs.tokens  # without copies the whole batch is sent
        self.cpu_us, self.stream_us = self._cpu_us(), self._stream_us()
        self.us = np.maximum(self.cpu_us, self.stream_us)

    def _cpu_us(self) -> Numbers:
        costs = self.costs
        us = costs.call + costs.row * self.rows + _sums(costs.expert(self.counts))
        us[:-1] += costs.begin
        if costs.tokens > costs.most_rows:
            us[:-1][self.slots[:-1] > costs.most_rows] = np.inf  # the experts' rows must fit one call
            us[-1] = costs.call + costs.row * costs.tokens + self._pieces_us()
        us[0] = 0.0
        return us

    def _pieces_us(self) -> float:
        """The time of all experts, if the whole batch goes to the CPU in pieces: each reads the experts again."""
        pieces = np.minimum(self.counts, math.ceil(self.costs.tokens / self.costs.most_rows))  # with the expert
        return float((pieces * self.costs.expert(self.counts / pieces)).sum())

    def _stream_us(self) -> Numbers:
        costs, used = self.costs, len(self.counts)
        copied = np.arange(used, -1, -1)
        runs = copied * (used - copied) / max(1, used)  # the CPU's experts lie anywhere among the others
        us: Numbers = costs.wait + costs.sums * self.rows + costs.run * runs + costs.copy * copied
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
    native: Library | None = None,
) -> Ways:
    """The fastest division of experts, given the tokens of each. Experts without tokens go neither way.

    Both ways together must take at most `worth` of the time of the better one alone. Copies of `begun` have begun.
    With a library it is found there, in a third of the time.
    """
    costs = batch_costs(tokens, size, rates)
    if native is not None:
        return _by_library(native, counts, costs, worth, begun)
    order = _order_of_cpu(counts, begun)
    batch = _Batch(counts[order], costs)
    number = 0 if batch.us[0] < batch.us[-1] else len(order)
    both = int(np.maximum(LATE * batch.cpu_us, batch.stream_us).argmin())
    if batch.us[both] <= worth * batch.us[number]:
        number = both
    ways = tuple(order[:number].tolist()), tuple(sorted(order[number:].tolist()))
    taken = batch.cpu_us[number], batch.stream_us[number], batch.cpu_us[-1], batch.stream_us[0], batch.rows[number]
    return Ways(*ways, *map(float, taken))


def _by_library(native: Library, counts: Numbers, costs: BatchCosts, worth: float, begun: Sequence[int]) -> Ways:
    late, order = np.zeros(len(counts), dtype=np.uint8), np.empty(len(counts), dtype=np.int32)
    late[list(begun)] = 1
    number, found = native.divide(costs.struct, worth, counts, late, order)
    cpu, streamed = order[:number].tolist(), sorted(order[number : found.used].tolist())
    return Ways(
        tuple(cpu), tuple(streamed), found.cpu_us, found.stream_us, found.cpu_alone_us, found.copied_us, found.rows
    )


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
