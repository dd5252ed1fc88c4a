"""The race of layers: its layers, batches and contestants, on a CPU."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu import Race, Sample, engine_batch, fastest_variants, problem_of, rotating_batches
from benchmarks.runner import SUBJECTS, Case, Run
from lancebill.bench.check import expected_rows
from lancebill.bench.results import expert_bytes
from lancebill.bench.workload import Batch, Weights

CPU = torch.device("cpu")
RANK = Case.of(shape="8x64x64x2:ep2", weights="mxfp4", activations="bf16", routing="uniform", tokens=5)


@pytest.fixture
def race(tmp_path: Path) -> Race:
    options = {"out": tmp_path / "run.json", "device": "cpu", "note": "", "seconds": 100.0, "beside": ()}
    options |= {"rounds": 1, "window_us": 1.0, "pause_ms": 0.0, "distinct": 4}
    return Race(Run(SUBJECTS["gpu-shapes"], [RANK], argparse.Namespace(**options)))


def test_layers_are_ranks_of_models() -> None:
    named = {"weights": "mxfp4", "activations": "fp8", "tokens": 1}
    half = problem_of(Case.of(shape="gpt-oss-120b:tp4", **named))
    assert (half.intermediate, half.w13.bias) == (736, True)
    sizes = {(p.hidden, p.intermediate, p.experts, p.top_k) for p in map(problem_of, gpu.shape_cases())}
    assert {(7168, 256, 384, 8), (7168, 2048, 48, 8), (2880, 384, 128, 4)} <= sizes
    plain = problem_of(Case.of(part="gpt-oss-mxfp4-bf16", shape="gpt-oss-120b", **named))
    assert not plain.w13.bias and str(plain.activation) == "silu"  # what every peer computes


def test_every_layer_is_supported_on_hopper() -> None:
    """Otherwise a slow backend would be timed."""
    from lancebill.backends.oracle import select

    problems = dict.fromkeys(map(problem_of, (*gpu.race_cases(), *gpu.shape_cases())))
    assert {select(problem, "sm_90").backend.name for problem in problems} == {"hopper"}
    older = dict.fromkeys(map(problem_of, gpu.older_cases()))
    assert {select(problem, "sm_80").backend.name for problem in older} == {"ampere"}


def test_batches_have_ids_of_all_ranks_and_exceed_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(RANK)
    batch = engine_batch(problem, 64, "uniform", 0, CPU)
    assert batch.ids.dtype == torch.int64 and int(batch.ids.max()) >= problem.experts == 4
    assert torch.equal(batch.local.ids, torch.where(batch.ids < 4, batch.ids, -1).to(torch.int32))
    assert batch.local.rows == int((batch.ids < 4).sum()) and batch.local.experts == 4
    monkeypatch.setattr(gpu, "ROTATED_BYTES", 10 * expert_bytes(problem))
    rotated = rotating_batches(problem, 64, "uniform", CPU)
    assert len(rotated) == 3 and len({b.ids.sum().item() for b in rotated}) > 1


class Peer:
    """Computes what the reference computes, times a factor; takes local ids."""

    def __init__(self, weights: Weights, factor: float) -> None:
        self.weights, self.factor = weights, factor

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        assert ids.dtype == torch.int32
        batch = Batch(x, ids, weights)
        return self.factor * expected_rows(self.weights.problem, self.weights, batch, torch.arange(x.shape[0]))


def test_a_wrong_peer_is_left_out(race: Race) -> None:
    sample = Sample.make(problem_of(RANK), CPU, distinct=4)
    race.measure_cell(RANK, sample, {"right": Peer(sample.weights, 1.0), "wrong": Peer(sample.weights, 1.1)})
    (row,) = race.run.rows
    assert list(row.peers) == ["right"] and row["error"] < 1e-2
    assert "differs" in race.run.absent[f"{RANK}: wrong"]
    weights = engine_batch(problem_of(RANK), 5, "uniform", 0, CPU).local.experts * expert_bytes(problem_of(RANK))
    assert row["floor_us"] >= 0.9 * weights / (race.ceilings.read_gbs * 1e3)
    assert row["of_floor"] == pytest.approx(row["floor_us"] / row["us"], rel=1e-3)


def test_the_fastest_variant_of_a_family_counts() -> None:
    us = {"humming-grouped, sorted": 3.0, "humming-grouped": 5.0, "humming-indexed, sorted": 2.0, "torch-grouped": 9.0}
    found = fastest_variants({"torch-grouped, sorted": 8.0, **us})
    assert list(found.items()) == [
        ("humming", 2.0), ("torch-grouped", 9.0), ("torch-grouped, sorted", 8.0), ("humming with sort", 5.0),
    ]  # fmt: skip


def test_a_layer_without_time_is_noted(race: Race) -> None:
    race.measure_layer([RANK], (), until=0.0)
    assert not race.run.rows and set(race.run.absent) == {str(RANK)}
