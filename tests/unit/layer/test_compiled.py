"""Layers under torch.compile: one graph for equal layers, any number of tokens, and little host time."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lancebill.backends import oracle
from lancebill.errors import LaunchError
from lancebill.layer import compiled_op
from lancebill.layer.compiled_op import routed_experts
from lancebill.layer.parts import LayerParts
from lancebill.layer.quantized_linear import QuantizedLinear
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.moe.layout import Packed
from lancebill.moe.problem import Problem
from lancebill.moe.routing import Routing
from lancebill.testing.layers import layer_problem, make_layer, routing

PROBLEM = layer_problem("int4-g32", "bf16", hidden=64, intermediate=32, experts=4, top_k=2)
LAYERS = 48


class CountGraphs:
    """A compiler that counts the graphs it gets and keeps their operators."""

    def __init__(self) -> None:
        self.graphs: list[list[str]] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: object) -> Callable[..., Any]:
        self.graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        forward: Callable[..., Any] = graph.forward
        return forward


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch.compiler.reset()


def random_weights(problem: Problem, seed: int) -> dict[str, Packed]:
    """Other codes for each seed."""
    made = make_layer(problem, oracle.select(problem, "cpu").backend.name, "cpu", distinct=1)
    weights = {m: {n: t.clone() for n, t in tensors.items()} for m, tensors in made.weights.items()}
    generator = torch.Generator().manual_seed(seed)
    for tensors in weights.values():
        codes = tensors["codes"].view(torch.uint8)
        codes.copy_(torch.randint(0, 256, codes.shape, generator=generator, dtype=torch.uint8))
    return weights


def new_layer(seed: int) -> RoutedExperts:
    choice = oracle.select(PROBLEM, "cpu")
    return RoutedExperts(LayerParts(choice, random_weights(PROBLEM, seed), Routing(2, renormalize=True)))


class Block(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.experts = new_layer(seed)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return x + self.experts(x * 2, topk_ids=ids, topk_weights=weights)


def arguments(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    routed = routing(PROBLEM, tokens, tokens, "cpu")
    return torch.randn(tokens, 64).bfloat16(), routed.ids.long(), routed.weights.bfloat16()


@pytest.mark.parametrize("dynamic", [False, True])
def test_equal_blocks_share_one_graph(dynamic: bool) -> None:
    """48 blocks, compiled one by one, whole: one graph, 0 recompiles; with dynamic shapes also over batch sizes."""
    counter, blocks = CountGraphs(), [Block(seed) for seed in range(LAYERS)]
    compiled = [torch.compile(block, backend=counter, fullgraph=True, dynamic=dynamic) for block in blocks]
    torch._dynamo.utils.counters.clear()
    for tokens in (5, 9, 2) if dynamic else (5,):
        given = arguments(tokens)
        results = [run(*given) for run in compiled]
        assert all(torch.equal(got, block(*given)) for got, block in zip(results, blocks))
        assert not torch.equal(results[0], results[1])
    assert len(counter.graphs) == 1 and counter.graphs[0].count("lancebill.routed_experts.default") == 1
    stats = torch._dynamo.utils.counters["stats"]
    assert stats["unique_graphs"] == 1 and not torch._dynamo.utils.counters["graph_break"]


class RoutedBlock(nn.Module):
    """Routing inside, a shared expert, and a quantised linear."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.experts = new_layer(seed)
        self.experts.shared_experts = nn.Hardtanh()
        single = replace(PROBLEM, w2=None, experts=1, global_experts=1, top_k=1)
        self.linear = QuantizedLinear(oracle.select(single, "cpu"), random_weights(single, seed))

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        return self.linear(self.experts.forward_routed(x, logits))


