"""What a call on a GPU needs beside its kernels: host time, routing, graphs' memory, the first call; and one matrix."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import lancebill
from benchmarks.gpu import Sample, clock, problem_of, shape_name
from benchmarks.runner import Case, Run, subject
from lancebill.backends.oracle import select
from lancebill.bench.first_forward import FirstForward, first_forward
from lancebill.bench.timing import Call, CpuClock, CudaClock, host_time, measure
from lancebill.bench.workload import Weights
from lancebill.layer.parts import LayerParts
from lancebill.layer.quantized_linear import QuantizedLinear
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.moe.device import parse_device
from lancebill.moe.problem import Problem
from lancebill.moe.routing import SIGMOID, Routing, route
from lancebill.numbers.random_weight import random_weight
from lancebill.numbers.spec_names import parse_spec
from lancebill.testing.layers import layer_problem, make_layer, routing

BATCHES = 8  # different rows and routings
ROUNDS = 7


def host_us(calls: Sequence[Call], device: torch.device) -> float:
    """Microseconds of an eager call until the host can go on; on a CPU, of the call."""
    if device.type == "cuda":
        return host_time(calls, device)
    return measure(CpuClock(), {"calls": calls}, len(calls))["calls"].median


@subject(
    "gpu-linear",
    lambda: Case.product(size=("4096x4096", "14336x4096", "4096x14336", "8192x8192", "5120x5120", "28672x4096"),
                         weights=("mxfp4", "int4-g128", "int8", "fp8"), rows=(1, 2, 4, 8, 16)),
    device="cuda", repeats=(40, "timed calls"),
)  # fmt: skip
def gpu_linear(run: Run) -> None:
    """`QuantizedLinear` for few rows, against kernels that only read as many bytes, and its host time.

    Times are those of a replayed CUDA graph with evicted caches; `of_read` is the time of the fastest way to read, in
    turns with the layer, over ours. Host times are of eager calls; `nn_host_us` is that of `nn.Linear` just after,
    since hosts differ from minute to minute.
    """
    device = torch.device(run.device)
    for matrix, cases in run.groups("size", "weights"):
        n, k = map(int, matrix["size"].split("x"))
        weight = random_weight(parse_spec(matrix["weights"]), n, k, torch.Generator(device).manual_seed(0))
        layer = QuantizedLinear.from_weight(weight, device=run.device)
        dense = nn.Linear(k, n, bias=False, device=device, dtype=torch.bfloat16)
        size = sum(tensor.nbytes for tensor in layer.packed["w13"].values())
        readers: dict[str, list[Call]] = {}
        if device.type == "cuda":
            from lancebill.bench.read_kernel import reading_calls  # needs Triton

            readers = reading_calls(torch.empty(size // 4, dtype=torch.int32, device=device).random_())
        timer = CudaClock(device) if device.type == "cuda" else CpuClock()
        for case in (case for case in cases if not run.late(case)):
            x = torch.randn(case["rows"], k, device=device).bfloat16()
            taken = measure(timer, {"layer": [partial(layer, x)], **readers}, run.options.repeats)
            us = {name: times.median for name, times in taken.items()}
            mine = us.pop("layer")
            with torch.no_grad():
                hosts = [host_us([partial(call, x)], device) for call in (layer, dense)]
            of_read = min(us.values(), default=mine) / mine
            run.add(case, {"us": mine, "of_read": of_read, "host_us": hosts[0], "nn_host_us": hosts[1]})


# The host ------------------------------------------------------------------------------------------------

LAYERS = 8  # of a compiled graph
Given = tuple[Tensor, Tensor, Tensor]  # rows, ids, weights


def layer_cases(tokens: Sequence[int]) -> list[Case]:
    return Case.product(
        shape=("qwen3-30b-a3b", "deepseek-v4-flash"), weights=("mxfp4",), activations=("bf16",), tokens=tokens
    )


class Chain(nn.Module):
    """`count` calls of a layer, each on the result of the last."""

    def __init__(self, layer: RoutedExperts, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer] * count)

    def forward(self, x: Tensor, *, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, topk_ids=topk_ids, topk_weights=topk_weights)
        return x


def calls_with(layer: Callable[..., Tensor], batches: Sequence[Given]) -> list[Call]:
    return [partial(layer, x, topk_ids=ids, topk_weights=weights) for x, ids, weights in batches]


@subject("host-time", lambda: layer_cases((1, 16, 256)), device="cuda", distinct=(4, "experts with different numbers"))
@torch.no_grad()
def host_times(run: Run) -> None:
    """Host time of a layer's call: eager, with ids and weights as routers give them, and compiled.

    Calls are not waited for: this is the time until the next operator of a model can be launched. `routed_*`: how much
    more the host and the device need with ids in int64 and weights in bf16. A compiled call is measured alone, beside
    torch's own for `x + 1`, and in a graph of several layers, as models have them.
    """
    device = torch.device(run.device)
    for layer, cases in run.groups("shape", "weights", "activations"):
        made = Sample.make(problem_of(layer), device, run.options.distinct).layer
        for case in (case for case in cases if not run.late(case)):
            plain = [given(made.problem, case["tokens"], seed, device) for seed in range(BATCHES)]
            routed = [(x, ids.long(), weights.bfloat16()) for x, ids, weights in plain]
            eager = {"plain": calls_with(made, plain), "routed": calls_with(made, routed)}
            on_device = {name: taken.median for name, taken in clock(device, rounds=ROUNDS).measure(eager).items()}
            on_host = {name: host_us(calls, device) for name, calls in eager.items()}
            more = {"routed_host_us": on_host["routed"] - on_host["plain"]}
            more |= {"routed_device_us": on_device["routed"] - on_device["plain"]}
            run.add(case, {"host_us": on_host["plain"], **more, **compiled_times(made, routed, device)})


def given(problem: Problem, tokens: int, seed: int, device: torch.device) -> Given:
    chosen = routing(problem, tokens, seed, str(device))
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(tokens, problem.hidden, generator=generator, device=device).bfloat16()
    return x, chosen.ids.int(), chosen.weights.float()


def compiled_times(layer: RoutedExperts, batches: Sequence[Given], device: torch.device) -> dict[str, float]:
    def add_one(x: Tensor, *, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        return x + 1

    def compiled(called: Callable[..., Tensor], **options: Any) -> float:
        torch.compiler.reset()
        return host_us(calls_with(torch.compile(called, fullgraph=True, **options), batches), device)

    alone, chain = compiled(Chain(layer, 1)), compiled(Chain(layer, LAYERS))
    return {
        "eager_each_us": host_us(calls_with(Chain(layer, LAYERS), batches), device) / LAYERS,
        "compiled_each_us": (chain - alone) / (LAYERS - 1),
        "replayed_each_us": compiled(Chain(layer, LAYERS), mode="reduce-overhead") / LAYERS,
        "compiled_us": alone,
        "torch_us": compiled(add_one),
    }


@subject("first-forward",
         lambda: [case for spec in ("mxfp4", "int4-g128")
                  for case in Case.product(shape=("deepseek-v4-flash",), weights=(spec,), activations=("bf16",),
                                           tokens=(16,), run=(1, 2, 3))], device="cuda")  # fmt: skip
def first_forwards(run: Run) -> None:
    """Time from a fresh process to the first result of a layer, with the shipped kernels and an empty cache."""
    for case in (case for case in run.cases if not run.late(case)):
        wanted = FirstForward(
            shape_name(case["shape"]), case["weights"], case["activations"], run.device, case["tokens"], "auto"
        )
        found = first_forward(wanted)
        run.add(case, {"seconds": found.seconds, "compiled": found.compiled, "backend": found.backend})


# Routing -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Router:
    """A model's layer, how it routes, and the dtype of its logits."""

    hidden: int
    intermediate: int
    experts: int
    routing: Routing
    logits: torch.dtype


