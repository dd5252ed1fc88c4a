"""Which slice of which logical expert lives in which local slot.

Tensor parallelism cuts the intermediate size: rows of gate and up, columns of down. Expert
parallelism deals whole experts out. Everything is arithmetic on plain integers; formats, files and
kernels are not known here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lancebill.errors import ShardError

LINEAR, ROUND_ROBIN = "linear", "round_robin"


@dataclass(frozen=True)
class Cut:
    """Elements [start, stop) of the intermediate size, held in a buffer of `size` >= stop - start.

    Every rank's start, and where its padding begins, are multiples of `granule`: blocks cut down to
    gcd(block, granule) are whole on all ranks alike. 0 where nothing is cut.
    """

    start: int
    stop: int
    size: int
    granule: int


@dataclass(frozen=True)
class Placement:
    """One rank's share. Ranks of both kinds are counted from 0; redundant experts repeat the first
    logical ones after the last (physical id p >= E holds logical expert (p - E) % E)."""

    tp_rank: int = 0
    tp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1
    strategy: str = LINEAR
    redundant: int = 0
    pad_to: int = 1  # local intermediate size is rounded up to a multiple of this

    def __post_init__(self) -> None:
        if self.strategy not in (LINEAR, ROUND_ROBIN):
            raise ShardError("unknown placement", expected=f"{LINEAR} or {ROUND_ROBIN}", got=self.strategy)
        for kind, rank, size in (("tp", self.tp_rank, self.tp_size), ("ep", self.ep_rank, self.ep_size)):
            if size < 1 or not 0 <= rank < size:
                raise ShardError(f"{kind} rank outside its world", expected=f"0 to {size - 1}", got=f"{rank} of {size}")
        if self.redundant < 0 or self.pad_to < 1:
            raise ShardError(
                "no such padding or number of redundant experts",
                expected="redundant >= 0, pad_to >= 1",
                got=f"redundant {self.redundant}, pad_to {self.pad_to}",
            )

    def physical(self, experts: int) -> tuple[int, ...]:
        """The logical expert of every physical one."""
        return tuple(range(experts)) + tuple(i % experts for i in range(self.redundant))

    def slots(self, experts: int) -> tuple[int, ...]:
        """Physical ids held by this rank, in slot order."""
        total = experts + self.redundant
        if self.redundant and total % self.ep_size:
            raise ShardError(
                f"{experts} experts and {self.redundant} redundant ones do not divide over {self.ep_size} ranks",
                expected=f"redundant experts such that the sum is a multiple of {self.ep_size}",
            )
        if self.ep_size > total:
            raise ShardError("more ranks than experts", expected=f"ep at most {total}", got=self.ep_size)
        if self.strategy == ROUND_ROBIN:
            return tuple(range(self.ep_rank, total, self.ep_size))
        base, rest = divmod(total, self.ep_size)
        start = self.ep_rank * base + min(self.ep_rank, rest)
        return tuple(range(start, start + base + (self.ep_rank < rest)))

    def experts(self, experts: int) -> tuple[int, ...]:
        """Logical experts held by this rank, in slot order."""
        logical = self.physical(experts)
        return tuple(logical[p] for p in self.slots(experts))

    def expert_map(self, experts: int) -> tuple[int, ...]:
        """For every physical id its local slot, or -1."""
        mine = {p: slot for slot, p in enumerate(self.slots(experts))}
        return tuple(mine.get(p, -1) for p in range(experts + self.redundant))

    def cut(self, intermediate: int, *, block: int = 1, uneven: bool = False) -> Cut:
        """This rank's part of the intermediate size.

        Even cuts may fall inside a block (the caller re-blocks to the granule). With `uneven`,
        cuts keep blocks of `block` whole where every rank gets one, and the last may hold less.
        """
        per = _share(intermediate, self.tp_size, block, uneven)
        if per is None:
            sizes = range(1, min(intermediate, 64) + 1)
            legal = [size for size in sizes if _share(intermediate, size, block, uneven) is not None]
            raise ShardError(
                f"cannot cut an intermediate size of {intermediate} over {self.tp_size} ranks",
                expected=f"a tensor-parallel size of {', '.join(map(str, legal))}",
                got=self.tp_size,
            )
        start = self.tp_rank * per
        size = -(-per // self.pad_to) * self.pad_to
        granule = per if self.tp_size > 1 or size != per else 0
        return Cut(start, min(start + per, intermediate), size, granule)


def _share(intermediate: int, ranks: int, block: int, uneven: bool) -> int | None:
    """What each of `ranks` holds, the last perhaps less; None where there is no such cut."""
    if uneven and intermediate % (ranks * block):
        per = math.ceil(math.ceil(intermediate / block) / ranks) * block
        if per * (ranks - 1) < intermediate:
            return min(per, intermediate)
    return None if intermediate % ranks else intermediate // ranks
