"""The all-to-all form: send tokens to the ranks that hold their experts, and results back.

A token is sent to a rank once, even if several of its experts are there; the result of each slot comes back separately.
The receiving rank gets rows ordered by rank, token and slot, and the token's own rank sums its results in slot order.
So the result is exactly that of one rank with all experts and all tokens. Row counts are exchanged first: shapes
depend on the data, so this form cannot be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lancebill.layer.routed_experts import RoutedExperts
from lancebill.moe.dispatch import Contiguous, Indexed, SlotGroups, combine, group_slots
from lancebill.parallel.groups import RankGroup
from lancebill.parallel.replicas import ReplicaTables


@dataclass(frozen=True)
class SendPlan:
    """What this rank sends: rows of x grouped by destination, and per slot its row, expert and weight."""

    groups: SlotGroups  # slots by destination
    tokens: Tensor  # [R] token of each row sent
    rows: list[int]  # number sent to each rank
    slots: list[int]  # number sent to each rank
    labels: Tensor  # [S, 3] int32: row among those for the same rank, local expert, bits of the fp32 weight


def forward(
    layer: RoutedExperts,
    group: RankGroup,
    tables: ReplicaTables,
    x: Tensor,
    indexed: Indexed,
    out: Tensor,
    wire: torch.dtype,
) -> Tensor:
    """Run x [M, H] through the physical experts in `indexed`, on whichever rank they are, and write to `out`.

    A collective: ranks without tokens call it too. Results are sent back in the dtype `wire`.
    """
    send, received_rows, received_slots = _plan_exchange(tables, group, indexed)
    rows = group.all_to_all(x[send.tokens], send.rows, received_rows)
    labels = group.all_to_all(send.labels, send.slots, received_slots)
    starts = torch.tensor([0, *received_rows[:-1]], dtype=torch.int64, device=x.device).cumsum(0)
    counts = torch.tensor(received_slots, dtype=torch.int64, device=x.device)
    index = labels[:, 0] + torch.repeat_interleave(starts, counts, output_size=sum(received_slots))
    results = _compute(layer, rows, index, labels, wire)
    returned = group.all_to_all(results, received_slots, send.slots)
    if layer.problem.weight_on_input:
        indexed = Indexed(indexed.ids, torch.ones_like(indexed.weights))
    return combine(returned, send.groups, indexed, out)


def _plan_exchange(tables: ReplicaTables, group: RankGroup, indexed: Indexed) -> tuple[SendPlan, list[int], list[int]]:
    """What this rank sends, and how many rows and slots it receives from each rank."""
    ids, top_k = indexed.ids.long(), indexed.ids.shape[1]
    valid = ids.clamp(min=0)
    groups = group_slots(torch.where(ids >= 0, tables.rank[valid], -1), group.size)
    slots = groups.offsets.diff()
    target = torch.repeat_interleave(torch.arange(group.size, device=ids.device), slots)
    tokens = max(1, ids.shape[0])
    rows, row = torch.unique_consecutive(target * tokens + groups.rows(top_k), return_inverse=True)
    sent = torch.stack([torch.bincount(rows // tokens, minlength=group.size), slots], dim=1)
    each = [1] * group.size
    (sent_rows, sent_slots), (received_rows, received_slots) = (
        counts.t().tolist() for counts in (sent, group.all_to_all(sent, each, each))
    )
    first = sent[:, 0].cumsum(0) - sent[:, 0]
    labels = torch.stack(
        [
            (row - first[target]).to(torch.int32),
            tables.slot[valid.reshape(-1)[groups.slots]].to(torch.int32),
            indexed.weights.float().reshape(-1)[groups.slots].view(torch.int32),
        ],
        dim=1,
    )
    return SendPlan(groups, rows % tokens, sent_rows, sent_slots, labels), received_rows, received_slots


def _compute(layer: RoutedExperts, rows: Tensor, index: Tensor, labels: Tensor, wire: torch.dtype) -> Tensor:
    """The result of every received slot, in the order received."""
    local = labels[:, 1:2].contiguous()
    results = rows.new_empty(local.shape[0], rows.shape[1], dtype=wire)
    if local.shape[0] == 0:
        return results
    if layer.problem.weight_on_input:
        # The weight scales the input before it is quantised, so the backend applies it. Such layers are top-1.
        weights = labels[:, 2:3].contiguous().view(torch.float32)
        return layer.run_local(rows[index], Indexed(local, weights), results)
    groups = group_slots(local, layer.problem.experts)
    sorted_results = layer.run_local(rows[index[groups.slots]], Contiguous(groups.offsets), torch.empty_like(results))
    results[groups.slots] = sorted_results
    return results
