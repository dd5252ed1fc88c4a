"""The benchmark harness: timing in turns, checking results, floors, and the output of `lancebill bench`."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner, Result

from lancebill.backends import oracle
from lancebill.backends import registry as registry_module
from lancebill.backends.base import Plan
from lancebill.backends.reference import BACKEND as REFERENCE
from lancebill.backends.reference import Reference
from lancebill.bench import ceilings as rates
from lancebill.bench import peers, run, timing, workload
from lancebill.bench.ceilings import Ceilings
from lancebill.bench.check import check_output, expected_rows
from lancebill.bench.first_forward import FirstForward, first_forward
from lancebill.bench.peers_marlin import pad_halves
from lancebill.bench.results import BenchCase, BenchRow, BenchSetup
from lancebill.bench.run import check_setup, run_benchmark
from lancebill.bench.split_layer import make_layer
from lancebill.bench.timing import Call, Clock, Times, last_level_cache, measure
from lancebill.bench.workload import Batch, Weights, batches
from lancebill.cli.main import app
from lancebill.errors import LaunchError, SpecError, UnsupportedProblem, WrongResult
from lancebill.moe.activation import Activation
from lancebill.moe.dispatch import Dispatch
from lancebill.moe.layout import Packed, PlainLayout
from lancebill.moe.model_shapes import Shape, parse_shape
from lancebill.moe.problem import Problem
from lancebill.numbers.spec_names import ACTIVATIONS, parse_activation, parse_spec
from lancebill.split import host_calls
from lancebill.split.host_threads import HostThreads

FINE, PROBLEM, USAGE = 0, 1, 2
CPU = torch.device("cpu")
SHAPE = parse_shape("4,64,64,2")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use tiny ceilings and caches: these tests check the harness, not this machine."""
    monkeypatch.setattr(rates, "_READ_BYTES", {"cpu": 1 << 20, "cuda": 1 << 26})
    monkeypatch.setattr(rates, "_LARGEST", {"cpu": 128, "cuda": 512})
    monkeypatch.setattr(timing, "last_level_cache", lambda: 1 << 20)


def problem_of(weights: str = "mxfp4", activations: str = "bf16", shape: Shape = SHAPE) -> Problem:
    return shape.problem(parse_spec(weights), ACTIVATIONS[activations])


def lancebill(*words: object) -> Result:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


# workload --------------------------------------------------------------------------------------------


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


# results are checked ---------------------------------------------------------------------------------


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


# peers -----------------------------------------------------------------------------------------------


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


def test_experts_repeat_after_distinct_ones() -> None:
    problem = problem_of("int4-g32")
    repeated, own = Weights(problem, CPU, distinct=2), Weights(problem, CPU)
    packed = repeated.packed(PlainLayout())["w13"]["codes"]
    assert torch.equal(packed[2], packed[0]) and torch.equal(packed[3], packed[1])
    assert packed[2].data_ptr() != packed[0].data_ptr()
    dense = repeated.dense("w2", torch.float32)
    assert torch.equal(dense[3], dense[1]) and torch.equal(dense[:2], own.dense("w2", torch.float32)[:2])
    assert not torch.equal(own.dense("w2", torch.float32)[3], dense[3])


def test_peers_with_16_bit_inputs_are_checked_as_such() -> None:
    """Even if our layer quantises its inputs."""
    result = run_benchmark(BenchSetup(SHAPE, "mxfp4", "mxfp4", tokens=(4,), peers=("torch-loop",), repeats=1))
    assert not result.absent


# timing ----------------------------------------------------------------------------------------------


class Counting(Clock):
    """Logs the calls; each call takes one microsecond more than the last."""

    def __init__(self) -> None:
        super().__init__(CPU, 8)
        self.log: list[str] = []
        self.evicted: list[int] = []  # the number of timed calls before each eviction

    def evict(self) -> Tensor:
        self.evicted.append(len(self.log))
        return super().evict()

    def prepare(self, calls: Sequence[Call]) -> tuple[list[Call], str]:
        return list(calls), "count"

    def time(self, call: Call) -> float:
        self.log.append(str(call()))
        return float(len(self.log))


