"""Routing against reference values and against float64 loops."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from lancebill.errors import LaunchError, SpecError
from lancebill.moe.routing import (
    NONE,
    SIGMOID,
    SOFTMAX,
    SQRTSOFTPLUS,
    Method,
    Routed,
    Routing,
    SparseMixer,
    first_largest,
    route,
)
from lancebill.moe.simulation import Simulation

LOGITS = torch.tensor([[1.0, 2.0, 0.0, -1.0]])
GROUPED = torch.tensor([[0.9, 0.1, 0.5, 0.45, 0.6, 0.05, 0.2, 0.55]])
GROUP_BIAS = torch.tensor([0, 0, 0.1, 0.1, 0, 0, 0, 0])


def scores_of(scoring: str, row: list[float]) -> list[float]:
    if scoring == SOFTMAX:
        top = max(row)
        parts = [math.exp(x - top) for x in row]
        return [p / math.fsum(parts) for p in parts]
    one = {
        SIGMOID: lambda x: 1 / (1 + math.exp(-x)),
        SQRTSOFTPLUS: lambda x: math.sqrt(math.log1p(math.exp(x)) if x <= 20 else x),
        NONE: lambda x: x,
    }[scoring]
    return [one(x) for x in row]


def reference(routing: Routing, row: list[float], bias: list[float] | None) -> tuple[list[int], list[float]]:
    """The definition for one token, in float64 loops."""
    if routing.after_top_k:
        order = sorted(range(len(row)), key=lambda e: (-row[e], e))[: routing.top_k]
        weights = scores_of(routing.scoring, [row[e] for e in order])
    else:
        s = scores_of(routing.scoring, row)
        sel = [x + b for x, b in zip(s, bias)] if bias is not None else list(s)
        if routing.grouped:
            size = len(row) // routing.n_group
            groups = [sel[g * size : (g + 1) * size] for g in range(routing.n_group)]
            strength = [max(g) if bias is None else sum(sorted(g)[-2:]) for g in groups]
            kept = sorted(range(routing.n_group), key=lambda g: (-strength[g], g))[: routing.topk_group]
            sel = [x if e // size in kept else -math.inf for e, x in enumerate(sel)]
        order = sorted(range(len(row)), key=lambda e: (-sel[e], e))[: routing.top_k]
        weights = [s[e] for e in order]
    if routing.renormalize:
        total = sum(weights) + routing.epsilon
        weights = [w / (total if total > 0 else 1) for w in weights]
    return order, [w * routing.folded_scale for w in weights]


def route_one(routing: Routing, logits: Tensor, **inputs: Tensor) -> tuple[list[int], list[float]]:
    """Ids and weights of the first token."""
    routed = route(routing, logits, **inputs)
    return routed.ids[0].tolist(), routed.weights[0].tolist()


@pytest.mark.parametrize(
    ("scoring", "expected"),
    [
        (SOFTMAX, [0.643914, 0.236883, 0.087144, 0.032059]),
        (SIGMOID, [0.880797, 0.731059, 0.5, 0.268941]),
        (SQRTSOFTPLUS, [1.458399, 1.145976, 0.832555, 0.559698]),
        (NONE, [2, 1, 0, -1]),
    ],
)
def test_scoring_functions(scoring: str, expected: list[float]) -> None:
    ids, weights = route_one(Routing(4, scoring), LOGITS)
    assert ids == [1, 0, 2, 3]
    assert weights == pytest.approx(expected, abs=5e-7)


METHODS = [
    (Routing(2), Method.DEFAULT, [0.643914, 0.236883]),
    (Routing(2, after_top_k=True), Method.RENORMALIZE, [0.731059, 0.268941]),
    (Routing(1, SIGMOID, after_top_k=True, weight_on_input=True), Method.LLAMA4, [0.880797]),
    (Routing(2, renormalize=True), Method.RENORMALIZE_NAIVE, [0.731059, 0.268941]),
    (Routing(2, NONE), Method.TOP_K, [2, 1]),
    (Routing(2, SIGMOID, renormalize=True), Method.SIGMOID_RENORM, [0.546449, 0.453551]),
    (Routing(2, SIGMOID), Method.SIGMOID, [0.880797, 0.731059]),
    (Routing(2, SQRTSOFTPLUS, renormalize=True), Method.DEEPSEEK_V4, [0.55998, 0.44002]),
    (
        Routing(2, SQRTSOFTPLUS, renormalize=True, routed_scaling_factor=1.5),
        Method.DEEPSEEK_V4,
        [0.839971, 0.660029],
    ),
]


@pytest.mark.parametrize(("routing", "method", "expected"), METHODS)
def test_methods(routing: Routing, method: Method, expected: list[float]) -> None:
    assert routing.method is method
    ids, weights = route_one(routing, LOGITS)
    assert ids == [1, 0][: routing.top_k]
    assert weights == pytest.approx(expected, abs=1e-6)


def test_method_numbers_are_flashinfers() -> None:
    names = "DEFAULT RENORMALIZE DEEPSEEK_V3 LLAMA4 RENORMALIZE_NAIVE TOP_K SIGMOID_RENORM MINIMAX2 SIGMOID UNSPECIFIED"
    assert [Method[name] for name in names.split()] == list(range(10))
    assert (Method.DEEPSEEK_V4, Method.CUSTOM, Method.SIMULATED) == (100, 101, 102)


BIASED = Routing(2, SIGMOID, renormalize=True, correction=True)


@pytest.mark.parametrize(
    ("routing", "method"),
    [
        (replace(BIASED, n_group=8, topk_group=4, routed_scaling_factor=2.5), Method.DEEPSEEK_V3),
        (replace(BIASED, n_group=1, topk_group=1, routed_scaling_factor=2.5), Method.DEEPSEEK_V3),
        (BIASED, Method.MINIMAX2),
        (replace(BIASED, routed_scaling_factor=2.0), Method.UNSPECIFIED),
        (replace(BIASED, routed_scaling_factor=2.0, apply_scale_to_output=True), Method.MINIMAX2),
        (replace(BIASED, renormalize=False), Method.UNSPECIFIED),
        (replace(BIASED, scoring=SOFTMAX), Method.UNSPECIFIED),
        (Routing(2, SQRTSOFTPLUS), Method.UNSPECIFIED),
        (Routing(2, NONE, renormalize=True), Method.UNSPECIFIED),
        # The named methods have neither groups nor a scale.
        (Routing(2, n_group=4, topk_group=2), Method.UNSPECIFIED),
        (Routing(2, routed_scaling_factor=16.0), Method.UNSPECIFIED),
        (Routing(2, zero_experts=1), Method.UNSPECIFIED),
        (Routing(2, custom=SparseMixer()), Method.CUSTOM),
        (Routing(2, simulated=Simulation()), Method.SIMULATED),
    ],
)
def test_classification(routing: Routing, method: Method) -> None:
    assert routing.method is method


def test_the_bias_affects_selection_but_not_weights() -> None:
    ids, weights = route_one(BIASED, LOGITS, correction_bias=torch.tensor([0, 0, 0.6, 0]))
    assert ids == [2, 1]
    assert weights == pytest.approx([0.36211, 0.63789], abs=1e-5)


def test_groups_without_bias_are_ranked_by_their_largest_score() -> None:
    routing = Routing(3, NONE, renormalize=True, n_group=4, topk_group=2)
    ids, weights = route_one(routing, GROUPED)
    assert ids == [0, 4, 1]
    assert weights == pytest.approx([0.5625, 0.375, 0.0625], abs=1e-6)


def test_groups_with_bias_are_ranked_by_their_two_largest_scores() -> None:
    routing = Routing(3, NONE, renormalize=True, n_group=4, topk_group=2)
    ids, weights = route_one(routing, GROUPED, correction_bias=GROUP_BIAS)
    assert ids == [0, 2, 3]
    assert weights == pytest.approx([0.486486, 0.27027, 0.243243], abs=1e-6)
    _, scaled = route_one(replace(routing, routed_scaling_factor=2.5), GROUPED, correction_bias=GROUP_BIAS)
    assert scaled == pytest.approx([1.216216, 0.675676, 0.608108], abs=1e-6)


def test_negative_biased_scores_do_not_lose_to_excluded_groups() -> None:
    """If excluded groups were masked with 0 instead of -inf, their experts would win."""
    routing = Routing(3, SIGMOID, n_group=2, topk_group=1)
    bias = torch.tensor([-2.0, -2, -2, -3, -3, -3])
    ids, _ = route_one(routing, torch.zeros(1, 6), correction_bias=bias)
    assert ids == [0, 1, 2]


def every_routing(experts: int) -> list[Routing]:
    plain = [
        Routing(k, scoring, renormalize=norm, n_group=groups, topk_group=kept, routed_scaling_factor=scale)
        for k, scoring, norm, (groups, kept), scale in itertools.product(
            (1, 3), (SOFTMAX, SIGMOID, SQRTSOFTPLUS, NONE), (False, True), ((0, 0), (1, 1), (4, 2)), (1.0, 2.5)
        )
    ]
    after = [Routing(k, scoring, after_top_k=True) for k in (1, 3) for scoring in (SOFTMAX, SIGMOID)]
    return [*plain, *after, Routing(experts, SIGMOID, renormalize=True, epsilon=1e-20), Routing(experts)]


@pytest.mark.parametrize("biased", [False, True])
def test_every_method_agrees_with_float64_loops(biased: bool) -> None:
    experts = 24
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(9, experts, generator=generator) * 4).to(torch.bfloat16)
    logits[0, 5] = 30.0  # torch's softplus is the identity above 20
    bias = torch.randn(experts, generator=generator) if biased else None
    for routing in every_routing(experts):
        if biased and routing.after_top_k:
            continue
        routed = route(routing, logits, correction_bias=bias)
        assert routed.ids.dtype == torch.int32
        assert routed.weights.dtype == torch.float32
        for row, ids, weights in zip(logits.tolist(), routed.ids.tolist(), routed.weights.tolist()):
            expected_ids, expected = reference(routing, row, None if bias is None else bias.tolist())
            # bf16 logits repeat, and adding a large bias can round unequal scores to equal ones: compare as sets
            assert sorted(ids) == sorted(expected_ids), routing
            named = dict(zip(expected_ids, expected))
            np.testing.assert_allclose(weights, [named[e] for e in ids], rtol=2e-6, atol=1e-7, err_msg=str(routing))


@pytest.mark.parametrize("experts", [4, 60, 256, 512])
def test_ties_go_to_the_lowest_index(experts: int) -> None:
    logits = torch.zeros(3, experts)
    logits[1, experts // 2] = 1.0
    logits[2, 1] = -0.0  # must tie with 0.0
    for scoring in (SOFTMAX, SIGMOID, SQRTSOFTPLUS, NONE):
        ids = route(Routing(3, scoring), logits).ids.tolist()
        assert ids == [[0, 1, 2], [experts // 2, 0, 1], [0, 1, 2]]
    flat = torch.zeros(1, experts)
    assert route(Routing(2, SIGMOID, n_group=4, topk_group=2), flat).ids.tolist()[0] == [0, 1][:2]
    assert first_largest(torch.tensor([3.0, 5, 5, 3, 5]), 4).tolist() == [1, 2, 4, 0]


def test_saturated_sigmoids_do_not_tie_when_the_logits_select() -> None:
    logits = torch.tensor([[30.0, 40.0, 35.0]])
    assert route_one(Routing(1, SIGMOID), logits)[0] == [0]
    assert route_one(Routing(1, SIGMOID, after_top_k=True), logits)[0] == [1]


@pytest.mark.parametrize("scoring", [SOFTMAX, SIGMOID, SQRTSOFTPLUS, NONE])
@pytest.mark.parametrize("after", [False, True])
def test_a_nan_is_chosen_first_and_its_weight_is_nan(scoring: str, after: bool) -> None:
    nan = math.nan
    logits = torch.tensor([[1.0, -50.0, -nan, 7.0], [nan, nan, nan, nan], [-torch.inf, 0.0, 2.0, 1.0]])
    routed = route(Routing(2, scoring, after_top_k=after), logits)
    assert routed.weights[:2, 0].isnan().all() and routed.weights[2].isfinite().all()
    assert routed.ids.tolist()[1:] == [[0, 1], [2, 3]]
    if scoring != SOFTMAX or after:  # a softmax over all of them is all NaN
        assert routed.ids[0].tolist() == [2, 3]
    for renormalize in (False, True):
        whole = Routing(2, SIGMOID, renormalize=renormalize)
        assert route(whole, logits).weights.isnan().tolist()[0] == [True, renormalize]


def test_infinite_logits_are_computed_as_they_are() -> None:
    """A mask of -inf excludes experts; +inf saturates a sigmoid and has no softmax, as in torch."""
    inf = torch.inf
    assert route_one(Routing(2), torch.tensor([[-inf, 0.0, -inf, 0.0]])) == ([1, 3], [0.5, 0.5])
    assert route_one(Routing(2, SIGMOID), torch.tensor([[0.0, inf, -inf, 0.0]])) == ([1, 0], [1.0, 0.5])
    for row in ([inf, 0.0, 0.0], [-inf, -inf, -inf]):
        assert route(Routing(2), torch.tensor([row])).weights.isnan().all()


def test_a_nan_is_chosen_first_despite_a_bias_and_in_its_group() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0, math.nan]])
    bias = torch.tensor([9.0, 0, 0.5, -9.0])
    assert route(Routing(3, SIGMOID), logits, correction_bias=bias).ids.tolist() == [[3, 0, 2]]
    assert route(Routing(1, SIGMOID), logits.new_zeros(1, 4), correction_bias=logits[0]).weights.isnan().all()
    for corrected in (None, torch.zeros(4)):
        grouped = Routing(2, SIGMOID, n_group=2, topk_group=1)
        routed = route(grouped, torch.tensor([[9.0, 9.0, -5.0, math.nan]]), correction_bias=corrected)
        assert routed.ids.tolist() == [[3, 2]] and routed.weights.isnan().tolist() == [[True, False]]


def test_all_experts_and_no_tokens() -> None:
    ids, weights = route_one(Routing(4, renormalize=True), LOGITS)
    assert (ids, sum(weights)) == ([1, 0, 2, 3], pytest.approx(1.0))
    empty = route(Routing(2, SIGMOID, n_group=2, topk_group=1), torch.zeros(0, 4))
    assert (empty.ids.shape, empty.weights.shape) == ((0, 2), (0, 2))


def test_renormalising_a_zero_sum_does_not_divide_by_zero() -> None:
    assert route_one(Routing(2, NONE, renormalize=True), torch.zeros(1, 4))[1] == [0, 0]
    assert route_one(Routing(2, SIGMOID, renormalize=True), torch.full((1, 4), -1000.0))[1] == [0, 0]


@pytest.mark.parametrize("experts", [12, 60, 64])
def test_routing_is_batch_invariant(experts: int) -> None:
    generator = torch.Generator().manual_seed(experts)
    logits = torch.randn(257, experts, generator=generator) * 3
    bias = torch.randn(experts, generator=generator)
    for routing in (
        *every_routing(experts)[::5],
        Routing(2, custom=SparseMixer()),
        Routing(4, SIGMOID, zero_experts=5),
    ):
        used_bias = None if routing.after_top_k else bias
        batch = route(routing, logits, correction_bias=used_bias)
        for row in (0, 1, 100, 256):
            alone = route(routing, logits[row : row + 1].clone(), correction_bias=used_bias)
            assert same(alone, batch, row), routing


@pytest.mark.parametrize("scoring", [SOFTMAX, SIGMOID, SQRTSOFTPLUS])
def test_scores_do_not_depend_on_the_position_in_the_batch(scoring: str) -> None:
    """Twelve columns: alone a vector of eight and a scalar remainder, in a batch part of a longer vector loop."""
    logits = torch.randn(257, 12, generator=torch.Generator().manual_seed(9)) * 3
    routing = Routing(12, scoring)
    batch = route(routing, logits)
    assert all(same(route(routing, logits[row : row + 1].clone()), batch, row) for row in range(257))


def same(alone: Routed, batch: Routed, row: int) -> bool:
    identity = batch.identity_weight is None or torch.equal(batch.identity_weight[row], alone.identity_weight[0])
    return identity and torch.equal(alone.ids[0], batch.ids[row]) and torch.equal(alone.weights[0], batch.weights[row])


def test_bf16_logits_score_in_fp32_and_the_bias_keeps_its_bits() -> None:
    logits = torch.tensor([[0.5, 0.25]], dtype=torch.bfloat16)
    assert route_one(Routing(2, SIGMOID), logits)[1] == pytest.approx([0.6224593, 0.5621765], abs=1e-7)
    near = torch.tensor([1.0, 1 + 1 / 1024])  # equal in bf16
    assert route_one(Routing(1, SIGMOID), torch.zeros(1, 2, dtype=torch.bfloat16), correction_bias=near)[0] == [1]


def test_the_scale_may_be_left_to_the_output() -> None:
    routing = Routing(2, SIGMOID, routed_scaling_factor=2.5, apply_scale_to_output=True)
    assert route_one(routing, LOGITS)[1] == pytest.approx([0.880797, 0.731059], abs=1e-6)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"scoring": "hardmax"}, "hardmax"),
        ({"top_k": 0}, "top_k"),
        ({"weight_on_input": True}, "top-1"),
        ({"n_group": 4}, "groups"),
        ({"n_group": 4, "topk_group": 5}, "groups"),
        ({"topk_group": 1}, "groups"),
        ({"n_group": 4, "topk_group": 2, "custom": SparseMixer()}, "groups and custom"),
        ({"n_group": 4, "topk_group": 2, "hashed": True}, "groups and hashed"),
        ({"n_group": 4, "topk_group": 2, "after_top_k": True}, "groups and after_top_k"),
    ],
)
def test_invalid_routings_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Routing(**{"top_k": 2, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("routing", "experts", "biased"),
    [
        (Routing(2, SIGMOID, n_group=4, topk_group=2), 10, False),  # not divisible
        (Routing(5, SIGMOID, n_group=4, topk_group=2), 8, False),  # more than the experts in the chosen groups
        (Routing(2, SIGMOID, n_group=8, topk_group=2), 8, True),  # groups of one expert have no two largest scores
        (Routing(9), 8, False),
    ],
)
def test_impossible_groupings(routing: Routing, experts: int, biased: bool) -> None:
    bias = torch.zeros(experts) if biased else None
    with pytest.raises(SpecError):
        route(routing, torch.zeros(2, experts), correction_bias=bias)
    assert route(replace(routing, top_k=1, n_group=0, topk_group=0), torch.zeros(2, experts)).ids.shape == (2, 1)


@pytest.mark.parametrize(
    ("routing", "logits", "inputs"),
    [
        (Routing(2), torch.zeros(4), {}),
        (Routing(2), torch.zeros(1, 4, dtype=torch.int64), {}),
        (Routing(2), LOGITS, {"hidden": torch.zeros(2, 8)}),
        (Routing(2), LOGITS, {"correction_bias": torch.zeros(3)}),
        (Routing(2, correction=True), LOGITS, {}),
        (Routing(2, zero_experts=4), LOGITS, {}),
    ],
)
def test_invalid_inputs_are_refused(routing: Routing, logits: Tensor, inputs: dict[str, Tensor]) -> None:
    with pytest.raises(LaunchError):
        route(routing, logits, **inputs)
