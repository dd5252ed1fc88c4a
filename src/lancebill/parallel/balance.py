"""Where to put copies of experts so that ranks have equal work: plain lists in, plain lists out.

Three greedy steps: give the next spare place to the expert whose copies carry most; put the heaviest
copy on the least loaded rank that has room; let what stays on a rank stay in its slot. With several
nodes, groups of experts that are chosen together are first dealt to nodes, and the steps run inside
each node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from lancebill.errors import ShardError

Held = list[list[int]]  # by rank: the experts in its slots


def rebalance(load: Sequence[float], current: Sequence[Sequence[int]], *, nodes: int = 1, groups: int = 1) -> Held:
    """Experts by rank and slot for a measured `load` of each logical expert.

    The result is `current` itself where the greedy arrangement is no better: moving weights costs.
    """
    ranks, per_rank = len(current), len(current[0])
    if any(len(slots) != per_rank for slots in current):
        raise ShardError("only ranks with equally many experts can be balanced", got=[len(s) for s in current])
    if ranks * per_rank < len(load):
        raise ShardError("fewer places than experts", expected=f">= {len(load)}", got=ranks * per_rank)
    wanted = arrange(load, ranks, per_rank, nodes=nodes, groups=groups)
    if busiest(load, wanted) >= busiest(load, current):
        return [list(slots) for slots in current]
    return [keep_slots(mine, before) for mine, before in zip(wanted, current)]


def arrange(load: Sequence[float], ranks: int, per_rank: int, *, nodes: int = 1, groups: int = 1) -> Held:
    """Experts by rank, from nothing. Groups stay on one node where nodes divide them."""
    if ranks % nodes or len(load) % groups:
        raise ShardError(
            "ranks are spread over nodes and experts over groups evenly",
            expected=f"nodes that divide {ranks} and groups that divide {len(load)}",
            got=f"{nodes} nodes, {groups} groups",
        )
    if groups % nodes:
        nodes = groups = 1
    size, places = len(load) // groups, ranks // nodes * per_rank
    weight = [sum(load[g * size : (g + 1) * size]) for g in range(groups)]
    result: Held = []
    for members in pack(weight, nodes, groups // nodes):
        experts = [g * size + i for g in sorted(members) for i in range(size)]
        copies = replicate([load[e] for e in experts], places)
        counts = Counter(copies)
        shares = [load[experts[c]] / counts[c] for c in copies]
        result += [[experts[copies[i]] for i in mine] for mine in pack(shares, ranks // nodes, per_rank)]
    return result


def replicate(load: Sequence[float], places: int) -> list[int]:
    """The expert of every place: each once, then always the one whose copies carry most."""
    counts = [1] * len(load)
    copies = list(range(len(load)))
    while len(copies) < places:
        heaviest = max(range(len(load)), key=lambda e: load[e] / counts[e])
        counts[heaviest] += 1
        copies.append(heaviest)
    return copies


def pack(weights: Sequence[float], bins: int, per_bin: int) -> list[list[int]]:
    """Indices of `weights` in each bin: heaviest first, to the lightest bin with room."""
    held: list[list[int]] = [[] for _ in range(bins)]
    total = [0.0] * bins
    for item in sorted(range(len(weights)), key=lambda i: -weights[i]):
        lightest = min((b for b in range(bins) if len(held[b]) < per_bin), key=lambda b: total[b])
        held[lightest].append(item)
        total[lightest] += weights[item]
    return held


def keep_slots(wanted: Sequence[int], before: Sequence[int]) -> list[int]:
    """`wanted` in an order that leaves experts that were on this rank where they were."""
    left = Counter(wanted)
    result: list[int | None] = []
    for expert in before:
        stays = left[expert] > 0
        left[expert] -= stays
        result.append(expert if stays else None)
    new = iter(sorted(left.elements()))
    return [next(new) if expert is None else expert for expert in result]


def busiest(load: Sequence[float], held: Sequence[Sequence[int]]) -> float:
    """The largest load of a rank, an expert's load split evenly among its copies."""
    counts = Counter(expert for slots in held for expert in slots)
    return max(sum(load[expert] / counts[expert] for expert in slots) for slots in held)
