"""Figures that benchmarks measured: their results as records of the campaign, for page.py."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def records(results: Path) -> Iterator[tuple[str, str, Record]]:
    """(figure, machine, record), older results first."""
    for name, table, reached in TABLES:
        for file in sorted((results / table).glob("*/*.json")):
            result = json.loads(file.read_text(encoding="utf-8"))
            found = reached(result)
            if found is not None:
                words, failures = found
                figure = {"reached": words, "failures": failures}
                record = {"figures": {name: figure}, "date": result["date"][:10], "commit": result["commit"]}
                yield name, file.parent.name, record


def _sanitizer(result: Record) -> tuple[str, int]:
    verdicts = ", ".join(f"{v['tool']} {v['verdict']}" for v in result["verdicts"])
    return f"{len(result['cases'])} layers: {verdicts}", sum(v["verdict"] != "clean" for v in result["verdicts"])


def _perplexity(result: Record) -> tuple[str, int]:
    """Kernels against the reference on the same quantised weights."""
    rows = result["rows"]
    each = ", ".join(
        f"{row['weights']} x {row['activations']} {row['differs_by']:.5f} (bound {row['bound']})" for row in rows
    )
    return f"{result['tokens']:,} tokens, relative difference: {each}", sum(not row["within"] for row in rows)


def _invariant_cost(result: Record) -> tuple[str, int] | None:
    """Shapes whose batch-invariant order launches the same kernels cost nothing."""
    rows = [row for row in result.get("rows", result.get("results", [])) if "ours" in row]
    ratios = [row["batch_invariant"]["us"] / row["ours"]["us"] for row in rows if "batch_invariant" in row]
    if not ratios:
        return None
    median = statistics.median([*ratios, *[1.0] * (len(rows) - len(ratios))])
    words = (
        f"{100 * median - 100:.0f} % at the median of {len(rows)} shapes and sizes, {len(rows) - len(ratios)} of which"
        f" launch the same kernels; of the others {100 * statistics.median(ratios) - 100:.0f} % at the median,"
        f" {100 * max(ratios) - 100:.0f} % at most"
    )
    return words, int(median > 1.1)


def _first_call(result: Record) -> tuple[str, int]:
    seconds = [row["seconds"] for row in result["first_forward"]]
    compiled = sum(row["compiled"] for row in result["first_forward"])
    return f"first call with shipped kernels {min(seconds):.2f} to {max(seconds):.2f} s, {compiled} compiled", 0


TABLES: tuple[tuple[str, str, Callable[[Record], tuple[str, int] | None]], ...] = (
    ("S1", "sanitize", _sanitizer),
    ("N6", "perplexity", _perplexity),
    ("D4", "gpu-layer", _invariant_cost),
    ("C6", "first-forward", _first_call),
)
