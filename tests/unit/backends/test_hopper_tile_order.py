"""The producer and consumer protocol of the grouped GEMM, model-checked without a GPU over all interleavings.

A model of `kernels/gemm.py`: the producer and the consumer are lists of actions, and barriers have phases. Only one
side writes each location, so the pair of positions is the whole state, and the test visits every reachable pair.
"""

from __future__ import annotations

from itertools import product

import pytest

from lancebill.backends.hopper.plan import make_plan
from lancebill.testing.layers import layer_problem

Action = tuple[str, int]  # the action, and its step (of the ring of stages) or turn (of the block's tiles)
TURNS = 20


def producer(blocks: int) -> list[Action]:
    """Wait for each stage and fill it; after a tile's last stage publish the next tile."""
    actions: list[Action] = []
    for turn in range(TURNS):
        for step in range(turn * blocks, (turn + 1) * blocks):
            actions += [("wait for empty", step), ("fill", step)]
        actions.append(("publish", turn))
    return actions


def consumer(blocks: int, *, at_once: bool) -> list[Action]:
    """Wait for each stage, read and release it (`at_once`, or after the next stage has begun); take the next tile."""
    actions: list[Action] = []
    for turn in range(TURNS):
        for step in range(turn * blocks, (turn + 1) * blocks):
            actions += [("wait for full", step), ("read", step)]
            late = [] if step == turn * blocks else [("release", step - 1)]
            actions += [("release", step)] if at_once else late
        actions += [] if at_once else [("release", (turn + 1) * blocks - 1)]
        actions += [("wait for publish", turn), ("take", turn)]
    return actions


def phase_over(consumed: list[Action], what: str, size: int, number: int, *, before: bool = False) -> bool:
    """Whether a wait for entry `number % size` of a ring ends. A barrier has only one phase bit, no counter.

    `before`: entries start in the awaited state, so the first wait ends at once.
    """
    arrived = sum(action == what and n % size == number % size for action, n in consumed)
    return arrived % 2 != (number // size + before) % 2


@pytest.mark.parametrize(("stages", "blocks"), list(product([2, 3, 5, 8], [1, 2, 3, 7])))
@pytest.mark.parametrize("at_once", [False, True])
def test_the_consumer_reads_every_published_tile(stages: int, blocks: int, at_once: bool) -> None:
    assert explore(stages, blocks, stages + 1, at_once=at_once) == []


@pytest.mark.parametrize("at_once", [False, True])
def test_a_smaller_ring_loses_tiles(at_once: bool) -> None:
    """With one stage per tile the producer is as many tiles ahead as there are stages."""
    assert explore(3, 1, 3, at_once=at_once)


@pytest.mark.parametrize("together", [1, 16])
@pytest.mark.parametrize("entries", [1, 15, 16, 17, 40])
def test_every_unit_of_every_entry_is_one_tile(together: int, entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gemm = pytest.importorskip("lancebill.backends.hopper.kernels.gemm")
    monkeypatch.setattr(gemm.gl, "minimum", min)
    units = 3
    places = [gemm.place_of.fn(index, units, entries * units, together) for index in range(entries * units)]
    assert sorted(places) == list(product(range(entries), range(units)))
    first = [(entry, 0) for entry in range(min(entries, 16))]
    assert places[:units] == [(0, 0), (0, 1), (0, 2)] if together == 1 else places[: len(first)] == first


def test_tiles_of_matrices_larger_than_the_cache_are_computed_together() -> None:
    """Full tiles, if experts have several of them."""
    large = layer_problem("mxfp4", "fp8", hidden=4096, intermediate=14336, experts=8, top_k=2)
    gemm = make_plan(large, 8192).first_gemm
    assert [(tile.sizes[0], tile.together) for tile in gemm.tiles] == [(128, 16), (96, 1), (80, 1), (144, 16)]
    fits = layer_problem("mxfp4", "fp8", hidden=4096, intermediate=8192, experts=8, top_k=2)
    for plan in (make_plan(large, 256), make_plan(fits, 8192)):
        assert {tile.together for tile in plan.first_gemm.tiles} == {1}


def explore(stages: int, blocks: int, ring: int, *, at_once: bool) -> list[str]:
    """All errors over every interleaving of both sides."""
    producing, consuming = producer(blocks), consumer(blocks, at_once=at_once)
    seen, waiting, wrong = {(0, 0)}, [(0, 0)], []
    while waiting:
        f, m = waiting.pop()
        produced, consumed = producing[:f], consuming[:m]
        moves = []
        if f < len(producing) and can_proceed(producing[f], produced, consumed, stages, ring):
            moves.append((f + 1, m))
        if m < len(consuming) and can_proceed(consuming[m], produced, consumed, stages, ring):
            moves.append((f, m + 1))
            wrong += misread(consuming[m], produced, stages, ring)
        if not moves and (f, m) != (len(producing), len(consuming)):
            wrong.append(f"stuck at {producing[f : f + 1]}, {consuming[m : m + 1]}")
        waiting += [move for move in moves if move not in seen]
        seen.update(moves)
    return wrong


def can_proceed(action: Action, produced: list[Action], consumed: list[Action], stages: int, ring: int) -> bool:
    """Whether an action can proceed, given the past actions of producer and consumer."""
    what, number = action
    if what == "wait for empty":
        return phase_over(consumed, "release", stages, number, before=True)
    if what == "wait for full":
        return phase_over(produced, "fill", stages, number)
    return what != "wait for publish" or phase_over(produced, "publish", ring, number)


def misread(action: Action, produced: list[Action], stages: int, ring: int) -> list[str]:
    """The error if a read finds something else than its own step: the last one written to that entry."""
    what, number = action
    if what not in ("read", "take"):
        return []
    written, size = ("fill", stages) if what == "read" else ("publish", ring)
    held = [n for name, n in produced if name == written and n % size == number % size][-1:]
    return [] if held == [number] else [f"{what} {number}: {held}"]
