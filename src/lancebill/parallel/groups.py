"""Groups of ranks: a thin layer over torch.distributed.

Nothing here depends on experts. Without `init_process_group` a group has one rank and its collectives do nothing, so
that the same code runs with one process and with many.
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

try:  # torch >= 2.13; older versions have other names
    from torch.distributed import all_gather_single as _all_gather
    from torch.distributed import reduce_scatter_single as _reduce_scatter
except ImportError:
    from torch.distributed import all_gather_into_tensor as _all_gather
    from torch.distributed import reduce_scatter_tensor as _reduce_scatter

OUTSIDE = -1


@dataclass(frozen=True)
class RankGroup:
    """A group of `size` ranks; this process is number `rank` (OUTSIDE: not a member).

    Every method is a collective: all members call it, with equal shapes unless stated otherwise.
    """

    rank: int = 0
    size: int = 1
    ranks: tuple[int, ...] = (0,)  # global ranks of the members
    handle: dist.ProcessGroup | None = None

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send the first sent[0] rows to rank 0, the next sent[1] to rank 1, ...; returns received rows by rank."""
        if self._alone():
            return rows
        out = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), list(received), list(sent), group=self.handle)
        return out

    def all_gather(self, rows: Tensor) -> Tensor:
        """The rows of all ranks, concatenated in rank order."""
        if self._alone():
            return rows
        out = rows.new_empty(self.size * rows.shape[0], *rows.shape[1:])
        _all_gather(out, rows.contiguous(), group=self.handle)
        return out

    def reduce_scatter(self, rows: Tensor) -> Tensor:
        """Sum over ranks; each rank keeps its own part of the rows.

        gloo reduces everything on every rank and then slices, so it saves no traffic there.
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
        """The texts of all ranks, in rank order. Sent as byte tensors, so that nothing is unpickled."""
        data = torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)
        lengths = self.all_gather(torch.tensor([data.numel()], dtype=torch.int64, device=device)).tolist()
        padded = torch.nn.functional.pad(data, (0, max(lengths) - data.numel()))
        rows = self.all_gather(padded).view(len(lengths), -1).cpu()
        return [bytes(row[:length].tolist()).decode() for row, length in zip(rows, lengths)]

    def require_agreement(self, facts: Mapping[str, object], device: torch.device, what: str) -> None:
        """Raise on every rank if some ranks differ from the majority; the error names them and the difference."""
        texts = self.gather_text("\n".join(f"{name}: {value}" for name, value in facts.items()), device)
        usual = Counter(texts).most_common(1)[0][0].split("\n")
        odd = [rank for rank, text in enumerate(texts) if text.split("\n") != usual]
        if odd:
            differing = texts[odd[0]].split("\n")
            raise RanksDisagree(
                what,
                where=f"rank {', '.join(str(self.ranks[rank]) for rank in odd)}",
                expected="; ".join(line for line in usual if line not in differing),
                got="; ".join(line for line in differing if line not in usual),
            )

    def _alone(self) -> bool:
        if self.rank == OUTSIDE:
            raise LaunchError("this process is outside the group", hint="only members may call its collectives")
        return self.handle is None


@dataclass(frozen=True)
class Mesh:
    """Tensor parallelism inside expert parallelism: rank = ep_rank * tp_size + tp_rank.

    Ranks of a `tp` group hold slices of the same experts and get the same tokens; ranks of an `ep` group hold different
    experts and may get different tokens.
    """

    tp: RankGroup = RankGroup()
    ep: RankGroup = RankGroup()
    everyone: RankGroup = RankGroup()

    @classmethod
    def make(cls, tp: int = 1, ep: int = 1, ranks: Sequence[int] | None = None) -> Mesh:
        """A mesh over these global ranks (all of them by default).

        Every process calls this, those outside `ranks` too: torch creates groups collectively.
        """
        if not dist.is_initialized():
            if tp * ep != 1:
                raise ShardError(
                    f"tp {tp} and ep {ep} need more than one process",
                    hint="call torch.distributed.init_process_group first",
                )
            return cls()
        members = tuple(range(dist.get_world_size())) if ranks is None else tuple(ranks)
        if len(members) != tp * ep:
            raise ShardError(f"tp {tp} times ep {ep} is not the number of ranks", expected=tp * ep, got=len(members))
        return cls(
            tp=_join([members[e * tp : (e + 1) * tp] for e in range(ep)]),
            ep=_join([members[t::tp] for t in range(tp)]),
            everyone=_join([members]),
        )

    @property
    def outside(self) -> bool:
        """Whether this process is not in the mesh."""
        return self.everyone.rank == OUTSIDE

    def placement(self, *, strategy: str = LINEAR, redundant: int = 0, pad_to: int = 1) -> Placement:
        """This rank's placement, for `from_checkpoint`."""
        return Placement(self.tp.rank, self.tp.size, self.ep.rank, self.ep.size, strategy, redundant, pad_to)


def _join(all_ranks: list[tuple[int, ...]]) -> RankGroup:
    """Create all groups, as every process must, and return the one that this process is in."""
    me = dist.get_rank()
    mine = RankGroup(OUTSIDE, len(all_ranks[0]), ())
    for ranks in all_ranks:
        handle = dist.new_group(list(ranks))
        if me in ranks:
            mine = RankGroup(ranks.index(me), len(ranks), ranks, handle)
    return mine
