"""The benchmark of many models' layers: its layers, batches and cells on a CPU with a fake clock, and its tables."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from project import ROOT

sys.path.insert(0, str(ROOT / "benchmarks" / "old"))

import gpu_cell
import gpu_shapes
from gpu_shapes import Budget, Layer, Run, chosen_layers, engine_batch, named_layers, parser, rotating_batches

from lancebill.bench.check import expected_rows
from lancebill.bench.results import expert_bytes
from lancebill.bench.sustained import Steady
from lancebill.bench.timing import Call
from lancebill.bench.workload import Batch, Weights

CPU = torch.device("cpu")
RATES = {"read_gbs": 4000.0, "bf16": 700.0, "fp8": 1300.0}
RANK = Layer("8,64,64,2:ep2", "mxfp4", "bf16")


class FakeWindows:
    """Calls everything once; every call takes 10 us."""

    def measure(self, contestants: Mapping[str, Sequence[Call]]) -> dict[str, Steady]:
        for calls in contestants.values():
            for call in calls:
                call()
        return {name: Steady((10.0, 10.0)) for name in contestants}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run that writes to benchmarks/results/gpu-shapes/h200/run.json of a temporary folder."""
    monkeypatch.setattr(gpu_shapes, "clocks", str)
    for name, made in (("clocks", str), ("gpu_machine", dict)):
        monkeypatch.setattr(gpu_cell, name, made)
    monkeypatch.setattr(gpu_shapes, "ROTATED_BYTES", 1 << 16)
    file = tmp_path / "gpu-shapes" / "h200" / "run.json"
    file.parent.mkdir(parents=True)
    words = ["--tokens", "3,1", "--routings", "uniform,half-empty", "--out", str(file)]
    return Run(parser().parse_args(words), CPU, FakeWindows(), RATES)  # type: ignore[arg-type]


def test_layers_are_named_as_they_are_listed() -> None:
    layers = chosen_layers("qwen3-30b-a3b,gpt-oss-120b:tp2", "mxfp4:fp8,int4-g64:bf16")
    assert named_layers(";".join(layer.name for layer in layers)) == layers


def test_layers_are_chosen_by_name_and_rank() -> None:
    assert len(chosen_layers(None, None)) == sum(map(len, gpu_shapes.LAYERS.values()))
    (half,) = chosen_layers("gpt-oss-120b:tp4", "mxfp4:fp8")
    assert (half.problem.intermediate, half.problem.w13.bias, half.name) == (736, True, "gpt-oss-120b:tp4 mxfp4:fp8")
    assert [layer.shape for layer in chosen_layers("8,64,64,2;kimi-k2:ep8", "int4-g32:bf16")] == [
        "8,64,64,2", "kimi-k2:ep8",
    ]  # fmt: skip
    sizes = [
        (p.hidden, p.intermediate, p.experts, p.top_k) for p in (layer.problem for layer in chosen_layers(None, None))
    ]
    assert (7168, 256, 384, 8) in sizes and (7168, 2048, 48, 8) in sizes and (2880, 384, 128, 4) in sizes


def test_every_layer_is_supported_on_hopper() -> None:
    """Otherwise a slow backend would be timed."""
    from lancebill.backends.oracle import select

    assert {select(layer.problem, "sm_90").backend.name for layer in chosen_layers(None, None)} == {"hopper"}


def test_batches_have_ids_of_all_ranks_and_exceed_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = RANK.problem
    batch = engine_batch(problem, 64, "uniform", 0, CPU)
    assert batch.ids.dtype == torch.int64 and int(batch.ids.max()) >= problem.experts == 4
    assert torch.equal(batch.local.ids, torch.where(batch.ids < 4, batch.ids, -1).to(torch.int32))
    assert batch.local.rows == int((batch.ids < 4).sum()) and batch.local.experts == 4
    monkeypatch.setattr(gpu_shapes, "ROTATED_BYTES", 10 * expert_bytes(problem))
    rotated = rotating_batches(problem, 64, "uniform", CPU)
    assert len(rotated) == 3 and len({b.ids.sum().item() for b in rotated}) > 1


def test_a_layer_is_measured_and_recorded(run: Run) -> None:
    run.measure_layer(RANK, None, Budget(time.perf_counter() + 100, 1))
    run.finish()
    record = json.loads(run.arguments.out.read_text())
    assert record["absent"] == {} and record["ceilings"] == RATES
    assert [(row["tokens"], row["routing"]) for row in record["rows"]] == [
        (3, "uniform"), (3, "half-empty"), (1, "uniform"), (1, "half-empty"),
    ]  # fmt: skip
    for row in record["rows"]:
        assert row["ours"]["worst_row"] < 1e-2 and row["ours"]["repeatable"]
        weights = row["experts"] * expert_bytes(RANK.problem) / (RATES["read_gbs"] * 1e3)
        assert row["floor_us"] == pytest.approx(weights, abs=0.01) and row["of_floor"] == pytest.approx(
            weights / 10, abs=1e-4
        )
    assert len(gpu_shapes.table_text(record["rows"]).splitlines()) == 3


class Peer:
    """Computes what the reference computes, times a factor; takes local ids."""

    def __init__(self, weights: Weights, factor: float) -> None:
        self.weights, self.factor = weights, factor

    def sort(self, ids: torch.Tensor) -> None:
        assert ids.dtype == torch.int32

    def compute(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, routed: None) -> torch.Tensor:
        batch = Batch(x, ids, weights)
        return self.factor * expected_rows(self.weights.problem, self.weights, batch, torch.arange(x.shape[0]))


def test_a_wrong_peer_is_left_out(run: Run) -> None:
    weights = Weights(RANK.problem, CPU)
    peers = {"humming-indexed": Peer(weights, 1.0), "humming-grouped": Peer(weights, 1.1)}
    ours = gpu_shapes.make_ours(RANK.problem, weights, CPU)
    row = run.measure_cell(ours, weights, peers, 5, "uniform", "cell")  # type: ignore[arg-type]
    assert row["against"]["humming"]["variant"] == "humming-indexed, sorted" and row["against"]["humming"]["ratio"] == 1
    assert list(row["peers"]) == ["humming-indexed, sorted"]
    assert "differs" in run.record["absent"]["cell: humming-grouped"]


def test_a_layer_without_time_is_recorded_as_absent(run: Run) -> None:
    run.measure_layer(RANK, None, Budget(time.perf_counter() - 1, 1))
    assert run.record["rows"] == [] and set(run.record["absent"].values()) == {"out of time"}
    assert len(run.record["absent"]) == 4