def test_equal_blocks_with_routing_and_linears_share_one_graph() -> None:
    counter, blocks = CountGraphs(), [RoutedBlock(seed) for seed in range(4)]
    compiled = [torch.compile(block, backend=counter, fullgraph=True, dynamic=True) for block in blocks]
    for tokens in (5, 9):
        x, logits = torch.randn(tokens, 64).bfloat16(), torch.randn(tokens, 4)
        for run, block in zip(compiled, blocks):
            assert torch.equal(run(x, logits), block(x, logits))
    assert len(counter.graphs) == 1
    assert {"lancebill.routed_forward.default", "lancebill.quantized_linear.default"} <= set(counter.graphs[0])


def test_a_tag_means_a_living_layer() -> None:
    """A moved layer is found by its new tag; a deleted one, or a copy of a tag, is not."""
    layer, given = new_layer(0), arguments(3)
    want = layer(given[0], topk_ids=given[1], topk_weights=given[2])
    for _ in range(2):
        assert torch.equal(routed_experts(*given, layer.tag), want)
    before = layer.tag
    layer.tag = before.clone()
    assert torch.equal(routed_experts(*given, layer.tag), want)
    with pytest.raises(LaunchError, match="no longer exists"):
        routed_experts(*given, before)
    tag = layer.tag
    del layer
    gc.collect()
    with pytest.raises(LaunchError, match="no longer exists"):
        routed_experts(*given, tag)


def test_wrong_arguments_of_a_compiled_layer_are_refused() -> None:
    layer, (x, ids, weights) = new_layer(0), arguments(3)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    with pytest.raises(LaunchError, match="topk_ids does not fit"):
        compiled(x, topk_ids=ids[:2], topk_weights=weights)


def test_a_compiled_backward_raises() -> None:
    """As an eager one does. A forward pass alone is fine, also where inputs require gradients."""
    block, logits = RoutedBlock(0), torch.randn(5, 4)
    layer, linear = block.experts, block.linear
    ids, weights = torch.zeros(5, 2, dtype=torch.int64), torch.rand(5, 2)
    calls: tuple[Callable[[Tensor], Tensor], ...] = (
        lambda x: x + layer.forward_routed(x, logits),
        lambda x: x + layer(x, topk_ids=ids, topk_weights=weights),
        lambda x: linear(x) + x.sum(),
    )
    for call in calls:
        torch.compiler.reset()
        x = torch.randn(5, 64, dtype=torch.bfloat16, requires_grad=True)
        out = torch.compile(call, backend="aot_eager", fullgraph=True)(x)
        assert torch.equal(out, call(x)) and out.requires_grad
        with pytest.raises(LaunchError, match="compute no gradients"):
            out.sum().backward()
        assert x.grad is None


@pytest.mark.parametrize("routed", [False, True])
def test_exported_blocks_have_the_same_operators(routed: bool) -> None:
    """`torch.export` traces by running Python, without Dynamo."""
    block: nn.Module = RoutedBlock(0) if routed else Block(0)
    given = (torch.randn(5, 64).bfloat16(), torch.randn(5, 4)) if routed else arguments(5)
    exported = torch.export.export(block, given, strict=False)
    operators = {str(node.target) for node in exported.graph.nodes if node.op == "call_function"}
    expected = {"lancebill.routed_forward.default", "lancebill.quantized_linear.default"}
    assert (expected if routed else {"lancebill.routed_experts.default"}) <= operators


def test_known_layers_are_forgotten_when_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_op, "_MOST_FOUND", 2)
    layers, given = [new_layer(seed) for seed in range(4)], arguments(3)
    for layer in (*layers, *layers):
        want = layer(given[0], topk_ids=given[1], topk_weights=given[2])
        assert torch.equal(routed_experts(*given, layer.tag), want)
    assert len(compiled_op._FOUND) <= 2


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = new_layer(0)

    def forward(self, x: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        routed = self.experts.route(x, logits)
        return routed.ids, routed.weights


def test_exported_routing_is_the_definition() -> None:
    given = torch.randn(5, 64).bfloat16(), torch.randn(5, 4)
    router = Router()
    found = torch.export.export(router, given, strict=False).module()(*given)
    assert all(torch.equal(a, b) for a, b in zip(found, router(*given)))
