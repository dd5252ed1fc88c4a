"""Experts that move between a GPU and host memory while the layer computes, eager and captured.

Results are compared with the whole layer on the GPU. An expert that is computed twice or not at all, or from a place
that is half overwritten, is an error of the size of the result.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lancebill.backends.cpu import native
from lancebill.checkpoint.resolve import naming as names
from lancebill.errors import LaunchError
from lancebill.formats import registry
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.moe.dispatch import Indexed
from lancebill.moe.problem import Problem
from lancebill.split import divide_batch, large_batches, streamed
from lancebill.split import moves as moving
from lancebill.split.mover import MOVER
from lancebill.split.moves import Moves
from lancebill.split.ways import Rates
from lancebill.testing.checkpoints import Generated, Geometry, generate, save
from lancebill.testing.layers import layer_problem, worst_row

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or native.library() is None, reason="needs a GPU and the CPU kernels"
)
SIZE = Geometry(experts=16, hidden=512, intermediate=256, layers=1, top_k=4)
ON_GPU = 5
BOUND = 1.5e-2
Given = tuple[Tensor, Tensor, Tensor]


def plans() -> Iterator[tuple[Problem, int]]:
    problem = layer_problem("mxfp4", hidden=512, intermediate=256, experts=16, top_k=4)
    yield from ((problem, tokens) for tokens in (1, 3, 16, 1500))


@cache
def made(seed: int = 0) -> Generated:
    row = next(row for row in names.TABLE if row.family == "qwen3_moe")
    example = next(example for example in registry()["compressed-tensors"].examples() if "mxfp4" in example.name)
    return generate(example, row, row.forms[0], SIZE, seed=seed)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(made(), tmp_path_factory.mktemp("m") / "m")


@pytest.fixture(autouse=True)
def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts move whatever it costs, and only when a test says so. No graph is freed during a capture."""
    monkeypatch.setattr(moving, "break_even", lambda share, rates: 0.0)
    monkeypatch.setattr(MOVER, "add", lambda moves: None)
    gc.collect()


def load(folder: Path, on_gpu: int = ON_GPU) -> RoutedExperts:
    return RoutedExperts.from_checkpoint(folder, 0, device="cuda", gpu_experts=on_gpu, moves="recency")


def moves_of(layer: RoutedExperts) -> Moves:
    assert layer.moves is not None
    return layer.moves


def inputs(tokens: int, seed: int = 0, first: int | None = None) -> Given:
    """Rows that use any experts, or the four from `first` on."""
    g = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(tokens, SIZE.hidden, generator=g, device="cuda").bfloat16()
    ids = torch.rand(tokens, SIZE.experts, generator=g, device="cuda").topk(SIZE.top_k).indices
    if first is not None:
        ids = (ids * 0 + first + torch.arange(SIZE.top_k, device="cuda")) % SIZE.experts
    return x, ids, torch.rand(tokens, SIZE.top_k, generator=g, device="cuda")


def run(layer: RoutedExperts, given: Given) -> Tensor:
    out: Tensor = layer(given[0], topk_ids=given[1], topk_weights=given[2])
    return out


@contextmanager
def background(moves: Moves) -> Iterator[None]:
    """Moves made by another thread, as fast as it can."""
    ends = threading.Event()

    def work() -> None:
        while not ends.is_set():
            try:
                moved = moves.step()
            except LaunchError:  # `check` raises it in the thread of the test
                return
            if not moved:
                time.sleep(1e-4)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()
    moves.check()


def steps(moves: Moves, least: int, moved: int) -> Iterator[int]:
    """So many steps, and as many more as another thread needs for its moves: it gets the interpreter now and then."""
    end = time.monotonic() + 60
    for step in count():
        if step >= least and moves.moved >= moved:
            return
        assert time.monotonic() < end, f"{moves.moved} moves in {step} steps"
        yield step


class Replayed:
    """A captured call, on a stream of its own, whose layer may never have run before."""

    def __init__(self, layer: RoutedExperts, tokens: int) -> None:
        self.given, self.graph, self.stream = inputs(tokens), torch.cuda.CUDAGraph(), torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph, stream=self.stream):
            self.out = run(layer, self.given)

    def __call__(self, given: Given) -> Tensor:
        with torch.cuda.stream(self.stream):
            for held, new in zip(self.given, given):
                held.copy_(new)
            self.graph.replay()
            return self.out.clone()


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("tokens", [1, 16, 1500])
def test_the_experts_used_last_come_and_results_stay(folder: Path, tokens: int, captured: bool) -> None:
    whole, split = load(folder, SIZE.experts), load(folder)
    call = Replayed(split, tokens) if captured else lambda given: run(split, given)
    for seed, first in enumerate((0, 7, 12, 3)):
        given = inputs(tokens, seed, first)
        want = run(whole, given)
        torch.cuda.synchronize()
        results = [call(given)]
        torch.cuda.synchronize()
        while moves_of(split).step():
            results.append(call(given))
        torch.cuda.synchronize()
        assert all(worst_row(got, want) < BOUND for got in results), (first, moves_of(split).held)
        assert {(first + i) % SIZE.experts for i in range(4)} <= set(moves_of(split).held.experts)
    views = moves_of(split)._parts.views  # type: ignore[union-attr]
    assert not views.under_way() and views.uses.calls >= 4 and moves_of(split).moved >= 10


