"""How policies of residency do on generated traces, as a table: `python -m lancebill.split.policy_table`."""

from __future__ import annotations

from collections.abc import Iterator

from lancebill.split.residency import POLICIES, simulate
from lancebill.split.traces import REUSE, make_trace

STEPS = 300
CASES = (("qwen3-30b", 51), ("512-experts", 64), ("512-experts", 128))  # a trace, and places on the device


def rows() -> Iterator[str]:
    """The lines of the table: hit rates of each policy, and what LRU lacks to Belady's optimum."""
    yield "| trace | on the GPU | static | LRU | recent uses | Belady | LRU's gap | moves a token |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, places in CASES:
        reuse = REUSE[name]
        trace = make_trace(reuse, STEPS)
        found = {policy: simulate(trace, reuse.experts, places, POLICIES[policy]) for policy in POLICIES}
        rates = [f"{found[policy].hit_rate:.1%}" for policy in ("static", "lru", "recent", "belady")]
        gap = f"{(found['belady'].hit_rate - found['lru'].hit_rate) * 100:.1f} points"
        moves = f"{found['lru'].moves / STEPS:.1f}"
        yield f"| {' | '.join([name, f'{places} of {reuse.experts}', *rates, gap, moves])} |"


if __name__ == "__main__":
    print("\n".join(rows()))
