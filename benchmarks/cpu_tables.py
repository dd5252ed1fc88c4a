"""Tables of matrices and of whole models on CPUs."""

from __future__ import annotations

from typing import Any

from result_files import ResultFile, links, markdown_table, newest_files, result_files


def cpu_linear() -> str:
    return "\n".join(_linear_table(file) for file in newest_files("cpu-linear"))


def _linear_table(file: ResultFile) -> str:
    cells: dict[tuple[str, str], dict[int, str]] = {}
    for row in file.record["rows"]:
        cell = f"{row['us'] / 1e3:.2f} ({row['of_read']:.0%})"
        cells.setdefault((f"{row['n']} x {row['k']}", row["spec"]), {})[row["rows"]] = cell
    counts = sorted({count for by in cells.values() for count in by})
    rows = [(f"{size}, {spec}", *(by.get(count, "") for count in counts)) for (size, spec), by in cells.items()]
    threads = file.record["rows"][0]["threads"]
    note = (
        f"ms of `QuantizedLinear` with so many rows of bf16 on {file.machine_title}, {threads} threads: the fastest "
        "call with cold caches (the time in which the same threads read as many bytes, as a share of it)."
        f"{_load(file, threads)} {links(file.name)}"
    )
    return markdown_table(("rows", *(str(count) for count in counts)), rows, note)


def cpu_streams() -> str:
    return "\n".join(_streams_table(file) for file in result_files("cpu-streams"))


def _streams_table(file: ResultFile) -> str:
    record, served = file.record, file.record["served"]
    rows = [(row["rows"], f"{row['median_ms']:.1f}", f"{row['throughput']:.2f}x") for row in record["steps"]]
    note = (
        f"A model of the demo's size ({record['model']}) on {file.machine_title}, {record['threads']} threads: ms of a "
        f"native step with so many sequences, and throughput against one.{_served(served)}"
        f"{_load(file, record['threads'])}{record['note'] and ' ' + record['note']} {links(file.name)}"
    )
    return markdown_table(("sequences", "a step", "throughput"), rows, note) + _split_table(file)


KINDS = ("experts", "dense", "head", "attention")  # of work in a step; the others are little


def _split_table(file: ResultFile) -> str:
    record = file.record
    if "split" not in record:
        return ""
    rows = []
    for row in record["split"]:
        rest = sum(value for kind, value in row.items() if kind not in ("sequences", "tokens", "all", *KINDS))
        times = (row["all"], *(row[kind] for kind in KINDS), rest)
        rows.append((f"{row['sequences']} x {row['tokens']}", *(f"{value:.1f}" for value in times)))
    first = [
        f"{row['prompts']} x {row['tokens']} tokens {row['native_ms']:.1f} and {row['own_ms']:.1f}"
        for row in record["prompts"]
    ]
    note = (
        "What takes the time of such a step, in ms: each kind of work alone, the fastest of several runs. Prompts, "
        f"natively and by the model's own operators: {', '.join(first)}. {links(file.name)}"
    )
    return "\n" + markdown_table(("sequences x tokens", "all", *KINDS, "rest"), rows, note)


def cpu_prompts() -> str:
    return "\n".join(_prompts_table(file) for file in newest_files("cpu-prompts"))


def _prompts_table(file: ResultFile) -> str:
    kinds = ("experts", "dense", "attention")
    rows = [
        (f"{row['tokens']:,}", f"{row['native_seconds']:.2f}", f"{row['own_seconds']:.2f}",
         *(f"{row['split'][kind]:.2f}" for kind in kinds))
        for row in file.record["rows"]
    ]  # fmt: skip
    note = (
        f"A prompt of so many tokens of the demo's model ({file.record['model']}) on {file.machine_title}, one thread: "
        "seconds of the processor, natively and by the model's own operators, and what most of the native ones are "
        f"spent on.{_load(file, 1)} {links(file.name)}"
    )
    return markdown_table(("tokens", "native", "own operators", *kinds), rows, note)


def _load(file: ResultFile, threads: int) -> str:
    """The machine's load where it was more than the run's own threads."""
    load = file.record.get("load", 0)
    return f" The machine's load was {load:.1f}." if load >= threads + 1 else ""


def _served(served: dict[str, Any]) -> str:
    if "absent" in served:
        return ""
    rates = served["tokens_per_second"]
    said = f" Served, one stream has {rates['1']:.1f} tokens/s."
    for streams, more in served["throughput"].items():
        first = served["first_token"][streams]
        times = [run["time_to_first_token_ms"] for run in served["runs"][streams]]
        said += (
            f" {streams} together have {rates[streams]:.1f} ({more:.2f}x); the last of their first tokens comes "
            f"{first['over_first']:.2f}x as late as the first of them (at most "
            f"{max(each['p99'] / each['min'] for each in times):.1f}x in {len(times)} runs), and "
            f"{first['over_lone']:.1f}x as late as that of a stream alone."
        )
    long = served["long_prompt"]
    return said + (
        f" A prompt of {long['words']:,} tokens is read in {long['first_token_ms'] / 1e3:.1f} s; meanwhile "
        f"{long['streams']} streams under way wait at most {long['largest_gap_ms']:.0f} ms for a token, "
        f"{long['gap_before_ms']:.0f} ms before."
    )
