"""Figures that benchmarks measured: their records as records of the campaign, for page.py."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

from benchmarks.runner import Record, records


def measured() -> Iterator[tuple[str, str, dict[str, object]]]:
    """(figure, machine, record of the campaign), older results first."""
    for name, subject, reached in SUBJECTS:
        for record in records(subject):
            found = reached(record)
            if found is not None:
                figure = {"reached": found[0], "failures": found[1]}
                date, commit = str(record.facts["date"])[:10], record.facts["commit"]
                yield name, record.machine, {"figures": {name: figure}, "date": date, "commit": commit}


def _sanitizer(record: Record) -> tuple[str, int]:
    verdicts = ", ".join(f"{row['tool']} {row['verdict']}" for row in record.rows)
    return f"{record.facts['cases']} layers: {verdicts}", sum(row["verdict"] != "clean" for row in record.rows)


def _perplexity(record: Record) -> tuple[str, int]:
    """Kernels against the reference on the same quantised weights."""
    rows = [row for row in record.rows if "bound" in row]
    each = ", ".join(f"{row['variant']} {row['differs_by']:.5f} (bound {row['bound']})" for row in rows)
    failures = sum(row["differs_by"] > row["bound"] for row in rows)
    return f"{record.facts['tokens']:,} tokens, relative difference: {each}", failures


def _invariant_cost(record: Record) -> tuple[str, int] | None:
    """Shapes whose batch-invariant order launches the same kernels cost nothing."""
    ratios = [row["invariant_us"] / row["us"] for row in record.rows if "invariant_us" in row]
    if not ratios:
        return None
    same = len(record.rows) - len(ratios)
    median = statistics.median([*ratios, *[1.0] * same])
    words = (
        f"{100 * median - 100:.0f} % at the median of {len(record.rows)} shapes and sizes, {same} of which launch the"
        f" same kernels; of the others {100 * statistics.median(ratios) - 100:.0f} % at the median,"
        f" {100 * max(ratios) - 100:.0f} % at most"
    )
    return words, int(median > 1.1)


def _first_call(record: Record) -> tuple[str, int]:
    seconds, compiled = zip(*((row["seconds"], row["compiled"]) for row in record.rows))
    return f"first call with shipped kernels {min(seconds):.2f} to {max(seconds):.2f} s, {sum(compiled)} compiled", 0


SUBJECTS: tuple[tuple[str, str, Callable[[Record], tuple[str, int] | None]], ...] = (
    ("S1", "sanitize", _sanitizer),
    ("N6", "perplexity", _perplexity),
    ("D4", "gpu-layer", _invariant_cost),
    ("C6", "first-forward", _first_call),
)
