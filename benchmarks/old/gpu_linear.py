"""`QuantizedLinear` on a GPU for few rows: time against kernels that only read as many bytes, and host time.

    python benchmarks/gpu_linear.py [--shapes 4096x4096,...] [--specs mxfp4,...] [--rows 1,2,4,8,16] [--out FILE]

Times are those of a replayed CUDA graph with evicted caches. A kernel reads as many bytes as the packed matrix has, in
several ways, all in turns with the layer: `of_read` is the time of the fastest over ours. Host times are of eager
calls, without waiting for the GPU; `nn_host_us` is that of `nn.Linear` just after, since hosts differ from minute to
minute.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from machine import gpu_machine, origin, result_path

from lancebill.bench.read_kernel import fastest_read, reading_calls
from lancebill.bench.timing import CudaClock, host_time, measure
from lancebill.layer.quantized_linear import QuantizedLinear
from lancebill.numbers.random_weight import random_weight
from lancebill.numbers.spec_names import parse_spec

SHAPES = "4096x4096,14336x4096,4096x14336,8192x8192,5120x5120,28672x4096"
SPECS, ROWS = "mxfp4,int4-g128,int8,fp8", "1,2,4,8,16"


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
    size = sum(tensor.nbytes for tensor in layer.packed["w13"].values())
    words = torch.empty(size // 4, dtype=torch.int32, device=x.device).random_()
    taken = measure(CudaClock(x.device), {"layer": [partial(layer, x)], **reading_calls(words)}, repeats)
    us, (reader, read) = taken["layer"].median, fastest_read({name: took.median for name, took in taken.items()})
    dense = torch.nn.Linear(layer.in_features, layer.out_features, bias=False, device=x.device, dtype=x.dtype)
    with torch.no_grad():
        host = {name: host_time([partial(call, x)], x.device) for name, call in (("ours", layer), ("nn", dense))}
    return {
        "backend": layer.choice.backend.name,
        "bytes": size,
        "us": round(us, 2),
        "read_us": round(read, 2),
        "reader": reader,
        "of_read": round(read / us, 3),
        "gbs": round(size / us / 1e3),
        "host_us": round(host["ours"], 2),
        "nn_host_us": round(host["nn"], 2),
        "method": taken["layer"].method,
    }


if __name__ == "__main__":
    main()
