"""Which replica of an expert a token uses, and how experts move between ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lancebill.errors import ShardError
from lancebill.moe.placement import Placement
from lancebill.parallel.groups import RankGroup
from lancebill.parallel.moves import plan_moves, run_moves
from lancebill.parallel.replicas import Assignment, ReplicaTables, count_load

CPU = torch.device("cpu")


def _with_copies(count: int) -> Assignment:
    """Two experts, `count` copies of the first, every copy on its own rank."""
    slots = tuple((p,) for p in range(count + 1))
    return Assignment(2, slots, (*[0] * count, 1))


def test_tokens_alternate_among_replicas() -> None:
    ids = torch.zeros(8, 1, dtype=torch.int64)
    three = ReplicaTables(_with_copies(3), CPU).choose(ids).flatten().tolist()
    assert three == [0, 0, 2, 2, 1, 0, 0, 2]
    two = ReplicaTables(_with_copies(2), CPU).choose(ids).flatten().tolist()
    assert two == [0, 1, 0, 1, 0, 1, 0, 1]
    one = ReplicaTables(_with_copies(1), CPU).choose(ids).flatten().tolist()
    assert one == [0] * 8


def test_the_replica_hash_is_unsigned_at_any_token_index() -> None:
    tables = ReplicaTables(_with_copies(3), CPU)
    tokens = 100_000
    chosen = tables.choose(torch.zeros(tokens, 1, dtype=torch.int64)).flatten().tolist()
    assert chosen[-3:] == [((t * 2654435769) & 0xFFFFFFFF) % 3 for t in range(tokens - 3, tokens)]
    counts = torch.bincount(torch.tensor(chosen))
    assert int(counts.max() - counts.min()) < tokens // 100, "copies get equal load"


def test_invalid_ids_become_minus_one() -> None:
    ids = torch.tensor([[0, -1], [1, 2], [-7, 1]])
    chosen = ReplicaTables(_with_copies(2), CPU).choose(ids)
    assert chosen.dtype == torch.int32
    assert chosen.tolist() == [[0, -1], [2, -1], [-1, 2]]


def test_initial_copies_repeat_the_first_experts() -> None:
    assignment = Assignment.of(Placement(ep_size=4, redundant=2), 6)
    assert assignment.logical == (0, 1, 2, 3, 4, 5, 0, 1)
    assert assignment.replicas == ((0, 6), (1, 7), (2,), (3,), (4,), (5,))
    assert assignment.experts_by_rank == ((0, 1), (2, 3), (4, 5), (0, 1))
    assert assignment.expert_map(1) == (-1, -1, 0, 1, -1, -1, -1, -1)


def test_expert_maps_equal_those_of_the_placement() -> None:
    for strategy in ("linear", "round_robin"):
        assignment = Assignment.of(Placement(ep_size=4, strategy=strategy), 10)
        for rank in range(4):
            placement = Placement(ep_rank=rank, ep_size=4, strategy=strategy)
            assert assignment.expert_map(rank) == placement.expert_map(10)
            assert assignment.experts_by_rank[rank] == placement.experts(10)


def test_an_expert_without_a_slot_is_refused() -> None:
    with pytest.raises(ShardError, match="every expert"):
        Assignment.of(Placement(ep_size=2), 4).arranged([[0, 1], [2, 2]])


def test_load_excludes_padding() -> None:
    load = torch.zeros(4, dtype=torch.int64)
    count_load(load, torch.tensor([[0, 2], [2, -1], [-1, -1]], dtype=torch.int32))
    count_load(load, torch.empty(0, 2, dtype=torch.int32))
    assert load[:3].tolist() == [1, 0, 2]


def test_moves_prefer_local_copies_and_alternate_among_senders() -> None:
    before = [[0, 1], [2, 3], [0, 1]]
    moves = plan_moves(before, [[1, 0], [0, 0], [2, 1]])
    assert [(m.source, m.source_slot, m.target, m.target_slot) for m in moves] == [
        (0, 1, 0, 0),
        (0, 0, 0, 1),
        (0, 0, 1, 0),
        (2, 0, 1, 1),
        (1, 0, 2, 0),
        (2, 1, 2, 1),
    ]
    assert [m.stays for m in moves] == [False] * 5 + [True]


arrangements = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4), min_size=1, max_size=5)


@settings(max_examples=100, deadline=None)
@given(arrangements, st.data())
def test_moves_produce_the_new_arrangement(before: list[list[int]], data: st.DataObject) -> None:
    experts = sorted({e for slots in before for e in slots})
    after = data.draw(st.lists(st.lists(st.sampled_from(experts), max_size=5), min_size=1, max_size=6))
    moves = plan_moves(before, after)
    places = {(m.target, m.target_slot): before[m.source][m.source_slot] for m in moves}
    assert places == {(r, s): e for r, slots in enumerate(after) for s, e in enumerate(slots)}


@settings(max_examples=50, deadline=None)
@given(st.permutations(range(5)))
def test_rows_can_be_permuted_in_place(order: list[int]) -> None:
    rows = [torch.arange(15, dtype=torch.int16).view(5, 3), torch.arange(5, dtype=torch.uint8).view(5, 1)]
    want = [t[order].clone() for t in rows]
    run_moves(plan_moves([list(range(5))], [order]), rows, rows, RankGroup())
    assert all(torch.equal(a, b) for a, b in zip(rows, want))
