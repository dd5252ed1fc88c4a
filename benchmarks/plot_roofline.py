"""Draw the roofline of the races in benchmarks/results: every cell as the newest run has it, in one picture.

python benchmarks/roofline.py                     benchmarks/results/hopper-h200.png
python benchmarks/roofline.py results.json ...    a PNG beside each
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tables import RESULTS, newest, races

from lancebill.bench import plot
from lancebill.bench.roofline import draw_roofline, is_race


def main() -> None:
    plot.require()
    asked = [Path(word) for word in sys.argv[1:]]
    wanted: dict[Path, dict[str, Any]] = {file: json.loads(file.read_text()) for file in asked}
    if not asked:
        runs = races()
        last = list(runs.values())[-1]
        wanted = {RESULTS / "hopper-h200.json": last | {"rows": newest(runs), "several": True}}
    for file, record in wanted.items():
        picture = file.with_suffix(".png")
        if not is_race(record):
            print(f"{file.name}: no cells beside peers")
            continue
        draw_roofline(record, picture)
        print(f"{picture.name}: {len(record['rows'])} cells")


if __name__ == "__main__":
    main()
