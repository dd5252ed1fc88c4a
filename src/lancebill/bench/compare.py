"""Compares our times with a peer's: ratio and noise for each measurement, geometric means for a whole run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

SORTED = "sorted"  # the peer's routing sort is not part of its time


def best(times: Mapping[str, Mapping[str, Any]], names: Iterable[str]) -> tuple[str, Mapping[str, Any]] | None:
    """The fastest of these variants; None if none of them was timed."""
    timed = [(name, times[name]) for name in names if name in times]
    return min(timed, key=lambda item: float(item[1]["us"])) if timed else None


def compare(ours: Mapping[str, Any], peer: Mapping[str, Any]) -> dict[str, Any]:
    """The peer's time divided by ours, and whether ours is slower by more than the larger noise of the two."""
    ratio = float(peer["us"]) / float(ours["us"])
    noise = max(float(ours["noise"]), float(peer["noise"]))
    return {"ratio": round(ratio, 4), "noise": round(noise, 4), "slower_beyond_noise": ratio < 1 - noise}


def geometric_mean(values: Sequence[float]) -> float | None:
    """None if there are no values."""
    if not values:
        return None
    return math.exp(sum(math.log(value) for value in values) / len(values))


def summarize(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """For each part and each peer: the geometric mean over token counts, and the token counts where we are slower."""
    summary: dict[str, dict[str, Any]] = {}
    for part in dict.fromkeys(row["part"] for row in rows):
        of_part = [row for row in rows if row["part"] == part]
        peers = dict.fromkeys(name for row in of_part for name in row["against"])
        summary[part] = {
            "cells": len(of_part),
            "noise": max(float(row["ours"]["noise"]) for row in of_part),
            "against": {name: _against([row for row in of_part if name in row["against"]], name) for name in peers},
        }
    return summary


def _against(rows: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    ratios = {str(row["tokens"]): float(row["against"][name]["ratio"]) for row in rows}
    mean = geometric_mean(list(ratios.values()))
    return {
        "geometric_mean": None if mean is None else round(mean, 4),
        "ratios": ratios,
        "slower": [row["tokens"] for row in rows if row["against"][name]["slower_beyond_noise"]],
    }
