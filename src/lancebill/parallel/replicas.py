"""Logical experts and their physical copies.

Routers use logical ids. With redundant experts a logical expert has several physical copies on different ranks. A
physical id names a slot on a rank; load balancing changes only which logical expert is in that slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from lancebill.errors import ShardError
from lancebill.moe.dispatch import localize
from lancebill.moe.placement import Placement

_MIX, _WORD = 2654435769, 0xFFFFFFFF  # 2^32 / golden ratio: multiplicative hashing of token indices


@dataclass(frozen=True)
class Assignment:
    """Rank and slot of every copy of every expert; the same on all ranks."""

    experts: int  # number of logical experts
    slots: tuple[tuple[int, ...], ...]  # for each rank, its physical ids in slot order
    logical: tuple[int, ...]  # logical expert of each physical id

    def __post_init__(self) -> None:
        missing = set(range(self.experts)) - set(self.logical)
        if missing or not all(0 <= e < self.experts for e in self.logical):
            raise ShardError(
                "every expert needs a slot, and every slot an expert",
                expected=f"experts 0 to {self.experts - 1}",
                got=list(self.logical),
            )

    @classmethod
    def of(cls, placement: Placement, experts: int) -> Assignment:
        """The assignment after loading with `placement`."""
        ranks = [replace(placement, ep_rank=rank) for rank in range(placement.ep_size)]
        return cls(experts, tuple(rank.slots(experts) for rank in ranks), placement.physical(experts))

    @property
    def physical(self) -> int:
        return len(self.logical)

    @property
    def redundant(self) -> int:
        return self.physical - self.experts

    @cached_property
    def homes(self) -> tuple[tuple[int, int], ...]:
        """(rank, slot) of each physical id."""
        position = {p: (rank, slot) for rank, ids in enumerate(self.slots) for slot, p in enumerate(ids)}
        return tuple(position[p] for p in range(self.physical))

    @cached_property
    def replicas(self) -> tuple[tuple[int, ...], ...]:
        """For each logical expert, the physical ids of its copies."""
        copies: list[list[int]] = [[] for _ in range(self.experts)]
        for physical, expert in enumerate(self.logical):
            copies[expert].append(physical)
        return tuple(map(tuple, copies))

    @property
    def experts_by_rank(self) -> tuple[tuple[int, ...], ...]:
        """For each rank, the logical experts in its slots."""
        return tuple(tuple(self.logical[p] for p in ids) for ids in self.slots)

    def expert_map(self, rank: int) -> tuple[int, ...]:
        """The slot of each physical id on `rank`, or -1 if it is on another rank."""
        return tuple(slot if home == rank else -1 for home, slot in self.homes)

    def arranged(self, experts_by_rank: Sequence[Sequence[int]]) -> Assignment:
        """The same slots with these logical experts in them."""
        logical = [0] * self.physical
        for ids, experts in zip(self.slots, experts_by_rank, strict=True):
            for physical, expert in zip(ids, experts, strict=True):
                logical[physical] = expert
        return replace(self, logical=tuple(logical))


class ReplicaTables(nn.Module):
    """An assignment as lookup tensors, which move between devices with their module."""

    replicas: Tensor  # [L, most replicas] physical ids, -1 past the last
    counts: Tensor  # [L] replicas of each logical expert
    rank: Tensor  # [P] rank of each physical expert
    slot: Tensor  # [P] slot of each physical expert on its rank

    def __init__(self, assignment: Assignment, device: torch.device) -> None:
        super().__init__()
        width = max(len(ids) for ids in assignment.replicas)
        padded = [(*ids, *[-1] * (width - len(ids))) for ids in assignment.replicas]
        ranks, slots = zip(*assignment.homes)
        counts = [len(ids) for ids in assignment.replicas]
        for name, values in {"replicas": padded, "counts": counts, "rank": ranks, "slot": slots}.items():
            self.register_buffer(name, torch.tensor(values, dtype=torch.int64, device=device), persistent=False)

    def choose(self, ids: Tensor) -> Tensor:
        """Physical ids (int32) for logical ids [M, k]; invalid ids become -1.

        A hash of the token's index picks the replica, so no communication is needed.
        """
        logical = localize(ids, None, self.counts.numel()).to(torch.int64)
        valid = logical.clamp(min=0)
        token = torch.arange(ids.shape[0], device=ids.device).unsqueeze(-1)
        replica = ((token * _MIX) & _WORD) % self.counts[valid]
        return torch.where(logical >= 0, self.replicas[valid, replica], -1).to(torch.int32)


def count_load(load: Tensor, physical: Tensor) -> None:
    """Count the slots routed to each physical expert; the last entry of `load` counts invalid ids.

    Shapes do not depend on the data, so this can run in a CUDA graph. Integer sums are exact in any order.
    """
    flat = physical.reshape(-1).to(torch.int64)
    load.scatter_add_(0, torch.where(flat >= 0, flat, load.numel() - 1), torch.ones_like(flat))
