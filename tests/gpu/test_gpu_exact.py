"""Every shipped configuration gives exactly the float64 result, and repeated calls give the same bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from calls import OURS, call, gpu_backend, plan_of, poison_scratch, skip_unless_ours, skip_unsupported
from exact import ExactLayer, exact_inputs, exact_weights_of_slots, expected_result, make_exact_layer
from torch import Tensor

from lancebill.backends.gpu.shipped import TOKENS, problems
from lancebill.moe.activation import Activation
from lancebill.moe.dispatch import Indexed
from lancebill.moe.layout import W2, W13
from lancebill.moe.problem import BATCH_INVARIANT, Problem
from lancebill.testing.layers import layer_problem, make_layer, routing

skip_unless_ours()


def without_limits(problem: Problem) -> Problem:
    """Plain silu and no biases: then every step is exact."""
    assert problem.w2 is not None
    plain = {name: replace(shape, bias=False) for name, shape in problem.matrices.items()}
    return replace(problem, activation=Activation(), w13=plain[W13], w2=plain[W2])


SHIPPED = [without_limits(problem) for problem in problems()]
KINDS = {1: "uniform", 4: "holes", 16: "uniform", 64: "zipf", 256: "one", 1024: "zipf", 4096: "uniform", 16384: "zipf"}


def problem_id(problem: Problem) -> str:
    return f"{problem.w13.spec}-{problem.activations}-{problem.hidden}"


@lru_cache(maxsize=1)
def layer_of(number: int) -> ExactLayer:
    return make_exact_layer(SHIPPED[number])


def with_sparse_experts(routed: Indexed, experts: int) -> Indexed:
    """Give the last expert one row and the one before it none."""
    ids = torch.where(routed.ids >= experts - 2, routed.ids - (experts // 2), routed.ids)
    ids[-1, -1] = experts - 1
    return Indexed(ids.to(torch.int32).contiguous(), routed.weights)


BF16_SPECS = (
    "nvfp4", "int4", "int4-g32", "int4-g64:fp16", "int4-zp", "int4-g128-zp", "int8", "int8-g128", "fp8", "fp8-block",
)  # fmt: skip


OTHER_FORMS = [
    *((spec, "bf16") for spec in BF16_SPECS),
    *((spec, "fp8") for spec in ("int4", "int4-g128", "int4-g128-zp", "fp8", "fp8-block")),
    *((spec, "int8") for spec in ("int4", "int4-g128", "int4-g128-zp", "int4-g256", "int8", "int8-g128")),
]
OTHER_BATCHES = (2, 8, 50, 700)


def other_problem(spec: str, activations: str) -> Problem:
    """So many experts that slots of 8 tokens rarely share one, and each slot is a tile where kernels allow it."""
    return layer_problem(spec, activations, hidden=512, intermediate=256, experts=40, top_k=2)


@pytest.mark.plans(lambda spec, activations: [(other_problem(spec, activations), tokens) for tokens in OTHER_BATCHES])
@pytest.mark.parametrize(("spec", "activations"), OTHER_FORMS)
def test_every_other_form(spec: str, activations: str) -> None:
    """Except fp16 inputs, whose range is too small for fully open gates."""
    problem = other_problem(spec, activations)
    skip_unsupported(problem)
    check(problem, make_exact_layer(problem), OTHER_BATCHES)


@pytest.mark.plans(lambda number: [(SHIPPED[number], tokens) for tokens in TOKENS])
@pytest.mark.parametrize("number", range(len(SHIPPED)), ids=lambda number: problem_id(SHIPPED[number]))
def test_every_shipped_configuration(number: int) -> None:
    """The problems and batches that define the shipped set; other tests run gpt-oss' activation and biases."""
    skip_unsupported(SHIPPED[number])
    check(SHIPPED[number], layer_of(number), TOKENS)


def check(problem: Problem, layer: ExactLayer, batches: Sequence[int]) -> None:
    backend = gpu_backend()
    for tokens in batches:
        x = exact_inputs(layer, tokens, tokens)
        routed = exact_weights_of_slots(
            with_sparse_experts(routing(problem, tokens, 1, kind=KINDS.get(tokens, "uniform")), problem.experts), 2
        )
        plan = plan_of(problem, tokens)
        call(backend, problem, x, routed, layer.weights, problem.hidden)
        poison_scratch()
        got = call(backend, problem, x, routed, layer.weights, problem.hidden)
        want = expected_result(layer, plan, x, routed)
        wrong = (got != want).sum(1)
        assert not wrong.any(), (
            f"{tokens} tokens: {int((wrong > 0).sum())} rows differ, first {first_difference(got, want)}"
        )


def first_difference(got: Tensor, want: Tensor) -> tuple[int, int, float, float]:
    row, column = (got != want).nonzero()[0].tolist()
    return row, column, float(got[row, column]), float(want[row, column])


def small_problem(spec: str, activations: str, order: str) -> Problem:
    made = layer_problem(spec, activations, hidden=1024, intermediate=512, experts=64, top_k=4)
    return replace(made, order=order)


FORMS = [
    ("mxfp4", "bf16"), ("mxfp4", "fp8"), ("int4-g128", "bf16"), ("int4-g128", "fp8"), ("int4-g128", "int8"),
    ("int8", "int8"),
]  # fmt: skip


@pytest.mark.plans(lambda spec, activations, tokens: [(small_problem(spec, activations, "fast"), tokens)])
@pytest.mark.parametrize(("spec", "activations"), FORMS)
@pytest.mark.parametrize("tokens", [1, 4, 48, 300, 2000])
def test_fast_order_repeats_its_bits(spec: str, activations: str, tokens: int) -> None:
    problem = small_problem(spec, activations, "fast")
    skip_unsupported(problem)
    layer = make_layer(problem, OURS)
    x, routed = torch.randn(tokens, 1024, device="cuda").bfloat16(), routing(problem, tokens, 3)
    want, same = layer(x, routed), torch.ones((), dtype=torch.bool, device="cuda")
    for _ in range(100):
        same &= (layer(x, routed) == want).all()
    assert bool(same)


@pytest.mark.plans(
    lambda **form: [
        (small_problem(**form, order=BATCH_INVARIANT), tokens) for tokens in (1, 4, 48, 100, 300, 2000, 4096)
    ]
)
@pytest.mark.parametrize(("spec", "activations"), FORMS)
def test_batch_invariant_rows_do_not_depend_on_the_batch(spec: str, activations: str) -> None:
    """Every batch size up to 256, some up to 4096, single rows, and permuted rows."""
    problem = small_problem(spec, activations, BATCH_INVARIANT)
    skip_unsupported(problem)
    layer = make_layer(problem, OURS)
    x, routed = torch.randn(4096, 1024, device="cuda").bfloat16(), routing(problem, 4096, 5)
    whole, same = layer(x, routed), torch.ones((), dtype=torch.bool, device="cuda")
    for rows in batches(4096):
        part = Indexed(routed.ids[rows].contiguous(), routed.weights[rows].contiguous())
        same &= (layer(x[rows].contiguous(), part) == whole[rows]).all()
    assert bool(same)


def batches(most: int) -> Iterator[Tensor]:
    everything = torch.arange(most, device="cuda")
    for tokens in [*range(1, 257), 300, 511, 777, 1024, 1500, 2048, 3000, most]:
        yield everything[:tokens]
    for row in (0, 1, 77, most - 1):
        yield everything[row : row + 1]
    order = torch.randperm(most, generator=torch.Generator("cuda").manual_seed(1), device="cuda")
    yield order
    yield order[:200]
