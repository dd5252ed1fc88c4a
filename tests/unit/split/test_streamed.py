"""Large batches: experts that are copied, with the CPU in the place of the device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from layer_checkpoints import SIZE, make_checkpoint, make_inputs
from torch import Tensor
from without_gpu import RATES, InstantQueue, OrderedLane, needs_kernels, without_gpu

from lancebill.backends.cpu import native
from lancebill.backends.cpu.host_call import HostCall
from lancebill.errors import NotEnoughMemory
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.moe.dispatch import Indexed
from lancebill.numbers.unusual import unusual
from lancebill.split import batch_maps, cpu_rows, large_batches, streamed
from lancebill.split.batch_maps import wave_maps
from lancebill.split.chosen_experts import ChosenExperts
from lancebill.split.cpu_rows import expected_rows
from lancebill.split.divide_batch import copy_unasked
from lancebill.split.executor import SplitExecutor
from lancebill.split.large_batches import expert_size
from lancebill.split.run_part import run_part
from lancebill.split.streamed import BUFFERS, Stage, copy_wave, first_wave, pack_wave
from lancebill.split.waves import WaveCosts, waves_of
from lancebill.split.ways import Rates, choose_ways
from lancebill.testing.checkpoints import save

COSTS = WaveCosts(copy=1.0, pack=0.1, fixed=0.5)


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
