"""Experts and batches of a benchmark."""

from __future__ import annotations

import pytest
import torch
from bench_problems import CPU, SHAPE, problem_of

from lancebill.backends import oracle
from lancebill.bench import workload
from lancebill.bench.check import check_output, expected_rows
from lancebill.bench.split_layer import make_layer
from lancebill.bench.workload import Batch, Weights, batches
from lancebill.errors import LaunchError
from lancebill.moe.layout import PlainLayout
from lancebill.moe.model_shapes import parse_shape

pytestmark = pytest.mark.usefixtures("quick")


@pytest.mark.parametrize("spec", ["bf16", "mxfp4", "nvfp4", "int4-g32-zp", "fp8-block"])
def test_experts_have_different_weights(spec: str) -> None:
    problem = problem_of(spec, shape=parse_shape("8,64,64,2"))
    packed = Weights(problem, CPU).packed(PlainLayout())
    for tensors in packed.values():
        rows = tensors["codes"].flatten(1)
        assert rows.shape[0] == len({tuple(row.tolist()) for row in rows}) == 8
        assert all(bool((row != 0).any()) for row in rows)


def test_weights_are_deterministic() -> None:
    problem = problem_of("int4-g32")
    one, other = (Weights(problem, CPU) for _ in range(2))
    whole = one.packed(PlainLayout())
    part = other.packed(PlainLayout(), [3, 1])
    for matrix, tensors in part.items():
        assert all(torch.equal(tensor, whole[matrix][name][[3, 1]]) for name, tensor in tensors.items())
    assert torch.equal(one.dense("w2", torch.float32), other.dense("w2", torch.float32))
    assert one.dense("w2", torch.float32) is one.dense("w2", torch.float32)


def test_batches_have_different_routings() -> None:
    problem = problem_of(shape=parse_shape("16,64,64,2"))
    uniform, popular, hot = (batches(problem, 32, kind, 4, CPU) for kind in ("uniform", "zipf", "one-hot"))
    assert len({tuple(b.ids.flatten().tolist()) for b in uniform}) == 4
    assert {b.experts for b in hot} == {2}
    assert len({tuple(b.ids[0].sort().values.tolist()) for b in hot}) > 1
    most = [torch.bincount(b.ids.flatten(), minlength=16).max() for b in (uniform[0], popular[0], hot[0])]
    assert most[0] < most[1] < most[2] == 32
    for batch in uniform:
        assert batch.weights.sum(1).allclose(torch.ones(32))
        assert batch.x.dtype == torch.bfloat16 and bool((batch.x != 0).all())


@pytest.mark.parametrize("moves", ["off", "recency"])
def test_a_split_layer_is_the_whole_layer(moves: str) -> None:
    problem = problem_of()
    weights, batch = Weights(problem, torch.device("cpu")), batches(problem, 5, "uniform", 1, torch.device("cpu"))[0]
    choice = oracle.select(problem, "cpu")
    for on_device in (0, 1, SHAPE.experts):
        layer = make_layer(choice, weights, on_device, moves)
        assert layer.is_split == (on_device < SHAPE.experts)
        assert (layer.moves is not None) == (layer.is_split and moves != "off")
        out = layer(batch.x, topk_ids=batch.ids, topk_weights=batch.weights)
        check_output("split", problem, weights, batch, out)


def test_weights_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload, "_available", lambda device: 1000)
    with pytest.raises(LaunchError, match="fit in memory"):
        Weights(problem_of(), CPU).packed(PlainLayout())


def test_experts_repeat_after_distinct_ones() -> None:
    problem = problem_of("int4-g32")
    repeated, own = Weights(problem, CPU, distinct=2), Weights(problem, CPU)
    packed = repeated.packed(PlainLayout())["w13"]["codes"]
    assert torch.equal(packed[2], packed[0]) and torch.equal(packed[3], packed[1])
    assert packed[2].data_ptr() != packed[0].data_ptr()
    dense = repeated.dense("w2", torch.float32)
    assert torch.equal(dense[3], dense[1]) and torch.equal(dense[:2], own.dense("w2", torch.float32)[:2])
    assert not torch.equal(own.dense("w2", torch.float32)[3], dense[3])


def test_rows_without_experts_are_zero() -> None:
    problem = problem_of()
    batch = Batch(torch.randn(2, 64).bfloat16(), torch.full((2, 2), -1, dtype=torch.int32), torch.ones(2, 2))
    rows = expected_rows(problem, Weights(problem, CPU), batch, torch.arange(2))
    assert rows.shape == (2, 64) and not rows.any()
