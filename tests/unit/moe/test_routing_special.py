"""Routing without plain top-k: hash tables, zero experts, custom functions, simulated routing."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from lancebill.errors import LaunchError, SpecError
from lancebill.moe.routing import NONE, SOFTMAX, SQRTSOFTPLUS, Method, Routing, SparseMixer, route
from lancebill.moe.simulation import KINDS, Simulation

LOGITS = torch.tensor([[1.0, 2.0, 0.0, -1.0]])

HASHED = Routing(2, SQRTSOFTPLUS, renormalize=True, routed_scaling_factor=1.5, hashed=True)
TABLE = torch.tensor([[0, 1], [3, 2], [2, 0]])


def test_hash_routing_takes_experts_from_the_table_and_weights_from_scores() -> None:
    logits = LOGITS.repeat(4, 1)
    routed = route(HASHED, logits, table=TABLE, input_ids=torch.tensor([1, 0, -1, 2]))
    assert HASHED.method is Method.DEEPSEEK_V4
    assert routed.ids.tolist() == [[3, 2], [0, 1], [-1, -1], [2, 0]]
    s = [1.145976, 1.458399, 0.832555, 0.559698]
    expected = [[s[3], s[2]], [s[0], s[1]], [0, 0], [s[2], s[0]]]
    totals = [max(sum(pair), 1e-30) for pair in expected]
    np.testing.assert_allclose(
        routed.weights, [[1.5 * a / t for a in pair] for pair, t in zip(expected, totals)], atol=1e-6
    )
    biased = route(
        HASHED, logits, table=TABLE, input_ids=torch.tensor([1, 0, -1, 2]), correction_bias=torch.ones(4) * 9
    )
    assert torch.equal(biased.weights, routed.weights)


def test_invalid_table_entries_are_dropped() -> None:
    routed = route(HASHED, LOGITS, table=torch.tensor([[4, 1]]), input_ids=torch.tensor([0]))
    assert routed.ids.tolist() == [[-1, 1]]
    assert routed.weights.tolist() == [[0, 1.5]]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"table": TABLE}, "input_ids"),
        ({"input_ids": torch.tensor([0])}, "table"),
        ({"table": TABLE[:, :1], "input_ids": torch.tensor([0])}, "table"),
        ({"table": TABLE, "input_ids": torch.tensor([0, 1])}, "input_ids"),
        ({"table": TABLE, "input_ids": torch.tensor([3])}, "outside the table"),
    ],
)
def test_hash_routing_without_its_inputs(inputs: dict[str, Tensor], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        route(HASHED, LOGITS, **inputs)


def test_zero_experts_become_an_identity_weight() -> None:
    logits = torch.tensor([[3.0, 0.0, 2.0, 1.0], [3.0, 2.0, 0.0, 0.0], [0.0, 0.0, 9.0, 8.0]])
    routing = Routing(2, SOFTMAX, zero_experts=2, routed_scaling_factor=6.0)
    routed = route(routing, logits, correction_bias=torch.zeros(4))
    whole = route(replace(routing, zero_experts=0), logits, correction_bias=torch.zeros(4))
    assert routed.ids.tolist() == [[0, -1], [0, 1], [-1, -1]]
    is_zero = whole.ids >= 2
    assert torch.equal(routed.weights, torch.where(is_zero, 0.0, whole.weights))
    assert routed.identity_weight is not None
    np.testing.assert_allclose(routed.identity_weight, torch.where(is_zero, whole.weights, 0.0).sum(1), rtol=1e-6)


def test_custom_functions_get_all_arguments_and_their_results_are_cast() -> None:
    def backwards(hidden: Tensor | None, logits: Tensor, top_k: int, norm: bool) -> tuple[Tensor, Tensor]:
        assert hidden is not None
        assert norm
        worst = (-logits).topk(top_k).indices
        return torch.full(worst.shape, 0.5, dtype=torch.float64), worst.to(torch.int16)

    routing = Routing(2, custom=backwards, renormalize=True, routed_scaling_factor=2.0)
    routed = route(routing, LOGITS, hidden=torch.zeros(1, 8))
    assert routed.ids.tolist() == [[3, 2]]
    assert routed.weights.tolist() == [[1.0, 1.0]]
    assert (routed.ids.dtype, routed.weights.dtype) == (torch.int32, torch.float32)
    with pytest.raises(LaunchError, match="custom"):
        route(replace(routing, custom=lambda h, x, k, n: (x, x)), LOGITS)


def sparsemixer_reference(row: list[float], jitter: float) -> tuple[list[int], list[float]]:
    ids, weights = [], []
    for _ in range(2):
        left = [x if e not in ids else -math.inf for e, x in enumerate(row)]
        best = max(range(len(row)), key=lambda e: left[e])
        near = [
            e
            for e, x in enumerate(row)
            if left[e] > -math.inf and not (left[best] - x) / max(abs(x), left[best]) > 2 * jitter
        ]
        total = sum(math.exp(row[e] - left[best]) for e in near)
        ids.append(best)
        weights.append(1 / total)
    return ids, weights


def test_sparsemixer_agrees_with_float64_loops() -> None:
    generator = torch.Generator().manual_seed(5)
    for jitter in (0.0, 0.01, 0.3):
        logits = torch.randn(64, 8, generator=generator)
        routed = route(Routing(2, NONE, custom=SparseMixer(jitter)), logits)
        for row, ids, weights in zip(logits.tolist(), routed.ids.tolist(), routed.weights.tolist()):
            expected_ids, expected = sparsemixer_reference(row, jitter)
            assert ids == expected_ids
            assert weights == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("kind", list(KINDS))
def test_simulated_routing_is_seeded_and_legal(kind: str) -> None:
    logits = torch.zeros(500, 32, dtype=torch.bfloat16)
    routing = Routing(4, simulated=Simulation(kind, seed=7), correction=True)
    routed = route(routing, logits)
    assert torch.equal(routed.ids, route(routing, logits).ids)
    assert all(len(set(row)) == 4 and min(row) >= 0 and max(row) < 32 for row in routed.ids.tolist())
    assert (routed.weights == 0.25).all()
    other = route(replace(routing, simulated=Simulation(kind, seed=8)), logits)
    assert not torch.equal(routed.ids, other.ids)


def test_simulated_loads_follow_their_distribution() -> None:
    def load(kind: str) -> list[int]:
        ids = route(Routing(2, simulated=Simulation(kind)), torch.zeros(4000, 16)).ids
        return sorted(torch.bincount(ids.flatten(), minlength=16).tolist(), reverse=True)

    uniform, zipf, normal, one_hot = (load(kind) for kind in ("uniform", "zipf", "normal", "one-hot"))
    assert all(abs(count - 500) < 5 * math.sqrt(500) for count in uniform), "five standard deviations"
    assert zipf[0] > 5 * zipf[-1]
    assert normal[0] > 10 * normal[-1]
    assert one_hot == [4000, 4000] + [0] * 14
    busy, empty, one = (load(kind) for kind in ("eight-busy", "half-empty", "half-to-one"))
    assert busy[8:] == empty[8:] == [0] * 8 and busy[7] > 0.8 * busy[0] and empty[7] > 0.8 * empty[0]
    assert one[0] >= 2000 > 3 * one[1]


def test_unknown_simulation() -> None:
    with pytest.raises(SpecError, match="pareto"):
        Simulation("pareto")
