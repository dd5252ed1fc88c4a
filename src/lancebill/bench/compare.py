"""Ours beside a peer, cell by cell: ratios, noise, and what a whole run comes to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

SORTED = "sorted"  # the peer's routing sort was done before the clock started


def best(times: Mapping[str, Mapping[str, Any]], names: Iterable[str]) -> tuple[str, Mapping[str, Any]] | None:
    """The fastest of these variants that were timed."""
    found = [(name, times[name]) for name in names if name in times]
    return min(found, key=lambda item: float(item[1]["us"])) if found else None


def compare(ours: Mapping[str, Any], peer: Mapping[str, Any]) -> dict[str, Any]:
    """How many of ours fit into one of theirs, and whether ours is slower by more than both noises."""
    ratio = float(peer["us"]) / float(ours["us"])
    noise = max(float(ours["noise"]), float(peer["noise"]))
    return {"ratio": round(ratio, 4), "noise": round(noise, 4), "slower_beyond_noise": ratio < 1 - noise}


def geometric_mean(values: Sequence[float]) -> float | None:
    """None of nothing."""
    if not values:
        return None
    return math.exp(sum(math.log(value) for value in values) / len(values))


def summarize(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """For each part and each peer: the geometric mean over tokens, and the cells we lose."""
    found: dict[str, dict[str, Any]] = {}
    for part in dict.fromkeys(row["part"] for row in rows):
        mine = [row for row in rows if row["part"] == part]
        peers = dict.fromkeys(name for row in mine for name in row["against"])
        found[part] = {
            "cells": len(mine),
            "noise": max(float(row["ours"]["noise"]) for row in mine),
            "against": {name: _against([row for row in mine if name in row["against"]], name) for name in peers},
        }
    return found


def _against(rows: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    ratios = {str(row["tokens"]): float(row["against"][name]["ratio"]) for row in rows}
    mean = geometric_mean(list(ratios.values()))
    return {
        "geometric_mean": None if mean is None else round(mean, 4),
        "ratios": ratios,
        "slower": [row["tokens"] for row in rows if row["against"][name]["slower_beyond_noise"]],
    }