ROUTERS = {
    "qwen3": Router(2048, 768, 128, Routing(8, renormalize=True), torch.bfloat16),
    "deepseek-v3": Router(
        7168, 2048, 256,
        Routing(8, SIGMOID, renormalize=True, epsilon=1e-20, correction=True, n_group=8, topk_group=4,
                routed_scaling_factor=2.5), torch.float32,
    ),
}  # fmt: skip


@subject(
    "routing",
    lambda: Case.product(model=tuple(ROUTERS), weights=("mxfp4",), tokens=(1, 4, 16, 64, 1024)),
    device="cuda", intermediate=(0, "columns of an expert's hidden layer; 0: the model's"),
)  # fmt: skip
def routings(run: Run) -> None:
    """What routing adds to a layer: `forward_routed` against `forward` with the ids and weights that it computes.

    Both replay CUDA graphs of calls with different logits, in turns. Every routing is compared with the definition.
    """
    device = torch.device(run.device)
    for model, cases in run.groups("model", "weights"):
        router = ROUTERS[model["model"]]
        inner = run.options.intermediate or router.intermediate
        sizes = {"hidden": router.hidden, "intermediate": inner, "experts": router.experts}
        problem = layer_problem(model["weights"], "bf16", top_k=router.routing.top_k, **sizes)
        choice = select(problem, parse_device(run.device))
        packed = Weights(problem, device, distinct=8).packed(choice.backend.layout(problem))
        correction = {"correction": torch.randn(router.experts, device=device) * 0.1}
        parts = LayerParts(choice, packed, router.routing, router=correction if router.routing.correction else {})
        layer = RoutedExperts(parts)
        for case in (case for case in cases if not run.late(case)):
            batches = list(routed_batches(layer, router, case["tokens"], device))
            calls = {
                "forward": [partial(layer, x, topk_ids=ids, topk_weights=weights) for x, _, ids, weights in batches],
                "forward_routed": [partial(layer.forward_routed, x, logits) for x, logits, _, _ in batches],
            }
            us = {name: taken.median for name, taken in clock(device, rounds=ROUNDS).measure(calls).items()}
            hosts = {name: host_us(made, device) for name, made in calls.items()}
            added = {"added_us": us["forward_routed"] - us["forward"], "us": us["forward"]}
            run.add(case, {**added, "added_host_us": hosts["forward_routed"] - hosts["forward"]})


