"""Which experts should be on the device, judged on traces of routing.

A policy is a pure function from a trace to scores: after every step, how much each expert deserves a place. Those with
the highest scores stay. A step never waits for a missing expert: the CPU computes it, and the expert may get a place
afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import takewhile

Trace = Sequence[Sequence[int]]  # the experts that each step used
Scores = Sequence[Sequence[float]]  # after each step, of every expert
Policy = Callable[[Trace, int], Scores]


@dataclass(frozen=True)
class ExpertSwap:
    """An expert that comes to the device, into the place of one that leaves it."""

    place: int
    leaves: int
    comes: int


@dataclass(frozen=True)
class Residency:
    """The expert in each place of the device."""

    experts: tuple[int, ...]

    def swaps(
        self, scores: Sequence[float], candidates: Collection[int], most: int | None = None
    ) -> tuple[ExpertSwap, ...]:
        """The best candidates, each for the worst expert that is here, as long as that is better: `most` of them."""
        here = set(self.experts)
        coming = sorted((expert for expert in set(candidates) if expert not in here), key=lambda e: (-scores[e], e))
        leaving = sorted(range(len(self.experts)), key=lambda place: (scores[self.experts[place]], -place))
        pairs = zip(coming[:most], leaving)
        better = takewhile(lambda pair: scores[pair[0]] > scores[self.experts[pair[1]]], pairs)
        return tuple(ExpertSwap(place, self.experts[place], expert) for expert, place in better)

    def after(self, swaps: Collection[ExpertSwap]) -> Residency:
        """An expert that stays keeps its place."""
        coming = {swap.place: swap.comes for swap in swaps}
        return Residency(tuple(coming.get(place, expert) for place, expert in enumerate(self.experts)))


@dataclass(frozen=True)
class PolicyResult:
    """A policy's result on a trace: uses, hits on the device, and experts moved there."""

    uses: int
    hits: int
    moves: int
    steps_without_miss: int
    steps: int

    @property
    def hit_rate(self) -> float:
        return self.hits / max(1, self.uses)


def simulate(trace: Trace, experts: int, places: int, policy: Policy) -> PolicyResult:
    """Run a policy over a trace, beginning with the first experts on the device. An expert may come when it is used."""
    scores, held = policy(trace, experts), Residency(tuple(range(min(places, experts))))
    uses = hits = moves = clean = 0
    for step, used in enumerate(trace):
        found = sum(expert in held.experts for expert in used)
        uses, hits, clean = uses + len(used), hits + found, clean + (found == len(used))
        swaps = held.swaps(scores[step], used)
        held, moves = held.after(swaps), moves + len(swaps)
    return PolicyResult(uses, hits, moves, clean, len(trace))


def last_use(trace: Trace, experts: int) -> Scores:
    """The least recently used expert leaves (LRU)."""
    made, seen = [], [-1.0] * experts
    for step, used in enumerate(trace):
        for expert in used:
            seen[expert] = float(step)
        made.append(list(seen))
    return made


def recent_uses(trace: Trace, experts: int) -> Scores:
    """LRU with ties broken by earlier uses: a use counts half as much with every step, so it outweighs all earlier uses
    together.

    A slower decay hits less often on traces of real models, which have no lasting favourites.
    """
    made, held = [], [0.0] * experts
    for used in trace:
        held = [score / 2 for score in held]
        for expert in used:
            held[expert] += 1.0
        made.append(held)
    return made


def next_use(trace: Trace, experts: int) -> Scores:
    """The expert that is used again last leaves (Belady): nothing hits more often, but it knows the future."""
    coming, made = [float(len(trace) + 1)] * experts, []
    for step in reversed(range(len(trace))):
        made.append([-use for use in coming])
        for expert in trace[step]:
            coming[expert] = float(step)
    made.reverse()
    return made


def no_change(trace: Trace, experts: int) -> Scores:
    """The experts that were used most in the first half of the trace stay from then on."""
    half = len(trace) // 2
    counts = [0.0] * experts
    made = []
    for step, used in enumerate(trace):
        if step < half:
            counts = list(counts)
            for expert in used:
                counts[expert] += 1.0
        made.append(counts)
    return made


POLICIES: dict[str, Policy] = {"lru": last_use, "recent": recent_uses, "static": no_change, "belady": next_use}