def test_calls_alternate_and_batches_rotate() -> None:
    clock = Counting()
    contestants = {name: [lambda n=name, i=i: f"{n}{i}" for i in range(2)] for name in "ABC"}
    times = measure(clock, contestants, 8)
    rounds = [clock.log[i : i + 3] for i in range(0, 24, 3)]
    assert [sorted(called) for called in rounds] == [["A0", "B0", "C0"], ["A1", "B1", "C1"]] * 4
    before = {(one[0], two[0]) for called in rounds for one, two in pairwise(called)}
    assert len(before) == 6  # each implementation ran directly after each other one
    assert times["A"].us == tuple(i + 1.0 for i, name in enumerate(clock.log) if name.startswith("A"))
    assert clock.evicted == [0] * timing.COOL_DOWN  # the caches are emptied before the first timed call


def test_median_and_quartiles() -> None:
    times = Times((4.0, 1.0, 3.0, 2.0, 100.0))
    assert times.median == 3.0
    assert times.quartiles == (2.0, 4.0)
    assert Times((5.0,)).quartiles == (5.0, 5.0)


def test_the_cpu_clock_reads_more_than_the_cache() -> None:
    clock = timing.CpuClock()
    assert clock.buffer.numel() * clock.buffer.element_size() == 2 << 20
    assert float(clock.evict()) == clock.buffer.numel()
    calls: list[int] = []
    ready, method = clock.prepare([lambda: calls.append(1)] * 5)
    assert (len(ready), method, len(calls)) == (5, timing.WALL, timing.WARM_UP)
    assert 0 < clock.time(ready[0]) < 1e6


def test_last_level_cache_is_summed_over_sockets(tmp_path: Path) -> None:
    for cpu, (index, level, size, shared) in enumerate(
        [(0, 1, "64K", "0"), (3, 3, "32768K", "0-1"), (3, 3, "32M", "2-3"), (3, 3, "32M", "2-3"), (9, 3, "?", "9")]
    ):
        folder = tmp_path / f"cpu{cpu}" / "cache" / f"index{index}"
        folder.mkdir(parents=True)
        for name, text in (("level", level), ("size", size), ("shared_cpu_list", shared)):
            (folder / name).write_text(f"{text}\n")
    assert last_level_cache(tmp_path) == 64 << 20
    assert last_level_cache(tmp_path / "none") == 0


# floors ----------------------------------------------------------------------------------------------


def test_work_of_a_batch() -> None:
    problem = problem_of("mxfp4", shape=parse_shape("8,64,32,2"))
    ids = torch.tensor([[0, 1], [1, 2], [5, 1]], dtype=torch.int32)
    batch = Batch(torch.ones(3, 64, dtype=torch.bfloat16), ids, torch.ones(3, 2))
    work = BenchCase.of(problem, [batch, batch])
    assert work.experts == 4
    assert work.flops == 2 * 3 * 2 * (64 * 64 + 64 * 32)
    assert work.bytes == 4 * (64 * 64 + 64 * 32) * 4.25 / 8 + 2 * 3 * 64 * 2


def test_the_floor_is_the_larger_of_compute_and_memory_time() -> None:
    machine = Ceilings(100.0, {"fp32": 1.0, "bf16": 2.0, "fp8": 4.0, "int8": 3.0}, {})
    assert machine.rate(ACTIVATIONS["bf16"]) == 2.0
    assert machine.rate(ACTIVATIONS["fp8"]) == machine.rate(ACTIVATIONS["mxfp4"]) == 4.0
    assert machine.rate(ACTIVATIONS["int8"]) == 3.0
    assert machine.floor_us(2e6, 1e3, ACTIVATIONS["bf16"]) == 1.0  # 2 MFLOP at 2 TFLOP/s
    assert machine.floor_us(2e6, 1e6, ACTIVATIONS["bf16"]) == 10.0  # 1 MB at 100 GB/s
    work = BenchCase(2e6, 1e6, 1.0, ACTIVATIONS["bf16"])
    row = BenchRow("layer", "it", 1, Times((20.0,)), work, machine).describe()
    assert (row["tflops"], row["gbs"], row["floor_us"], row["roofline"]) == (0.1, 50.0, 10.0, 0.5)


@pytest.mark.parametrize("activations", ["bf16", "fp8", "int8"])
def test_ceilings_are_measured(activations: str) -> None:
    machine = rates.measure_ceilings(oracle.Device("cpu"), ACTIVATIONS[activations])
    assert {"bf16", "fp32"} <= set(machine.tflops)
    assert all(0 < rate < math.inf for rate in [machine.read_gbs, *machine.tflops.values()])
    assert machine.rate(ACTIVATIONS[activations]) >= machine.tflops["fp32"]


