"""Recorded results: benchmarks/results/<table>/<machine>/<date>t<time>-<commit>.json, and how tables print them.

Older runs have no time in their names; several of one date and commit have a suffix (-a, -b ...).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
MACHINES = {
    "aarch64": "an Arm CPU (aarch64)",
    "cascade-lake": "Intel Cascade Lake, 2 cores",
    "h200": "NVIDIA H200",
    "h200-as-sm-80": "NVIDIA H200 with the kernels of an sm_80",
    "neoverse-n1": "Arm Neoverse N1, 2 cores",
    "xeon-amx": "Intel Xeon with AMX, 2 of 16 cores",
    "xeon-avx512": "Intel Xeon, AMX switched off for us and for torch, 2 of 16 cores",
}


@dataclass(frozen=True)
class ResultFile:
    path: Path

    @property
    def name(self) -> str:
        """The path below benchmarks/results."""
        return self.path.relative_to(RESULTS).as_posix()

    @property
    def machine(self) -> str:
        return self.path.parent.name

    @property
    def machine_title(self) -> str:
        return MACHINES.get(self.machine, self.machine)

    @property
    def record(self) -> dict[str, Any]:
        return read_json(self.path)


@cache
def read_json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def write_record(path: Path, record: object) -> None:
    """Replace the file at once, so that a run that is killed leaves a whole one."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def result_files(table: str, machine: str = "*") -> list[ResultFile]:
    """Every run of a table, by machine, the oldest first."""
    return [ResultFile(path) for path in sorted((RESULTS / table).glob(f"{machine}/*.json"))]


def newest_files(table: str) -> list[ResultFile]:
    """The newest run of each machine."""
    return list({file.machine: file for file in result_files(table)}.values())


def links(*names: str) -> str:
    """Links from a page in docs/ to files below benchmarks/results."""
    return ", ".join(f"[{name}](../benchmarks/results/{name})" for name in names)


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[object]], note: str = "") -> str:
    """The first column is aligned left, the others right."""
    lines = [f"| {' | '.join(head)} |", "|" + "|".join("---" if i == 0 else "---:" for i in range(len(head))) + "|"]
    lines += [f"| {' | '.join(map(str, row))} |" for row in rows]
    return "\n".join(lines) + "\n" + (f"\n{note}\n" if note else "")


def table_by_tokens(cells: dict[str, dict[int, str]], note: str) -> str:
    """One row for each key of `cells`, one column for each number of tokens."""
    tokens = sorted({count for row in cells.values() for count in row})
    rows = [(name, *(row.get(count, "") for count in tokens)) for name, row in cells.items()]
    return markdown_table(("tokens", *(f"{count:,}" for count in tokens)), rows, note)


def geometric_mean(values: Iterable[float]) -> float:
    logarithms = [math.log(value) for value in values]
    return math.exp(sum(logarithms) / len(logarithms))