def test_replays_of_two_graphs_and_moves_at_the_same_time(folder: Path) -> None:
    """At least two thousand replays; nothing grows."""
    whole, split = load(folder, SIZE.experts), load(folder)
    graphs = [Replayed(split, tokens) for tokens in (1, 3)]
    given = [[inputs(tokens, seed, seed * 5) for seed in range(12)] for tokens in (1, 3)]
    want = [[run(whole, each) for each in several] for several in given]
    torch.cuda.synchronize()
    with background(moves_of(split)):
        for step in steps(moves_of(split), 1000, 50):
            each = step // 4 % 12
            got = [graph(several[each]) for graph, several in zip(graphs, given)]
            if step % 10 == 0:
                torch.cuda.synchronize()
                worst = max(worst_row(a, b[each]) for a, b in zip(got, want))
                assert worst < BOUND, (step, worst)
            if step == 200:
                held = torch.cuda.memory_allocated()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= held + (1 << 20)
    views = moves_of(split)._parts.views  # type: ignore[union-attr]
    assert not views.under_way() and views.uses.calls >= 2000


def test_captures_while_experts_move(folder: Path) -> None:
    """What the mover does in its thread must not disturb a capture, nor be part of it."""
    whole, split = load(folder, SIZE.experts), load(folder)
    given = [inputs(3, seed, seed * 4) for seed in range(4)]
    want = [run(whole, each) for each in given]
    run(split, given[0])
    with background(moves_of(split)):
        for step in steps(moves_of(split), 20, 5):
            for each in given:
                run(split, each)
            graph, turn = Replayed(split, 3), step % 4
            got = graph(given[turn])
            torch.cuda.synchronize()
            assert worst_row(got, want[turn]) < BOUND, step
            del graph
            gc.collect()


def test_a_place_is_not_overwritten_while_a_call_may_read_it(folder: Path) -> None:
    split, given = load(folder), inputs(3, 0, 8)
    run(split, given)
    torch.cuda.synchronize()
    before, moves = split.packed["w13"], moves_of(split)
    held = {name: tensor.clone() for name, tensor in before.items()}
    assert split.expert_map is not None
    with moves.call(Indexed(given[1], given[2], split.expert_map)):
        torch.cuda._sleep(1_000_000_000)  # about half a second
        thread = threading.Thread(target=moves.step)
        thread.start()
        time.sleep(0.1)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            same = [bool(torch.equal(tensor, held[name])) for name, tensor in before.items()]
            left = int((split.expert_map >= 0).sum())
        assert all(same) and left == ON_GPU - 1 and thread.is_alive()
    thread.join()
    assert moves.moved == 4 and int((split.expert_map >= 0).sum()) == ON_GPU


def test_refits_while_experts_move(folder: Path, tmp_path: Path) -> None:
    split, given = load(folder), [inputs(3, seed, seed * 4) for seed in range(4)]
    run(split, given[0])
    with background(moves_of(split)):
        for seed in (1, 2):
            whole = load(save(made(seed), tmp_path / str(seed)), SIZE.experts)
            torch.cuda.synchronize()
            split.load_weights(made(seed).tensors.items())
            split.finish()
            for _ in steps(moves_of(split), 5, 4 * seed):
                for each in given:
                    assert worst_row(run(split, each), run(whole, each)) < BOUND


def test_a_failed_move_is_told_once_and_the_layer_computes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, split, given = load(folder, SIZE.experts), load(folder), inputs(3, 0, 8)
    want = run(whole, given)
    run(split, given)
    torch.cuda.synchronize()
    with monkeypatch.context() as patched:
        patched.setattr(moving, "repack", lambda *given: (_ for _ in ()).throw(torch.cuda.OutOfMemoryError("none")))
        with pytest.raises(LaunchError, match="could not be moved"):
            moves_of(split).step()
    with pytest.raises(LaunchError, match="could not be moved"):
        run(split, given)
    assert worst_row(run(split, given), want) < BOUND
    assert moves_of(split).step() == 0


def test_large_batches_see_where_experts_are(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some experts are copied for the batch, by the map of the call."""
    both = Rates(copy_gbs=50, cpu_gbs=50, cpu_gflops=5000, pack_gbs=200, call_us=0, wait_us=0)
    for name, value in {"measure_rates": lambda *given: both, "_RATES": {}, "_STAGES": {}}.items():
        monkeypatch.setattr(large_batches, name, value)
    whole, split = load(folder, SIZE.experts), load(folder)
    assert split.host_experts is not None and split.host_experts.report is not None
    monkeypatch.setattr(streamed, "WAVE_BYTES", 3 * split.host_experts.report.bytes // SIZE.experts)
    sent: list[Any] = []
    choose = divide_batch.choose_ways
    monkeypatch.setattr(divide_batch, "choose_ways", lambda *a, **b: sent.append(choose(*a, **b)) or sent[-1])
    for seed, first in enumerate((0, 7, 12)):
        run(split, inputs(3, seed, first))
        torch.cuda.synchronize()
        moves_of(split).step()
        given = inputs(1500, seed)
        assert worst_row(run(split, given), run(whole, given)) < 2e-2, seed
    assert any(ways.streamed for ways in sent) and moves_of(split).moved >= 4
    assert not any({*ways.cpu} & {*ways.streamed} for ways in sent)


def test_the_real_mover_moves(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(moving, "break_even", lambda share, rates: 0.0)
    split, given = load(folder), inputs(3, 0, 8)
    graph, end = Replayed(split, 3), time.monotonic() + 30
    while not {8, 9, 10, 11} <= set(moves_of(split).held.experts):
        graph(given)
        assert time.monotonic() < end, "nothing moved"
    torch.cuda.synchronize()
    assert worst_row(graph(given), run(load(folder, SIZE.experts), given)) < BOUND
