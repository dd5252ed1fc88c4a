"""Choose where copies of experts go, so that ranks have equal load. Works on plain lists.

Three greedy steps: give each spare slot to the expert with the highest load per copy; put the heaviest copy on the
least loaded rank with a free slot; keep experts that stay on their rank in their slot. With several nodes, groups of
experts that are routed together are first distributed over nodes, and the steps run within each node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from lancebill.errors import ShardError

ExpertsByRank = list[list[int]]  # for each rank, the logical experts in its slots


def rebalance(
    load: Sequence[float], current: Sequence[Sequence[int]], *, nodes: int = 1, groups: int = 1
) -> ExpertsByRank:
    """Experts by rank and slot for a measured `load` of each logical expert.

    Returns `current` if the greedy arrangement is no better, because moving weights costs time.
    """
    ranks, per_rank = len(current), len(current[0])
    if any(len(slots) != per_rank for slots in current):
        raise ShardError("ranks must hold the same number of experts to be balanced", got=[len(s) for s in current])
    if ranks * per_rank < len(load):
        raise ShardError("there are fewer slots than experts", expected=f">= {len(load)}", got=ranks * per_rank)
    arranged = arrange(load, ranks, per_rank, nodes=nodes, groups=groups)
    if busiest(load, arranged) >= busiest(load, current):
        return [list(slots) for slots in current]
    return [keep_slots(mine, before) for mine, before in zip(arranged, current)]


def arrange(load: Sequence[float], ranks: int, per_rank: int, *, nodes: int = 1, groups: int = 1) -> ExpertsByRank:
    """Experts by rank, ignoring the current arrangement. A group stays on one node if nodes divide the groups."""
    if ranks % nodes or len(load) % groups:
        raise ShardError(
            "nodes must divide the ranks, and groups must divide the experts",
            expected=f"nodes that divide {ranks} and groups that divide {len(load)}",
            got=f"{nodes} nodes, {groups} groups",
        )
    if groups % nodes:
        nodes = groups = 1
    size, slots = len(load) // groups, ranks // nodes * per_rank
    weight = [sum(load[g * size : (g + 1) * size]) for g in range(groups)]
    result: ExpertsByRank = []
    for members in pack_bins(weight, nodes, groups // nodes):
        experts = [g * size + i for g in sorted(members) for i in range(size)]
        copies = replicate([load[e] for e in experts], slots)
        counts = Counter(copies)
        shares = [load[experts[c]] / counts[c] for c in copies]
        result += [[experts[copies[i]] for i in mine] for mine in pack_bins(shares, ranks // nodes, per_rank)]
    return result


def replicate(load: Sequence[float], slots: int) -> list[int]:
    """The expert of every slot: each expert once, then repeatedly the one with the highest load per copy."""
    counts = [1] * len(load)
    copies = list(range(len(load)))
    while len(copies) < slots:
        heaviest = max(range(len(load)), key=lambda e: load[e] / counts[e])
        counts[heaviest] += 1
        copies.append(heaviest)
    return copies


def pack_bins(weights: Sequence[float], bins: int, per_bin: int) -> list[list[int]]:
    """Indices of `weights` in each bin: the heaviest item first, into the lightest bin with room."""
    items: list[list[int]] = [[] for _ in range(bins)]
    total = [0.0] * bins
    for item in sorted(range(len(weights)), key=lambda i: -weights[i]):
        lightest = min((b for b in range(bins) if len(items[b]) < per_bin), key=lambda b: total[b])
        items[lightest].append(item)
        total[lightest] += weights[item]
    return items


def keep_slots(experts: Sequence[int], before: Sequence[int]) -> list[int]:
    """`experts` of one rank, ordered so that those that were on it `before` keep their slot."""
    left = Counter(experts)
    result: list[int | None] = []
    for expert in before:
        stays = left[expert] > 0
        left[expert] -= stays
        result.append(expert if stays else None)
    new = iter(sorted(left.elements()))
    return [next(new) if expert is None else expert for expert in result]


def busiest(load: Sequence[float], by_rank: Sequence[Sequence[int]]) -> float:
    """The load of the busiest rank; an expert's load is split evenly among its copies."""
    counts = Counter(expert for slots in by_rank for expert in slots)
    return max(sum(load[expert] / counts[expert] for expert in slots) for slots in by_rank)
