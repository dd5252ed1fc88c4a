"""Whether moving experts to the device pays: how soon they are used again, and what a copy costs. Pure functions.

A move costs a copy of the expert, and saves the CPU as many computations as the expert is used before it leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lancebill.split.ways import Rates

_WEIGHT = 1 / 32  # of the newest observation


@dataclass(frozen=True)
class RecentReuse:
    """The share of uses that find their expert among those used last: the hit rate of LRU, wherever experts are."""

    hit_rate: float = 1.0  # nothing is known at first, and trying costs little

    def after(self, before: Sequence[int], now: Sequence[int], places: int) -> RecentReuse:
        """After the experts were used whose last use differs; `places` experts fit the device."""
        used = [expert for expert, time in enumerate(now) if time != before[expert]]
        if not used:
            return self
        oldest = max(
            1, sorted(before, reverse=True)[places - 1]
        )  # age of the oldest expert that LRU keeps on the device
        hits = sum(before[expert] >= oldest for expert in used)
        return replace(self, hit_rate=self.hit_rate + (hits / len(used) - self.hit_rate) * _WEIGHT)


def break_even(share: float, rates: Rates) -> float:
    """The hit rate of LRU from which moving pays, with this share of the experts on the device.

    Without moves the share is the hit rate, as routing has no lasting favourites; with LRU every miss is a move. Both
    rates are measured while the CPU computes and copies run.
    """
    cost = rates.cpu_gbs / rates.copy_gbs  # of a move, in computations of the CPU
    return (cost + share) / (cost + 1)
