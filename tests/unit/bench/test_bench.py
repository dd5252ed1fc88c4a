"""A run of the benchmark: results are checked, threads are as before, and what cannot be measured is refused."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from bench_problems import CPU, PROBLEM, SHAPE, lancebill, problem_of
from torch import Tensor

from lancebill.backends import oracle
from lancebill.backends import registry as registry_module
from lancebill.backends.base import Plan
from lancebill.backends.reference import BACKEND as REFERENCE
from lancebill.backends.reference import Reference
from lancebill.bench import run, timing, workload
from lancebill.bench.check import check_output, expected_rows
from lancebill.bench.first_forward import FirstForward, first_forward
from lancebill.bench.results import BenchSetup
from lancebill.bench.run import check_setup, run_benchmark
from lancebill.bench.workload import Weights, batches
from lancebill.errors import LaunchError, SpecError, UnsupportedProblem, WrongResult
from lancebill.moe.dispatch import Dispatch
from lancebill.moe.layout import Packed
from lancebill.numbers.spec_names import parse_activation
from lancebill.split import host_calls
from lancebill.split.host_threads import HostThreads

pytestmark = pytest.mark.usefixtures("quick")


class Wrong(Reference):
    """The reference backend with a defect."""

    name = "wrong"

    def __init__(self, defect: str) -> None:
        self.defect = defect

    def run(self, plan: Plan, x: Tensor, dispatch: Dispatch, weights: Mapping[str, Packed], out: Tensor) -> Tensor:
        before = out.clone()
        super().run(plan, x, dispatch, weights, out)
        if self.defect == "unwritten row":
            out[-1] = before[-1]
        elif self.defect == "half":
            out.mul_(0.5)
        elif self.defect == "rows swapped":
            out.copy_(out.flip(0))
        return out


@pytest.mark.parametrize("defect", ["unwritten row", "half", "rows swapped"])
def test_wrong_results_are_refused(defect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"wrong": Wrong(defect), "reference": REFERENCE}
    for module in (registry_module, oracle):
        monkeypatch.setattr(module, "registry", lambda: found)
    with pytest.raises(WrongResult, match="wrong, 3 tokens"):
        run_benchmark(BenchSetup(SHAPE, "mxfp4", tokens=(3,), backends=("wrong",), repeats=1))
    words = ("--shape", "4,64,64,2", "--weights", "mxfp4", "--tokens", "3", "--repeats", "1", "--backend", "wrong")
    result = lancebill("bench", *words)
    assert result.exit_code == PROBLEM
    assert "wrong, 3 tokens" in result.stderr


@pytest.mark.parametrize("activations", ["bf16", "fp8", "fp8-static", "int8-static", "nvfp4", "fp16"])
def test_the_check_equals_the_reference_on_some_rows(activations: str) -> None:
    problem = problem_of("int4-g32", activations)
    weights = Weights(problem, CPU)
    (batch,) = batches(problem, 9, "uniform", 1, CPU)
    layer = BenchSetup(SHAPE, "int4-g32", activations)
    assert layer.problem() == problem
    rows = torch.tensor([0, 5, 8])
    part = expected_rows(problem, weights, batch, rows)
    whole = expected_rows(problem, weights, batch, torch.arange(9))
    assert torch.allclose(part, whole[rows], rtol=1e-5, atol=1e-5)
    assert check_output("it", problem, weights, batch, whole.to(batch.x.dtype)) < 4e-3
    with pytest.raises(WrongResult, match="differs from the reference"):
        check_output("it", problem, weights, batch, 1.1 * whole)


def test_static_scales_of_inputs_reach_the_range_of_inputs() -> None:
    """With two levels of scales, the outer one is divided by what the inner ones reach."""
    for name, reach in (("fp8-static", 448.0), ("nvfp4", 448.0 * 6)):
        weights = Weights(problem_of("mxfp4"), CPU)
        scale = weights._input_scale(parse_activation(name), 3)
        assert scale.view(torch.float32).tolist() == pytest.approx([workload.INPUT_RANGE / reach] * 3)


def test_threads_are_as_before_after_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    during: list[tuple[int, HostThreads]] = []
    threads, host = torch.get_num_threads(), HostThreads(2)
    monkeypatch.setattr(host_calls, "_THREADS", [host])
    monkeypatch.setattr(run, "check_setup", lambda setup: None)
    monkeypatch.setattr(run, "_measure", lambda *_: during.append((torch.get_num_threads(), host_calls.host_threads())))
    run_benchmark(BenchSetup(SHAPE, "mxfp4", threads=1, split=1, cpu_threads=1))
    assert during == [(1, HostThreads.choose(1))]
    assert (torch.get_num_threads(), host_calls.host_threads()) == (threads, host)


def test_an_unsupported_request_is_refused() -> None:
    with pytest.raises(UnsupportedProblem, match="need the CPU kernels"):
        check_setup(BenchSetup(SHAPE, "bf16", device="sm_90", split=1))
    with pytest.raises(SpecError, match="no backend is called"):
        run_benchmark(BenchSetup(SHAPE, "mxfp4", backends=("none",)))
    with pytest.raises(SpecError, match="unknown simulated routing"):
        run_benchmark(BenchSetup(SHAPE, "mxfp4", routing="wild"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_graphs_are_timed_if_capture_works_and_events_otherwise() -> None:
    names = ("torch-grouped", "torch-loop")
    result = run_benchmark(
        BenchSetup(SHAPE, "bf16", device="cuda", tokens=(1, 4), backends=("reference",), peers=names, repeats=4)
    )
    assert not result.absent
    for row in result.rows:
        if row.part == "layer":
            assert row.times.method == row.peers["torch-loop"].method == timing.EVENTS
            assert row.peers["torch-grouped"].method == timing.GRAPH
        assert row.times.median > 0


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(SpecError, match="on a GPU"):
        run_benchmark(BenchSetup(SHAPE, "mxfp4", tokens=(3,), host=True, repeats=1))
    with pytest.raises(LaunchError, match="the measuring process failed"):
        first_forward(FirstForward("4,64,64,2", "mxfp4", "bf16", "cpu", 3, "unheard-of"))
