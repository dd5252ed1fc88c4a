"""The exact tier: every shipped configuration gives the bits of float64, poisoned and guarded; and bits never move."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from calls import call, poison_scratch
from exact import ExactLayer, exact_inputs, exact_weights_of_slots, judge, make
from torch import Tensor

from lancebill.backends.hopper.plan import make_plan
from lancebill.backends.hopper.shipped import TOKENS, problems
from lancebill.backends.registry import registry
from lancebill.moe.dispatch import Indexed
from lancebill.moe.problem import BATCH_INVARIANT, Problem
from lancebill.testing.layers import layer_problem, make_layer, routing

if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs an sm_90 GPU", allow_module_level=True)
pytest.importorskip("triton")

SHIPPED = list(problems())
KINDS = {1: "uniform", 4: "holes", 16: "uniform", 64: "zipf", 256: "one", 1024: "zipf", 4096: "uniform", 16384: "zipf"}


def named(problem: Problem) -> str:
    return f"{problem.w13.spec}-{problem.activations}-{problem.hidden}"


@lru_cache(maxsize=1)
def layer_of(number: int) -> ExactLayer:
    return make(SHIPPED[number])


def lonely(routed: Indexed, experts: int) -> Indexed:
    """The last expert has one row, the one before it none."""
    ids = torch.where(routed.ids >= experts - 2, routed.ids - (experts // 2), routed.ids)
    ids[-1, -1] = experts - 1
    return Indexed(ids.to(torch.int32).contiguous(), routed.weights)


def plans() -> Iterator[tuple[Problem, int]]:
    """What most of these tests launch, to be compiled together."""
    yield from ((problem, tokens) for problem in SHIPPED for tokens in TOKENS)
    yield from ((other(*form), tokens) for form in OTHERS for tokens in FEW)
    for order in ("fast", BATCH_INVARIANT):
        yield from ((small(*form, order), tokens) for form in FORMS for tokens in (1, 4, 48, 100, 300, 2000, 4096))


WIDE = (
    "nvfp4", "int4", "int4-g32", "int4-g64:fp16", "int4-zp", "int4-g128-zp", "int8", "int8-g128", "fp8", "fp8-block",
)  # fmt: skip


OTHERS = [*((spec, "bf16") for spec in WIDE), ("int4-g128", "fp8")]
FEW = (2, 50, 700)


def other(spec: str, activations: str) -> Problem:
    return layer_problem(spec, activations, hidden=512, intermediate=256, experts=5, top_k=2)


@pytest.mark.parametrize(("spec", "activations"), OTHERS)
def test_every_other_form(spec: str, activations: str) -> None:
    """But fp16 inputs, whose range is too small for gates that are wholly open."""
    problem = other(spec, activations)
    check(problem, make(problem), FEW)


@pytest.mark.parametrize("number", range(len(SHIPPED)), ids=lambda number: named(SHIPPED[number]))
def test_every_shipped_configuration(number: int) -> None:
    """Problems and batches are those the set is made from, so every kernel of it runs here."""
    check(SHIPPED[number], layer_of(number), TOKENS)


def check(problem: Problem, layer: ExactLayer, batches: Sequence[int]) -> None:
    backend = registry()["hopper"]
    for tokens in batches:
        x = exact_inputs(layer, tokens, tokens)
        routed = exact_weights_of_slots(
            lonely(routing(problem, tokens, 1, kind=KINDS.get(tokens, "uniform")), problem.experts), 2
        )
        plan = make_plan(problem, tokens)
        call(backend, problem, x, routed, layer.weights, problem.hidden)
        poison_scratch()
        got = call(backend, problem, x, routed, layer.weights, problem.hidden)
        want = judge(layer, plan, x, routed)
        wrong = (got != want).sum(1)
        assert not wrong.any(), f"{tokens} tokens: {int((wrong > 0).sum())} rows differ, first {first(got, want)}"


def first(got: Tensor, want: Tensor) -> tuple[int, int, float, float]:
    row, column = (got != want).nonzero()[0].tolist()
    return row, column, float(got[row, column]), float(want[row, column])


def small(spec: str, activations: str, order: str) -> Problem:
    made = layer_problem(spec, activations, hidden=1024, intermediate=512, experts=16, top_k=4)
    return replace(made, order=order)


FORMS = [("mxfp4", "bf16"), ("mxfp4", "fp8"), ("int4-g128", "bf16"), ("int4-g128", "fp8")]


@pytest.mark.parametrize(("spec", "activations"), FORMS)
@pytest.mark.parametrize("tokens", [1, 4, 48, 300, 2000])
def test_fast_repeats_its_bits(spec: str, activations: str, tokens: int) -> None:
    problem = small(spec, activations, "fast")
    layer = make_layer(problem, "hopper")
    x, routed = torch.randn(tokens, 1024, device="cuda").bfloat16(), routing(problem, tokens, 3)
    want, same = layer(x, routed), torch.ones((), dtype=torch.bool, device="cuda")
    for _ in range(100):
        same &= (layer(x, routed) == want).all()
    assert bool(same)


@pytest.mark.parametrize(("spec", "activations"), FORMS)
def test_a_row_does_not_know_its_batch(spec: str, activations: str) -> None:
    """Every batch up to 256, some up to 4096; rows alone, and all of them in another order."""
    problem = small(spec, activations, BATCH_INVARIANT)
    layer = make_layer(problem, "hopper")
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
