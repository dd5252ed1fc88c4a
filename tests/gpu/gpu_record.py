"""Joins the two parts of a run to one small record, `<GPU>.json`, beside them.

python tests/gpu/gpu_record.py FOLDER [--to benchmarks/results/gpu-suite]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SAME = ("commit", "gpu", "versions")


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts, names of failed cells, and how many were skipped for each reason."""
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
        "times": {name: figure for note in notes for name, figure in note.get("times", {}).items()},
        "rates": [note["rates"] for note in notes if "rates" in note],
        "backends": dict(Counter(name for note in notes for name in note.get("experts on", ())).most_common()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--to", type=Path, default=ROOT / "benchmarks" / "results" / "gpu-suite")
    chosen = parser.parse_args()
    record = joined([json.loads((chosen.folder / f"part-{part}.json").read_text()) for part in (1, 2)])
    chosen.to.mkdir(parents=True, exist_ok=True)
    name = record["gpu"].split(",")[0].split()[-1].lower()
    (chosen.to / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    print(f"{name}: {record['passed']} passed, {record['failed']} failed, {record['skipped']} skipped")
    sys.exit(1 if record["failed"] else 0)


if __name__ == "__main__":
    main()
