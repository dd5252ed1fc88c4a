"""Move experts between ranks: rows of the layer's tensors, sent point to point."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lancebill.parallel.groups import RankGroup


@dataclass(frozen=True)
class Move:
    """Copy one expert's rows from (rank, slot) to (rank, slot)."""

    source: int
    source_slot: int
    target: int
    target_slot: int

    @property
    def stays(self) -> bool:
        return (self.source, self.source_slot) == (self.target, self.target_slot)


def plan_moves(before: Sequence[Sequence[int]], after: Sequence[Sequence[int]]) -> list[Move]:
    """The moves from arrangement `before` to arrangement `after`; the same list on all ranks.

    A rank copies from itself if it can; otherwise the ranks that hold an expert take turns in sending it. The two
    arrangements may have different numbers of ranks and slots.
    """
    holders: dict[int, list[tuple[int, int]]] = {}
    for rank, slots in enumerate(before):
        for slot, expert in enumerate(slots):
            holders.setdefault(expert, []).append((rank, slot))
    moves, turn = [], dict.fromkeys(holders, 0)
    for rank, slots in enumerate(after):
        old = before[rank] if rank < len(before) else ()
        for slot, expert in enumerate(slots):
            if slot < len(old) and old[slot] == expert:
                moves.append(Move(rank, slot, rank, slot))
            elif expert in old:
                moves.append(Move(rank, list(old).index(expert), rank, slot))
            else:
                source = holders[expert][turn[expert] % len(holders[expert])]
                turn[expert] += 1
                moves.append(Move(*source, rank, slot))
    return moves


def run_moves(moves: Sequence[Move], rows: Sequence[Tensor], out: Sequence[Tensor], group: RankGroup) -> None:
    """Copy rows [E_before, -1] into `out` [E_after, -1], between ranks where needed.

    If `out` is `rows`, moves are in place: received rows stay in temporary tensors until all sends are done. A
    collective: ranks without a move call it too.
    """
    me, in_place = group.rank, rows is out
    sends = [m for m in moves if m.source == me and m.target != me]
    receives = [m for m in moves if m.target == me and not (in_place and m.stays)]
    landings = [[torch.empty_like(t[m.target_slot]) if in_place else t[m.target_slot] for m in receives] for t in out]
    operations = []
    for source, waiting in zip(rows, landings):
        for m in sends:
            operations.append(_operation(dist.isend, source[m.source_slot], m.target, group))
        for m, landing in zip(receives, waiting):
            if m.source == me:
                landing.copy_(source[m.source_slot])
            else:
                operations.append(_operation(dist.irecv, landing, m.source, group))
    for request in dist.batch_isend_irecv(operations) if operations else []:
        request.wait()
    if in_place:
        for target, waiting in zip(out, landings):
            for m, landing in zip(receives, waiting):
                target[m.target_slot].copy_(landing)


def _operation(send_or_receive: Callable[..., Any], row: Tensor, peer: int, group: RankGroup) -> dist.P2POp:
    """Send a row to a peer or receive one, as bytes: backends do not support all integer dtypes."""
    return dist.P2POp(send_or_receive, row.view(torch.uint8), group.ranks[peer], group.handle)
