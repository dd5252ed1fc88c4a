"""Which rows go to which local expert.

A backend receives one of three forms. Expert ids are local; slots of other ranks and padding are -1
and are dropped. Grouping rows by expert is a stable sort (`group_slots`), so equal inputs give equal
orders.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lancebill.errors import LaunchError


@dataclass(frozen=True)
class Indexed:
    """For each token and slot an expert id and its routing weight.

    Every backend takes local ids (int32, -1 without an expert) and fp32 weights, both contiguous. A backend that
    `accepts_any_ids` also takes a router's own output: int32 or int64 ids with any values and strides, fp32, bf16 or
    fp16 weights, and a map from global ids to local ones. Ids without a local expert contribute nothing.
    """

    ids: Tensor  # [M, k]
    weights: Tensor  # [M, k]
    expert_map: Tensor | None = None  # [global experts] int32; None: ids are local

    @property
    def tokens(self) -> int:
        return int(self.ids.shape[0])


@dataclass(frozen=True)
class Contiguous:
    """Rows already grouped: rows offsets[e] .. offsets[e + 1] of x belong to expert e."""

    offsets: Tensor  # [E + 1] int64


@dataclass(frozen=True)
class Batched:
    """x is [E, T, H]; only the first counts[e] rows of expert e are valid."""

    counts: Tensor  # [E] int32


Dispatch = Indexed | Contiguous | Batched


def tensors_of(dispatch: Dispatch) -> dict[str, Tensor | None]:
    """By name."""
    if isinstance(dispatch, Indexed):
        return {"ids": dispatch.ids, "weights": dispatch.weights, "expert_map": dispatch.expert_map}
    return {"offsets": dispatch.offsets} if isinstance(dispatch, Contiguous) else {"counts": dispatch.counts}


@dataclass(frozen=True)
class SlotGroups:
    """Slots grouped by expert: sorted row s is slot `slots[s]` = token * k + j of the input."""

    slots: Tensor  # [S] int64
    offsets: Tensor  # [E + 1] int64

    def rows(self, top_k: int) -> Tensor:
        """The token each sorted row comes from."""
        return self.slots // top_k


def localize(ids: Tensor, expert_map: Tensor | None, experts: int) -> Tensor:
    """Global ids to local ids. Ids of other ranks, negative ids and ids past the end become -1."""
    limit = experts if expert_map is None else expert_map.numel()
    legal = (ids >= 0) & (ids < limit)
    if expert_map is None:
        return torch.where(legal, ids, -1).to(torch.int32)
    local = expert_map.to(torch.int32)[torch.where(legal, ids, 0).to(torch.int64)]
    return torch.where(legal, local, -1)


def group_slots(ids: Tensor, experts: int) -> SlotGroups:
    """Group the slots of local ids [M, k] by expert, stably; -1 is dropped."""
    flat = ids.reshape(-1).to(torch.int64)
    counts = torch.bincount(flat + 1, minlength=experts + 1)
    order = torch.argsort(flat, stable=True)
    offsets = torch.zeros(experts + 1, dtype=torch.int64, device=ids.device)
    offsets[1:] = counts[1 : experts + 1].cumsum(0)
    dropped = int(counts[0])
    return SlotGroups(order[dropped : dropped + int(offsets[-1])], offsets)


def to_contiguous(x: Tensor, indexed: Indexed, experts: int) -> tuple[Tensor, Contiguous, SlotGroups]:
    """Gather an indexed batch into contiguous groups. Pass the `SlotGroups` to `combine` to undo it."""
    groups = group_slots(indexed.ids, experts)
    return x[groups.rows(indexed.ids.shape[1])], Contiguous(groups.offsets), groups


def to_batched(x: Tensor, indexed: Indexed, experts: int, capacity: int) -> tuple[Tensor, Batched, SlotGroups]:
    """Copy an indexed batch to [E, capacity, H]; rows past each count are NaN."""
    groups = group_slots(indexed.ids, experts)
    counts = groups.offsets.diff()
    if int(counts.max()) > capacity:
        raise LaunchError(
            "an expert has more tokens than the batched form holds", expected=f"<= {capacity}", got=int(counts.max())
        )
    out = torch.full((experts, capacity, x.shape[1]), float("nan"), dtype=x.dtype, device=x.device)
    expert = torch.repeat_interleave(torch.arange(experts, device=x.device), counts)
    row = torch.arange(groups.slots.numel(), device=x.device) - groups.offsets[expert]
    out[expert, row] = x[groups.rows(indexed.ids.shape[1])]
    return out, Batched(counts.to(torch.int32)), groups


def combine(rows: Tensor, groups: SlotGroups, indexed: Indexed, out: Tensor) -> Tensor:
    """Weight sorted result rows and sum them per token in slot order, in fp32, then round once."""
    tokens, top_k = indexed.ids.shape
    spread = torch.zeros(tokens * top_k, rows.shape[1], dtype=torch.float32, device=rows.device)
    spread[groups.slots] = rows.float()
    weights = torch.where(indexed.ids >= 0, indexed.weights, torch.zeros_like(indexed.weights)).float()
    weighted = spread.view(tokens, top_k, rows.shape[1]) * weights.unsqueeze(-1)
    total = torch.zeros(tokens, rows.shape[1], dtype=torch.float32, device=rows.device)
    for slot in range(top_k):
        total += weighted[:, slot]
    return out.copy_(total)
