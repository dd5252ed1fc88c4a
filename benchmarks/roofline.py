"""Draw the roofline of every race in benchmarks/results: a PNG beside each JSON that `benchmarks/hopper.py` wrote.

python benchmarks/roofline.py [results.json ...]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from colibri.bench import plot
from colibri.bench.roofline import draw_roofline, is_race

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    plot.require()
    asked = [Path(word) for word in sys.argv[1:]]
    for file in asked or sorted(RESULTS.glob("hopper-*.json")):
        record = json.loads(file.read_text())
        if not is_race(record):
            print(f"{file.name}: no cells beside peers")
            continue
        draw_roofline(record, file.with_suffix(".png"))
        print(f"{file.with_suffix('.png').name}: {len(record['rows'])} cells")


if __name__ == "__main__":
    main()
