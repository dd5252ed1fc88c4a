"""`QuantizedLinear` on a CPU for few rows: time against reading as many bytes with the same threads.

    python benchmarks/cpu_linear.py [--shapes 4096x4096,...] [--specs mxfp4,...] [--rows 1,2,4,8,16] [--threads N]
                                    [--repeats 15] [--out FILE] [--note WORDS]

Times are of single calls with cold caches, bf16 inputs. The library's own reader reads the packed weights themselves,
in turns with the layer: `of_read` is the reader's fastest time over ours. A spec may be the name of a GGUF type.
"""

from __future__ import annotations

import argparse
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
from machine import origin, result_path
from result_files import write_record

from lancebill.backends.cpu import native
from lancebill.bench.timing import CpuClock, measure
from lancebill.cli.env import describe
from lancebill.formats.gguf import TYPES
from lancebill.layer.quantized_linear import QuantizedLinear
from lancebill.numbers.random_weight import random_weight
from lancebill.numbers.spec_names import parse_spec

SHAPES, SPECS, ROWS = "4096x4096,14336x4096", "mxfp4,int4-g128,int8,Q4_K,Q6_K", "1,2,4,8,16"
READ = ("codes", "scales", "zeros")  # what the kernels read of a packed matrix


def main() -> None:
    chosen = parse()
    torch.set_num_threads(chosen.threads)
    path, clock, rows = chosen.out or result_path("cpu-linear"), CpuClock(), list[dict[str, Any]]()
    for shape in chosen.shapes.split(","):
        for name in chosen.specs.split(","):
            n, k = map(int, shape.split("x"))
            spec = TYPES[name].spec if name in TYPES else parse_spec(name)
            layer = QuantizedLinear.from_weight(random_weight(spec, n, k, torch.Generator().manual_seed(0)))
            for count in map(int, chosen.rows.split(",")):
                x = torch.randn(count, k).bfloat16()
                row = {"n": n, "k": k, "spec": name, "rows": count, "threads": chosen.threads}
                rows.append(row | times(clock, layer, x, chosen))
                print(json.dumps(rows[-1]), flush=True)
            save(path, rows, chosen.note)
    print(path)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=SHAPES, help="rows x columns of the matrices")
    parser.add_argument("--specs", default=SPECS)
    parser.add_argument("--rows", default=ROWS, help="rows of the input")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path, help="default: a new file in benchmarks/results/cpu-linear")
    parser.add_argument("--note", default="")
    return parser.parse_args()


def times(clock: CpuClock, layer: QuantizedLinear, x: torch.Tensor, chosen: argparse.Namespace) -> dict[str, Any]:
    library, packed = native.library(), [layer.packed["w13"][name] for name in READ if name in layer.packed["w13"]]
    assert library is not None, native.state().why
    largest, size = max(packed, key=torch.Tensor.numel), sum(tensor.nbytes for tensor in packed)
    calls = {"layer": [partial(layer, x)], "read": [partial(library.read, largest, chosen.threads)]}
    taken = measure(clock, calls, chosen.repeats)
    ours, read = min(taken["layer"].us), min(taken["read"].us) * size / largest.nbytes
    return {
        "backend": layer.choice.backend.name,
        "bytes": size,
        "us": round(ours, 1),
        "median_us": round(taken["layer"].median, 1),
        "read_us": round(read, 1),
        "of_read": round(read / ours, 3),
        "gbs": round(size / ours / 1e3, 2),
    }


def save(path: Path, rows: list[dict[str, Any]], note: str) -> None:
    machine = describe()
    about = {"cpu": machine["cpu"], "python": machine["python"], "packages": machine["packages"]}
    record = {**origin(Path(__file__).name), "machine": about, "note": note, "load": os.getloadavg()[0], "rows": rows}
    write_record(path, record)


if __name__ == "__main__":
    main()
