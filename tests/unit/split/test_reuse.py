"""When moving experts pays, judged on generated traces with public statistics of reuse."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from lancebill.cli.main import app
from lancebill.split.residency import POLICIES, simulate
from lancebill.split.reuse import RecentReuse, break_even
from lancebill.split.traces import REUSE, make_trace
from lancebill.split.ways import ASSUMED, Rates


@pytest.mark.parametrize(("name", "places"), [("qwen3-30b", 51), ("512-experts", 64), ("512-experts", 128)])
def test_recent_reuse_is_the_hit_rate_of_lru(name: str, places: int) -> None:
    reuse, seen = REUSE[name], RecentReuse()
    trace = make_trace(reuse, 300)
    last = [0] * reuse.experts
    for step, used in enumerate(trace, 1):
        before, last = last, [step if expert in used else time for expert, time in enumerate(last)]
        seen = seen.after(before, last, places)
    assert abs(seen.hit_rate - simulate(trace, reuse.experts, places, POLICIES["lru"]).hit_rate) < 0.08
    assert seen.after(last, last, places) is seen, "nothing was used"


def test_moving_pays_if_it_saves_the_cpu_more_than_copies_cost() -> None:
    """The rule against what policies do on traces: time of the CPU's computations and of copies."""
    for name, places in (("qwen3-30b", 51), ("512-experts", 64), ("512-experts", 128)):
        reuse = REUSE[name]
        lru = simulate(make_trace(reuse, 300), reuse.experts, places, POLICIES["lru"])
        share = places / reuse.experts
        for copy_gbs in (5.0, 20.0, 50.0, 500.0):
            rates = Rates(copy_gbs, 120.0, 4000.0, 100.0)
            saved, cost = (lru.hits - share * lru.uses) / rates.cpu_gbs, lru.moves / rates.copy_gbs
            assert (lru.hit_rate > break_even(share, rates)) == (saved > cost), (name, places, copy_gbs)
    assert break_even(0.5, ASSUMED) > break_even(0.5, Rates(1e6, 1.0, 1.0, 1.0)) == pytest.approx(0.5)


def test_explain_says_when_experts_move() -> None:
    words = ["explain", "--shape", "qwen3-30b-a3b", "--weights", "mxfp4", "--device", "sm_90", "--gpu-experts", "64"]
    told = CliRunner().invoke(app, [*words, "--moves", "recency"])
    assert "more than 85% of uses" in " ".join(told.output.split()), told.output
    made = CliRunner().invoke(app, [*words, "--moves", "recency", "--json"])
    assert json.loads(made.output)["moving_pays_from_hit_rate"] == pytest.approx(0.853, abs=1e-3)
    assert "moving_pays" not in CliRunner().invoke(app, [*words, "--json"]).output
    assert "off or recency" in CliRunner().invoke(app, [*words, "--moves", "always"]).output
