"""Large batches: which way each expert goes, and experts that are copied, with the CPU in the place of the device."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from layer_checkpoints import SIZE, make_checkpoint, make_inputs
from torch import Tensor
from typer.testing import CliRunner

from lancebill.backends.cpu import native
from lancebill.backends.cpu.executor import CpuExecutor
from lancebill.backends.cpu.host_call import HostCall
from lancebill.cli.main import app
from lancebill.errors import NotEnoughMemory
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.moe.dispatch import Indexed
from lancebill.numbers.unusual import unusual
from lancebill.split import batch_maps, cpu_rows, large_batches, measure_rates, streamed
from lancebill.split.batch_maps import wave_maps
from lancebill.split.chosen_experts import ChosenExperts
from lancebill.split.cpu_rows import MOST_ROWS, expected_rows, few_enough
from lancebill.split.divide_batch import copy_unasked
from lancebill.split.executor import SplitExecutor
from lancebill.split.large_batches import expert_size
from lancebill.split.run_part import run_part
from lancebill.split.streamed import BUFFERS, Stage, copy_wave, first_wave, pack_wave
from lancebill.split.waves import WaveCosts, waves_of
from lancebill.split.ways import BOTH_WORTH, LATE, ExpertSize, Rates, _Batch, batch_costs, choose_ways, expected_ways
from lancebill.testing.checkpoints import save

RATES = Rates(copy_gbs=50, cpu_gbs=150, cpu_gflops=5000, pack_gbs=200)
COSTS = WaveCosts(copy=1.0, pack=0.1, fixed=0.5)
needs_kernels = pytest.mark.skipif(native.library() is None, reason="the CPU kernels are not built")
EXPERT = ExpertSize(bytes=10_000_000, flops=40_000_000, row_bytes=4096 * 6)


class OrderedLane:
    """Copies at once, and knows which buffers may be filled and read."""

    def __init__(self) -> None:
        self.busy: set[int] = set()
        self.ready: set[int] = set()
        self.copied = 0
        self.lock = threading.Lock()

    @contextmanager
    def batch(self) -> Iterator[None]:
        with self.lock:
            self.busy.clear()  # by work of the last batch, which has ended
            yield

    def copy(self, target: Tensor, place: int, source: Tensor, first: int, count: int) -> None:
        rows = source[first : first + count]
        self.copied += rows.nbytes
        target[place : place + count].copy_(rows)

    def begin(self, buffer: int) -> None:
        assert buffer not in self.busy, "the buffer is still read"
        self.ready.discard(buffer)

    def filled(self, buffer: int) -> None:
        self.ready.add(buffer)
        self.busy.add(buffer)

    def use(self, buffer: int) -> None:
        assert buffer in self.ready

    def release(self, buffer: int) -> None:
        self.busy.discard(buffer)


@pytest.fixture(params=["auto", "reference"])
def layer(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RoutedExperts]:
    folder = save(make_checkpoint("gptq", "actorder"), tmp_path / "m")
    yield RoutedExperts.from_checkpoint(folder, 1, dtype=torch.float32, gpu_experts=1, backend=request.param)


@pytest.mark.parametrize("wave", [1, 2, 8])
def test_copied_experts_give_what_the_cpu_gives(
    layer: RoutedExperts, wave: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, executor = layer.host_experts, layer.executor
    assert host is not None and isinstance(executor, SplitExecutor) and host.expert_map is not None
    held = host.packed
    each = sum(t[0].nbytes for tensors in held.values() for t in tensors.values())
    monkeypatch.setattr(streamed, "WAVE_BYTES", wave * each)
    stage = Stage.make(executor.own, host.executor, torch.device("cpu"))
    assert stage.experts == min(wave, SIZE.experts - 1)
    x, ids, weights = make_inputs(9)
    x, ids = x.float(), ids.long()
    ids[0, 1], ids[1, 0] = -1, SIZE.experts + 7
    used = {int(host.expert_map[i]) for i in ids.flatten() if 0 <= i < SIZE.experts} - {-1}
    slots, lane, total = sorted(used), OrderedLane(), torch.zeros(x.shape)
    waves = waves_of(slots, stage.experts, COSTS)
    numbers = torch.full((SIZE.experts,), -1, dtype=torch.int32)
    for number, copied in enumerate(waves):
        for place, slot in enumerate(copied):
            numbers[host.expert_map == slot] = number * stage.experts + place
    for number in range(BUFFERS):
        copy_wave(stage, lane, held, waves, number)
    for number, wave_map in enumerate(wave_maps(numbers, len(waves), stage.experts)):
        pack_wave(stage, lane, held, waves, number)
        total.add_(run_part(stage.executor, x, Indexed(ids, weights.float()), wave_map, x.dtype))
    assert lane.copied == len(slots) * each, "only experts with tokens, each once"
    want = host.compute(x, ids, weights, torch.empty_like(x))
    assert torch.allclose(total, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))


def test_the_first_wave_has_the_most_used_experts() -> None:
    assert first_wave(np.array([1.0, 9, 0, 5, 2, 0, 0, 5]), 2) == [1, 3]
    assert first_wave(np.array([0.0, 0, 1]), 5) == [2]


class InstantQueue:
    """Makes each step at once."""

    capturing = False

    def __init__(self, device: torch.device) -> None:
        self.key = "instant"

    def fork(self) -> None:
        pass

    def mapped(self, memory: Tensor) -> Tensor:
        return memory

    def gather(self, target: Tensor, sources: Sequence[Tensor]) -> None:
        target.copy_(torch.cat([source.reshape(-1).view(torch.uint8) for source in sources]))

    def fetched(self, memory: Tensor) -> Tensor:
        return memory.clone()

    def take_rows(self, target: Tensor, source: Tensor, numbers: Tensor) -> None:
        torch.index_select(source, 0, numbers, out=target)

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def call(self, call: HostCall) -> None:
        call.run()

    def allocate(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.uint8)

    def wait(self) -> None:
        pass

    def join(self) -> None:
        pass

    def mark(self) -> InstantQueue:
        return self

    def synchronize(self) -> None:
        pass


def without_gpu(monkeypatch: pytest.MonkeyPatch, lane: OrderedLane, rates: Rates) -> None:
    """The CPU in the place of the device, and one expert in a wave."""
    for name, value in {
        "SideStream": InstantQueue, "lane_of": lambda device: lane,
        "pin_in_place": lambda tensor: True, "measure_rates": lambda *given: rates, "_RATES": {}, "_STAGES": {},
    }.items():  # fmt: skip
        monkeypatch.setattr(large_batches, name, value)
    monkeypatch.setattr(batch_maps, "MailboxQueue", InstantQueue)
    monkeypatch.setattr(streamed, "WAVE_BYTES", 1)


def chosen_by(ids: Tensor, weights: Tensor) -> ChosenExperts:
    library = native.library()
    assert library is not None
    return ChosenExperts(library, ids.int(), weights)


@needs_kernels
@hypothesis.settings(deadline=None)
@hypothesis.given(*(st.integers(1, most) for most in (9, 20, 4, 5)), st.integers(0, 1 << 30))
def test_slots_are_counted_and_rows_taken_as_defined(
    known: int, tokens: int, top_k: int, experts: int, seed: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, known + 1, (tokens, top_k), generator=g)  # the first and the last are no expert
    weights, expert_map = (
        torch.rand(tokens, top_k, generator=g),
        torch.randint(-1, experts, (known,), generator=g).int(),
    )
    places = torch.cat([expert_map, torch.tensor([-1, -1])])[ids]  # -1 finds the last one
    chosen = chosen_by(ids, weights)
    want = [int((places == expert).sum()) for expert in range(experts)]
    assert chosen.counts(expert_map, experts).tolist() == want
    rows, room = (places >= 0).any(1).nonzero().flatten(), torch.zeros(tokens, dtype=torch.int32)
    taken_ids, taken_weights = torch.full((tokens, top_k), 77, dtype=torch.int32), torch.zeros(tokens, top_k)
    count = chosen.take(expert_map, room, taken_ids, taken_weights)
    assert count == len(rows) and torch.equal(room[:count], rows.int())
    assert torch.equal(taken_ids[:count], ids[rows].int()) and torch.equal(taken_weights[:count], weights[rows])
    assert (taken_ids[count:] == 77).all(), "nothing is written behind them"


@needs_kernels
@pytest.mark.parametrize("sent", [0.5, 1.0])
def test_rows_that_use_an_expert_of_the_cpu_are_sent(sent: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_maps, "MailboxQueue", InstantQueue)
    monkeypatch.setattr(cpu_rows, "MOST_SENT", sent)
    room, weights = batch_maps.BatchMaps(3, 4, 8, 2, torch.device("cpu")), torch.rand(6, 2)
    ids = torch.tensor([[0, 1], [2, 3], [-1, 3], [1, 0], [4, 2], [1, 2]])
    chosen = chosen_by(ids, weights)
    rows = room.cpu_rows(chosen, torch.tensor([0, -1, 2, 1]), (2, 1))
    assert room.cpu_map.tolist() == [-1, -1, 2, 1]
    used = [1, 2, 4, 5] if sent == 1 else list(range(6))
    assert torch.equal(rows.ids, ids[used].int()) and torch.equal(rows.weights, weights[used])
    assert (rows.numbers is None) == (len(used) == 6)
    assert rows.numbers is None or rows.numbers.tolist() == used


def test_places_of_copied_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_maps, "MailboxQueue", InstantQueue)
    room, expert_map = batch_maps.BatchMaps(4, 6, 3, 2, torch.device("cpu")), torch.tensor([-1, 3, 0, -1, 2, 1])
    for waves, on_cpu in (([(0, 1), (3,)], (2,)), ([(1,), (2,)], ()), ([(2, 3)], (3, 0))):
        numbers = room.copied(expert_map, waves, 2, on_cpu)
        for wave, found in zip(waves, wave_maps(numbers, len(waves), 2).tolist()):
            ways = set(wave) - set(on_cpu)
            assert found == [wave.index(slot) if slot in ways else -1 for slot in expert_map.tolist()]


@pytest.mark.parametrize("dtypes", [(torch.int32, torch.float32), (torch.int64, torch.bfloat16)])
def test_ids_weights_and_flags_are_fetched_through_room_of_the_batch(
    dtypes: tuple[torch.dtype, torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_maps, "MailboxQueue", InstantQueue)
    room = batch_maps.BatchMaps(4, 6, 3, 2, torch.device("cpu"))
    large = 7 if dtypes[0] == torch.int32 else 2**33 + 3  # whose last bits are an expert
    ids, weights = torch.tensor([[5, 0], [-9, 3], [2, large]], dtype=dtypes[0]), torch.rand(3, 2).to(dtypes[1])
    for rows in (3, 1):
        room.ask(Indexed(ids[:rows], weights[:rows]))
        fetched = room.fetch(Indexed(ids[:rows], weights[:rows]))
        for flag in (True, False):
            room.ask_whether(torch.tensor(flag))
            assert room.answer() == flag
        want = ids if dtypes[0] == torch.int32 else ids.clamp(-1, 6)
        assert fetched[0].tolist() == want[:rows].tolist() and torch.equal(fetched[1], weights[:rows].float())
        assert fetched[0].dtype == torch.int32


@pytest.mark.parametrize("share", [0.02, 0.2, 0.9])
def test_the_number_of_rows_that_are_sent_is_expected(share: float) -> None:
    g = torch.Generator().manual_seed(0)
    used = (torch.rand(4000, 8, generator=g) < share).sum(1)
    rows = int((used > 0).sum())
    none, expected = expected_rows(4000, np.array([0.0, float(used.sum())])).tolist()
    assert expected == 4000 if rows > 3200 else expected == pytest.approx(rows, rel=0.05)
    assert none == 0 and expected_rows(0, np.zeros(1)).tolist() == [0]


@needs_kernels
@pytest.mark.parametrize("sent", [0.0, 1.0], ids=["all rows", "some rows"])
@pytest.mark.parametrize("moves", ["off", "recency"])
@pytest.mark.parametrize("cpu_gbs", [1e-3, 15.0, 1e9], ids=["copied", "both", "computed"])
def test_a_batch_is_the_whole_layer_whichever_way_experts_go(
    cpu_gbs: float, moves: str, sent: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_rows, "MOST_SENT", sent)
    folder = save(make_checkpoint(), tmp_path / "m")
    layer, whole = (
        RoutedExperts.from_checkpoint(folder, 0, gpu_experts=number, moves=moves) for number in (1, SIZE.experts)
    )
    without_gpu(monkeypatch, OrderedLane(), Rates(10.0, cpu_gbs, 1e9, 1e9, call_us=0, wait_us=0, divide_us=0))
    executor = layer.executor
    assert isinstance(executor, SplitExecutor) and layer.expert_map is not None
    for seed in range(3):
        x, ids, weights = make_inputs(9, seed)
        given = Indexed(ids, weights, layer.expert_map)
        with executor._maps(given) as maps:
            given = Indexed(ids, weights, maps.own)
            counts = chosen_by(ids, weights).counts(maps.host, executor.host.executor.problem.experts)
            large = executor.large_batches
            ways = choose_ways(counts, len(x), large.size, large._measured(x.device))
            assert bool(ways.cpu) == (cpu_gbs > 1) and bool(ways.streamed) == (cpu_gbs < 1e9)
            out = large.run(x, given, maps.host, torch.empty_like(x))
            assert (out is None) == (not ways.streamed)
            if out is None:
                continue
            got = out.float()
            want = whole(x, topk_ids=ids, topk_weights=weights).float()
            assert float((got - want).abs().max() / want.abs().max()) < 2e-2, seed


class FullQueue(InstantQueue):
    """Has room for no call."""

    joined = 0

    def call(self, call: HostCall) -> None:
        raise NotEnoughMemory("no pinned host memory is left")

    def join(self) -> None:
        FullQueue.joined += 1


@needs_kernels
def test_what_was_queued_for_the_cpu_is_waited_for_if_the_rest_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads rows and writes sums, and their memory is used again."""
    layer = RoutedExperts.from_checkpoint(save(make_checkpoint(), tmp_path / "m"), 0, gpu_experts=1)
    executor = layer.executor
    assert isinstance(executor, SplitExecutor) and layer.host_experts is not None
    places = layer.host_experts.expert_map
    assert layer.expert_map is not None and places is not None
    both = Rates(10.0, 15.0, 1e9, 1e9, call_us=0, wait_us=0, divide_us=0)
    without_gpu(monkeypatch, OrderedLane(), both)
    monkeypatch.setattr(large_batches, "SideStream", FullQueue)
    monkeypatch.setattr(FullQueue, "joined", 0)
    x, ids, weights = make_inputs(9)
    with pytest.raises(NotEnoughMemory):
        executor.large_batches.run(x, Indexed(ids, weights, layer.expert_map), places, torch.empty_like(x))
    assert FullQueue.joined == 1


