"""Memory of the CUDA graphs of a model: layers x captured sizes, in one shared pool and in separate pools.

    python benchmarks/capture_memory.py [--shape qwen3-30b-a3b] [--weights mxfp4] [--layers 48] [--out FILE]

Layers share one set of weights: only what captures allocate is measured, by what is free on the device before and
after. `pool`: `shared` by all graphs, `separate` for each graph, or `reserved`, where `lancebill.reserve` comes before
captures into a shared pool. One layer is captured before anything is measured, which loads the kernels.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from pathlib import Path
from typing import Any

import torch
from machine import gpu_machine, origin, result_path
from result_files import write_record
from torch import nn

import lancebill
from lancebill.backends.oracle import select
from lancebill.layer.parts import LayerParts
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.moe.device import parse_device
from lancebill.moe.model_shapes import parse_shape
from lancebill.moe.problem import Problem
from lancebill.numbers.spec_names import parse_activation, parse_spec
from lancebill.testing.layers import make_layer, routing

SIZES = (1, 2, 4, *range(8, 257, 8))  # 35 numbers of tokens, as engines capture
SHARED, SEPARATE, RESERVED = "shared", "separate", "reserved"


def main() -> None:
    given = parse()
    problem = parse_shape(given.shape).problem(parse_spec(given.weights), parse_activation("bf16"), tp=1)
    choice = select(problem, parse_device("cuda"))
    parts = LayerParts(choice, make_layer(problem, choice.backend.name, distinct=1).weights)
    measure(SHARED, model(parts, 1), problem)
    rows = []
    for pool in (SHARED, SEPARATE, RESERVED):
        rows.append({"pool": pool, **measure(pool, model(parts, given.layers), problem)})
        print(json.dumps(rows[-1]), flush=True)
    names = {"shape": given.shape, "weights": given.weights, "activations": "bf16", "layers": given.layers}
    record = {**origin(Path(__file__).name), "machine": gpu_machine(), **names, "sizes": SIZES, "rows": rows}
    write_record(given.out or result_path("capture-memory", "cuda"), record)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-30b-a3b")
    parser.add_argument("--weights", default="mxfp4")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--out", type=Path, help="default: a new file in benchmarks/results/capture-memory")
    return parser.parse_args()


def model(parts: LayerParts, layers: int) -> nn.ModuleList:
    return nn.ModuleList([RoutedExperts(parts) for _ in range(layers)])


def measure(pool: str, layers: nn.ModuleList, problem: Problem) -> dict[str, Any]:
    """Bytes that the device holds after all captures and did not before, those reserved, and seconds of captures."""
    inputs = torch.randn(max(SIZES), problem.hidden, device="cuda").bfloat16()
    routed = routing(problem, max(SIZES), 0)
    free = free_bytes()
    reserved = lancebill.reserve(layers, max(SIZES)) if pool == RESERVED else 0
    handle = None if pool == SEPARATE else torch.cuda.graph_pool_handle()
    start, graphs = time.perf_counter(), []
    for tokens in reversed(SIZES):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=handle):
            x = inputs[:tokens]
            for layer in layers:
                x = layer(x, topk_ids=routed.ids[:tokens], topk_weights=routed.weights[:tokens])
        graphs.append(graph)
    seconds = round(time.perf_counter() - start, 2)
    return {"device_bytes": free - free_bytes(), "reserved_bytes": reserved, "seconds": seconds}


def free_bytes() -> int:
    """What other tensors and graphs, which may be gone by now, have left on the device."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


if __name__ == "__main__":
    main()
