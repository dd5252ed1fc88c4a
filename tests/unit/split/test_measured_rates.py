"""The rates by which large batches are divided, as a split layer measures them."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from layer_checkpoints import make_checkpoint, make_inputs
from without_gpu import RATES, OrderedLane, needs_kernels, without_gpu

from lancebill.backends.cpu.executor import CpuExecutor
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.moe.dispatch import Indexed
from lancebill.split import large_batches, measure_rates, streamed
from lancebill.split.executor import SplitExecutor
from lancebill.split.large_batches import expert_size
from lancebill.split.streamed import Stage
from lancebill.split.ways import Rates, batch_costs
from lancebill.testing.checkpoints import save


@needs_kernels
def test_rates_are_measured_beside_no_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are measured with the buffers of batches, so neither a batch nor another thread may use them meanwhile."""
    layer = RoutedExperts.from_checkpoint(save(make_checkpoint(), tmp_path / "m"), 0, gpu_experts=1)
    executor, lane, measured = layer.executor, OrderedLane(), []
    assert isinstance(executor, SplitExecutor) and layer.host_experts is not None
    assert layer.expert_map is not None and layer.host_experts.expert_map is not None
    without_gpu(monkeypatch, lane, RATES)

    def measure(host: CpuExecutor, stage: Stage, lane: OrderedLane, host_us: object) -> Rates:
        measured.append(lane.lock.locked())
        for tensors in stage.raw[0].values():
            tensors["codes"].zero_()
        time.sleep(0.05)  # so that the other thread comes, too
        return Rates(10.0, 1e-3, 1e9, 1e9)

    monkeypatch.setattr(large_batches, "measure_rates", measure)
    x, ids, weights = make_inputs(9)
    given, places = Indexed(ids, weights, layer.expert_map), layer.host_experts.expert_map
    large, found = executor.large_batches, []
    for _ in range(2):
        found.append(large.run(x, given, places, torch.empty_like(x)))
    assert found[0] is not None and found[1] is not None and torch.equal(found[0], found[1])
    large_batches._RATES.clear()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(large._measured, [x.device] * 2))
    assert measured == [True, True], "once for the batches, once for the threads"


@needs_kernels
@pytest.mark.parametrize("cpu_gbs", [1e-3, 1e9], ids=["copied", "computed"])
def test_the_host_is_timed_with_a_batch(cpu_gbs: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = RoutedExperts.from_checkpoint(save(make_checkpoint(), tmp_path / "m"), 0, gpu_experts=1)
    executor, lane, waited = layer.executor, OrderedLane(), set[torch.device]()
    assert isinstance(executor, SplitExecutor)
    without_gpu(monkeypatch, lane, RATES)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: (lane.busy.clear(), waited.add(device)))
    rates = Rates(10.0, cpu_gbs, 1e9, 1e9, call_us=123.0)
    begin, divide, call = executor.large_batches._host_us(rates, torch.device("cpu"))
    assert waited == {torch.device("cpu")}, "for the layer's device, not for the current GPU"
    assert (call == 123) == (cpu_gbs < 1) and call >= 0, "as assumed, if nothing was sent"
    assert begin > 0 and divide > 0 and lane.copied % expert_size(executor.host.executor).bytes == 0 < lane.copied


class PassedEvent:
    """An event that has passed when it was asked for twice."""

    def __init__(self, enable_timing: bool) -> None:
        self.asked = 0

    def record(self, stream: object) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        self.asked += 1
        return self.asked > 2

    def elapsed_time(self, end: PassedEvent) -> float:
        return 8.0 if end.asked else 16.0  # ms; copies that nothing runs beside meet a busy machine


@needs_kernels
def test_rates_are_measured_at_several_numbers_of_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = RoutedExperts.from_checkpoint(save(make_checkpoint(), tmp_path / "m"), 0, gpu_experts=1)
    executor, lane, waited = layer.executor, OrderedLane(), set[torch.device]()
    assert isinstance(executor, SplitExecutor) and layer.host_experts is not None
    host = layer.host_experts.executor
    assert isinstance(host, CpuExecutor)
    monkeypatch.setattr(streamed, "WAVE_BYTES", 1)
    monkeypatch.setattr(torch.cuda, "Event", PassedEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", waited.add)
    vars(lane).update(stream=None, device=torch.device("cpu"))
    stage = Stage.make(executor.own, host, torch.device("cpu"))
    rates = measure_rates.measure_rates(host, stage, lane, lambda rates: (5.0, rates.wave_experts, 7.0))  # type: ignore[arg-type]
    each = expert_size(host).bytes
    assert waited == {lane.device}  # type: ignore[attr-defined]
    assert rates.wait_us == 5.0 and rates.divide_us == rates.wave_experts == 1 and rates.call_us == 7.0
    assert [round(tokens) for tokens, _ in rates.cpu_points] == [1, 8, 24, 72, 136]
    assert rates.copy_gbs == pytest.approx(64 * each / 8e-3 / 1e9), "64 waves of one expert in 8 ms"
    few, many = batch_costs(512, expert_size(host), rates).expert(np.array([1.0, 64.0])).tolist()
    assert many >= few > 0
    assert lane.copied == 5 * 64 * each, "beside five calls"
    call, experts = measure_rates._call(host, 16)
    counts = torch.bincount(call.ids[:, 0].long(), minlength=experts)
    assert (counts == 16).all() and experts == host.problem.experts and (call.ids[:, 1:] == -1).all()
    first = call.ids[:, 0].clone()
    assert measure_rates._next_seconds(call, 2, 8) > 0
    assert torch.equal(call.ids[:, 0], (first + 2) % 8), "other experts, so that they are not in a cache"


@needs_kernels
def test_experts_without_neighbours_take_longer_to_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = RoutedExperts.from_checkpoint(save(make_checkpoint(), tmp_path / "m"), 0, gpu_experts=0)
    executor, lane, pieces, waited = layer.executor, OrderedLane(), list[int](), set[torch.device]()
    assert isinstance(executor, SplitExecutor) and isinstance(executor.host.executor, CpuExecutor)
    host, each = executor.host.executor, expert_size(executor.host.executor).bytes
    monkeypatch.setattr(streamed, "WAVE_BYTES", 2 * each)
    monkeypatch.setattr(torch.cuda, "Event", PassedEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", waited.add)
    monkeypatch.setattr(PassedEvent, "elapsed_time", lambda start, end: float(len(pieces)))  # ms
    copy = lane.copy
    vars(lane).update(
        stream=None, device=torch.device("cpu"), copy=lambda *given: (pieces.append(given[4]), copy(*given))
    )
    stage = Stage.make(executor.own, host, torch.device("cpu"))
    run_us = measure_rates._run_us(host, stage, lane, 2 * each)  # type: ignore[arg-type]
    assert waited == {lane.device}  # type: ignore[attr-defined]
    pairs = len(pieces) // 3
    assert set(pieces[:pairs]) == {2} and set(pieces[pairs:]) == {1}, "two by two, then one by one"
    assert run_us == pytest.approx((3 * pairs - pairs) / 64 * 1e3)