@pytest.mark.parametrize(("long_enough", "size"), [(math.inf, 256), (0.0, 128)])
def test_gemms_grow_until_they_take_long_enough(long_enough: float, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "_LARGEST", {"cpu": 256})
    monkeypatch.setattr(rates, "_GEMMS", {"fp32": rates._GEMMS["fp32"]})
    monkeypatch.setattr(rates, "_LONG_ENOUGH", long_enough)
    monkeypatch.setattr(rates.native, "library", lambda: None)  # torch's ways to read are enough
    machine = rates.measure_ceilings(oracle.Device("cpu"), ACTIVATIONS["fp32"])
    assert machine.size["fp32"] == size and machine.read_gbs > 0


def test_static_scales_of_inputs_reach_the_range_of_inputs() -> None:
    """With two levels of scales, the outer one is divided by what the inner ones reach."""
    for name, reach in (("fp8-static", 448.0), ("nvfp4", 448.0 * 6)):
        weights = Weights(problem_of("mxfp4"), CPU)
        scale = weights._input_scale(parse_activation(name), 3)
        assert scale.view(torch.float32).tolist() == pytest.approx([workload.INPUT_RANGE / reach] * 3)


def test_rows_without_experts_are_zero() -> None:
    problem = problem_of()
    batch = Batch(torch.randn(2, 64).bfloat16(), torch.full((2, 2), -1, dtype=torch.int32), torch.ones(2, 2))
    rows = expected_rows(problem, Weights(problem, CPU), batch, torch.arange(2))
    assert rows.shape == (2, 64) and not rows.any()


# the command -----------------------------------------------------------------------------------------


WORDS = ("bench", "--device", "cpu", "--shape", "4,64,64,2", "--weights", "mxfp4", "--tokens", "1,4", "--repeats", 3)
ROW = {"shape", "weights", "activations", "tokens", "routing", "part", "us", "spread", "tflops", "gbs", "roofline"}


def test_bench_writes_json(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    file = tmp_path / "bench.json"
    result = lancebill(*WORDS, "--peers", "torch-grouped,torch-loop", "--threads", 1, "--json", file)
    assert result.exit_code == FINE, result.output
    assert "torch-loop" in result.stdout
    assert "4 tokens" in result.stderr
    assert torch.get_num_threads() == threads
    found: dict[str, Any] = json.loads(file.read_text())
    meta = found["meta"]
    assert (meta["device"], meta["threads"], meta["repeats"], meta["evicted_bytes"]) == ("cpu", 1, 3, 2 << 20)
    assert {"versions", "commit", "command", "ceilings", "date", "machine", "problem"} <= set(meta)
    assert meta["versions"]["torch"] == torch.__version__
    assert meta["ceilings"]["read_gbs"] > 0
    assert [(r["tokens"], r["part"]) for r in found["rows"]] == [
        (tokens, part) for tokens in (1, 4) for part in ("layer", "dispatch", "combine")
    ]
    for row in found["rows"]:
        assert ROW | {"backend", "peers"} <= set(row)
        assert row["us"] > 0 and row["spread"][0] <= row["us"] <= row["spread"][1]
        assert row["roofline"] == pytest.approx(row["floor_us"] / row["us"])
        timed = {"torch-grouped", "torch-grouped, sorted", "torch-loop"}
        assert set(row["peers"]) == (timed if row["part"] == "layer" else set())
    assert found["rows"][0]["backend"] == oracle.select(problem_of(), oracle.Device("cpu")).backend.name
    assert 0 <= found["rows"][0]["error"] < 1e-2


def test_bench_takes_batch_invariant_order(tmp_path: Path) -> None:
    result = lancebill(*WORDS, "--order", "batch-invariant", "--json", tmp_path / "bench.json")
    assert result.exit_code == FINE, result.output
    assert json.loads((tmp_path / "bench.json").read_text())["meta"]["problem"]["order"] == "batch-invariant"


@pytest.mark.parametrize(
    ("option", "name", "says"),
    [
        ("--plot", "x.xyz", "no plot has this suffix"),
        ("--json", "no/x", "cannot be written"),
        ("--json", ".", "cannot be written"),
    ],
)
def test_outputs_are_checked_before_the_measurement(option: str, name: str, says: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = lancebill(*WORDS, option, tmp_path / name)
    assert result.exit_code == USAGE and says in result.output and "measuring" not in result.output


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_figures_that_cannot_be_shown_are_written_and_the_reverse(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "lancebill", *map(str, WORDS), "--json", str(tmp_path / "bench.json")]
    with Path("/dev/full").open("w") as full:
        assert subprocess.run(words, stdout=full, stderr=subprocess.PIPE, check=False).returncode == PROBLEM
    assert json.loads((tmp_path / "bench.json").read_text())["rows"]
    done = lancebill(*WORDS, "--json", "/dev/full")
    assert done.exit_code == PROBLEM and "4 experts" in done.stdout and "No space left" in done.stderr


def test_bench_writes_a_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for file in (tmp_path / "bench.png", tmp_path / "bench.SVG"):
        result = lancebill(*WORDS, "--peers", "torch-loop-fp32", "--routing", "zipf", "--plot", file)
        assert result.exit_code == FINE, result.output
        assert file.stat().st_size > 10_000
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_nothing_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = lancebill(*WORDS, "--plot", tmp_path / "bench.png")
    assert result.exit_code == PROBLEM
    assert "pip install matplotlib" in result.stderr
    assert "measuring" not in result.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("--tokens", "1,x"),
        ("--tokens", "0"),
        ("--tokens", ""),
        ("--routing", "wild"),
        ("--order", "slow"),
        ("--moves", "recency"),
        ("--split", "99"),
        ("--split", "99", "--moves", "recency"),
        ("--cpu-threads", "1"),
        ("--split", "1", "--cpu-threads", "5000"),
        ("--split", "1", "--cpu-threads", "1"),
        ("--first-forward", "--split", "1"),
        ("--first-forward", "--split", "1", "--moves", "nonsense"),
        ("--peers", "vllm"),
        ("--shape", "large"),
        ("--weights", "int40"),
        ("--device", "abacus"),
        ("--device", "sm_90"),
        ("--backend", "none"),
        ("--first-forward", "--backend", "none"),
        ("--first-forward", "--peers", "none"),
        ("--first-forward", "--routing", "wild"),
        ("--json", "no/such/folder/file"),
    ],
)
def test_usage_errors(words: tuple[str, ...]) -> None:
    result = lancebill(*WORDS, *words)
    assert result.exit_code == USAGE
    assert "measuring" not in result.stderr


