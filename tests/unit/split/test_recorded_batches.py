"""How large batches would be divided at the rates of recorded runs, beside the times that the ways took there."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest
from project import ROOT

from lancebill.moe.model_shapes import NAMED
from lancebill.split import cpu_rows
from lancebill.split import ways as ways_module
from lancebill.split.ways import ExpertSize, Rates, Ways, choose_ways, expected_ways

# With the rows of a call of the CPU then.
RUNS = {"2026-11-17t203500-6a2252e": 1024, "2026-11-17t230049-b9127d9": 2048, "2026-11-17t234130-a9fabef": 2048}


@dataclass(frozen=True)
class Recorded:
    """One batch of a run: half of the experts in host memory, tokens routed to all alike."""

    run: str
    row: dict[str, Any]
    wire_gbs: float

    def __str__(self) -> str:
        return f"{self.run[-7:]}-{self.row['shape']}-{self.row['spec']}-{self.row['tokens']}"

    @cached_property
    def rates(self) -> Rates:
        points = tuple((tokens, us) for tokens, us in self.row["rates"].get("cpu_points", ()))
        return Rates(**{"sums_gbs": 5.5} | self.row["rates"] | {"cpu_points": points})

    @cached_property
    def size(self) -> ExpertSize:
        shape, missing = NAMED[self.row["shape"]], self.row["on_cpu"] + self.row["copied"]
        stored = self.row["wire_us"] * self.wire_gbs * 1e3 / missing
        return ExpertSize(round(stored), 6 * shape.hidden * shape.intermediate, 4 * shape.hidden)

    def choose(self) -> Ways:
        shape = NAMED[self.row["shape"]]
        missing, tokens = self.row["on_cpu"] + self.row["copied"], self.row["tokens"]
        return expected_ways(missing, tokens, shape.top_k, shape.experts, self.size, self.rates)

    def cpu_estimate(self, experts: int) -> float:
        """Of so many experts that the CPU computes in this batch."""
        shape, tokens = NAMED[self.row["shape"]], self.row["tokens"]
        counts = dict.fromkeys(range(experts), tokens * shape.top_k / shape.experts)
        return choose_ways(counts, tokens, self.size, self.rates).cpu_alone_us


def recorded() -> list[Recorded]:
    found = []
    for run in RUNS:
        path = ROOT / "benchmarks" / "results" / "hybrid" / "h200" / f"{run}.json"
        record = json.loads(path.read_text(encoding="utf-8"))
        rows = [row for row in record["rows"] if row["kind"] == "prefill"]
        found += [Recorded(run, row, record["machine"]["wire_gbs"]) for row in rows]
    return found


@pytest.fixture(params=recorded(), ids=str)
def batch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Recorded:
    found: Recorded = request.param
    monkeypatch.setattr(ways_module, "MOST_ROWS", RUNS[found.run])
    monkeypatch.setattr(cpu_rows, "MOST_SENT", 0.0)  # all rows were sent then
    return found


def test_both_ways_are_taken_where_they_were_faster_than_one(batch: Recorded) -> None:
    """Where the recorded division lost a fifth, one way is taken; where it did not lose, both are."""
    row, ways = batch.row, batch.choose()
    if not row["on_cpu"]:
        assert not ways.cpu, "copies alone were right"
        return
    lost = row["prefill_us"] / min(row["cpu_us"], row["copied_us"])
    assert ways.streamed, "the CPU alone was never the fastest"
    if lost > 1.2:
        assert not ways.cpu, lost
    elif lost < 1.01:
        assert 0 < len(ways.cpu) <= row["on_cpu"], "the CPU was the slower part, everywhere"


def test_the_estimate_of_the_cpu_is_what_was_measured(batch: Recorded) -> None:
    """Alone, and for the few experts that it has beside copies: there the whole rows of the batch count more."""
    row, missing = batch.row, batch.row["on_cpu"] + batch.row["copied"]
    assert 0.8 < batch.cpu_estimate(missing) / row["cpu_us"] < 1.5
    if row["on_cpu"]:
        assert 0.75 < batch.cpu_estimate(row["on_cpu"]) / row["prefill_us"] < 1.5
