"""Joins the two parts of a run to one small record, `<GPU>.json`, beside them.

python tests/gpu/gpu_record.py FOLDER [--to benchmarks/results/gpu-suite]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SAME = ("commit", "gpu", "versions")


def joined(parts: list[dict[str, Any]], before: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Counts, names of failed cells, and how many were skipped for each reason.

    `before` are the times of the last record. A cell that failed leaves those it has: the next run is compared with
    them again.
    """
    for key in SAME:
        assert all(part[key] == parts[0][key] for part in parts), f"the parts differ in {key}"
    cells = {name: found for part in parts for name, found in part["cells"].items()}
    notes = [found["notes"] for found in cells.values() if found.get("notes")]
    outcomes = Counter(found["outcome"] for found in cells.values())
    return {
        **{key: parts[0][key] for key in SAME},
        "seconds": [part["seconds"] for part in parts],
        "passed": outcomes["passed"],
        "failed": outcomes["failed"],
        "skipped": outcomes["skipped"],
        "failures": {name: found["reason"][:300] for name, found in cells.items() if found["outcome"] == "failed"},
        "skips": dict(sorted(Counter(f["reason"] for f in cells.values() if f["outcome"] == "skipped").items())),
        "times": {**_times(cells, "failed"), **before, **_times(cells, "passed")},
        "rates": [note["rates"] for note in notes if "rates" in note],
        "backends": dict(Counter(name for note in notes for name in note.get("experts on", ())).most_common()),
    }


def _times(cells: Mapping[str, Any], outcome: str) -> dict[str, Any]:
    chosen = [found["notes"] for found in cells.values() if found["outcome"] == outcome and found.get("notes")]
    return {name: time for notes in chosen for name, time in notes.get("times", {}).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--to", type=Path, default=ROOT / "benchmarks" / "results" / "gpu-suite")
    chosen = parser.parse_args()
    parts = [json.loads((chosen.folder / f"part-{part}.json").read_text()) for part in (1, 2)]
    chosen.to.mkdir(parents=True, exist_ok=True)
    name = parts[0]["gpu"].split(",")[0].split()[-1].lower()
    file = chosen.to / f"{name}.json"
    record = joined(parts, json.loads(file.read_text())["times"] if file.exists() else {})
    file.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{name}: {record['passed']} passed, {record['failed']} failed, {record['skipped']} skipped")
    sys.exit(1 if record["failed"] else 0)


if __name__ == "__main__":
    main()
