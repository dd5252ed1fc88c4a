"""GPU time of the experts' kernels in a step of one sequence, from a profiler or from the trace that a server wrote."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MOST_NAMED = 40


@dataclass(frozen=True)
class Kernel:
    """One launch of a kernel: when it began and how long it took, in microseconds."""

    name: str
    start: float
    us: float


def time_of_experts(kernels: Iterable[Kernel], words: Sequence[str], steps: int) -> dict[str, Any]:
    """GPU time of a step, by kernel; the experts' are those with one of `words` in their name.

    Overlapping kernels count in full, except in `experts_busy_us_per_step`.
    """
    spent: dict[str, float] = {}
    intervals: list[tuple[float, float]] = []  # of the experts' kernels
    for kernel in kernels:
        spent[kernel.name] = spent.get(kernel.name, 0.0) + kernel.us / steps
        if _is_named(kernel.name, words):
            intervals.append((kernel.start, kernel.start + kernel.us))
    experts = {name: us for name, us in spent.items() if _is_named(name, words)}
    most = sorted(spent, key=spent.__getitem__, reverse=True)[:MOST_NAMED]
    return {
        "us_per_step": round(sum(spent.values()), 2),
        "experts_us_per_step": round(sum(experts.values()), 2),
        "experts_busy_us_per_step": round(covered(intervals) / steps, 2),
        "experts": {name[:120]: round(us, 2) for name, us in sorted(experts.items(), key=lambda one: -one[1])},
        "all": {name[:120]: round(spent[name], 2) for name in most},
    }


def kernels_of_trace(path: Path) -> list[Kernel]:
    """The launches in a trace of torch's profiler."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        events = json.load(file)["traceEvents"]
    return [Kernel(one["name"], float(one["ts"]), float(one["dur"])) for one in events if one.get("cat") == "kernel"]


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """The time that at least one interval covers. A kernel that waits for its predecessor overlaps with it."""
    total, reached = 0.0, 0.0
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _is_named(name: str, words: Sequence[str]) -> bool:
    return any(word in name.lower() for word in words)
