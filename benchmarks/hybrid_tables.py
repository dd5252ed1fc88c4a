"""Tables of layers and models that are split between a GPU and the CPU, and of packing on a GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from result_files import ResultFile, links, markdown_table, newest_files, result_files, table_by_tokens

Row = dict[str, Any]
PEERS = ("llama.cpp", "kt-kernel")
_DECODE_NOTE = (
    "µs of a replayed call with the share of experts that is on the GPU, uniform routing (the most that is asked: the "
    "slower part alone / 0.9 + 20 µs)."
)
_PREFILL_NOTE = (
    "ms of a call with half of the experts on the GPU, as planned (with all missing experts on the CPU; with all "
    "copied; best: the least of the time of the wire, of the CPU, and of both together)."
)
_PEERS_NOTE = (
    "µs of all experts on the CPU (a peer's time over ours; wrong: its result differs, and its time is not compared)."
)

_MOVES_NOTE = (
    "µs of a step with half of the experts on the GPU, on traces with the reuse of real models, with moves where they "
    "pay by estimate (with experts that stay; with moves in any case)."
)


def hybrid() -> str:
    """For each kind of rows the newest runs of a machine."""
    pages = []
    for machine in dict.fromkeys(file.machine for file in result_files("hybrid")):
        for kind, table in {"decode": decode, "prefill": prefill, "peers": peers, "moves": moves}.items():
            for file, rows in _newest(machine, kind):
                pages += [f"{_title(file)} {_within(rows) if 'within' in rows[0] else ''}".rstrip() + "\n", table(rows)]
    return "\n".join(pages)


def _newest(machine: str, kind: str) -> Iterator[tuple[ResultFile, list[Row]]]:
    """For each layer the rows of the newest run that has some, by run."""
    seen: set[tuple[str, str]] = set()
    for file in reversed(result_files("hybrid", machine)):
        found = [row for row in file.record["rows"] if row["kind"] == kind and _layer(row) not in seen]
        if found:
            yield file, found
        seen |= {_layer(row) for row in found}


def _layer(row: Row) -> tuple[str, str]:
    return row["shape"], row["spec"]


def _title(file: ResultFile) -> str:
    machine = file.record["machine"]
    low_high = " to ".join(dict.fromkeys(f"{rate:.0f}" for rate in sorted(machine["read_gbs"])))
    return (
        f"{file.machine_title}, {machine['threads']} threads; memory is read at {low_high} GB/s, "
        f"PCIe copies {machine['wire_gbs']:.0f} GB/s; {links(file.name)}."
    )


def _within(rows: list[Row]) -> str:
    kept = sum(row["within"] for row in rows)
    if "over_best" in rows[0]:
        worst = max(row["over_best"] for row in rows)
        slower = sum(not row["never_slower"] for row in rows)
        return (
            f"{kept} of {len(rows)} cells take at most 1.15 times the best, the worst {worst:.2f} times; {slower} are "
            "slower than one way alone."
        )
    worst = max(row["split_us"] / row["bar_us"] for row in rows)
    return f"{kept} of {len(rows)} cells are within what is asked, the worst takes {worst:.2f} times it."


def decode(rows: list[Row]) -> str:
    table: dict[str, dict[int, str]] = {}
    for row in rows:
        if row["routing"] == "uniform":
            label = f"{row['shape']}, {row['spec']}, {row['share']} %"
            table.setdefault(label, {})[row["tokens"]] = f"{row['split_us']:,.0f} ({row['bar_us']:,.0f})"
    return table_by_tokens(table, _DECODE_NOTE)


def prefill(rows: list[Row]) -> str:
    table: dict[str, dict[int, str]] = {}
    for row in rows:
        best = row["prefill_us"] / row["over_best"]
        planned, cpu, copied, best = (us / 1e3 for us in (row["prefill_us"], row["cpu_us"], row["copied_us"], best))
        text = f"{planned:.1f} ({cpu:.1f}; {copied:.1f}; best {best:.1f})"
        table.setdefault(f"{row['shape']}, {row['spec']}", {})[row["tokens"]] = text
    return table_by_tokens(table, _PREFILL_NOTE)


def peers(rows: list[Row]) -> str:
    table: dict[str, dict[int, str]] = {}
    for row in rows:
        found = ", ".join(f"{name} {_ratio(row, name)}" for name in PEERS if f"{name}_us" in row)
        table.setdefault(f"{row['shape']}, {row['spec']}", {})[row["tokens"]] = f"{row['cpu_us']:,.0f} ({found})"
    return table_by_tokens(table, _PEERS_NOTE)


def moves(rows: list[Row]) -> str:
    table: dict[str, dict[int, str]] = {}
    for row in rows:
        text = f"{row['recency_us']:,.0f} ({row['still_us']:,.0f}; {row['always_us']:,.0f})"
        table.setdefault(f"{row['shape']}, {row['spec']}", {})[row["tokens"]] = text
    return table_by_tokens(table, _MOVES_NOTE)


def _ratio(row: Row, peer: str) -> str:
    return f"{row[f'{peer}_over_ours']:.2f}x" if math.isfinite(row[f"{peer}_difference"]) else "wrong"


def hybrid_generate() -> str:
    """Whole small models with half of their experts in host memory: the newest run of each machine."""
    return "\n".join(_generate_table(file) for file in newest_files("hybrid-generate"))


def _generate_table(file: ResultFile) -> str:
    model, steps, interrupt = (file.record[name] for name in ("model", "steps", "interrupt"))
    split, whole = (f"{model[name]:,.0f}" for name in ("tokens_per_s", "whole_tokens_per_s"))
    calls = steps["rows"]
    slowest, fastest = (f"{end(row['tokens_per_s'] for row in calls):,.0f}" for end in (min, max))
    first, later = (_growth(before, after) for before, after in ((steps["before"], calls[0]), (calls[0], calls[-1])))
    same = sum(row["same"] for row in calls)
    after = "the same tokens" if steps["interrupted"] and steps["same_after"] else "not the same"
    rows = [
        ("tokens/s (the same model whole on the GPU)", f"{split} ({whole})"),
        ("tokens before the first that differs from the whole model's, of 64", model["equal_tokens"]),
        (f"{steps['steps']:,} steps of a tiny model in {len(calls)} calls", f"{slowest} to {fastest} tokens/s"),
        ("calls with the tokens of the first one", f"{same} of {len(calls)}"),
        ("memory, threads and mailboxes after its first call; from there to the last one", f"{first}; {later}"),
        ("a call after one that was interrupted", after),
        ("a process that gets SIGINT", f"ends after {interrupt['end_s']:.1f} s with status {interrupt['ended_with']}"),
        ("GPU memory that is missing afterwards", f"{file.record['lost_gpu']:,} bytes"),
    ]  # fmt: skip
    note = (
        f"`generate` on {file.machine_title} with half of the experts on the GPU, random weights, in CUDA graphs: "
        f"{model['layers']} layers of {model['experts']} experts, MXFP4; the tiny model has {steps['split_layers']} "
        f"layers. {links(file.name)}"
    )
    return markdown_table(("", "measured"), rows, note)


def _growth(before: Row, after: Row) -> str:
    units = {
        "rss": "bytes of host memory",
        "gpu": "bytes of GPU memory",
        "threads": "threads",
        "mailboxes": "mailboxes",
    }
    grown = [f"{after[name] - before[name]:+,} {unit}" for name, unit in units.items() if after[name] != before[name]]
    return ", ".join(grown) or "nothing grew"


def pack() -> str:
    return "\n".join(
        (_pack_on_gpu if "gpu" in file.record["machine"] else _pack_on_cpu)(file) for file in newest_files("pack")
    )


def _pack_on_gpu(file: ResultFile) -> str:
    rows = [
        (row["case"], row["source"], f"{row['bytes_per_s'] / 1e9:.0f}", f"{100 * row['copy_share']:.1f} %",
         f"{row['seconds'] * 1e3:.0f}", f"{row['peak_bytes'] / 2**20:,.0f}")
        for row in file.record["results"]
    ]  # fmt: skip
    head = ("stored as", "from", "GB/s", "of the copy rate", "ms", "MiB beside the result")
    pinned = file.record["pinned_copy_bytes_per_s"] / 1e9
    what = f"The copy rate of pinned memory is that of copies from there, {pinned:.0f} GB/s."
    return markdown_table(head, rows, f"{_packed_layer(file)} {what} {links(file.name)}")


def _pack_on_cpu(file: ResultFile) -> str:
    """A row for each case: from memory and from files, with each number of threads."""
    found: dict[str, dict[tuple[str, int], Row]] = {}
    for row in file.record["results"]:
        found.setdefault(row["case"], {})[row["source"], row["threads"]] = row
    ways = sorted({way for rows in found.values() for way in rows}, key=lambda way: (way[0] != "memory", way[1]))
    head = ["stored as", *(f"{source}, {_threads(count)}" for source, count in ways)]
    rows = [
        (case, *(f"{each[way]['bytes_per_s_core'] / 1e9:.2f} ({each[way]['bytes_per_s'] / 1e9:.1f})" for way in ways))
        for case, each in found.items()
    ]
    copied = file.record["copy_bytes_per_s"] / 1e9
    what = f"GB/s for each second of a core (GB/s; a load has two threads at least). A core copies {copied:.1f} GB/s."
    return markdown_table(head, rows, f"{_packed_layer(file)} {what} {links(file.name)}")


def _packed_layer(file: ResultFile) -> str:
    size = file.record["results"][0]["packed_bytes"] / 1e9
    return f"A layer of {size:.1f} GB on {file.machine_title}, all experts."


def _threads(count: int) -> str:
    return f"{count} threads" if count > 1 else "1 thread"
