"""The table of plain rounding and scale search: error, perplexity and time of each spec."""

from __future__ import annotations

from typing import Any

from result_files import ResultFile, links, markdown_table, newest_files, result_files

HEAD = (
    "spec", "error", "with search", "divergence", "with search", "perplexity", "with search", "loss difference", "time",
)  # fmt: skip


def rounding() -> str:
    return "\n".join(_table(file) for file in newest_files("rounding"))


def _table(newest: ResultFile) -> str:
    """The rows of all runs on this machine over the same tokens; of a spec the newest."""
    record = newest.record
    alike = [file for file in result_files("rounding", newest.machine) if _text(file.record) == _text(record)]
    rows = {row["spec"]: row for file in alike for row in file.record["rows"]}
    note = (
        f"The demo model's experts rounded to each spec. RMS error of the weights; divergence (Kullback-Leibler, nats) "
        f"of the predictions from those of the stored weights; perplexity of {record['tokens']:,} tokens of WikiText-2 "
        f"in windows of {record['window']}, where the stored weights have {record['stored_perplexity']:.2f}; loss with "
        f"search less that without it, in nats, and its standard error; CPU time of rounding with search over that "
        f"without it, on {newest.machine_title}; {links(*(file.name for file in alike))}"
    )
    return markdown_table(HEAD, map(_cells, rows.values()), note)


def _text(record: dict[str, Any]) -> tuple[Any, ...]:
    return record["model"], record["text"], record["tokens"], record["window"]


def _cells(row: dict[str, Any]) -> list[str]:
    plain, search, loss = row["plain"], row["search"], row["loss_difference"]
    return [
        row["spec"],
        f"{plain['rms_error']:.2%}",
        f"{search['rms_error']:.2%}",
        f"{plain['divergence']['mean']:.4f}",
        f"{search['divergence']['mean']:.4f}",
        f"{plain['perplexity']:.2f}",
        f"{search['perplexity']:.2f}",
        f"{loss['mean']:+.3f} ± {loss['stderr']:.3f}",
        f"{row['seconds_ratio']:.2f}x",
    ]
