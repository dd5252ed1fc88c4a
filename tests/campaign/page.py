"""Makes docs/reliability.md from the records of the campaign.

python tests/campaign/page.py            rewrites it
python tests/campaign/page.py --check    exits with 1 if it is not what the records make it
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # of benchmarks

import other_results  # noqa: E402
import tool_table  # noqa: E402
from figures import FIGURES, Target  # noqa: E402

PAGE = ROOT / "docs" / "reliability.md"
RESULTS = ROOT / "benchmarks" / "results"

HEAD = """\
# Reliability

What was tried to break lancebill, how often, and what came of it. The page is made by `tests/campaign/page.py` from the
records in `benchmarks/results/reliability`; nothing in it is typed by hand. A row shows the newest run on each machine,
with failures if there were any. "not run" means that no run is recorded yet, not that nothing is known.

`nox -s campaign` runs every part that needs no GPU at full size and records it; `nox -s campaign -- soak` runs one.
Each command below takes options for its size and, with `--record`, writes a record. Figures held by the test suite are
counted by `tests/campaign/suite.py`. A commit that is not in the history was rebased after the run; several commits are
those of the shards that were added up.
"""


def page() -> str:
    """The whole text."""
    runs = _runs()
    lines = [HEAD]
    for title, targets in FIGURES.items():
        lines += [
            f"## {title}\n",
            "| | figure | target | reached | date, commit | command |",
            "|---|---|---|---|---|---|",
        ]
        lines += [_row(target, runs.get(target.name, {})) for target in targets]
        lines.append("")
    return "\n".join([*lines, *tool_table.section(runs.get("R7", {}))])


def _runs() -> dict[str, dict[str, dict[str, Any]]]:
    """{figure: {machine: record}}, the newest record of each part."""
    runs: dict[str, dict[str, dict[str, Any]]] = {}
    found = [
        (file, json.loads(file.read_text(encoding="utf-8"))) for file in (RESULTS / "reliability").glob("*/*/*.json")
    ]
    for file, record in sorted(found, key=lambda one: (one[1]["date"], one[1].get("time", ""), one[0].name)):
        for name in record["figures"]:
            runs.setdefault(name, {})[f"{file.parent.name}"] = record
    for name, machine, record in other_results.measured():
        runs.setdefault(name, {})[machine] = record
    return runs


def _row(target: Target, runs: dict[str, dict[str, Any]]) -> str:
    reached, when = [], []
    for machine, record in sorted(runs.items()):
        figure = record["figures"][target.name]
        failed = f" **({figure['failures']} failed)**" if figure["failures"] else ""
        last = record.get("details", {}).get("last format")
        stopped = f" (stopped after {last}, formats in alphabetical order)" if last else ""
        strict = record.get("outside bounds when run", 0) if target.name in ("N4", "S5") else 0
        again = f" ({strict} by the narrower bounds of the run, judged again)" if strict > figure["failures"] else ""
        reached.append(f"{machine}: {figure['reached']}{again}{stopped}{failed}")
        commits = record.get("commits", {record["commit"]: 1})
        when.append(f"{record['date']}, {' '.join(commit[:7] for commit in commits)}")
    missing = "not run (needs a GPU)" if target.gpu else "not run"
    command = f"`{target.command}`" if target.script else ""
    cells = (target.name, target.what, target.target, "<br>".join(reached) or missing, "<br>".join(when), command)
    return f"| {' | '.join(cells)} |"


def main() -> None:
    if "--check" in sys.argv:
        same = PAGE.exists() and PAGE.read_text(encoding="utf-8") == page()
        sys.exit(0 if same else f"{PAGE.name} is not what the records make it: run tests/campaign/page.py")
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
