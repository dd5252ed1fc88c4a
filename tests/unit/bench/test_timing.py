"""Calls are timed in turns, and compared with floors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from bench_problems import CPU, problem_of
from torch import Tensor

from lancebill.backends import oracle
from lancebill.bench import ceilings as rates
from lancebill.bench import timing
from lancebill.bench.ceilings import Ceilings
from lancebill.bench.results import BenchCase, BenchRow
from lancebill.bench.timing import Call, Clock, Times, last_level_cache, measure
from lancebill.bench.workload import Batch
from lancebill.moe.model_shapes import parse_shape
from lancebill.numbers.spec_names import ACTIVATIONS

pytestmark = pytest.mark.usefixtures("quick")


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
