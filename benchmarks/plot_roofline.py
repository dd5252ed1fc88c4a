"""Draw the share of the roofline that a layer reaches on a GPU, ours and its peers'.

python benchmarks/plot_roofline.py                     every machine of benchmarks/results/gpu-layer, newest cells
python benchmarks/plot_roofline.py results.json ...    one PNG next to each file
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from gpu_tables import layer_runs, newest_cells
from result_files import RESULTS, read_json, result_files

from lancebill.bench import plot
from lancebill.bench.roofline import draw_roofline, is_race


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="results of benchmarks/gpu_layer.py")
    files: list[Path] = parser.parse_args().files
    plot.check_file(Path("roofline.png"))
    records: dict[Path, dict[str, Any]] = {file.with_suffix(".png"): read_json(file) for file in files}
    if not files:
        for machine in dict.fromkeys(file.machine for file in result_files("gpu-layer")):
            runs = layer_runs(machine)
            newest = list(runs.values())[-1]
            picture = RESULTS / "gpu-layer" / machine / "roofline.png"
            records[picture] = newest | {"rows": newest_cells(runs), "several": True}
    for picture, record in records.items():
        if not is_race(record):
            print(f"{picture.stem}: no rows with peers")
            continue
        draw_roofline(record, picture)
        print(f"{picture.name}: {len(record['rows'])} cells")


if __name__ == "__main__":
    main()
