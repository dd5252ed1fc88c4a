"""Policies of what is on the device, on generated traces: bounds, order, and the reuse that the traces promise."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from lancebill.split import policy_table
from lancebill.split.residency import POLICIES, ExpertSwap, Residency, simulate
from lancebill.split.traces import REUSE, make_trace


@pytest.mark.parametrize("name", REUSE)
def test_traces_have_the_reuse_that_was_measured(name: str) -> None:
    reuse = REUSE[name]
    trace = make_trace(reuse, 200)
    assert all(len(set(used)) == reuse.top_k for used in trace)
    for places, rate in reuse.hits:
        assert abs(simulate(trace, reuse.experts, places, POLICIES["lru"]).hit_rate - rate) < 0.06
    half = simulate(trace[100:], reuse.experts, reuse.experts // 16, POLICIES["static"]).hit_rate
    assert half < 0.35, "no lasting favourites"


def test_policies_lie_between_lru_and_beladys_optimum() -> None:
    reuse = REUSE["qwen3-30b"]
    for seed in range(3):
        trace = make_trace(reuse, 200, seed)
        found = {name: simulate(trace, reuse.experts, 51, policy).hit_rate for name, policy in POLICIES.items()}
        assert found["belady"] >= found["recent"] >= found["lru"] - 0.005 > found["static"], found


def test_the_documented_table_is_what_policies_do() -> None:
    page = (Path(__file__).parents[3] / "docs" / "hybrid.md").read_text(encoding="utf-8")
    table = list(policy_table.rows())
    assert all(line in page.splitlines() for line in table), "\n".join(table)


def test_belady_is_the_best_of_all_choices() -> None:
    """On traces so short that every possible choice can be tried."""
    generator = random.Random(0)
    for _ in range(20):
        trace = [(generator.randrange(4),) for _ in range(7)]
        best = {frozenset((0, 1)): 0}
        for (used,) in trace:
            reached: dict[frozenset[int], int] = {}
            for held, hits in best.items():
                for kept in itertools.combinations(sorted(held | {used}), 2):
                    score = hits + (used in held)
                    reached[frozenset(kept)] = max(score, reached.get(frozenset(kept), 0))
            best = reached
        assert simulate(trace, 4, 2, POLICIES["belady"]).hits == max(best.values())


def test_experts_that_stay_keep_their_places() -> None:
    before = Residency((5, 2, 9))
    scores = [0, 0, 3, 0, 0, 1, 0, 2, 0, 0]
    swaps = before.swaps(scores, (7, 2))
    after = before.after(swaps)
    assert swaps == (ExpertSwap(place=2, leaves=9, comes=7),) and after == Residency((5, 2, 7))
    assert not after.swaps(scores, (1, 3)), "an expert that deserves no place gets none"
    assert not before.swaps([1] * 10, range(10)), "experts that are used alike stay where they are"
    assert before.swaps(scores, range(10), most=0) == ()
