"""Large batches: which way each expert goes, and experts that are copied, with the CPU in the place of the device."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from layer_checkpoints import SIZE, make_checkpoint, make_inputs
from torch import Tensor
from typer.testing import CliRunner

from lancebill.backends.cpu import native
from lancebill.backends.cpu.host_call import HostCall
from lancebill.cli.main import app
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.moe.dispatch import Indexed
from lancebill.split import large_batches, streamed
from lancebill.split.executor import SplitExecutor
from lancebill.split.streamed import Stage, add_streamed, count_tokens, wave_maps
from lancebill.split.ways import ExpertSize, Rates, choose_ways, expected_ways
from lancebill.testing.checkpoints import save

RATES = Rates(copy_gbs=50, cpu_gbs=150, cpu_gflops=5000, pack_gbs=200)
EXPERT = ExpertSize(bytes=10_000_000, flops=40_000_000, row_bytes=4096 * 6)


class OrderedLane:
    """Copies at once, and knows which buffers may be filled and read."""

    def __init__(self) -> None:
        self.busy: set[int] = set()
        self.ready: set[int] = set()
        self.copied = 0

    def begin_batch(self) -> None:
        assert not self.busy

    def copy(self, target: Tensor, source: Tensor) -> None:
        self.copied += source.nbytes
        target.copy_(source)

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
    counts = count_tokens(ids, host.expert_map, host.problem.experts)
    assert sum(counts.values()) == sum(int(host.expert_map[i]) >= 0 for i in ids.flatten() if 0 <= i < SIZE.experts)
    slots, lane, total = sorted(counts), OrderedLane(), torch.zeros(x.shape)
    maps = wave_maps(host.expert_map, slots, stage.experts)
    add_streamed(stage, lane, held, maps, slots, x, Indexed(ids, weights.float()), total)
    assert lane.copied == len(slots) * each, "only experts with tokens, each once"
    want = host.compute(x, ids, weights, torch.empty_like(x))
    assert torch.allclose(total, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))


class InstantQueue:
    """Makes each step at once."""

    capturing = False

    def __init__(self, device: torch.device) -> None:
        self.key = "instant"

    def mapped(self, memory: Tensor) -> Tensor:
        return memory

    def gather(self, target: Tensor, sources: Sequence[Tensor]) -> None:
        target.copy_(torch.cat([source.reshape(-1).view(torch.uint8) for source in sources]))

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


@pytest.mark.skipif(native.library() is None, reason="the CPU kernels are not built")
@pytest.mark.parametrize("moves", ["off", "recency"])
@pytest.mark.parametrize("cpu_gbs", [1e-3, 15.0, 1e9], ids=["copied", "both", "computed"])
def test_a_batch_is_the_whole_layer_whichever_way_experts_go(
    cpu_gbs: float, moves: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(make_checkpoint(), tmp_path / "m")
    layer, whole = (
        RoutedExperts.from_checkpoint(folder, 0, gpu_experts=number, moves=moves) for number in (1, SIZE.experts)
    )
    rates = Rates(10.0, cpu_gbs, 1e9, 1e9, call_us=0.0, wait_us=0.0)
    for name, value in {
        "SideStream": InstantQueue, "MailboxQueue": InstantQueue, "lane_of": lambda device: lane,
        "pin_in_place": lambda tensor: True, "measure_rates": lambda *given: rates, "_RATES": {}, "_STAGES": {},
    }.items():  # fmt: skip
        monkeypatch.setattr(large_batches, name, value)
    monkeypatch.setattr(streamed, "WAVE_BYTES", 1)
    lane, executor = OrderedLane(), layer.executor
    assert isinstance(executor, SplitExecutor) and layer.expert_map is not None
    for seed in range(3):
        x, ids, weights = make_inputs(9, seed)
        given = Indexed(ids, weights, layer.expert_map)
        with executor._maps(given) as maps:
            given = Indexed(ids, weights, maps.own)
            ways = executor.large_batches.choose(given, maps.host)
            assert bool(ways.cpu) == (cpu_gbs > 1) and bool(ways.streamed) == (cpu_gbs < 1e9)
            if not ways.streamed:
                continue
            got = executor.large_batches.run(x, given, maps.host, ways, torch.empty_like(x)).float()
            want = whole(x, topk_ids=ids, topk_weights=weights).float()
            assert float((got - want).abs().max() / want.abs().max()) < 2e-2, seed


def test_the_fastest_division_is_chosen() -> None:
    few = choose_ways(dict.fromkeys(range(4), 1.0), 1, EXPERT, RATES)
    many = choose_ways(dict.fromkeys(range(64), 512.0), 8192, EXPERT, RATES)
    assert not few.streamed, "few tokens: reading an expert is faster for the CPU than copying it"
    assert len(many.streamed) > 55, "many tokens: a copy takes as long as for few"
    between = choose_ways({e: 1.0 + e for e in range(64)}, 600, EXPERT, RATES)
    assert between.cpu and between.streamed
    assert max(between.cpu) < min(between.streamed), "the CPU gets those with few tokens"
    assert between.estimate_us <= min(
        choose_ways({e: 1.0 + e for e in range(64)}, 600, EXPERT, only).estimate_us
        for only in (
            Rates(50, 1e-3, 1e-3, 200),  # all are copied
            Rates(1e-3, 150, 5000, 200),  # the CPU computes all
        )
    )
    assert choose_ways({3: 0.0, 4: 2.0}, 2, EXPERT, RATES).cpu == (4,)
    assert choose_ways({}, 2, EXPERT, RATES).estimate_us == 0


def test_more_tokens_never_send_fewer_experts_to_the_gpu() -> None:
    sizes = (1, 8, 64, 512, 2048, 8192, 32768)
    sent = [len(expected_ways(64, tokens, 8, 128, EXPERT, RATES).streamed) for tokens in sizes]
    assert sent == sorted(sent) and sent[0] == 0 and sent[-1] > 60
    text = str(expected_ways(64, 2048, 8, 128, EXPERT, RATES))
    assert "the CPU computes" in text and "are copied to the GPU" in text


# Recorded on an H200's host: tokens, top k, experts, those in host memory, bytes of an expert and its operations for a
# token, the rates of the CPU, and the time that the CPU took alone.
MEASURED = (
    (512, 8, 128, 64, 10.03e6, 37.7e6, 91.1, 4455, 18_413), (2048, 8, 128, 64, 10.03e6, 37.7e6, 91.1, 4455, 72_632),
    (8192, 8, 128, 64, 10.03e6, 37.7e6, 91.1, 4455, 269_672), (512, 6, 256, 128, 13.4e6, 50.3e6, 110.2, 4976, 32_554),
    (2048, 6, 256, 128, 13.4e6, 50.3e6, 110.2, 4976, 85_063),
    (8192, 6, 256, 128, 13.4e6, 50.3e6, 110.2, 4976, 331_864),
)  # fmt: skip


@pytest.mark.parametrize("measured", MEASURED)
def test_the_estimate_of_the_cpu_is_what_was_measured(measured: tuple[float, ...]) -> None:
    """Rather too high than too low: the GPU can wait for the CPU, but a copy takes the time it takes."""
    tokens, top_k, experts, missing, size, flops, cpu_gbs, cpu_gflops, us = measured
    rates = Rates(copy_gbs=50, cpu_gbs=cpu_gbs, cpu_gflops=cpu_gflops, pack_gbs=50)
    expert = ExpertSize(round(size), round(flops), 4096 * 4)
    ways = expected_ways(int(missing), int(tokens), int(top_k), int(experts), expert, rates)
    assert 0.95 < ways.cpu_alone_us / us < 1.5


def test_explain_prints_the_ways() -> None:
    words = ["explain", "--shape", "qwen3-30b-a3b", "--weights", "mxfp4", "--device", "sm_90", "--gpu-experts", "64"]
    text = CliRunner().invoke(app, [*words, "--tokens", "2048"]).output
    assert "experts in host memory: the CPU computes" in " ".join(text.split())
    figures = json.loads(CliRunner().invoke(app, [*words, "--tokens", "1", "--json"]).output)["missing_experts"]
    assert not figures["streamed"] and figures["cpu_us"] > 0
