"""The table of plain rounding and scale search: error, perplexity and time of each spec."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from result_files import ResultFile, links, markdown_table, newest_files, result_files

HEAD = (
    "spec", "error", "with search", "divergence", "with search", "perplexity", "stored", "plain", "with search",
    "loss difference", "time",
)  # fmt: skip


def rounding() -> str:
    return "\n".join(_table(file.machine) for file in newest_files("rounding"))


def _table(machine: str) -> str:
    """A row for each spec: of all runs on this machine the one over most tokens, the newest of those."""
    files, chosen = result_files("rounding", machine), dict[str, tuple[ResultFile, dict[str, Any]]]()
    for file in files:
        for row in file.record["rows"]:
            before = chosen.get(row["spec"])
            if before is None or file.record["tokens"] >= before[0].record["tokens"]:
                chosen[row["spec"]] = file, row
    used = {file.name: file for file, _ in chosen.values()}
    note = (
        f"The demo model's experts rounded to each spec. RMS error of the weights; divergence (Kullback-Leibler, nats) "
        f"of the predictions from those of the stored weights; perplexity of so many tokens of WikiText-2, in windows "
        f"of {_windows(used.values())}, with the stored weights, plain rounding and search; loss with search less that "
        f"with plain rounding, in nats, and its standard error over the same tokens, which runs "
        f"over 1,024 of them take as independent; CPU time of rounding with search "
        f"over that without it, on {files[-1].machine_title}; {links(*used)}"
    )
    return markdown_table(HEAD, (_cells(file.record, row) for file, row in chosen.values()), note)


def _windows(files: Iterable[ResultFile]) -> str:
    return " or ".join(str(size) for size in sorted({file.record["window"] for file in files}))


def _cells(record: dict[str, Any], row: dict[str, Any]) -> list[str]:
    plain, search, loss = row["plain"], row["search"], row["loss_difference"]
    return [
        row["spec"],
        f"{plain['rms_error']:.2%}",
        f"{search['rms_error']:.2%}",
        f"{plain['divergence']['mean']:.4f}",
        f"{search['divergence']['mean']:.4f}",
        f"{record['tokens']:,} tokens",
        f"{record['stored_perplexity']:.2f}",
        f"{plain['perplexity']:.2f}",
        f"{search['perplexity']:.2f}",
        f"{loss['mean']:+.3f} ± {loss['stderr']:.3f}",
        f"{row['seconds_ratio']:.2f}x",
    ]
