"""Every way to capture a layer in a CUDA graph: results equal eager ones bit for bit, replay after replay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import cache

import pytest
import torch
from calls import OURS
from torch import Tensor

import lancebill
from lancebill.layer.parts import LayerParts
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.moe.problem import Problem
from lancebill.testing.layers import layer_problem, make_layer, routing

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SIZES = (1, 3, 40, 600)
HIDDEN = 512


def make_problem() -> Problem:
    return layer_problem("mxfp4", "bf16", hidden=HIDDEN, intermediate=256, experts=16, top_k=4)


def plans() -> Iterator[tuple[Problem, int]]:
    yield from ((make_problem(), tokens) for tokens in SIZES)


@cache
def weights() -> object:
    return make_layer(make_problem(), OURS)


@pytest.fixture(autouse=True)
def no_garbage() -> None:
    """A graph of an earlier test, freed by the garbage collector during a capture, would invalidate the capture."""
    gc.collect()


def new_layer() -> RoutedExperts:
    """A layer that has never run."""
    from lancebill.backends import oracle

    made = weights()
    choice = oracle.select(make_problem(), "cuda", OURS)
    return RoutedExperts(LayerParts(choice, made.weights))  # type: ignore[attr-defined]


class Call:
    """The arguments of a call in memory that replays read."""

    def __init__(self, tokens: int, seed: int = 0) -> None:
        self.tokens = tokens
        self.x = torch.empty(tokens, HIDDEN, dtype=torch.bfloat16, device="cuda")
        self.ids = torch.empty(tokens, 4, dtype=torch.int64, device="cuda")
        self.weights = torch.empty(tokens, 4, dtype=torch.bfloat16, device="cuda")
        self.fill(seed)

    def fill(self, seed: int) -> None:
        routed = routing(make_problem(), self.tokens, seed)
        generator = torch.Generator("cuda").manual_seed(seed)
        self.x.copy_(torch.randn(self.x.shape, generator=generator, device="cuda"))
        self.ids.copy_(routed.ids)
        self.weights.copy_(routed.weights)

    def run(self, layer: RoutedExperts) -> Tensor:
        out: Tensor = layer(self.x, topk_ids=self.ids, topk_weights=self.weights)
        return out


def check_replays(graph: torch.cuda.CUDAGraph, call: Call, out: Tensor) -> None:
    """With other inputs each time, against an eager call of another layer with equal weights."""
    judge = new_layer()
    for seed in (1, 2, 3):
        call.fill(seed)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, call.run(judge)), seed


@pytest.mark.parametrize("tokens", SIZES)
@pytest.mark.parametrize("warm", ["side stream", "another size", "never"])
def test_the_documented_pattern(tokens: int, warm: str) -> None:
    """Warm up on a side stream, then capture; and without any warm-up, at a size that never ran."""
    layer, call = new_layer(), Call(tokens)
    if warm != "never":
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                (call if warm == "side stream" else Call(7)).run(layer)
        torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call.run(layer)
    check_replays(graph, call, out)


@pytest.mark.parametrize("tokens", SIZES)
@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_a_given_stream_and_pool(tokens: int, mode: str) -> None:
    """The stream has run eager calls before, and runs them after; two graphs share the pool."""
    layer, call, stream, pool = new_layer(), Call(tokens), torch.cuda.Stream(), torch.cuda.graph_pool_handle()
    with torch.cuda.stream(stream):
        call.run(layer), call.run(layer)
    graphs, outs = [torch.cuda.CUDAGraph() for _ in range(2)], []
    for graph in graphs:
        with torch.cuda.graph(graph, stream=stream, pool=pool, capture_error_mode=mode):
            outs.append(call.run(layer))
    with torch.cuda.stream(stream):
        call.run(layer)
    for graph, out in zip(graphs, outs):
        check_replays(graph, call, out)


def test_graphed_callables() -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = new_layer()

        def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            return self.layer(x, topk_ids=ids, topk_weights=weights) + x

    block, calls = Block(), [Call(tokens) for tokens in SIZES]
    want = [block(call.x, call.ids, call.weights).clone() for call in calls]
    samples = tuple((call.x.clone(), call.ids.clone(), call.weights.clone()) for call in calls)
    graphed = torch.cuda.make_graphed_callables(tuple(Block() for _ in calls), samples)
    for run, call, expected in zip(graphed, calls, want):
        for _ in range(2):
            assert torch.equal(run(call.x, call.ids, call.weights), expected)


@pytest.mark.parametrize("tokens", SIZES)
def test_two_graphs_replayed_at_once(tokens: int) -> None:
    """Of the same layer, on two streams, without waiting for each other: memory and counters are their own."""
    layer, judge, calls, graphs, outs = new_layer(), new_layer(), [], [], []
    for seed in (1, 2):
        calls.append(Call(tokens, seed))
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            results = [calls[-1].run(layer) for _ in range(8)]
        outs.append(results)
    want = [call.run(judge) for call in calls]
    streams = [torch.cuda.Stream() for _ in graphs]
    torch.cuda.synchronize()
    for _ in range(50):
        for stream, graph in zip(streams, graphs):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for expected, results in zip(want, outs):
        assert all(torch.equal(result, expected) for result in results)


def test_branches_of_one_graph() -> None:
    """Two layers on parallel streams of a capture."""
    layers, call, graph = [new_layer(), new_layer()], Call(1), torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    with torch.cuda.graph(graph):
        side.wait_stream(torch.cuda.current_stream())
        outs = []
        for _ in range(8):
            outs.append(call.run(layers[0]))
            with torch.cuda.stream(side):
                outs.append(call.run(layers[1]))
        torch.cuda.current_stream().wait_stream(side)
    for seed in range(20):
        call.fill(seed)
        graph.replay()
        torch.cuda.synchronize()
        want = call.run(layers[0])
        assert all(torch.equal(out, want) for out in outs)


def test_graphs_outlive_eager_calls_and_other_graphs() -> None:
    """Replays stay right after eager calls at larger sizes, after other captures, and after those graphs are gone."""
    layer, call, graph = new_layer(), Call(1), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call.run(layer)
    for tokens in (600, 3, 40):
        Call(tokens).run(layer)
        other, rest = torch.cuda.CUDAGraph(), Call(tokens)
        with torch.cuda.graph(other):
            rest.run(layer)
        other.replay()
        del other
        gc.collect()
        torch.cuda.empty_cache()
        torch.full((1 << 24,), 0x5A, dtype=torch.uint8, device="cuda")
        check_replays(graph, call, out)


def test_reserved_memory() -> None:
    """Captures allocate nothing but outputs; graphs of all sizes share the memory."""
    model = torch.nn.ModuleList([new_layer() for _ in range(3)])
    assert lancebill.reserve(model, max_tokens=max(SIZES)) > 0
    captured = []
    for tokens in SIZES:
        call, graph = Call(tokens), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = [call.run(layer) for layer in model]
        captured.append((graph, call, outs))
    for graph, call, outs in captured:
        for out in outs:
            check_replays(graph, call, out)


def test_a_capture_holds_no_memory_of_ours() -> None:
    """After a capture only the caller's tensors are alive in its pool."""
    layer, call, graph, pool = new_layer(), Call(40), torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    with torch.cuda.graph(graph, pool=pool):
        out = call.run(layer)
    live = [
        block
        for segment in torch.cuda.memory_snapshot()
        if tuple(segment["segment_pool_id"]) == tuple(pool)
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    ]
    assert len(live) == 1 and live[0]["requested_size"] == out.numel() * out.element_size()


@pytest.mark.parametrize("tokens", [1, 40])
def test_reduce_overhead(tokens: int) -> None:
    layer, call = new_layer(), Call(tokens)

    def block(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return layer(x * 1, topk_ids=ids, topk_weights=weights) + x

    want = block(call.x, call.ids, call.weights)
    compiled = torch.compile(block, mode="reduce-overhead", fullgraph=True)
    for _ in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        assert torch.equal(compiled(call.x, call.ids, call.weights), want)
