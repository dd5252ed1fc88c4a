"""What routing adds to a layer: `forward_routed` against `forward` with the ids and weights that it computes.

    python benchmarks/routing.py [--device cuda] [--models qwen3,deepseek-v3] [--tokens 1,4,16,64,1024] [--smoke]
                                 [--spec mxfp4] [--intermediate 256] [--out FILE] [--note WORDS]

On a GPU both replay CUDA graphs of back-to-back calls with different logits, in turns; `host_us` is the host time of
eager calls. On a CPU single calls with cold caches are timed in turns, and `route` alone; minima count, because the
machine may be shared. Alone, `route` also fetches code that `forward` needs anyway. `--intermediate` makes experts
smaller where memory is short (a shard of the layer). Every routing is first compared with the definition.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from machine import clocks, gpu_machine, origin, result_path
from result_files import write_record
from torch import Tensor

from lancebill.backends.oracle import select
from lancebill.bench.sustained import Windows
from lancebill.bench.timing import CpuClock, host_time, measure
from lancebill.bench.workload import Weights
from lancebill.cli.env import describe
from lancebill.layer.parts import LayerParts
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.moe.device import parse_device
from lancebill.moe.routing import SIGMOID, Routing, route
from lancebill.testing.layers import layer_problem

BATCHES = 8  # different logits
DISTINCT = 8  # experts with different numbers; the others repeat them in their own memory
CPU_REPEATS = 40
ROUNDS = 7


@dataclass(frozen=True)
class Model:
    hidden: int
    intermediate: int
    experts: int
    routing: Routing
    logits: torch.dtype


MODELS = {
    "qwen3": Model(2048, 768, 128, Routing(8, renormalize=True), torch.bfloat16),
    "deepseek-v3": Model(
        7168, 2048, 256,
        Routing(8, SIGMOID, renormalize=True, epsilon=1e-20, correction=True, n_group=8, topk_group=4,
                routed_scaling_factor=2.5),
        torch.float32,
    ),
}  # fmt: skip


def main() -> None:
    arguments = parse()
    device = torch.device(arguments.device)
    rows: list[dict[str, Any]] = []
    for name in arguments.models:
        model = MODELS[name]
        model = replace(model, intermediate=arguments.intermediate or model.intermediate)
        layer = make_layer(model, arguments.spec, device)
        for tokens in arguments.tokens:
            row = {"model": name, "intermediate": model.intermediate, "weights": arguments.spec, "tokens": tokens}
            row |= on_gpu(layer, model, tokens, device) if device.type == "cuda" else on_cpu(layer, model, tokens)
            rows.append(row)
            print(json.dumps(row), flush=True)
    if not arguments.smoke:
        path = arguments.out or result_path("routing", arguments.device)
        machine = gpu_machine() | {"clocks": clocks()} if device.type == "cuda" else describe()["cpu"]
        record = {**origin("routing.py"), "machine": machine, "note": arguments.note, "rows": rows}
        write_record(path, record)
        print(f"wrote {path}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(MODELS))
    parser.add_argument("--tokens", type=lambda text: list(map(int, text.split(","))), default=[1, 4, 16, 64, 1024])
    parser.add_argument("--spec", default="mxfp4")
    parser.add_argument("--intermediate", type=int, help="columns of an expert's hidden layer; default: the model's")
    parser.add_argument("--smoke", action="store_true", help="write no file")
    parser.add_argument("--out", type=Path, help="default: a new file in benchmarks/results/routing")
    parser.add_argument("--note")
    return parser.parse_args()


def make_layer(model: Model, spec: str, device: torch.device) -> RoutedExperts:
    sizes = {"hidden": model.hidden, "intermediate": model.intermediate, "experts": model.experts}
    problem = layer_problem(spec, "bf16", top_k=model.routing.top_k, **sizes)
    choice = select(problem, parse_device(str(device)), "hopper" if device.type == "cuda" else "cpu")
    packed = Weights(problem, device, distinct=DISTINCT).packed(choice.backend.layout(problem))
    router = {"correction": torch.randn(model.experts, device=device) * 0.1} if model.routing.correction else {}
    return RoutedExperts(LayerParts(choice, packed, model.routing, router=router))


@dataclass(frozen=True)
class RoutedBatch:
    """One batch, with the ids and weights that its logits give."""

    x: Tensor
    logits: Tensor
    ids: Tensor
    weights: Tensor

    @classmethod
    def make(cls, layer: RoutedExperts, model: Model, tokens: int, seed: int, device: torch.device) -> RoutedBatch:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(tokens, model.hidden, generator=generator).to(device, torch.bfloat16)
        logits = torch.randn(tokens, model.experts, generator=generator).to(device, model.logits)
        routed = layer.route(x, logits)
        expected = route(model.routing, logits.cpu(), correction_bias=on_host(layer.router_correction))
        assert torch.equal(routed.ids.cpu(), expected.ids)
        torch.testing.assert_close(routed.weights.cpu(), expected.weights, rtol=1.2e-7, atol=0)
        return cls(x, logits, routed.ids, routed.weights)


def on_host(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.cpu()


def calls(layer: RoutedExperts, batches: Sequence[RoutedBatch]) -> dict[str, list[Callable[[], object]]]:
    def forward(b: RoutedBatch) -> Callable[[], object]:
        return lambda: layer(b.x, topk_ids=b.ids, topk_weights=b.weights)

    def routed(b: RoutedBatch) -> Callable[[], object]:
        return lambda: layer.forward_routed(b.x, b.logits)

    def alone(b: RoutedBatch) -> Callable[[], object]:
        return lambda: layer.route(b.x, b.logits)

    made = {"forward": forward, "forward_routed": routed, "route": alone}
    return {name: [make(batch) for batch in batches] for name, make in made.items()}


def on_gpu(layer: RoutedExperts, model: Model, tokens: int, device: torch.device) -> dict[str, Any]:
    batches = [RoutedBatch.make(layer, model, tokens, seed, device) for seed in range(BATCHES)]
    contestants = calls(layer, batches)
    both = {name: contestants[name] for name in ("forward", "forward_routed")}
    times = Windows(device, rounds=ROUNDS).measure(both)
    # Alone, it would let the GPU cool down before one of the two and not before the other.
    times |= Windows(device, rounds=ROUNDS).measure({"route": contestants["route"]})
    host = {name: round(host_time(made, device), 1) for name, made in contestants.items()}
    added = times["forward_routed"].median - times["forward"].median
    return {
        "added_us": round(added, 2),
        "added_host_us": round(host["forward_routed"] - host["forward"], 1),
        "host_us": host,
        **{name: steady.describe() for name, steady in times.items()},
    }


def on_cpu(layer: RoutedExperts, model: Model, tokens: int) -> dict[str, Any]:
    batches = [RoutedBatch.make(layer, model, tokens, seed, torch.device("cpu")) for seed in range(BATCHES)]
    times = measure(CpuClock(), calls(layer, batches), CPU_REPEATS)
    least = {name: min(taken.us) for name, taken in times.items()}
    added = least["forward_routed"] - least["forward"]
    return {
        "threads": torch.get_num_threads(),
        "added_us": round(added, 1),
        "share": round(added / least["forward"], 5),
        **{name: {"min_us": round(least[name], 1), "median_us": round(times[name].median, 1)} for name in least},
    }


if __name__ == "__main__":
    main()