@needs_kernels
@pytest.mark.parametrize("which", ["every", "last"])
@pytest.mark.parametrize("in_place", [False, True])
def test_waves_that_were_packed_on_a_wrong_assumption_are_packed_again(
    in_place: bool, which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the result replaces the rows, which are read twice then."""
    layer = RoutedExperts.from_checkpoint(save(make_checkpoint(), tmp_path / "m"), 0, gpu_experts=1)
    lane, pack, wrong, packed = OrderedLane(), Stage.pack, [True], [0]
    without_gpu(monkeypatch, lane, Rates(10.0, 1e-3, 1e9, 1e9))

    def assuming_pack(stage: Stage, buffer: int, count: int) -> None:
        pack(stage, buffer, count)
        packed[0] += 1
        bad = wrong[0] and (which == "every" or packed[0] % last == 0)
        if not unusual(torch.tensor(bad)) and bad:  # not asked yet: wrong bytes
            for tensors in stage.packed.values():
                tensors["codes"].zero_()

    monkeypatch.setattr(Stage, "pack", assuming_pack)
    executor = layer.executor
    assert isinstance(executor, SplitExecutor) and layer.host_experts is not None
    assert layer.expert_map is not None and layer.host_experts.expert_map is not None
    x, ids, weights = make_inputs(9)
    given, large, found = Indexed(ids, weights, layer.expert_map), executor.large_batches, []
    last = len(layer.host_experts.expert_map[ids.unique().long()].unique()) - 1  # the number of waves: -1 is none
    for wrong[0] in (True, False):
        copy = x.clone()
        out = large.run(copy, given, layer.host_experts.expert_map, copy if in_place else torch.empty_like(x))
        assert out is not None
        found.append(out)
    assert torch.equal(*found) and packed[0] == 3 * last and lane.copied % 3 == 0, "twice, then once"


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
def test_copies_begin_before_the_router_has_chosen_if_nearly_all_experts_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = RoutedExperts.from_checkpoint(save(make_checkpoint(), tmp_path / "m"), 0, gpu_experts=1)
    executor, lane = layer.executor, OrderedLane()
    assert isinstance(executor, SplitExecutor) and layer.host_experts is not None
    places, each = layer.host_experts.expert_map, expert_size(layer.host_experts.executor).bytes
    assert layer.expert_map is not None and places is not None
    without_gpu(monkeypatch, lane, RATES)
    for tokens, copied in ((1, []), (200, [0])):
        x, ids, weights = make_inputs(tokens)
        batch = executor.large_batches._batch(x, Indexed(ids, weights, layer.expert_map), places)
        assert list(copy_unasked(batch)) == copied and lane.copied == each * len(copied)


@needs_kernels
@pytest.mark.parametrize("cpu_gbs", [1e-3, 1e9], ids=["copied", "computed"])
def test_the_host_is_timed_with_a_batch(cpu_gbs: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = RoutedExperts.from_checkpoint(save(make_checkpoint(), tmp_path / "m"), 0, gpu_experts=1)
    executor, lane = layer.executor, OrderedLane()
    assert isinstance(executor, SplitExecutor)
    without_gpu(monkeypatch, lane, RATES)
    monkeypatch.setattr(torch.cuda, "synchronize", lane.busy.clear)
    rates = Rates(10.0, cpu_gbs, 1e9, 1e9, call_us=123.0)
    begin, divide, call = executor.large_batches._host_us(rates, torch.device("cpu"))
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
    executor, lane = layer.executor, OrderedLane()
    assert isinstance(executor, SplitExecutor) and layer.host_experts is not None
    host = layer.host_experts.executor
    assert isinstance(host, CpuExecutor)
    monkeypatch.setattr(streamed, "WAVE_BYTES", 1)
    monkeypatch.setattr(torch.cuda, "Event", PassedEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    vars(lane).update(stream=None, device=torch.device("cpu"))
    stage = Stage.make(executor.own, host, torch.device("cpu"))
    rates = measure_rates.measure_rates(host, stage, lane, lambda rates: (5.0, rates.wave_experts, 7.0))  # type: ignore[arg-type]
    each = expert_size(host).bytes
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
    executor, lane, pieces = layer.executor, OrderedLane(), list[int]()
    assert isinstance(executor, SplitExecutor) and isinstance(executor.host.executor, CpuExecutor)
    host, each = executor.host.executor, expert_size(executor.host.executor).bytes
    monkeypatch.setattr(streamed, "WAVE_BYTES", 2 * each)
    monkeypatch.setattr(torch.cuda, "Event", PassedEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(PassedEvent, "elapsed_time", lambda start, end: float(len(pieces)))  # ms
    copy = lane.copy
    vars(lane).update(stream=None, copy=lambda *given: (pieces.append(given[4]), copy(*given)))
    stage = Stage.make(executor.own, host, torch.device("cpu"))
    run_us = measure_rates._run_us(host, stage, lane, 2 * each)  # type: ignore[arg-type]
    pairs = len(pieces) // 3
    assert set(pieces[:pairs]) == {2} and set(pieces[pairs:]) == {1}, "two by two, then one by one"
    assert run_us == pytest.approx((3 * pairs - pairs) / 64 * 1e3)


def test_the_fastest_division_is_chosen() -> None:
    few = choose_ways(np.ones(4), 1, EXPERT, RATES)
    many = choose_ways(np.full(64, 512.0), 8192, EXPERT, RATES)
    assert not few.streamed, "few tokens: reading an expert is faster for the CPU than copying it"
    assert len(many.streamed) > 55, "many tokens: a copy takes as long as for few"
    between = choose_ways(np.arange(1.0, 65), 600, EXPERT, RATES)
    assert between.cpu and between.streamed
    assert max(between.cpu) < min(between.streamed), "the CPU gets those with few tokens"
    assert between.estimate_us <= min(
        choose_ways(np.arange(1.0, 65), 600, EXPERT, only).estimate_us
        for only in (
            Rates(50, 1e-3, 1e-3, 200),  # all are copied
            Rates(1e-3, 150, 5000, 200),  # the CPU computes all
        )
    )
    begun = choose_ways(np.arange(1.0, 65), 600, EXPERT, RATES, begun=(0, 1))
    assert len(begun.cpu) >= len(between.cpu) - 2 and {0, 1} <= {*begun.streamed}, "what is copied stays on the GPU"
    assert choose_ways(np.array([0.0, 0, 0, 0, 2]), 2, EXPERT, RATES).cpu == (4,)
    assert choose_ways(np.zeros(0), 2, EXPERT, RATES).estimate_us == 0


def test_both_ways_must_save_more_than_estimates_are_wrong() -> None:
    """With little for the CPU to win, all experts are copied, or none."""
    counts = np.full(64, 240.0)
    taken = choose_ways(counts, 2048, EXPERT, RATES)
    always = choose_ways(counts, 2048, EXPERT, RATES, worth=1.0)
    assert taken.streamed == tuple(range(64)) and taken.estimate_us == taken.copied_us
    assert always.cpu and BOTH_WORTH * taken.copied_us < always.estimate_us < taken.copied_us
    for tokens in (64, 200, 512, 2048, 8192):
        found = expected_ways(64, tokens, 8, 128, EXPERT, RATES)
        alone = min(found.copied_us, found.cpu_alone_us)
        assert found.estimate_us == alone or (found.cpu and found.streamed and found.estimate_us <= BOTH_WORTH * alone)


@pytest.mark.parametrize("tokens", [64, 512, 2048, 8192])
def test_no_other_division_is_faster_by_estimate(tokens: int) -> None:
    g = torch.Generator().manual_seed(tokens)
    counts = sorted(torch.poisson(torch.full((96,), tokens / 16.0), generator=g).clamp(min=1).tolist())
    rates = replace(RATES, cpu_points=((1.0, 60.0), (8.0, 190.0), (64.0, 450.0)), wave_us=150.0, wave_experts=10)
    batch = _Batch(np.array(counts), batch_costs(tokens, EXPERT, rates))
    found = choose_ways(np.array(counts), tokens, EXPERT, rates, worth=1.0)
    late = np.maximum(LATE * batch.cpu_us, batch.stream_us)
    assert max(LATE * found.cpu_us, found.stream_us) == late.min() and len(late) == 97
    assert batch.us.min() <= found.estimate_us <= LATE * batch.us.min()
    assert found.rows == batch.rows[len(found.cpu)] <= tokens


def test_a_batch_that_one_call_has_no_room_for_is_divided_so_that_rows_fit() -> None:
    counts, points = np.full(64, 300.0), ((1.0, 50.0), (300.0, 150.0))
    found = choose_ways(counts, 4096, EXPERT, replace(RATES, cpu_points=points), worth=1.0)
    assert len(found.cpu) == 6 and 6 * 300 <= MOST_ROWS < 7 * 300 and found.rows <= 6 * 300
    found = choose_ways(counts, 4096, EXPERT, replace(RATES, cpu_points=points, copy_gbs=10), worth=1.0)
    assert not found.streamed, "the whole batch goes in pieces"
    assert few_enough(MOST_ROWS, MOST_ROWS + 1) and not few_enough(MOST_ROWS, MOST_ROWS), "else all rows are sent"


@needs_kernels
@hypothesis.settings(deadline=None)
@hypothesis.given(
    st.lists(st.integers(0, 300), max_size=40),
    st.sampled_from([1, 64, 512, 2048, 2049, 20000]),
    st.tuples(*(st.floats(low, 4.0) for low in (1.0, 1.0, 2.0, 1.0))),
    st.sampled_from([BOTH_WORTH, 1.0]),
    st.sets(st.integers(0, 39), max_size=4),
    st.booleans(),
)
def test_the_library_divides_as_defined(
    used: list[int], tokens: int, powers: tuple[float, ...], worth: float, begun: set[int], points: bool
) -> None:
    copy_gbs, cpu_gbs, cpu_gflops, run_us = (10**power for power in powers)
    lines = ((1.0, 30.0), (16.0, 30.0), (64.0, cpu_gbs)) if points else ()
    rates = Rates(copy_gbs, cpu_gbs, cpu_gflops, 200.0, wave_us=50.0, wave_experts=5, run_us=run_us, cpu_points=lines)
    counts, copied = np.array(used, dtype=np.float64), sorted(expert for expert in begun if expert < len(used))
    want, got = (
        choose_ways(counts, tokens, EXPERT, rates, worth, copied, library) for library in (None, native.library())
    )
    assert got.estimate_us == pytest.approx(want.estimate_us, rel=1e-9), "the same, or as fast"
    assert {*got.cpu} | {*got.streamed} == {*want.cpu} | {*want.streamed}
    if len(got.cpu) == len(want.cpu):
        assert got.cpu == want.cpu and got.streamed == want.streamed
        for name in ("cpu_us", "stream_us", "cpu_alone_us", "copied_us", "rows"):
            assert getattr(got, name) == pytest.approx(getattr(want, name), rel=1e-9)


def test_costs_of_a_wave_grow_with_its_experts() -> None:
    rates = replace(RATES, wave_us=100.0, token_us=0.5, expert_us=10.0, expert_token_us=0.02)
    costs = rates.wave_costs(EXPERT, 1000)
    assert costs.fixed + costs.pack == pytest.approx(600 + EXPERT.bytes / rates.pack_gbs / 1e3), "of one expert"
    assert costs.pack == pytest.approx(30 + EXPERT.bytes / rates.pack_gbs / 1e3), "of each further one"
    assert costs.copy == pytest.approx(EXPERT.bytes / rates.copy_gbs / 1e3)


def test_pieces_of_neighbouring_experts_take_time() -> None:
    counts, pieces = np.full(64, 240.0), replace(RATES, run_us=30.0)
    apart, joined = (_Batch(counts, batch_costs(2048, EXPERT, rates)).stream_us for rates in (pieces, RATES))
    more = apart - joined
    assert more[0] == more[-1] == 0, "all copied are one piece"
    assert more[32] == pytest.approx(30 * 16), "half of them, at random: every second one begins a piece"
    assert choose_ways(counts, 2048, EXPERT, pieces).copied_us == choose_ways(counts, 2048, EXPERT, RATES).copied_us


def test_the_time_of_the_cpu_is_on_lines_through_what_was_measured() -> None:
    rates = replace(RATES, cpu_points=((1.0, 100.0), (16.0, 130.0), (64.0, 610.0)))
    taken = batch_costs(64, EXPERT, rates).expert(np.array([0.5, 1, 8.5, 16, 40, 64, 128, 2048]))
    assert taken.tolist() == [100, 100, 115, 130, 370, 610, 1250, 20450], "with half a token it is read whole"
    pieces = choose_ways(np.array([4096.0]), 4096, EXPERT, rates, worth=1.0)
    whole = choose_ways(np.array([2048.0]), 2048, EXPERT, rates, worth=1.0)
    rows_us = 1.5 * EXPERT.row_bytes * 2048 / rates.copy_gbs / 1e3
    assert pieces.cpu_alone_us == pytest.approx(2 * whole.cpu_alone_us - rates.call_us), "a piece reads experts again"
    assert whole.cpu_alone_us == pytest.approx(taken[-1] + rates.call_us + rows_us)


def test_more_tokens_never_send_fewer_experts_to_the_gpu() -> None:
    sizes = (1, 8, 64, 512, 2048, 8192, 32768)
    sent = [len(expected_ways(64, tokens, 8, 128, EXPERT, RATES).streamed) for tokens in sizes]
    assert sent == sorted(sent) and sent[0] == 0 and sent[-1] > 60
    text = str(expected_ways(64, 2048, 8, 128, EXPERT, RATES))
    assert "the CPU computes" in text and "are copied to the GPU" in text


def test_explain_prints_the_ways() -> None:
    words = ["explain", "--shape", "qwen3-30b-a3b", "--weights", "mxfp4", "--device", "sm_90", "--gpu-experts", "64"]
    text = CliRunner().invoke(app, [*words, "--tokens", "2048"]).output
    assert "experts in host memory: the CPU computes" in " ".join(text.split())
    figures = json.loads(CliRunner().invoke(app, [*words, "--tokens", "1", "--json"]).output)["missing_experts"]
    assert not figures["streamed"] and figures["cpu_us"] > 0
