"""Tables of layers of many models on a GPU, from the files of `benchmarks/gpu_shapes.py`."""

from __future__ import annotations

from typing import Any

from result_files import ResultFile, geometric_mean, links, markdown_table, result_files, table_by_tokens

Row = dict[str, Any]
LAYER = ("shape", "weights", "activations", "routing")
UNIFORM = "uniform"
REACHABLE = 0.97  # of the floor, in the best cells


def gpu_shapes() -> str:
    """For each machine: mean ratios, what they could be, every layer with uniform routing, then skewed routings, then
    small batches beside reading."""
    pages = []
    for machine in dict.fromkeys(file.machine for file in result_files("gpu-shapes")):
        rows = newest_cells(result_files("gpu-shapes", machine))
        uniform = [row for row in rows if row["routing"] == UNIFORM]
        skewed = [row for row in rows if row["routing"] != UNIFORM]
        tables = [means(uniform), highest_means(uniform), cells(uniform, _UNIFORM_NOTE), cells(skewed, _SKEWED_NOTE)]
        tables += [beside_reading(result_files("gpu-shapes", machine)), _sources(rows)]
        pages.append("\n".join(table for table in tables if table))
    return "\n".join(pages)


_UNIFORM_NOTE = (
    "µs of a whole layer on an H200 with uniform routing, from int64 ids to the combined output (Humming's time over "
    "ours in the same run, our share of the floor). Humming's faster GEMM type counts; it is timed without its routing "
    "sort. The floor is the larger of the flops at the rate of a dense GEMM and the bytes of the activated experts at "
    "the rate of reads, both measured in the same run."
)
_HIGHEST_NOTE = (
    "Geometric means by tokens; in brackets, what they would be if every cell were at least at "
    f"{REACHABLE:.0%} of the floor."
)
_SKEWED_NOTE = (
    "The same with skewed routing. eight-busy: eight experts share all tokens; half-empty: half of the experts do; "
    "zipf: the r-th most popular expert is 1/r as likely as the first; half-to-one: every second token goes to one "
    "expert."
)


_READ_NOTE = (
    "µs of a whole layer with uniform routing; in brackets, the fastest of several ways only to read the bytes of the "
    "activated experts, in two launches of which the second waits for the first, as a share of it, and then the floor, "
    "which has no launch and no wait. Both are timed in the same way, in turns."
)


def newest_cells(files: list[ResultFile]) -> list[Row]:
    """Every cell once: from the newest run that timed a peer, else from the newest run. Adds the run's name."""
    found: dict[tuple[object, ...], Row] = {}
    runs = sorted(files, key=lambda file: str(file.record["date"]))
    for row in (row | {"run": file.name} for file in runs for row in file.record["rows"]):
        key = (*(row[name] for name in LAYER), row["tokens"])
        if row["against"] or not found.get(key, row)["against"]:
            found[key] = row
    return list(found.values())


def ratio(row: Row) -> float | None:
    """Humming's time over ours; None if it was not timed."""
    return float(row["against"]["humming"]["ratio"]) if "humming" in row["against"] else None


def means(rows: list[Row]) -> str:
    """The geometric mean of all cells of each spec, the lowest, and the cells below 1."""
    lines = []
    for spec in dict.fromkeys((row["weights"], row["activations"]) for row in rows):
        compared = {
            f"{row['shape']} at {row['tokens']:,}": found
            for row in rows
            if (row["weights"], row["activations"]) == spec and (found := ratio(row)) is not None
        }
        if compared:
            lowest = min(compared, key=lambda cell: compared[cell])
            slower = ", ".join(cell for cell, found in compared.items() if found < 1)
            mean = f"{geometric_mean(compared.values()):.2f}x"
            cell = f"{compared[lowest]:.2f}x ({lowest})"
            lines.append((" x ".join(spec), len(compared), mean, cell, slower or "none"))
    head = ("weights x activations", "cells", "geometric mean", "lowest", "slower than Humming")
    return markdown_table(head, lines) if lines else ""


def highest_means(rows: list[Row]) -> str:
    """The means by tokens, and how high they could be: a cell near the floor cannot become much faster."""
    groups: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for row in rows:
        found = ratio(row)
        if found is not None:
            highest = found * max(1.0, REACHABLE / row["of_floor"])
            groups.setdefault((f"{row['weights']} x {row['activations']}", row["tokens"]), []).append((found, highest))
    table: dict[str, dict[int, str]] = {}
    for (spec, tokens), ratios in groups.items():
        now, highest = map(geometric_mean, zip(*ratios))
        table.setdefault(spec, {})[tokens] = f"{now:.2f}x ({highest:.2f}x)"
    return table_by_tokens(table, _HIGHEST_NOTE) if table else ""


def cells(rows: list[Row], note: str) -> str:
    table: dict[str, dict[int, str]] = {}
    for row in rows:
        found = ratio(row)
        versus = "" if found is None else f"{found:.2f}x, "
        label = f"{row['shape']}, {row['weights']} x {row['activations']}"
        label += "" if row["routing"] == UNIFORM else f", {row['routing']}"
        table.setdefault(label, {})[row["tokens"]] = f"{row['ours']['us']:,.0f} ({versus}{row['of_floor']:.0%})"
    return table_by_tokens(table, note) if table else ""


def beside_reading(files: list[ResultFile]) -> str:
    """Layers beside kernels that only read, from the newest run that has any."""
    timed = [file for file in files if any("read" in row for row in file.record["rows"])]
    if not timed:
        return ""
    newest = max(timed, key=lambda file: str(file.record["date"]))
    table: dict[str, dict[int, str]] = {}
    for row in newest.record["rows"]:
        if "read" in row:
            read = f"{row['read']['us']:.1f}, {row['read']['of_read']:.0%}"
            cell = f"{row['ours']['us']:.1f} ({read}; {row['of_floor']:.0%})"
            table.setdefault(f"{row['shape']}, {row['weights']} x {row['activations']}", {})[row["tokens"]] = cell
    return table_by_tokens(table, f"{_READ_NOTE} {links(newest.name)}")


def _sources(rows: list[Row]) -> str:
    return f"Each cell is from the newest run that has it: {links(*dict.fromkeys(row['run'] for row in rows))}\n"
