"""Memory of the CUDA graphs of a model: layers x captured sizes, in one shared pool and in separate pools.

    python benchmarks/capture_memory.py --layers 48 --hidden 2048 --intermediate 768 --experts 128 --top-k 8

Layers share one set of weights: only what captures allocate is measured. Prints JSON.
"""

from __future__ import annotations

import argparse
import json

import torch

import lancebill
from lancebill.backends import oracle
from lancebill.layer.parts import LayerParts
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.testing.layers import layer_problem, make_layer, routing

SIZES = (1, 2, 4, *range(8, 257, 8))  # 35 sizes, as engines capture


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("layers", 48), ("hidden", 2048), ("intermediate", 768), ("experts", 128), ("top-k", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    problem = layer_problem("mxfp4", "bf16", hidden=given.hidden, intermediate=given.intermediate,
                            experts=given.experts, top_k=given.top_k)  # fmt: skip
    made = make_layer(problem, "hopper", distinct=1)
    choice = oracle.select(problem, "cuda", "hopper")
    results = {}
    for kind in ("shared pool", "separate pools", "reserved"):
        layers = torch.nn.ModuleList([RoutedExperts(LayerParts(choice, made.weights)) for _ in range(given.layers)])
        results[kind] = measure(kind, layers, problem)
    print(json.dumps({"sizes": len(SIZES), "bytes": results, **vars(given)}, indent=1))


def measure(kind: str, layers: torch.nn.ModuleList, problem: lancebill.Problem) -> dict[str, float]:
    """Bytes that the device holds after all captures and did not before, and the seconds captures took."""
    inputs = torch.randn(max(SIZES), problem.hidden, device="cuda").bfloat16()
    routed = routing(problem, max(SIZES), 0)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    reserved = lancebill.reserve(layers, max(SIZES)) if kind == "reserved" else 0
    pool = None if kind == "separate pools" else torch.cuda.graph_pool_handle()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graphs = []
    start.record()
    for tokens in reversed(SIZES):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            x = inputs[:tokens]
            for layer in layers:
                x = layer(x, topk_ids=routed.ids[:tokens], topk_weights=routed.weights[:tokens])
        graphs.append(graph)
    end.record()
    torch.cuda.synchronize()
    seconds = start.elapsed_time(end) / 1e3
    torch.cuda.empty_cache()
    left, _ = torch.cuda.mem_get_info()
    return {"device": free - left, "reserved": reserved, "seconds": seconds}


if __name__ == "__main__":
    main()