def test_threads_are_as_before_after_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    during: list[tuple[int, HostThreads]] = []
    threads, host = torch.get_num_threads(), HostThreads(2)
    monkeypatch.setattr(host_calls, "_THREADS", [host])
    monkeypatch.setattr(run, "check_setup", lambda setup: None)
    monkeypatch.setattr(run, "_measure", lambda *_: during.append((torch.get_num_threads(), host_calls.host_threads())))
    run_benchmark(BenchSetup(SHAPE, "mxfp4", threads=1, split=1, cpu_threads=1))
    assert during == [(1, HostThreads.choose(1))]
    assert (torch.get_num_threads(), host_calls.host_threads()) == (threads, host)


def test_the_text_says_what_is_split() -> None:
    text = lancebill(*WORDS, "--split", "1").output
    assert f"1 experts on the device, {SHAPE.experts - 1} in host memory" in " ".join(text.split()), text
    assert "in host memory" not in lancebill(*WORDS).output


def test_an_unsupported_request_is_refused() -> None:
    with pytest.raises(UnsupportedProblem, match="need the CPU kernels"):
        check_setup(BenchSetup(SHAPE, "bf16", device="sm_90", split=1))
    with pytest.raises(SpecError, match="no backend is called"):
        run_benchmark(BenchSetup(SHAPE, "mxfp4", backends=("none",)))
    with pytest.raises(SpecError, match="unknown simulated routing"):
        run_benchmark(BenchSetup(SHAPE, "mxfp4", routing="wild"))


# CUDA ------------------------------------------------------------------------------------------------


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


def test_marlin_pads_each_half_of_the_rows_by_itself() -> None:
    rows = torch.arange(1, 13).view(4, 3)
    padded = pad_halves(rows, 2, 6, 4).view(2, 3, 4)
    assert torch.equal(padded[:, :2, :3].reshape(4, 3), rows)
    assert int(padded.sum()) == int(rows.sum())


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(SpecError, match="on a GPU"):
        run_benchmark(BenchSetup(SHAPE, "mxfp4", tokens=(3,), host=True, repeats=1))
    with pytest.raises(LaunchError, match="the measuring process failed"):
        first_forward(FirstForward("4,64,64,2", "mxfp4", "bf16", "cpu", 3, "unheard-of"))
