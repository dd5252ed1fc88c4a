"""Problems without a backend or a kernel, and backends that contradict each other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import lancebill.backends as backends
from lancebill.backends import oracle
from lancebill.backends.base import TensorTable
from lancebill.backends.cpu import Cpu
from lancebill.backends.cpu.form import NoForm, matrix_form
from lancebill.backends.cpu.native import library
from lancebill.backends.cpu.native.abi import IsaLevel
from lancebill.backends.gpu.call import check_call, readable
from lancebill.backends.gpu.workspace import Workspaces
from lancebill.backends.registry import registry
from lancebill.errors import LaunchError, UnsupportedProblem
from lancebill.moe.device import Device
from lancebill.moe.dispatch import Batched, Indexed
from lancebill.moe.layout import MatrixShape
from lancebill.moe.problem import BATCHED
from lancebill.numbers.dtypes import BF16, E4M3, codebook
from lancebill.numbers.spec import QuantSpec, Scale, group
from lancebill.numbers.spec_names import ACTIVATIONS
from lancebill.testing.layers import layer_problem, make_layer

HOPPER = Device("cuda", 90)
SIZES = {"hidden": 256, "intermediate": 256, "experts": 4, "top_k": 2}


def test_a_choice_without_a_backend_has_the_reasons() -> None:
    problem = layer_problem("mxfp4", "bf16", **SIZES)
    with pytest.raises(UnsupportedProblem, match="runs on CPUs only") as refused:
        oracle.select(problem, HOPPER, "torch-cpu")
    assert "torch-cpu does not compute this" in str(refused.value)
    assert "reference: supported, about" in str(refused.value)  # nothing was chosen that it could be slower than
    choice = oracle.explain(problem, HOPPER, "torch-cpu")
    assert choice.chosen is None
    with pytest.raises(UnsupportedProblem, match="runs on CPUs only"):
        _ = choice.backend


def test_rows_that_are_no_whole_slices_have_no_gpu_kernel() -> None:
    problem = layer_problem("int4", "bf16", **SIZES | {"hidden": 208})
    assert "K must be a multiple of 32" in str(list(registry()["hopper"].reasons(problem, HOPPER)))


def test_what_gpu_kernels_do_not_compute() -> None:
    def reasons(spec: str, **options: int | bool) -> str:
        return str(list(registry()["hopper"].reasons(layer_problem(spec, "bf16", **SIZES | options), HOPPER)))

    assert "2000 local experts" in reasons("mxfp4", experts=2000)
    assert "in act-order, and its inputs are rotated" in reasons("int4-g128-h128", act_order=True)
    assert "rotated" not in reasons("int4-g128-h128")


def test_a_large_codebook_has_no_cpu_kernel() -> None:
    spec = QuantSpec(codebook([i**1.5 for i in range(256)]), (Scale(BF16, group(32)),))
    with pytest.raises(NoForm, match="no kernel for"):
        matrix_form(MatrixShape("w13", 64, 64, spec), ACTIVATIONS["bf16"])


def test_what_cpus_do_not_compute() -> None:
    problem, cpu = layer_problem("mxfp4", "bf16", **SIZES), Device("cpu")
    odd = layer_problem("int4", "bf16", **SIZES | {"hidden": 33})
    assert "an odd row length (33)" in str(list(registry()["torch-cpu"].reasons(odd, cpu)))
    narrow = replace(problem, input=E4M3)
    assert "supported: bf16, fp16, fp32" in str(list(registry()["cpu"].reasons(narrow, cpu)))


@pytest.mark.skipif(library() is None, reason="the CPU kernels are not built")
def test_instructions_that_this_machine_lacks() -> None:
    native = library()
    assert native is not None
    lacking = next(level for level in IsaLevel if level not in native.levels)
    reasons = list(Cpu(lacking).check(layer_problem("mxfp4", "bf16", **SIZES), Device("cpu")))
    assert [reason.code for reason in reasons] == ["level"] and str(lacking) in str(reasons[0])


@pytest.mark.skipif(library() is None, reason="the CPU kernels are not built")
def test_calls_without_rows_do_nothing() -> None:
    problem = layer_problem("mxfp4", "bf16", **SIZES)
    executor = make_layer(problem, "cpu", "cpu", distinct=1).executor
    x, none = torch.empty(0, 256, dtype=torch.bfloat16), torch.empty(0, 2)
    out = torch.empty(0, 256)
    assert executor.run(x, Indexed(none.int(), none), out) is out
    plan = executor.plan(x, Indexed(none.int(), none))
    assert executor.fast_call(x, plan, False) is None and executor.linear_call(x, plan) is None


@pytest.mark.parametrize("name", ["hopper", "ampere"])
def test_gpu_calls_without_rows_launch_nothing(name: str) -> None:
    """On any machine: there is nothing to launch."""
    backend, problem = registry()[name], layer_problem("mxfp4", "bf16", **SIZES)
    x, none, out = torch.empty(0, 256, dtype=torch.bfloat16), torch.empty(0, 2), torch.empty(0, 256)
    dispatch = Indexed(none.int(), none)
    assert backend.run(backend.plan(problem, 1, HOPPER), x, dispatch, {}, out) is out
    assert backend.executor(problem, HOPPER, TensorTable.of({})).run(x, dispatch, out) is out


def test_one_matrix_is_estimated_without_a_second_one() -> None:
    layer = layer_problem("mxfp4", "bf16", **SIZES)
    linear = replace(layer, w2=None, experts=1, global_experts=1, top_k=1)
    for name in ("hopper", "ampere"):
        whole, one = (registry()[name].plan(problem, 64, HOPPER).estimate_us for problem in (layer, linear))
        assert 0 < one < whole


def test_a_workspace_that_grows_keeps_its_counters() -> None:
    workspaces, cpu = Workspaces(), torch.device("cpu")
    small = workspaces.of_stream(cpu, 0, 100)
    large = workspaces.of_stream(cpu, 0, 1000)
    assert large.memory.numel() >= 1000 and large.counters is small.counters and large.lock is small.lock
    assert workspaces.of_stream(cpu, 0, 100) is large


@pytest.mark.parametrize("counts", [3, 4])
def test_counts_of_rows_must_fit_the_experts(counts: int) -> None:
    problem = replace(layer_problem("mxfp4", "bf16", **SIZES), dispatch=BATCHED)
    plan = registry()["hopper"].plan(problem, 8, HOPPER)
    x = torch.empty(4, 2, 256, dtype=torch.bfloat16)
    dispatch = readable(Batched(torch.ones(counts, 2, dtype=torch.int32)[:, 0]))
    assert isinstance(dispatch, Batched) and dispatch.counts.is_contiguous()
    if counts == 4:
        check_call(plan, x, dispatch, torch.empty_like(x))
    else:
        with pytest.raises(LaunchError, match="counts do not fit"):
            check_call(plan, x, dispatch, torch.empty_like(x))


def test_two_backends_of_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "twin_backend.py").write_text("from lancebill.backends.reference import BACKEND")
    monkeypatch.setattr(backends, "__path__", [*backends.__path__, str(tmp_path)])
    registry.cache_clear()
    with pytest.raises(UnsupportedProblem, match="two backends are called 'reference'"):
        registry()
