"""Ranks that talk to each other: thin names over torch.distributed, and one rank alone.

Nothing here knows of experts. A program that never called `init_process_group` gets groups of one
rank whose collectives are the identity, so that the same code runs on one process and on many.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lancebill.errors import LaunchError, RanksDisagree, ShardError
from lancebill.moe.placement import LINEAR, Placement

try:  # the names of torch 2.13; before, the same two under longer ones
    from torch.distributed import all_gather_single as _all_gather
    from torch.distributed import reduce_scatter_single as _reduce_scatter
except ImportError:
    from torch.distributed import all_gather_into_tensor as _all_gather
    from torch.distributed import reduce_scatter_tensor as _reduce_scatter

OUTSIDE = -1


@dataclass(frozen=True)
class RankGroup:
    """`size` ranks, of which this process is number `rank` (OUTSIDE: it is none of them).

    Every method is a collective: all members call it, with equal shapes unless it says otherwise.
    """

    rank: int = 0
    size: int = 1
    ranks: tuple[int, ...] = (0,)  # the members' numbers in the whole world
    handle: dist.ProcessGroup | None = None

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Deal rows out, sent[r] of them to rank r in order; what comes back is in rank order too."""
        if self._alone():
            return rows
        out = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), list(received), list(sent), group=self.handle)
        return out

    def all_gather(self, rows: Tensor) -> Tensor:
        """Everyone's rows, one after the other in rank order."""
        if self._alone():
            return rows
        out = rows.new_empty(self.size * rows.shape[0], *rows.shape[1:])
        _all_gather(out, rows.contiguous(), group=self.handle)
        return out

    def reduce_scatter(self, rows: Tensor) -> Tensor:
        """Sum over ranks; each keeps its own part of the rows.

        gloo takes every dtype we send; inside it reduces everything and cuts, so it saves no traffic.
        """
        if self._alone():
            return rows
        out = rows.new_empty(rows.shape[0] // self.size, *rows.shape[1:])
        _reduce_scatter(out, rows.contiguous(), group=self.handle)
        return out

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, in place."""
        if not self._alone():
            dist.all_reduce(tensor, group=self.handle)
        return tensor

    def gather_text(self, text: str, device: torch.device) -> list[str]:
        """Everyone's text in rank order: bytes in tensors, nothing is unpickled."""
        data = torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)
        lengths = self.all_gather(torch.tensor([data.numel()], device=device)).tolist()
        padded = torch.nn.functional.pad(data, (0, max(lengths) - data.numel()))
        rows = self.all_gather(padded).view(len(lengths), -1).cpu()
        return [bytes(row[:length].tolist()).decode() for row, length in zip(rows, lengths)]

    def agree(self, facts: Mapping[str, object], device: torch.device, what: str) -> None:
        """Raise, on every rank alike, where some say something else than most; names them and it."""
        texts = self.gather_text("\n".join(f"{name}: {value}" for name, value in facts.items()), device)
        usual = Counter(texts).most_common(1)[0][0].split("\n")
        odd = [rank for rank, text in enumerate(texts) if text.split("\n") != usual]
        if odd:
            said = texts[odd[0]].split("\n")
            raise RanksDisagree(
                what,
                where=f"rank {', '.join(str(self.ranks[rank]) for rank in odd)}",
                expected="; ".join(line for line in usual if line not in said),
                got="; ".join(line for line in said if line not in usual),
            )

    def _alone(self) -> bool:
        if self.rank == OUTSIDE:
            raise LaunchError("this process is outside the group", hint="only its members take part in its collectives")
        return self.handle is None


@dataclass(frozen=True)
class Mesh:
    """Tensor parallelism inside expert parallelism: rank = ep_rank * tp_size + tp_rank.

    Ranks of one `tp` group hold slices of the same experts and are given the same tokens; ranks of
    one `ep` group hold different experts and may be given different tokens.
    """

    tp: RankGroup = RankGroup()
    ep: RankGroup = RankGroup()
    everyone: RankGroup = RankGroup()

    @classmethod
    def make(cls, tp: int = 1, ep: int = 1, ranks: Sequence[int] | None = None) -> Mesh:
        """Groups over `ranks` of the world (all of them by default).

        Every process of the world calls this, those outside `ranks` too: groups are made together.
        """
        if not dist.is_initialized():
            if tp * ep != 1:
                raise ShardError(
                    f"tp {tp} and ep {ep} need other processes", hint="call torch.distributed.init_process_group first"
                )
            return cls()
        members = tuple(range(dist.get_world_size())) if ranks is None else tuple(ranks)
        if len(members) != tp * ep:
            raise ShardError(f"tp {tp} and ep {ep} do not fill the ranks", expected=tp * ep, got=len(members))
        return cls(
            tp=_join([members[e * tp : (e + 1) * tp] for e in range(ep)]),
            ep=_join([members[t::tp] for t in range(tp)]),
            everyone=_join([members]),
        )

    @property
    def outside(self) -> bool:
        """Whether this process takes no part."""
        return self.everyone.rank == OUTSIDE

    def placement(self, *, strategy: str = LINEAR, redundant: int = 0, pad_to: int = 1) -> Placement:
        """What this rank holds, for `from_checkpoint`."""
        return Placement(self.tp.rank, self.tp.size, self.ep.rank, self.ep.size, strategy, redundant, pad_to)


def _join(all_ranks: list[tuple[int, ...]]) -> RankGroup:
    """Make all groups, as every process must, and give the one this process is in."""
    me = dist.get_rank()
    mine = RankGroup(OUTSIDE, len(all_ranks[0]), ())
    for ranks in all_ranks:
        handle = dist.new_group(list(ranks))
        if me in ranks:
            mine = RankGroup(ranks.index(me), len(ranks), ranks, handle)
    return mine
