"""`QuantizedLinear` on a GPU for few rows: time against a kernel that only reads as many bytes, and host time.

    python benchmarks/gpu_linear.py [--shapes 4096x4096,...] [--specs mxfp4,...] [--rows 1,2,4,8,16] [--out FILE]

Times are those of a replayed CUDA graph with evicted caches. The read kernel reads the packed weights themselves, in
turns with the layer: `of_read` is its time over ours. Host times are of eager calls, without waiting for the GPU.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from machine import gpu_machine, origin, result_path

from lancebill.bench.read_kernel import make_sink, read_words
from lancebill.bench.timing import CudaClock, host_time, measure
from lancebill.layer.quantized_linear import QuantizedLinear
from lancebill.numbers.random_weight import random_weight
from lancebill.numbers.spec_names import parse_spec

SHAPES, SPECS, ROWS = "4096x4096,14336x4096,4096x14336", "mxfp4,int4-g128,int8,fp8", "1,2,4,8,16"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=SHAPES, help="rows x columns of the matrices")
    parser.add_argument("--specs", default=SPECS)
    parser.add_argument("--rows", default=ROWS, help="rows of the input")
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--out", type=Path, help="default: a new file in benchmarks/results/gpu-linear")
    chosen = parser.parse_args()
    rows = []
    for shape in chosen.shapes.split(","):
        for spec in chosen.specs.split(","):
            n, k = map(int, shape.split("x"))
            generator = torch.Generator("cuda").manual_seed(0)
            layer = QuantizedLinear.from_weight(random_weight(parse_spec(spec), n, k, generator), device="cuda")
            for count in map(int, chosen.rows.split(",")):
                x = torch.randn(count, k, device="cuda").bfloat16()
                rows.append({"n": n, "k": k, "spec": spec, "rows": count, **times(layer, x, chosen.repeats)})
                print(json.dumps(rows[-1]), flush=True)
    path = chosen.out or result_path("gpu-linear", "cuda")
    path.write_text(
        json.dumps({**origin(Path(__file__).name), "machine": gpu_machine(), "rows": rows}, indent=1) + "\n"
    )


def times(layer: QuantizedLinear, x: torch.Tensor, repeats: int) -> dict[str, Any]:
    codes = [tensor.view(-1).view(torch.int32) for tensor in layer.packed["w13"].values()]
    largest = max(codes, key=torch.Tensor.numel)
    size = sum(tensor.nbytes for tensor in codes)
    calls = {"layer": [partial(layer, x)], "read": [partial(read_words, largest, make_sink(x.device))]}
    taken = measure(CudaClock(x.device), calls, repeats)
    read = taken["read"].median * size / largest.nbytes
    return {
        "backend": layer.choice.backend.name,
        "bytes": size,
        "us": round(taken["layer"].median, 2),
        "read_us": round(read, 2),
        "of_read": round(read / taken["layer"].median, 3),
        "gbs": round(size / taken["layer"].median / 1e3),
        "host_us": round(host_time([partial(layer, x)], x.device), 2),
        "method": taken["layer"].method,
    }


if __name__ == "__main__":
    main()
