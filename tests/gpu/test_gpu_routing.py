"""Routing on the GPU: the same experts as on the CPU, no host synchronisation, bits that do not depend on the batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from lancebill.moe.routing import NONE, SIGMOID, SOFTMAX, SQRTSOFTPLUS, Routing, SparseMixer, first_largest, route

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

EXPERTS, VOCABULARY = 256, 1000
ROUTINGS = [
    Routing(8, SOFTMAX, renormalize=True),
    Routing(8, SIGMOID, renormalize=True, n_group=8, topk_group=4, routed_scaling_factor=2.5),
    Routing(6, SQRTSOFTPLUS, renormalize=True, routed_scaling_factor=1.5),
    Routing(6, SQRTSOFTPLUS, renormalize=True, routed_scaling_factor=1.5, hashed=True),
    Routing(4, SOFTMAX, after_top_k=True),
    Routing(1, SIGMOID, after_top_k=True, weight_on_input=True),
    Routing(12, SOFTMAX, zero_experts=100),
    Routing(2, NONE, custom=SparseMixer()),
]


@contextmanager
def no_synchronisation() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def inputs_of(routing: Routing, tokens: int, device: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = {"logits": torch.randn(tokens, EXPERTS, generator=generator) * 3}
    inputs["logits"][0, 7] = torch.nan
    if routing.hashed:
        inputs["table"] = torch.rand(VOCABULARY, EXPERTS, generator=generator).argsort(1)[:, : routing.top_k]
        inputs["input_ids"] = torch.randint(-1, VOCABULARY, (tokens,), generator=generator)
    elif not routing.after_top_k:
        inputs["correction_bias"] = torch.randn(EXPERTS, generator=generator)
    return {name: tensor.to(device) for name, tensor in inputs.items()}


@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_gpu_and_cpu_choose_the_same_experts_without_synchronisation(routing: Routing) -> None:
    expected = route(routing, **inputs_of(routing, 300, "cpu"))
    inputs = inputs_of(routing, 300, "cuda")
    with no_synchronisation():
        routed = route(routing, **inputs)
    assert torch.equal(routed.ids.cpu(), expected.ids)
    torch.testing.assert_close(routed.weights.cpu(), expected.weights, rtol=3e-7, atol=0)


@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_routing_is_captured_and_replayed(routing: Routing) -> None:
    inputs = inputs_of(routing, 33, "cuda")
    expected = route(routing, **inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        routed = route(routing, **inputs)
    graph.replay()
    assert torch.equal(routed.ids, expected.ids)
    assert torch.equal(routed.weights, expected.weights)


@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_bits_of_a_row_do_not_depend_on_the_batch(routing: Routing) -> None:
    inputs = inputs_of(routing, 300, "cuda")
    batch = route(routing, **inputs)
    for row in (0, 1, 299):
        one = {n: t[row : row + 1].clone() if n in ("logits", "input_ids") else t for n, t in inputs.items()}
        alone = route(routing, **one)
        assert torch.equal(alone.ids[0], batch.ids[row])
        assert torch.equal(alone.weights[0], batch.weights[row])


def test_ties_and_signed_zeros() -> None:
    values = torch.zeros(5, 512, device="cuda")
    values[:, ::2] = -0.0
    values[3, 400] = 1.0
    assert first_largest(values, 3).tolist() == [[0, 1, 2]] * 3 + [[400, 0, 1], [0, 1, 2]]