def routed_batches(
    layer: RoutedExperts, router: Router, tokens: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Rows and logits, with the ids and weights that they give."""
    bias = None if layer.router_correction is None else layer.router_correction.cpu()
    for seed in range(BATCHES):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(tokens, router.hidden, generator=generator).to(device, torch.bfloat16)
        logits = torch.randn(tokens, router.experts, generator=generator).to(device, router.logits)
        found = layer.route(x, logits)
        expected = route(router.routing, logits.cpu(), correction_bias=bias)
        assert torch.equal(found.ids.cpu(), expected.ids)
        torch.testing.assert_close(found.weights.cpu(), expected.weights, rtol=1.2e-7, atol=0)
        yield x, logits, found.ids, found.weights


# CUDA graphs ---------------------------------------------------------------------------------------------

CAPTURED = (1, 2, 4, *range(8, 257, 8))  # 35 numbers of tokens, as engines capture
SHARED, SEPARATE, RESERVED = "shared", "separate", "reserved"


@subject(
    "capture-memory",
    lambda: Case.product(pool=(SHARED, SEPARATE, RESERVED), shape=("qwen3-30b-a3b",), weights=("mxfp4",), layers=(48,),
                         sizes=(len(CAPTURED),)), device="cuda",
)  # fmt: skip
def capture_memory(run: Run) -> None:
    """GPU memory of a model's CUDA graphs: layers x captured sizes, in one shared pool and in separate pools.

    Layers share one set of weights: only what captures allocate is measured, by what is free on the device before and
    after. `pool`: shared by all graphs, one for each graph, or `lancebill.reserve` comes before captures into a shared
    pool. One layer is captured before anything is measured, which loads the kernels.
    """
    for case in run.cases:
        problem = problem_of(case.replace(activations="bf16"))
        choice = select(problem, parse_device(run.device))
        parts = LayerParts(choice, make_layer(problem, choice.backend.name, run.device, distinct=1).weights)
        captured(SHARED, nn.ModuleList([RoutedExperts(parts)]), problem)
        layers = nn.ModuleList([RoutedExperts(parts) for _ in range(case["layers"])])
        run.add(case, captured(case["pool"], layers, problem))


def captured(pool: str, layers: nn.ModuleList, problem: Problem) -> dict[str, float]:
    """MiB that the device holds after all captures and did not before, those reserved, and seconds of captures."""
    inputs = torch.randn(max(CAPTURED), problem.hidden, device="cuda").bfloat16()
    routed = routing(problem, max(CAPTURED), 0)
    free = free_bytes()
    reserved = lancebill.reserve(layers, max(CAPTURED)) if pool == RESERVED else 0
    handle = None if pool == SEPARATE else torch.cuda.graph_pool_handle()
    start, graphs = time.perf_counter(), []
    for tokens in reversed(CAPTURED):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=handle):
            x = inputs[:tokens]
            for layer in layers:
                x = layer(x, topk_ids=routed.ids[:tokens], topk_weights=routed.weights[:tokens])
        graphs.append(graph)
    seconds = time.perf_counter() - start
    return {"device_mib": (free - free_bytes()) / 2**20, "reserved_mib": reserved / 2**20, "seconds": seconds}


def free_bytes() -> int:
    """What other tensors and graphs, which may be gone by now, have left on the device."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]
