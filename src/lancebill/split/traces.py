"""Generated traces of routing with the reuse that real models show.

Measured traces have no lasting favourites, but experts are soon used again. A stack of experts, most recent on top, and
a distribution of the depth of the next use reproduce this: the share of depths up to n is the hit rate of an LRU cache
with n places.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Reuse:
    """Experts of a layer, those of a token, and hit rates of LRU caches: (places, rate), ascending."""

    experts: int
    top_k: int
    hits: tuple[tuple[int, float], ...]

    def depth(self, share: float) -> int:
        """The depth below which this share of uses lies; between known points it grows linearly."""
        points = [(0, 0.0), *self.hits, (self.experts, 1.0)]
        (low, before), (high, after) = next(pair for pair in pairwise(points) if share <= pair[1][1])
        return low + int((high - low) * (share - before) / (after - before))


# Public measurements: 512 experts (llama.cpp), and Qwen3-30B's 128, half of whose uses come again within two tokens.
REUSE = {
    "512-experts": Reuse(512, 10, ((64, 0.67), (128, 0.81))),
    "qwen3-30b": Reuse(128, 8, ((16, 0.50), (51, 0.925))),
}


def make_trace(reuse: Reuse, steps: int, seed: int = 0) -> list[tuple[int, ...]]:
    """The experts of each step."""
    random_ = random.Random(seed)
    stack = random_.sample(range(reuse.experts), reuse.experts)
    trace = []
    for _ in range(steps):
        used = [stack.pop(min(reuse.depth(random_.random()), len(stack) - 1)) for _ in range(reuse.top_k)]
        stack[:0] = used
        trace.append(tuple(used))
    return trace
