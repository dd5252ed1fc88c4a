"""Routing on the GPU, by the definition and by the kernel: the same experts as on the CPU, no host synchronisation,
bits that do not depend on the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from calls import GPU, OURS, skip_unsupported
from routings import CASES, Case, check, expected, make_case

from lancebill.backends.gpu.route_program import RoutePrograms
from lancebill.backends.gpu.route_step import RouteStep
from lancebill.backends.gpu.target import compile_target
from lancebill.backends.oracle import select
from lancebill.backends.route_call import RouteCall
from lancebill.jit.build import build_all
from lancebill.jit.load import loadable
from lancebill.layer.parts import LayerParts
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.moe.activation import Activation
from lancebill.moe.router_tensors import RouterTensors
from lancebill.moe.routing import (
    NONE,
    SIGMOID,
    SOFTMAX,
    SQRTSOFTPLUS,
    Routed,
    Routing,
    SparseMixer,
    first_largest,
    route,
)
from lancebill.numbers.weight import same_bits
from lancebill.testing.layers import layer_problem, make_layer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

EXPERTS, VOCABULARY = 256, 1000
TARGET = compile_target(GPU.arch)
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
    torch.testing.assert_close(routed.weights.cpu(), expected.weights, rtol=3e-7, atol=0, equal_nan=True)


@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_routing_is_captured_and_replayed(routing: Routing) -> None:
    inputs = inputs_of(routing, 33, "cuda")
    expected = route(routing, **inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        routed = route(routing, **inputs)
    graph.replay()
    assert torch.equal(routed.ids, expected.ids)
    assert same_bits(routed.weights, expected.weights)


@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_bits_of_a_row_do_not_depend_on_the_batch(routing: Routing) -> None:
    inputs = inputs_of(routing, 300, "cuda")
    batch = route(routing, **inputs)
    for row in (0, 1, 299):
        one = {n: t[row : row + 1].clone() if n in ("logits", "input_ids") else t for n, t in inputs.items()}
        alone = route(routing, **one)
        assert torch.equal(alone.ids[0], batch.ids[row])
        assert same_bits(alone.weights[0], batch.weights[row])


def test_ties_and_signed_zeros() -> None:
    values = torch.zeros(5, 512, device="cuda")
    values[:, ::2] = -0.0
    values[3, 400] = 1.0
    assert first_largest(values, 3).tolist() == [[0, 1, 2]] * 3 + [[400, 0, 1], [0, 1, 2]]


KERNEL_CASES = [*CASES, *map(make_case, range(100, 140))]


def large_case(number: int, tokens: int) -> Case:
    """The routings of whole models, with ordinary logits."""
    routing = [r for r in ROUTINGS if r.custom is None][number % (len(ROUTINGS) - 1)]
    inputs = inputs_of(routing, tokens, "cpu")
    table = inputs["table"].contiguous() if routing.hashed else None
    router = RouterTensors(None, inputs.get("correction_bias"), table)
    return Case(number, routing, inputs["logits"].to((torch.float32, torch.bfloat16)[number % 2]), router,
                inputs.get("input_ids"))  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def compiled_routing() -> None:
    """Compile all routing kernels of this file on all cores."""
    steps = [RouteStep.of(call_of(case)) for case in (*KERNEL_CASES, *(large_case(n, 4) for n in range(14)))]
    sources = [step.compiled_for(TARGET).source for step in steps if step is not None]
    assert build_all([loadable(source, GPU.index) for source in sources]) == {}


def call_of(case: Case) -> RouteCall:
    call = RouteCall.make(case.routing, case.logits, case.router, None, case.input_ids)
    assert call is not None and call.supported()
    return call


def run_kernel(case: Case) -> Routed:
    call = call_of(case)
    program = RoutePrograms(TARGET).find(call)
    assert program is not None
    return program.run(call.logits, call.input_ids)


def test_the_kernel_computes_the_definition() -> None:
    """Ties, NaN, infinities, signed zeros, padding, every setting; rows may be views of wider rows."""
    for case in KERNEL_CASES:
        check(run_kernel(case.to("cuda")), case)


@pytest.mark.parametrize("number", range(14))
def test_the_kernel_on_many_tokens(number: int) -> None:
    case = large_case(number, 5000)
    on_gpu = case.to("cuda")
    whole = run_kernel(on_gpu)
    check(whole, case)
    alone = run_kernel(on_gpu.rows(slice(4999, None)))
    assert torch.equal(alone.ids[0], whole.ids[4999]) and torch.equal(alone.weights[0], whole.weights[4999])


@pytest.mark.parametrize("number", [0, 1, 5])
def test_the_kernel_is_captured_without_synchronisation(number: int) -> None:
    case, programs = large_case(number, 33).to("cuda"), RoutePrograms(TARGET)
    call = call_of(case)
    program = programs.find(call)
    assert program is not None
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        found = programs.find(call)  # binds another program: the capture has its own stream
        assert found is not None
        routed = found.run(call.logits, call.input_ids)
    for seed in (3, 4):
        case.logits.copy_(torch.randn(case.logits.shape, generator=torch.Generator().manual_seed(seed)))
        with no_synchronisation():
            graph.replay()
        check(routed, case)


def test_a_layer_reads_what_the_kernel_wrote() -> None:
    """Routing and layers back to back in one graph, where each kernel may start before its predecessor ends."""
    problem = layer_problem("mxfp4", "bf16", hidden=512, intermediate=256, experts=64, top_k=4)
    sample, device = make_layer(problem, OURS, distinct=8), GPU
    routing = Routing(4, SIGMOID, renormalize=True, n_group=8, topk_group=3, correction=True)
    correction = torch.randn(64, device="cuda")
    choice = select(problem, device, OURS)
    layer = RoutedExperts(LayerParts(choice, sample.weights, routing, router={"correction": correction}))
    for tokens in (1, 16, 300):
        x = [torch.randn(tokens, 512, device="cuda").bfloat16() for _ in range(20)]
        logits = [torch.randn(tokens, 64, device="cuda") for _ in range(20)]
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            eager = [layer.forward_routed(a, b) for a, b in zip(x, logits)]
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            outputs = [layer.forward_routed(a, b) for a, b in zip(x, logits)]
        graph.replay()
        torch.cuda.synchronize()
        for number, (a, b) in enumerate(zip(x, logits)):
            want = expected(Case(0, routing, b, RouterTensors(None, correction)))
            ids, weights = want.ids.cuda(), want.weights.cuda()
            direct = layer(a, topk_ids=ids, topk_weights=weights)
            torch.testing.assert_close(outputs[number], direct, rtol=1e-2, atol=1e-3)
            assert torch.equal(outputs[number], eager[number])


SILU, LIMITED = Activation(), Activation("swigluoai", limit=7.0)  # a limit must not turn NaN into a number


@pytest.mark.parametrize("tokens", [3, 40])
@pytest.mark.parametrize(("activations", "activation"), [("bf16", SILU), ("fp8", SILU), ("bf16", LIMITED)])
def test_non_finite_logits_and_inputs_reach_their_own_row_only(
    activations: str, activation: Activation, tokens: int
) -> None:
    """As on CPUs (docs/numerics.md): the output of such a token is NaN, and no other token changes."""
    problem = layer_problem(
        "mxfp4", activations, hidden=512, intermediate=256, experts=64, top_k=4, activation=activation
    )
    skip_unsupported(problem)
    sample = make_layer(problem, OURS, distinct=8)
    for routing in (Routing(4), Routing(4, SIGMOID, renormalize=True, n_group=8, topk_group=3)):
        layer = RoutedExperts(LayerParts(select(problem, GPU, OURS), sample.weights, routing))
        x, logits = torch.randn(tokens, 512, device="cuda").bfloat16(), torch.randn(tokens, 64, device="cuda")
        sound = layer.forward_routed(x, logits).clone()
        assert sound.isfinite().all()
        logits[1, 7] = torch.nan
        routed = layer.forward_routed(x, logits).clone()
        assert routed[1].isnan().all() and torch.equal(routed[2:], sound[2:]) and torch.equal(routed[0], sound[0])
        for bad in (torch.nan, torch.inf):
            x[2, 3] = bad
            out = layer.forward_routed(x, logits)
            assert not out[2].isfinite().any() and torch.equal(out[0], sound[0])
            assert torch.equal(out[3:], sound[3:])
