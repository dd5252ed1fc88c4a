"""In how many waves experts are copied, and of how many experts each is. Pure functions.

While a wave is copied, the GPU packs and computes the one before. What it does with the last one comes after all
copies, so waves become smaller towards the end: each is as large as the GPU can manage while the next one is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate, pairwise


@dataclass(frozen=True)
class WaveCosts:
    """Microseconds: an expert's copy, what the GPU does for it, and what the GPU does for a wave of any size."""

    copy: float
    pack: float
    fixed: float


@cache
def wave_sizes(most: int) -> tuple[int, ...]:
    """The sizes that packing is prepared for: what fits the buffers, half of it, and so on to one."""
    sizes = [most]
    while sizes[-1] > 1:
        sizes.append(-(-sizes[-1] // 2))
    return tuple(sizes)


def shortest_wave(most: int, costs: WaveCosts, us: float) -> int:
    """The smallest wave whose copy takes at least so long."""
    return min((size for size in wave_sizes(most) if size * costs.copy >= us), default=most)


@lru_cache(64)
def last_waves(most: int, costs: WaveCosts) -> tuple[int, ...]:
    """The sizes of the last waves, which are not whole ones."""
    ends = [shortest_wave(most, costs, costs.fixed)]
    while ends[0] < most:
        manages = ends[0] * costs.copy - costs.fixed  # while that wave is copied
        before = max((size for size in wave_sizes(most) if size * costs.pack <= manages), default=0)
        if before <= ends[0]:
            break
        ends.insert(0, before)
    return tuple(size for size in ends if size < most)


def waves_of(slots: Sequence[int], most: int, costs: WaveCosts, first: Sequence[int] = ()) -> list[Sequence[int]]:
    """Divide experts into waves; a wave is copied, packed and computed together. `first`: the first wave, if chosen."""
    begun = set(first)
    rest = [slot for slot in slots if slot not in begun] if first else slots
    left, ends = len(rest), list[int]()
    for size in reversed(last_waves(most, costs)):
        if size > left:
            break
        ends.insert(0, size)
        left -= size
    some = [left % most] if left % most else []
    # Whole ones first: their copies last while the host asks the CPU for its part.
    edges = accumulate([*[most] * (left // most), *some, *ends], initial=0)
    return [*([first] if first else []), *(rest[start:end] for start, end in pairwise(edges))]
