"""How large batches would be divided at the rates of recorded runs, beside the times that the ways took there."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from statistics import median

import numpy as np
import pytest

from benchmarks.runner import Row, records
from lancebill.moe.model_shapes import NAMED
from lancebill.split.ways import ExpertSize, Rates, Ways, choose_ways, expected_ways


@dataclass(frozen=True)
class Recorded:
    """One batch of a run: half of the experts in host memory, tokens routed to all alike."""

    run: str
    row: Row
    wire_gbs: float

    def __str__(self) -> str:
        return f"{self.run[-7:]}-{self.row['shape']}-{self.row['weights']}-{self.row['tokens']}"

    @cached_property
    def rates(self) -> Rates:
        points = tuple((tokens, us) for tokens, us in self.row["rates"]["cpu_points"])
        return Rates(**self.row["rates"] | {"cpu_points": points})

    @cached_property
    def size(self) -> ExpertSize:
        shape, missing = NAMED[self.row["shape"]], self.row["on_cpu"] + self.row["copied"]
        stored = self.row["wire_ms"] * self.wire_gbs * 1e6 / missing
        return ExpertSize(round(stored), 6 * shape.hidden * shape.intermediate, 4 * shape.hidden)

    def choose(self) -> Ways:
        shape = NAMED[self.row["shape"]]
        missing, tokens = self.row["on_cpu"] + self.row["copied"], self.row["tokens"]
        return expected_ways(missing, tokens, shape.top_k, shape.experts, self.size, self.rates)

    def cpu_estimate(self, experts: int) -> float:
        """Of so many experts that the CPU computes in this batch."""
        shape, tokens = NAMED[self.row["shape"]], self.row["tokens"]
        counts = np.full(experts, tokens * shape.top_k / shape.experts)
        return choose_ways(counts, tokens, self.size, self.rates).cpu_alone_us


def recorded() -> list[Recorded]:
    return [
        Recorded(record.path.stem, row, record.facts["wire_gbs"])
        for record in records("hybrid", "h200")
        for row in record.rows
        if row["kind"] == "prefill"
    ]


@pytest.fixture(params=recorded(), ids=str)
def batch(request: pytest.FixtureRequest) -> Recorded:
    found: Recorded = request.param
    return found


def test_both_ways_are_taken_where_they_were_faster_than_one(batch: Recorded) -> None:
    """Where the CPU had a share, both ways together were faster than the better one alone."""
    row, ways = batch.row, batch.choose()
    assert ways.streamed, "the CPU alone was never the fastest"
    if row["on_cpu"]:
        assert 0 < len(ways.cpu) <= row["on_cpu"] + 1, "the CPU was the slower part, everywhere"


def test_estimates_are_what_was_measured() -> None:
    """All missing experts on the CPU, all copied, and as planned.

    The CPU's rate changes from second to second, and is extrapolated beyond 136 tokens of an expert.
    """
    cpu, copied, planned = list[float](), list[float](), list[float]()
    for batch in recorded():
        row, ways = batch.row, batch.choose()
        if row["on_cpu"]:
            cpu.append(batch.cpu_estimate(row["on_cpu"] + row["copied"]) / row["cpu_ms"] / 1e3)
        copied.append(ways.copied_us / row["copied_ms"] / 1e3)
        planned.append(ways.estimate_us / row["prefill_ms"] / 1e3)
    assert 0.9 < median(cpu) < 1.1 and 0.85 < min(cpu) <= max(cpu) < 1.3, cpu
    assert 0.98 < median(copied) < 1.04 and 0.96 < min(copied) <= max(copied) < 1.05, copied
    assert 0.97 < median(planned) < 1.03 and 0.9 < min(planned) <= max(planned) < 1.05, planned
