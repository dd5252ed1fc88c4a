"""Dispatch forms: stable orders, and equal results of one layer in all three forms."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lancebill.backends.reference import BACKEND
from lancebill.errors import LaunchError
from lancebill.moe.activation import Activation
from lancebill.moe.device import Device
from lancebill.moe.dispatch import Indexed, combine, group_slots, localize, to_batched, to_contiguous
from lancebill.moe.layout import MatrixShape, Packed
from lancebill.moe.problem import BATCHED, CONTIGUOUS, Problem
from lancebill.numbers.codec import dequantize, quantize
from lancebill.numbers.spec import CHANNEL, int_spec
from lancebill.numbers.spec_names import ACTIVATIONS
from lancebill.numbers.weight import LogicalWeight

IDS = torch.tensor([[1, 2], [0, 1], [1, 3]])
HIDDEN, INTER, EXPERTS, TOP_K = 16, 12, 6, 3


def test_slots_are_grouped_by_expert_in_slot_order() -> None:
    groups = group_slots(IDS, 4)
    assert groups.slots.tolist() == [2, 0, 3, 4, 1, 5]
    assert groups.offsets.tolist() == [0, 1, 4, 5, 6]
    assert groups.offsets.dtype == torch.int64
    assert groups.rows(2).tolist() == [1, 0, 1, 2, 0, 2]
    assert torch.argsort(groups.slots).tolist() == [1, 4, 0, 2, 3, 5]


def test_slots_of_other_ranks_are_dropped() -> None:
    expert_map = torch.tensor([-1, 0, -1, 1], dtype=torch.int32)
    local = localize(IDS, expert_map, 2)
    assert local.tolist() == [[0, -1], [-1, 0], [0, 1]]
    assert local.dtype == torch.int32
    groups = group_slots(local, 2)
    assert groups.slots.tolist() == [0, 3, 4, 5]
    assert groups.offsets.tolist() == [0, 3, 4]


def test_ids_outside_the_experts_never_wrap_around() -> None:
    wild = torch.tensor([[-1, 4], [-7, 3], [2, 100]])
    assert localize(wild, None, 4).tolist() == [[-1, -1], [-1, 3], [2, -1]]
    expert_map = torch.tensor([0, 1, 2, 3])
    assert localize(wild, expert_map, 4).tolist() == [[-1, -1], [-1, 3], [2, -1]]


def test_ids_past_the_last_expert_are_dropped() -> None:
    assert group_slots(torch.tensor([[5, 0], [-1, 1]]), 2).slots.tolist() == [1, 3]


def test_no_tokens_and_no_slots() -> None:
    for ids in (torch.zeros(0, 2, dtype=torch.int32), torch.full((3, 2), -1, dtype=torch.int32)):
        groups = group_slots(ids, 4)
        assert groups.slots.numel() == 0
        assert groups.offsets.tolist() == [0] * 5


def test_batched_rows_past_the_counts_are_nan() -> None:
    x = torch.arange(6.0).view(3, 2)
    rows, batched, _ = to_batched(x, Indexed(IDS, torch.ones(3, 2)), 4, capacity=4)
    assert batched.counts.tolist() == [1, 3, 1, 1]
    assert rows[1, :3].tolist() == x.tolist()
    assert all(rows[e, count:].isnan().all() for e, count in enumerate(batched.counts.tolist()))
    with pytest.raises(LaunchError, match="more tokens"):
        to_batched(x, Indexed(IDS, torch.ones(3, 2)), 4, capacity=2)


def test_combine_sums_in_slot_order_and_ignores_empty_slots() -> None:
    ids = torch.tensor([[0, -1, 1], [-1, -1, -1]])
    weights = torch.tensor([[0.5, torch.nan, 2.0], [torch.inf, torch.nan, 1.0]])
    rows = torch.tensor([[2.0, 4.0], [3.0, 5.0]])
    out = combine(rows, group_slots(ids, 2), Indexed(ids, weights), torch.full((2, 2), torch.nan))
    assert out.tolist() == [[7.0, 12.0], [0.0, 0.0]]


class Layer:
    """A small layer of int8 experts: packed, and as fp32 matrices for the reference computation."""

    def __init__(self, experts: int, activation: Activation, bias: bool) -> None:
        generator = torch.Generator().manual_seed(11)
        spec = int_spec(8, CHANNEL)
        rows = INTER * (2 if activation.gated else 1)
        shapes = {
            "w13": MatrixShape("w13", rows, HIDDEN, spec, bias),
            "w2": MatrixShape("w2", HIDDEN, INTER, spec, bias),
        }
        self.problem = Problem(
            shapes["w13"],
            shapes["w2"],
            experts,
            experts,
            TOP_K,
            activation,
            activations=ACTIVATIONS["fp32"],
        )
        layout = BACKEND.layout(self.problem)
        self.packed: dict[str, Packed] = {}
        self.plain: dict[str, list[tuple[Tensor, Tensor]]] = {}
        for name, shape in shapes.items():
            self.packed[name] = layout.allocate(shape, experts)
            self.plain[name] = []
            for expert in range(experts):
                codes = quantize(torch.randn(shape.n, shape.k, generator=generator), spec)
                b = torch.randn(shape.n, generator=generator) if bias else None
                weight = LogicalWeight(spec, codes.codes, codes.scales, codes.zero, bias=b)
                layout.pack(shape, weight, {n: t[expert] for n, t in self.packed[name].items()})
                self.plain[name].append((dequantize(weight), torch.zeros(shape.n) if b is None else b))

    def reference(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Token by token, slot by slot: y += w * (W2 act(W13 x + b13) + b2)."""
        out = torch.zeros(x.shape[0], HIDDEN)
        for token in range(x.shape[0]):
            for slot in range(ids.shape[1]):
                expert = int(ids[token, slot])
                if expert < 0:
                    continue
                (w13, b13), (w2, b2) = self.plain["w13"][expert], self.plain["w2"][expert]
                hidden = self.problem.activation((w13 @ x[token] + b13).unsqueeze(0))[0]
                out[token] += weights[token, slot] * (w2 @ hidden + b2)
        return out


