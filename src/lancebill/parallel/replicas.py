"""Which physical expert serves which logical one.

A router names logical experts. With redundant experts one of them has several physical copies on
different ranks; a physical id is a place (a rank and a slot there), and load balancing changes only
which logical expert lives in it.
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

_MIX, _WORD = 2654435769, 0xFFFFFFFF  # 2^32 over the golden ratio: neighbouring tokens land far apart


@dataclass(frozen=True)
class Assignment:
    """Where every copy of every expert lives; plain integers, the same on all ranks."""

    experts: int  # logical ones
    slots: tuple[tuple[int, ...], ...]  # by rank: its physical ids in slot order
    logical: tuple[int, ...]  # by physical id

    def __post_init__(self) -> None:
        missing = set(range(self.experts)) - set(self.logical)
        if missing or not all(0 <= e < self.experts for e in self.logical):
            raise ShardError(
                "every expert needs a place and every place an expert",
                expected=f"experts 0 to {self.experts - 1}",
                got=list(self.logical),
            )

    @classmethod
    def of(cls, placement: Placement, experts: int) -> Assignment:
        """What loading under `placement` gives on all of its ranks."""
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
        """By physical id: (rank, slot)."""
        place = {p: (rank, slot) for rank, ids in enumerate(self.slots) for slot, p in enumerate(ids)}
        return tuple(place[p] for p in range(self.physical))

    @cached_property
    def replicas(self) -> tuple[tuple[int, ...], ...]:
        """By logical expert: the physical ids that hold it."""
        held: list[list[int]] = [[] for _ in range(self.experts)]
        for physical, expert in enumerate(self.logical):
            held[expert].append(physical)
        return tuple(map(tuple, held))

    @property
    def held(self) -> tuple[tuple[int, ...], ...]:
        """By rank: the logical experts in its slots."""
        return tuple(tuple(self.logical[p] for p in ids) for ids in self.slots)

    def expert_map(self, rank: int) -> tuple[int, ...]:
        """For every physical id the slot on `rank`, or -1."""
        return tuple(slot if home == rank else -1 for home, slot in self.homes)

    def arranged(self, held: Sequence[Sequence[int]]) -> Assignment:
        """The same places with other experts in them."""
        logical = [0] * self.physical
        for ids, experts in zip(self.slots, held, strict=True):
            for physical, expert in zip(ids, experts, strict=True):
                logical[physical] = expert
        return replace(self, logical=tuple(logical))


class Tables(nn.Module):
    """An assignment as tensors that follow their module between devices: what a forward looks up."""

    replicas: Tensor  # [L, most replicas] physical ids, -1 past the last
    counts: Tensor  # [L] replicas of each logical expert
    rank: Tensor  # [P] where each physical expert lives
    slot: Tensor  # [P] and which slot it has there

    def __init__(self, assignment: Assignment, device: torch.device) -> None:
        super().__init__()
        width = max(len(ids) for ids in assignment.replicas)
        padded = [(*ids, *[-1] * (width - len(ids))) for ids in assignment.replicas]
        ranks, slots = zip(*assignment.homes)
        counts = [len(ids) for ids in assignment.replicas]
        for name, values in {"replicas": padded, "counts": counts, "rank": ranks, "slot": slots}.items():
            self.register_buffer(name, torch.tensor(values, device=device), persistent=False)

    def choose(self, ids: Tensor) -> Tensor:
        """Logical ids [M, k] to physical ones, int32. A token's index picks among replicas, so that
        no communication is needed; ids that name no expert become -1."""
        logical = localize(ids, None, self.counts.numel()).to(torch.int64)
        known = logical.clamp(min=0)
        token = torch.arange(ids.shape[0], device=ids.device).unsqueeze(-1)
        replica = ((token * _MIX) & _WORD) % self.counts[known]
        return torch.where(logical >= 0, self.replicas[known, replica], -1).to(torch.int32)


def count_load(load: Tensor, physical: Tensor) -> None:
    """Add one for every slot routed to a physical expert; the last entry of `load` takes the rest.

    Shapes do not depend on the data and integers add up exactly, so that this runs in a graph.
    """
    flat = physical.reshape(-1).to(torch.int64)
    load.scatter_add_(0, torch.where(flat >= 0, flat, load.numel() - 1), torch.ones_like(flat))
