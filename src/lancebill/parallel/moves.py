"""Moving experts between ranks: rows of live tensors, sent point to point."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lancebill.parallel.groups import RankGroup

Held = Sequence[Sequence[int]]  # by rank: the experts in its slots


@dataclass(frozen=True)
class Move:
    """One expert's rows from a slot to a slot."""

    source: int
    source_slot: int
    target: int
    target_slot: int

    @property
    def stays(self) -> bool:
        return (self.source, self.source_slot) == (self.target, self.target_slot)


def plan_moves(before: Held, after: Held) -> list[Move]:
    """What must be copied so that ranks that hold `before` hold `after`; the same list on all ranks.

    A rank copies from itself where it can; else the copies of an expert take turns in sending it.
    The two may have different numbers of ranks and of slots.
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


def carry_out(moves: Sequence[Move], rows: Sequence[Tensor], out: Sequence[Tensor], group: RankGroup) -> None:
    """Copy rows [E_before, -1] into `out` [E_after, -1], across ranks where moves say so.

    With `out` the same list as `rows` it is done in place: arrivals wait aside until everything that
    leaves has left. All members of `group` call this, those without a move too.
    """
    me, aside = group.rank, rows is out
    going = [m for m in moves if m.source == me and m.target != me]
    coming = [m for m in moves if m.target == me and not (aside and m.stays)]
    landings = [[torch.empty_like(t[m.target_slot]) if aside else t[m.target_slot] for m in coming] for t in out]
    operations = []
    for source, waiting in zip(rows, landings):
        for m in going:
            operations.append(_operation(dist.isend, source[m.source_slot], m.target, group))
        for m, landing in zip(coming, waiting):
            if m.source == me:
                landing.copy_(source[m.source_slot])
            else:
                operations.append(_operation(dist.irecv, landing, m.source, group))
    for request in dist.batch_isend_irecv(operations) if operations else []:
        request.wait()
    if aside:
        for target, waiting in zip(out, landings):
            for m, landing in zip(coming, waiting):
                target[m.target_slot].copy_(landing)


def _operation(way: Callable[..., Any], row: Tensor, peer: int, group: RankGroup) -> dist.P2POp:
    """One row to or from a peer, as bytes: transports do not know all integer dtypes."""
    return dist.P2POp(way, row.view(torch.uint8), group.ranks[peer], group.handle)
