"""Peers compute the layer, or give a reason."""

from __future__ import annotations

import pytest
import torch
from bench_problems import CPU, SHAPE, problem_of
from torch import Tensor

from lancebill.bench import peers
from lancebill.bench.check import check_output
from lancebill.bench.peers_marlin import pad_halves
from lancebill.bench.results import BenchSetup
from lancebill.bench.run import run_benchmark
from lancebill.bench.workload import Weights, batches
from lancebill.errors import SpecError
from lancebill.moe.activation import Activation
from lancebill.moe.model_shapes import Shape
from lancebill.moe.problem import Problem

pytestmark = pytest.mark.usefixtures("quick")


SHAPES = [SHAPE, Shape("odd", 5, 64, 96, 3, Activation("swigluoai", limit=7.0), bias=True)]


@pytest.mark.parametrize("name", ["torch-grouped", "torch-loop", "torch-loop-fp32"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
def test_peers_compute_the_layer(name: str, shape: Shape) -> None:
    problem = problem_of("mxfp4", shape=shape)
    weights = Weights(problem, CPU)
    peer = peers.PEERS[name](problem, weights)
    for tokens, routing in ((1, "uniform"), (7, "zipf"), (5, "one-hot")):
        (batch,) = batches(problem, tokens, routing, 1, CPU)
        got = peer(batch.x, batch.ids, batch.weights)
        assert got.dtype == batch.x.dtype
        check_output(name, problem, weights, batch, got)


class Absent(peers.Peer):
    def __init__(self, problem: Problem, weights: Weights) -> None:
        raise ImportError("no module named 'quick'\nand more")

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        raise AssertionError


class Incorrect(peers.Peer):
    def __init__(self, problem: Problem, weights: Weights) -> None: ...

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return x


def test_peers_that_fail_or_are_wrong_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "PEERS", {"absent": Absent, "incorrect": Incorrect, "loop": peers.TorchLoop})
    result = run_benchmark(BenchSetup(SHAPE, "bf16", tokens=(2,), peers=("absent", "incorrect", "loop"), repeats=1))
    assert result.absent["absent"] == "no module named 'quick'"
    assert "differs from the reference" in result.absent["incorrect"]
    assert set(result.rows[0].peers) == {"loop"}


def test_families_expand_and_unknown_names_are_refused() -> None:
    assert peers.expand_families(("humming", "torch-loop", "humming-indexed")) == (
        "humming-indexed",
        "humming-grouped",
        "torch-loop",
    )
    with pytest.raises(SpecError, match="no peer is called 'cutlass'"):
        peers.expand_families(("torch", "cutlass"))


def test_a_sorting_peer_is_timed_with_and_without_its_sort() -> None:
    result = run_benchmark(BenchSetup(SHAPE, "bf16", tokens=(3,), peers=("torch",), repeats=1))
    assert not result.absent
    assert set(result.rows[0].peers) == {"torch-grouped", "torch-grouped, sorted"}


@pytest.mark.parametrize("name", ["humming", "marlin", "triton_kernels"])
def test_missing_gpu_peers_give_a_reason(name: str) -> None:
    """Their packages are not installed where the tests run; the benchmark runs without them."""
    result = run_benchmark(BenchSetup(SHAPE, "mxfp4", tokens=(1,), peers=(name,), repeats=1))
    assert set(result.absent) == set(peers.expand_families((name,)))
    assert all("No module named" in why for why in result.absent.values())


def test_peers_with_16_bit_inputs_are_checked_as_such() -> None:
    """Even if our layer quantises its inputs."""
    result = run_benchmark(BenchSetup(SHAPE, "mxfp4", "mxfp4", tokens=(4,), peers=("torch-loop",), repeats=1))
    assert not result.absent


def test_marlin_pads_each_half_of_the_rows_by_itself() -> None:
    rows = torch.arange(1, 13).view(4, 3)
    padded = pad_halves(rows, 2, 6, 4).view(2, 3, 4)
    assert torch.equal(padded[:, :2, :3].reshape(4, 3), rows)
    assert int(padded.sum()) == int(rows.sum())
