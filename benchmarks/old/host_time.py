"""Host time of a layer's call on a GPU: eager, with what routers give, and compiled.

    python benchmarks/host_time.py [--shapes qwen3-30b-a3b,...] [--weights mxfp4] [--tokens 1,16,256] [--out FILE]

Calls are not waited for, so this is the time until the next operator of a model can be launched. `given` also has the
device's time of replayed calls, because ids and weights of other dtypes are read by our kernels themselves.

A compiled call is measured alone, beside torch's own for `x + 1`, and in a graph of several layers, as models have
them: `each` is what one more layer adds to the graph.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from machine import clocks, gpu_machine, origin, result_path
from result_files import write_record
from torch import Tensor, nn

from lancebill.backends.oracle import select
from lancebill.bench.sustained import Windows
from lancebill.bench.timing import Call, host_time
from lancebill.bench.workload import Weights
from lancebill.layer.parts import LayerParts
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.moe.device import parse_device
from lancebill.moe.model_shapes import parse_shape
from lancebill.moe.problem import Problem
from lancebill.moe.routing import Routing
from lancebill.numbers.spec_names import parse_activation, parse_spec
from lancebill.testing.layers import routing

DEVICE = torch.device("cuda")
BATCHES = 8  # different rows and routings
LAYERS = 8  # of a compiled graph
ROUNDS = 7
Given = tuple[Tensor, Tensor, Tensor]  # rows, ids, weights


def main() -> None:
    arguments = parse()
    rows = []
    for shape in arguments.shapes.split(","):
        problem = parse_shape(shape).problem(parse_spec(arguments.weights), parse_activation("bf16"), tp=1)
        layer = make_layer(problem)
        for tokens in map(int, arguments.tokens.split(",")):
            row = {"shape": shape, "weights": arguments.weights, "activations": "bf16", "tokens": tokens}
            rows.append(row | measured(layer, problem, tokens))
            print(json.dumps(rows[-1]), flush=True)
    record = {**origin(Path(__file__).name), "machine": gpu_machine() | {"clocks": clocks()}, "rows": rows}
    path = arguments.out or result_path("host-time", "cuda")
    write_record(path, record)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="qwen3-30b-a3b,deepseek-v4-flash")
    parser.add_argument("--weights", default="mxfp4")
    parser.add_argument("--tokens", default="1,16,256")
    parser.add_argument("--out", type=Path, help="default: a new file in benchmarks/results/host-time")
    return parser.parse_args()


def make_layer(problem: Problem) -> RoutedExperts:
    choice = select(problem, parse_device("cuda"))
    packed = Weights(problem, DEVICE, distinct=4).packed(choice.backend.layout(problem))
    return RoutedExperts(LayerParts(choice, packed, Routing(problem.top_k, renormalize=True)))


def measured(layer: RoutedExperts, problem: Problem, tokens: int) -> dict[str, Any]:
    plain = [make_batch(problem, tokens, seed) for seed in range(BATCHES)]
    forms = {
        "int32, fp32": plain,
        "int64, fp32": [(x, ids.long(), weights) for x, ids, weights in plain],
        "int64, bf16": [(x, ids.long(), weights.bfloat16()) for x, ids, weights in plain],
        "int64, bf16, columns of wider tensors": [
            (x, wider(ids.long()), wider(weights.bfloat16())) for x, ids, weights in plain
        ],
    }
    eager = {form: calls(layer, batches) for form, batches in forms.items()}
    device = Windows(DEVICE, rounds=ROUNDS).measure(eager)
    host = {form: round(host_time(made, DEVICE), 1) for form, made in eager.items()}
    return {
        "host_us": host["int32, fp32"],
        "given": {form: {"host_us": host[form], "device_us": round(device[form].median, 2)} for form in forms},
        "compiled": compiled_times(layer, forms["int64, bf16"]),
    }


def make_batch(problem: Problem, tokens: int, seed: int) -> Given:
    routed = routing(problem, tokens, seed, "cuda")
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(tokens, problem.hidden, generator=generator, device=DEVICE).bfloat16()
    return x, routed.ids.int(), routed.weights.float()


def wider(tensor: Tensor) -> Tensor:
    """The same values, as columns of a tensor that has more."""
    return torch.cat([tensor, tensor], dim=1)[:, : tensor.shape[1]]


def calls(layer: Callable[..., Tensor], batches: Sequence[Given]) -> list[Call]:
    def call(x: Tensor, ids: Tensor, weights: Tensor) -> Call:
        return lambda: layer(x, topk_ids=ids, topk_weights=weights)

    return [call(*batch) for batch in batches]


class Chain(nn.Module):
    """`count` calls of a layer, each on the result of the last."""

    def __init__(self, layer: RoutedExperts, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer] * count)

    def forward(self, x: Tensor, *, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, topk_ids=topk_ids, topk_weights=topk_weights)
        return x


@torch.no_grad()
def compiled_times(layer: RoutedExperts, batches: Sequence[Given]) -> dict[str, float]:
    def add_one(x: Tensor, *, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        return x + 1

    def time_of(called: Callable[..., Tensor], **options: Any) -> float:
        torch.compiler.reset()
        return host_time(calls(torch.compile(called, fullgraph=True, **options), batches), DEVICE)

    alone, chain = time_of(Chain(layer, 1)), time_of(Chain(layer, LAYERS))
    found = {
        "alone_us": alone,
        "torch_us": time_of(add_one),
        "each_us": (chain - alone) / (LAYERS - 1),
        "eager_each_us": host_time(calls(Chain(layer, LAYERS), batches), DEVICE) / LAYERS,
        "replayed_each_us": time_of(Chain(layer, LAYERS), mode="reduce-overhead") / LAYERS,
    }
    return {name: round(us, 1) for name, us in found.items()}


if __name__ == "__main__":
    main()
