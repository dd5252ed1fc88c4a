"""How a block comes to its tiles, proved without a GPU: every order in which its two kinds of warps can go on.

A model of `backends/hopper/kernels/gemm.py`: the warp that feeds and the warps that multiply as lists of what they do, barriers with
their phases. Each is alone in what it writes, so where both stand is all there is to know, and every pair of places is
looked at.
"""

from __future__ import annotations

from itertools import product

import pytest

from lancebill.backends.hopper.plan import make_plan
from lancebill.backends.hopper.steps import steps
from lancebill.testing import sass
from lancebill.testing.layers import layer_problem

Action = tuple[str, int]  # what, and which: a step of the ring of stages, or a turn
TURNS = 20


def feeder(blocks: int) -> list[Action]:
    """Waits for each stage and fills it; after a tile's last it tells which comes next."""
    found: list[Action] = []
    for turn in range(TURNS):
        for step in range(turn * blocks, (turn + 1) * blocks):
            found += [("wait for empty", step), ("fill", step)]
        found.append(("deal", turn))
    return found


def multiplier(blocks: int, *, at_once: bool) -> list[Action]:
    """Waits for each stage and reads it. Releases it `at_once`, or once the next has begun; reads what comes next."""
    found: list[Action] = []
    for turn in range(TURNS):
        for step in range(turn * blocks, (turn + 1) * blocks):
            found += [("wait for full", step), ("read", step)]
            late = [] if step == turn * blocks else [("release", step - 1)]
            found += [("release", step)] if at_once else late
        found += [] if at_once else [("release", (turn + 1) * blocks - 1)]
        found += [("wait for deal", turn), ("take", turn)]
    return found


def phase_over(done: list[Action], what: str, size: int, number: int, *, before: bool = False) -> bool:
    """Whether a wait for place `number % size` of a ring ends: its phases alternate, nobody counts them.

    `before`: the first wait for a place is for what was there from the start.
    """
    arrived = sum(action == what and n % size == number % size for action, n in done)
    return arrived % 2 != (number // size + before) % 2


@pytest.mark.parametrize(("stages", "blocks"), list(product([2, 3, 5, 8], [1, 2, 3, 7])))
@pytest.mark.parametrize("at_once", [False, True])
def test_every_turn_is_read_as_it_was_dealt(stages: int, blocks: int, at_once: bool) -> None:
    assert explore(stages, blocks, stages + 1, at_once=at_once) == []


@pytest.mark.parametrize("at_once", [False, True])
def test_a_smaller_ring_would_lose_turns(at_once: bool) -> None:
    """With one stage a tile the feeder is as many turns ahead as there are stages."""
    assert explore(3, 1, 3, at_once=at_once)


def test_kernels_have_such_a_ring() -> None:
    """A barrier for each stage that is full, for each that is empty, and for each turn."""
    pytest.importorskip("triton")
    from lancebill.jit.build import binary

    problem = layer_problem("mxfp4", "bf16", hidden=256, intermediate=128, experts=8, top_k=2)
    for step in steps(make_plan(problem, 100)):
        if step.source.kernel == "grouped":
            made = sum(name.startswith("SYNCS.EXCH") for name, _ in sass.instructions(binary(step.source).cubin))
            assert made == 3 * dict(step.source.constants)["STAGES"] + 1


def explore(stages: int, blocks: int, ring: int, *, at_once: bool) -> list[str]:
    """What goes wrong in any order of what both do."""
    feeding, multiplying = feeder(blocks), multiplier(blocks, at_once=at_once)
    seen, waiting, wrong = {(0, 0)}, [(0, 0)], []
    while waiting:
        f, m = waiting.pop()
        fed, done = feeding[:f], multiplying[:m]
        moves = []
        if f < len(feeding) and goes_on(feeding[f], fed, done, stages, ring):
            moves.append((f + 1, m))
        if m < len(multiplying) and goes_on(multiplying[m], fed, done, stages, ring):
            moves.append((f, m + 1))
            wrong += misread(multiplying[m], fed, stages, ring)
        if not moves and (f, m) != (len(feeding), len(multiplying)):
            wrong.append(f"stuck at {feeding[f : f + 1]}, {multiplying[m : m + 1]}")
        waiting += [move for move in moves if move not in seen]
        seen.update(moves)
    return wrong


def goes_on(action: Action, fed: list[Action], done: list[Action], stages: int, ring: int) -> bool:
    """Whether it need not wait, after what was fed and what was done with it."""
    what, number = action
    if what == "wait for empty":
        return phase_over(done, "release", stages, number, before=True)
    if what == "wait for full":
        return phase_over(fed, "fill", stages, number)
    return what != "wait for deal" or phase_over(fed, "deal", ring, number)


def misread(action: Action, fed: list[Action], stages: int, ring: int) -> list[str]:
    """What a read finds that is not what it was to find: the last that was written there is."""
    what, number = action
    if what not in ("read", "take"):
        return []
    written, size = ("fill", stages) if what == "read" else ("deal", ring)
    held = [n for name, n in fed if name == written and n % size == number % size][-1:]
    return [] if held == [number] else [f"{what} {number}: {held}"]
