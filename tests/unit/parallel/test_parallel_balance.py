"""The rebalance algorithm: small cases worked out by hand, and properties that hold for every load."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lancebill.errors import ShardError
from lancebill.moe.placement import Placement
from lancebill.parallel.balance import arrange, busiest, keep_slots, pack_bins, rebalance, replicate
from lancebill.parallel.replicas import Assignment


def test_spare_slots_go_to_the_expert_with_the_highest_load_per_copy() -> None:
    assert replicate([90.0, 40.0, 10.0], 6) == [0, 1, 2, 0, 0, 1]  # 90, then 45 against 40, then 30 against 40
    assert replicate([5.0, 5.0], 3) == [0, 1, 0], "ties go to the first"
    assert replicate([1.0, 2.0], 2) == [0, 1]


def test_the_heaviest_item_goes_to_the_lightest_bin_with_room() -> None:
    assert pack_bins([7.0, 6.0, 5.0, 4.0], 2, 2) == [[0, 3], [1, 2]]
    assert pack_bins([9.0, 1.0, 1.0, 1.0], 2, 2) == [[0, 3], [1, 2]], (
        "the lighter bin is full when the last item is placed"
    )


def test_an_expert_that_stays_on_a_rank_keeps_its_slot() -> None:
    assert keep_slots([4, 7, 2], before=[2, 9, 7]) == [2, 4, 7]
    assert keep_slots([3, 3, 5], before=[1, 3, 2]) == [3, 3, 5], "one of the two copies stays, the other is new"


def test_groups_stay_on_one_node() -> None:
    load = [8.0, 1.0, 7.0, 1.0, 6.0, 1.0, 5.0, 1.0]  # four groups of two
    held = arrange(load, ranks=4, per_rank=3, nodes=2, groups=4)
    nodes = [set(held[0] + held[1]), set(held[2] + held[3])]
    assert nodes == [{0, 1, 6, 7}, {2, 3, 4, 5}], "group loads 9 with 6, 8 with 7"
    free = arrange(load, ranks=4, per_rank=3, nodes=2, groups=1)
    assert free == arrange(load, ranks=4, per_rank=3), "groups that nodes do not divide are ignored"


def test_a_rebalance_worked_out_by_hand() -> None:
    """Six experts on four ranks with two spare slots; experts 0 and 1 have most of the load."""
    current = Assignment.of(Placement(ep_size=4, redundant=2), 6).experts_by_rank
    load = [100.0, 60.0, 10.0, 10.0, 10.0, 10.0]
    held = rebalance(load, current)
    # 100 is split, then 60: copies of 50 50 30 30 10 10 10 10, the heaviest paired with the lightest
    assert sorted(e for slots in held for e in slots) == [0, 0, 1, 1, 2, 3, 4, 5]
    assert busiest(load, held) == 60.0
    assert busiest(load, current) == 80.0


@pytest.mark.parametrize(
    ("load", "current", "options"),
    [
        ([1.0] * 5, [[0, 1, 2], [3, 4]], {}),
        ([1.0] * 5, [[0, 1], [2, 3]], {}),
        ([1.0] * 4, [[0, 1], [2, 3]], {"nodes": 3}),
        ([1.0] * 4, [[0, 1], [2, 3]], {"groups": 3}),
    ],
)
def test_impossible_layouts_are_refused(load: list[float], current: list[list[int]], options: dict[str, int]) -> None:
    with pytest.raises(ShardError):
        rebalance(load, current, **options)


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[float], Assignment, int, int]:
    """(load, assignment, nodes, groups) with compatible sizes."""
    nodes, groups = draw(st.sampled_from([(1, 1), (2, 1), (2, 4), (3, 3), (1, 4)]))
    ranks = nodes * draw(st.integers(1, 3))
    experts = groups * draw(st.integers(1, 5)) * (1 if ranks == 1 else ranks)
    redundant = ranks * draw(st.integers(0, 3))
    loads = st.one_of(st.integers(0, 10_000), st.integers(0, 3))
    load = [float(v) for v in draw(st.lists(loads, min_size=experts, max_size=experts))]
    return load, Assignment.of(Placement(ep_size=ranks, redundant=redundant), experts), nodes, groups


@settings(max_examples=150, deadline=None)
@given(problems())
def test_rebalance_properties_for_every_load(problem: tuple[list[float], Assignment, int, int]) -> None:
    load, assignment, nodes, groups = problem
    current = assignment.experts_by_rank
    held = rebalance(load, current, nodes=nodes, groups=groups)
    moved = assignment.arranged(held)  # raises if an expert has no slot
    assert [len(slots) for slots in moved.experts_by_rank] == [len(slots) for slots in current]
    assert busiest(load, held) <= busiest(load, current)
    for new, old in zip(held, current):
        assert all(new[i] == expert or new.count(expert) < old.count(expert) for i, expert in enumerate(old))
    assert rebalance(load, held, nodes=nodes, groups=groups) == held, "a second rebalance moves nothing"


@settings(max_examples=50, deadline=None)
@given(st.permutations(range(16)), st.sampled_from([2, 4, 8]), st.sampled_from([0, 8]))
def test_skewed_loads_are_balanced_close_to_the_optimum(order: list[int], ranks: int, redundant: int) -> None:
    load = [1000.0 / (1 + order[e]) for e in range(16)]
    current = Assignment.of(Placement(ep_size=ranks, redundant=redundant), 16).experts_by_rank
    held = rebalance(load, current)
    bound = max(sum(load) / ranks, 0 if redundant else max(load))
    assert busiest(load, held) <= min(busiest(load, current), 1.5 * bound)