def indexed(layer: Layer, x: Tensor, work: Indexed, problem: Problem | None = None) -> Tensor:
    plan = BACKEND.plan(problem or layer.problem, x.shape[0], Device("cpu"))
    return BACKEND.run(plan, x, work, layer.packed, torch.full((x.shape[0], HIDDEN), torch.nan))


def contiguous(layer: Layer, x: Tensor, work: Indexed) -> Tensor:
    rows, dispatch, groups = to_contiguous(x, work, EXPERTS)
    plan = BACKEND.plan(replace(layer.problem, dispatch=CONTIGUOUS), x.shape[0], Device("cpu"))
    results = BACKEND.run(plan, rows, dispatch, layer.packed, torch.full((rows.shape[0], HIDDEN), torch.nan))
    return combine(results, groups, work, torch.empty(x.shape[0], HIDDEN))


def batched(layer: Layer, x: Tensor, work: Indexed) -> Tensor:
    padded, dispatch, groups = to_batched(x, work, EXPERTS, capacity=x.shape[0] * TOP_K + 2)
    plan = BACKEND.plan(replace(layer.problem, dispatch=BATCHED), x.shape[0], Device("cpu"))
    filled = BACKEND.run(plan, padded, dispatch, layer.packed, torch.full_like(padded, torch.nan))
    for expert, count in enumerate(dispatch.counts.tolist()):
        assert filled[expert, count:].isnan().all(), "rows past the count were written"
    rows = torch.cat([filled[e, :count] for e, count in enumerate(dispatch.counts.tolist())])
    return combine(rows, groups, work, torch.empty(x.shape[0], HIDDEN))


def work_of(tokens: int, experts: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, HIDDEN, generator=generator)
    ids = torch.rand(tokens, experts, generator=generator).argsort(dim=1)[:, :TOP_K]
    ids[::5, 1] = -1
    ids[3::7] = -1  # a padded row
    return x, ids, torch.rand(tokens, TOP_K, generator=generator)


LAYERS = [
    pytest.param(Activation("silu"), False, id="silu"),
    pytest.param(Activation("swigluoai", limit=7.0), True, id="swigluoai with bias"),
    pytest.param(Activation("relu2_no_mul"), False, id="relu2"),
]


@pytest.mark.parametrize("tokens", [0, 1, 17, 257])
@pytest.mark.parametrize(("activation", "bias"), LAYERS)
def test_all_three_dispatch_forms_give_equal_results(activation: Activation, bias: bool, tokens: int) -> None:
    layer = Layer(EXPERTS, activation, bias)
    x, ids, weights = work_of(tokens, EXPERTS, seed=tokens)
    work = Indexed(localize(ids, None, EXPERTS), weights)
    results = [form(layer, x, work) for form in (indexed, contiguous, batched)]
    expected = layer.reference(x, ids, weights)
    for result in results:
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-4)
        assert torch.equal(result, results[0])


@pytest.mark.parametrize("tokens", [0, 1, 17, 257])
def test_expert_parallel_ranks_sum_to_the_full_layer(tokens: int) -> None:
    layer = Layer(EXPERTS, Activation("silu"), bias=True)
    x, ids, weights = work_of(tokens, 2 * EXPERTS, seed=tokens + 1)
    everywhere = torch.arange(2 * EXPERTS)
    total = torch.zeros(tokens, HIDDEN)
    expected = torch.zeros(tokens, HIDDEN)
    for rank in range(2):  # round robin: expert e is local expert e // 2 of rank e % 2
        expert_map = torch.where(everywhere % 2 == rank, everywhere // 2, -1)
        local = localize(ids, expert_map, EXPERTS)
        assert torch.equal(local, torch.where((ids >= 0) & (ids % 2 == rank), ids // 2, -1))
        parts = [form(layer, x, Indexed(local, weights)) for form in (indexed, contiguous, batched)]
        assert all(torch.equal(part, parts[0]) for part in parts)
        total += parts[0]
        expected += layer.reference(x, local, weights)
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-4)


def test_a_nan_token_does_not_affect_other_tokens() -> None:
    layer = Layer(EXPERTS, Activation("silu"), bias=False)
    x, ids, weights = work_of(17, EXPERTS, seed=2)
    clean = indexed(layer, x, Indexed(localize(ids, None, EXPERTS), weights))
    x[4] = torch.nan
    for form in (indexed, contiguous, batched):
        dirty = form(layer, x, Indexed(localize(ids, None, EXPERTS), weights))
        others = torch.arange(17) != 4
        assert torch.equal(dirty[others], clean[others])
        assert dirty[4].isnan().all()


def test_weights_on_the_input_are_not_applied_again() -> None:
    layer = Layer(EXPERTS, Activation("silu"), bias=True)
    x, ids, weights = work_of(17, EXPERTS, seed=4)
    top = replace(layer.problem, top_k=1, weight_on_input=True)
    result = indexed(layer, x, Indexed(ids[:, :1], weights[:, :1]), top)
    expected = layer.reference(x * weights[:, :1], ids[:, :1], torch.ones(17, 1))
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-4)
    assert not torch.allclose(result, layer.reference(x, ids[:, :1], weights[:, :1]), atol=1e-2)
