"""Tokens travel to the ranks that hold their experts, and results travel home.

Each token goes to a rank once, however many of its experts live there; each slot's result comes
back by itself. The receiving rank sees rows in the order of ranks, tokens and slots, and the sum is
taken at home in slot order: exactly what one rank with all experts and all tokens would compute.
Row counts are exchanged first, so shapes follow the data and a graph cannot hold this form.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lancebill.layer.routed_experts import RoutedExperts
from lancebill.moe.dispatch import Contiguous, Indexed, Sorted, combine, sort
from lancebill.parallel.groups import RankGroup
from lancebill.parallel.replicas import Tables


@dataclass(frozen=True)
class Parcels:
    """What a rank sends: rows of x grouped by destination, and for each slot which row, which
    expert there, and its weight."""

    groups: Sorted  # slots by destination
    tokens: Tensor  # [R] the token of each row
    rows: list[int]  # sent to each rank
    slots: list[int]  # sent to each rank
    labels: Tensor  # [S, 3] int32: row within the parcel, local slot of the expert, weight's bits


def forward(
    layer: RoutedExperts, group: RankGroup, tables: Tables, x: Tensor, indexed: Indexed, out: Tensor, wire: torch.dtype
) -> Tensor:
    """x [M, H] through the physical experts `indexed` names, wherever they are, into `out`.

    Every rank of the group calls this, those without tokens too. Results come home in `wire`.
    """
    parcels, came_rows, came_slots = _pack(tables, group, indexed)
    rows = group.all_to_all(x[parcels.tokens], parcels.rows, came_rows)
    labels = group.all_to_all(parcels.labels, parcels.slots, came_slots)
    starts = torch.tensor([0, *came_rows[:-1]], device=x.device).cumsum(0)
    counts = torch.tensor(came_slots, device=x.device)
    index = labels[:, 0] + torch.repeat_interleave(starts, counts, output_size=sum(came_slots))
    results = _compute(layer, rows, index, labels, wire)
    home = group.all_to_all(results, came_slots, parcels.slots)
    if layer.problem.weight_on_input:
        indexed = Indexed(indexed.ids, torch.ones_like(indexed.weights))
    return combine(home, parcels.groups, indexed, out)


def _pack(tables: Tables, group: RankGroup, indexed: Indexed) -> tuple[Parcels, list[int], list[int]]:
    """This rank's parcels, and the numbers of rows and of slots that come from each rank."""
    ids, top_k = indexed.ids.long(), indexed.ids.shape[1]
    known = ids.clamp(min=0)
    groups = sort(torch.where(ids >= 0, tables.rank[known], -1), group.size)
    slots = groups.offsets.diff()
    target = torch.repeat_interleave(torch.arange(group.size, device=ids.device), slots)
    tokens = max(1, ids.shape[0])
    rows, row = torch.unique_consecutive(target * tokens + groups.rows(top_k), return_inverse=True)
    sent = torch.stack([torch.bincount(rows // tokens, minlength=group.size), slots], dim=1)
    each = [1] * group.size
    (sent_rows, sent_slots), (came_rows, came_slots) = (
        counts.t().tolist() for counts in (sent, group.all_to_all(sent, each, each))
    )
    first = sent[:, 0].cumsum(0) - sent[:, 0]
    labels = torch.stack(
        [
            (row - first[target]).to(torch.int32),
            tables.slot[known.reshape(-1)[groups.slots]].to(torch.int32),
            indexed.weights.float().reshape(-1)[groups.slots].view(torch.int32),
        ],
        dim=1,
    )
    return Parcels(groups, rows % tokens, sent_rows, sent_slots, labels), came_rows, came_slots


def _compute(layer: RoutedExperts, rows: Tensor, index: Tensor, labels: Tensor, wire: torch.dtype) -> Tensor:
    """The result of every label that came, in the order they came."""
    local = labels[:, 1:2].contiguous()
    results = rows.new_empty(local.shape[0], rows.shape[1], dtype=wire)
    if local.shape[0] == 0:
        return results
    if layer.problem.weight_on_input:
        # The weight belongs before the input's quantisation, so the backend applies it. Such layers are top-1.
        weights = labels[:, 2:3].contiguous().view(torch.float32)
        return layer.run_local(rows[index], Indexed(local, weights), results)
    groups = sort(local, layer.problem.experts)
    sorted_results = layer.run_local(rows[index[groups.slots]], Contiguous(groups.offsets), torch.empty_like(results))
    results[groups.slots] = sorted_results
    return results
