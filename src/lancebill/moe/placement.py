"""Which slice of which logical expert is in which local slot.

Tensor parallelism shards the intermediate size: rows of gate and up, columns of down. Expert
parallelism distributes whole experts. This is arithmetic on plain integers, independent of formats,
files and kernels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lancebill.errors import ShardError

LINEAR, ROUND_ROBIN = "linear", "round_robin"


@dataclass(frozen=True)
class Cut:
    """Elements [start, stop) of the intermediate size, stored in a buffer of `size` >= stop - start.

    The start of every rank and of its padding is a multiple of `granule`: no rank splits a block that
    is refined to gcd(block, granule). `granule` is 0 if nothing is cut.
    """

    start: int
    stop: int
    size: int
    granule: int


@dataclass(frozen=True)
class Placement:
    """One rank's shard, in tensor parallelism and expert parallelism.

    Redundant experts are copies of the first logical experts, appended after the last: physical id
    p >= E holds logical expert (p - E) % E.
    """

    tp_rank: int = 0
    tp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1
    strategy: str = LINEAR
    redundant: int = 0
    pad_to: int = 1  # the local intermediate size is rounded up to a multiple of this

    def __post_init__(self) -> None:
        if self.strategy not in (LINEAR, ROUND_ROBIN):
            raise ShardError("unknown placement", expected=f"{LINEAR} or {ROUND_ROBIN}", got=self.strategy)
        for kind, rank, size in (("tp", self.tp_rank, self.tp_size), ("ep", self.ep_rank, self.ep_size)):
            if size < 1 or not 0 <= rank < size:
                raise ShardError(f"{kind} rank out of range", expected=f"0 to {size - 1}", got=f"{rank} of {size}")
        if self.redundant < 0 or self.pad_to < 1:
            raise ShardError(
                "invalid padding or number of redundant experts",
                expected="redundant >= 0, pad_to >= 1",
                got=f"redundant {self.redundant}, pad_to {self.pad_to}",
            )

    def physical(self, experts: int) -> tuple[int, ...]:
        """The logical expert of every physical id."""
        return tuple(range(experts)) + tuple(i % experts for i in range(self.redundant))

    def slots(self, experts: int) -> tuple[int, ...]:
        """Physical ids held by this rank, in slot order."""
        total = experts + self.redundant
        if self.redundant and total % self.ep_size:
            raise ShardError(
                f"{experts} experts plus {self.redundant} redundant ones do not divide evenly by {self.ep_size} ranks",
                expected=f"redundant experts such that the sum is a multiple of {self.ep_size}",
            )
        if self.ep_size > total:
            raise ShardError("more ranks than experts", expected=f"ep at most {total}", got=self.ep_size)
        if self.strategy == ROUND_ROBIN:
            return tuple(range(self.ep_rank, total, self.ep_size))
        base, remainder = divmod(total, self.ep_size)
        start = self.ep_rank * base + min(self.ep_rank, remainder)
        return tuple(range(start, start + base + (self.ep_rank < remainder)))

    def experts(self, experts: int) -> tuple[int, ...]:
        """Logical experts held by this rank, in slot order."""
        logical = self.physical(experts)
        return tuple(logical[p] for p in self.slots(experts))

    def expert_map(self, experts: int) -> tuple[int, ...]:
        """For every physical id its local slot, or -1 if another rank holds it."""
        slot_of = {p: slot for slot, p in enumerate(self.slots(experts))}
        return tuple(slot_of.get(p, -1) for p in range(experts + self.redundant))

    def cut(self, intermediate: int, *, block: int = 1, uneven: bool = False) -> Cut:
        """This rank's part of the intermediate size.

        Even cuts may split a block (the caller then refines blocks to the granule). With `uneven`, cuts
        fall on multiples of `block` if every rank gets at least one block; the last rank may get less.
        """
        per = _share(intermediate, self.tp_size, block, uneven)
        if per is None:
            sizes = range(1, min(intermediate, 64) + 1)
            legal = [size for size in sizes if _share(intermediate, size, block, uneven) is not None]
            raise ShardError(
                f"cannot shard an intermediate size of {intermediate} over {self.tp_size} ranks",
                expected=f"a tensor-parallel size of {', '.join(map(str, legal))}",
                got=self.tp_size,
            )
        start = self.tp_rank * per
        size = -(-per // self.pad_to) * self.pad_to
        granule = per if self.tp_size > 1 or size != per else 0
        return Cut(start, min(start + per, intermediate), size, granule)


def _share(intermediate: int, ranks: int, block: int, uneven: bool) -> int | None:
    """The size of each rank's shard (the last may be smaller); None if the size cannot be sharded."""
    if uneven and intermediate % (ranks * block):
        per = math.ceil(math.ceil(intermediate / block) / ranks) * block
        if per * (ranks - 1) < intermediate:
            return min(per, intermediate)
    return None if intermediate % ranks else intermediate // ranks
