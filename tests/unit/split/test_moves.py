"""Experts that move while a layer computes, with the CPU as both parts: results stay what they are, bit for bit.

Every token has two experts with weights of one, so their sum does not depend on which part computes which.
"""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from layer_checkpoints import SIZE, make_checkpoint, make_inputs
from torch import Tensor

from lancebill.backends.cpu import native
from lancebill.checkpoint.read.files import Checkpoint
from lancebill.errors import LaunchError, SpecError
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.moe.dispatch import Indexed
from lancebill.moe.placement import ROUND_ROBIN, Placement
from lancebill.split import moves as moving
from lancebill.split.mover import MOVER, Mover
from lancebill.split.moves import Moves
from lancebill.split.residency import Residency
from lancebill.testing.checkpoints import save

Given = tuple[Tensor, Tensor, Tensor]
LIMIT = 60.0  # seconds: nothing is expected to take so long, however busy the machine is


@pytest.fixture(autouse=True)
def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it costs, and only when a test says so."""
    monkeypatch.setattr(moving, "break_even", lambda share, rates: 0.0)
    monkeypatch.setattr(MOVER, "add", lambda moves: None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_checkpoint("gptq", "actorder"), tmp_path_factory.mktemp("m") / "m")


def _load(folder: Path, **options: Any) -> RoutedExperts:
    return RoutedExperts.from_checkpoint(folder, 0, **{"gpu_experts": 2, "moves": "recency"} | options)


def _moves(layer: RoutedExperts) -> Moves:
    assert layer.moves is not None
    return layer.moves


def _inputs(seed: int, *experts: int) -> Given:
    """Rows that use these two experts only, or any."""
    x, ids, weights = make_inputs(3, seed)
    if experts:
        ids[:] = torch.tensor(experts)
    return x, ids, torch.ones_like(weights)


def _run(layer: RoutedExperts, given: Given) -> Tensor:
    out: Tensor = layer(given[0], topk_ids=given[1], topk_weights=given[2])
    return out


@contextmanager
def _background(moves: Moves) -> Iterator[None]:
    """Moves made by another thread; it pauses when there is nothing to move, or it would hold the interpreter."""
    ends = threading.Event()

    def work() -> None:
        while not ends.is_set():
            if not moves.step():
                time.sleep(1e-3)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


def _wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end
        time.sleep(1e-3)


def _wait_for_experts(layer: RoutedExperts, experts: set[int]) -> None:
    _wait_until(lambda: set(_moves(layer).held.experts) == experts)


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_the_experts_used_last_come_and_results_stay(folder: Path, backend: str) -> None:
    whole, split = _load(folder, gpu_experts=4, backend=backend), _load(folder, backend=backend)
    assert whole.moves is None, "all fits: nothing moves"
    if backend != "auto" and native.library() is not None:  # the two parts have different kernels, and layouts
        assert split.host_experts is not None and split.host_experts.layout != split.layout
    want_here = [(0, 1), (3, 2), (1, 2), (1, 0), (3, 2)]
    for seed, experts in enumerate(want_here):
        given = _inputs(seed, *experts)
        results = [_run(split, given)]
        while _moves(split).step():
            results.append(_run(split, given))
        assert set(_moves(split).held.experts) == set(experts)
        assert split.expert_map is not None and split.host_experts is not None
        here = {expert: place for expert, place in enumerate(split.expert_map.tolist()) if place >= 0}
        assert here == {expert: place for place, expert in enumerate(_moves(split).held.experts)}
        want = _run(whole, given)
        for got in (*results, _run(split, given)):
            if backend == "auto":
                assert torch.equal(got, want), experts
            else:
                assert (got - want).abs().max() <= 1e-2 * want.abs().max(), experts
    assert _moves(split).moved == 6


def test_other_weights_change_the_last_bits_within_a_bound(folder: Path) -> None:
    """A part adds weight * result with one rounding; the sum of two parts has two."""
    split = _load(folder, dtype=torch.float32)
    x, ids, weights = make_inputs(64)
    given = x.float(), ids, weights
    each = [_run(split, (given[0], ids, weights * torch.eye(2)[slot])).abs() for slot in range(2)]
    results = [_run(split, given)]
    for experts in ((2, 3), (1, 2), (0, 3), (0, 1)):
        _run(split, (given[0], torch.tensor(experts).expand(64, 2), weights))
        assert _moves(split).step() > 0
        results.append(_run(split, given))
    for other in results[1:]:
        assert ((other - results[0]).abs() <= 2 * 2.0**-23 * (each[0] + each[1])).all()
    if native.library() is not None:
        assert not all(torch.equal(other, results[0]) for other in results[1:]), "the bound is needed"


def test_calls_and_moves_at_the_same_time(folder: Path) -> None:
    """Two threads call a layer until a third one has moved more than 50 experts, and 300 times at least."""
    whole, split = _load(folder, gpu_experts=4), _load(folder)
    generator = random.Random(0)
    pairs = [generator.sample(range(SIZE.experts), 2) for _ in range(12)]
    given = [_inputs(seed, *pair) for seed, pair in enumerate(pairs)]
    want = [_run(whole, each) for each in given]
    _run(split, given[0])
    wrong: list[int] = []

    def calls() -> None:
        end = time.monotonic() + LIMIT
        for step in itertools.count():
            each = step // 3 % len(given)
            if not torch.equal(_run(split, given[each]), want[each]):
                wrong.append(step)
            if step >= 300 and (_moves(split).moved > 50 or time.monotonic() > end):
                return

    threads = [threading.Thread(target=calls) for _ in range(2)]
    with _background(_moves(split)):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong and _moves(split).moved > 50, (wrong, _moves(split).moved)
    views = _moves(split)._parts.views  # type: ignore[union-attr]
    assert len(views.held) <= 3 and not views.under_way() and views.uses.calls > 600


def test_a_place_is_not_overwritten_while_a_call_may_read_it(folder: Path) -> None:
    split = _load(folder)
    _run(split, _inputs(0, 2, 3))
    moves, held = _moves(split), {name: tensor.clone() for name, tensor in split.packed["w13"].items()}
    assert split.expert_map is not None
    with moves.call(Indexed(_inputs(0, 2, 3)[1], torch.empty(0), split.expert_map)) as maps:
        assert maps.own.tolist() == [0, 1, -1, -1] and maps.host.tolist() == [-1, -1, 2, 3]
        thread = threading.Thread(target=moves.step)
        thread.start()
        _wait_until(lambda: maps.own.tolist() != split.expert_map.tolist())
        time.sleep(0.05)
        assert split.expert_map.tolist() == [0, -1, -1, -1], "the expert that leaves is the host's at once"
        assert maps.own.tolist() == [0, 1, -1, -1], "but not for a call that has begun"
        assert all(torch.equal(tensor, held[name]) for name, tensor in split.packed["w13"].items())
    thread.join()
    assert split.expert_map.tolist() == [-1, -1, 1, 0] or split.expert_map.tolist() == [-1, -1, 0, 1]
    assert not all(torch.equal(tensor, held[name]) for name, tensor in split.packed["w13"].items())


@pytest.mark.parametrize("way", ["copy", "wait"])
def test_a_failed_move_is_told_once_and_the_layer_computes(
    folder: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, split, given = _load(folder, gpu_experts=4), _load(folder), _inputs(0, 2, 3)
    want = _run(whole, given)
    assert torch.equal(_run(split, given), want)
    moves = _moves(split)
    if way == "copy":
        monkeypatch.setattr(moving, "repack", lambda *given: (_ for _ in ()).throw(RuntimeError("no memory")))
        with pytest.raises(LaunchError, match="no memory"):
            moves.step()
        assert moves.held == Residency((0, -1)), "the place is empty"
    else:
        monkeypatch.setattr(moving, "LIMIT_S", 0.01)
        with moves.call(Indexed(given[1], given[2], split.expert_map)), pytest.raises(LaunchError, match="not ended"):
            moves.step()
        assert moves.held == Residency((0, 1)), "nothing has changed"
    with pytest.raises(LaunchError, match=r"could not be moved.*(no memory|has not ended)"):
        _run(split, given)
    for seed in range(4):
        assert torch.equal(_run(split, _inputs(seed)), _run(whole, _inputs(seed)))
        assert moves.step() == 0, "experts stay where they are"


def test_a_place_that_a_failed_move_left_empty_is_filled_later(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a copy of the layer: in the layer itself nothing moves any more, and a refit leaves the place empty."""
    whole, split, given = _load(folder, gpu_experts=4), _load(folder), _inputs(0, 2, 3)
    _run(split, given)
    with monkeypatch.context() as broken, pytest.raises(LaunchError, match="no memory"):
        broken.setattr(moving, "repack", lambda *given: (_ for _ in ()).throw(RuntimeError("no memory")))
        _moves(split).step()
    _moves(split).refill()
    assert _moves(split).held == Residency((0, -1))
    copies: list[RoutedExperts] = [copy.deepcopy(split) for _ in range(2)]
    for copied in copies:
        assert torch.equal(_run(copied, given), _run(whole, given))
    assert _moves(copies[0]).step() == 2 and set(_moves(copies[0]).held.experts) == {2, 3}
    monkeypatch.setattr(moving, "LIMIT_S", 0.01)
    moves = _moves(copies[1])
    with moves.call(Indexed(given[1], given[2], split.expert_map)), pytest.raises(LaunchError, match="not ended"):
        moves.step()
    assert moves.held == Residency((0, -1))
    assert torch.equal(_run(copies[0], given), _run(whole, given))


def test_what_does_not_pay_stays_where_it_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split = _load(folder)
    monkeypatch.setattr(moving, "break_even", lambda share, rates: 1.01)
    _run(split, _inputs(0, 2, 3))
    assert _moves(split).step() == 0 and _moves(split).held == Residency((0, 1))


def test_other_layers_have_their_turn_between_moves(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving, "MOST", 1)
    split = _load(folder)
    _run(split, _inputs(0, 2, 3))
    assert [_moves(split).step() for _ in range(3)] == [1, 1, 0]
    assert set(_moves(split).held.experts) == {2, 3}


def test_experts_stay_when_a_layer_gets_another_executor(folder: Path) -> None:
    split, given = _load(folder), _inputs(0, 2, 3)
    want = _run(split, given)
    assert not Moves(split).restore(), "no call has begun: nothing can have moved"
    assert _moves(split).step() == 2
    split.adopt(split.choice, split.packed)
    assert torch.equal(_run(split, given), want) and set(_moves(split).held.experts) == {2, 3}


def test_refits_while_experts_move(folder: Path, tmp_path: Path) -> None:
    split = _load(folder)
    pairs = [_inputs(seed, *pair) for seed, pair in enumerate([(0, 1), (3, 2), (1, 2), (3, 0)])]
    _run(split, pairs[0])
    experts = {0, 1}
    with _background(_moves(split)):
        for seed in range(1, 5):
            other = make_checkpoint("gptq", "actorder", seed=seed)
            whole = RoutedExperts.from_checkpoint(save(other, tmp_path / str(seed)), 0)
            tensors = [(n, t) for n, t in other.tensors.items() if ".layers.0." in n]
            random.Random(seed).shuffle(tensors)
            split.load_weights(tensors)
            split.finish()
            for given in pairs:  # the next refit begins while the last pair comes
                _wait_for_experts(split, experts)
                experts = set(given[1][0].tolist())
                for _ in range(3):
                    assert torch.equal(_run(split, given), _run(whole, given)), seed


def test_copies_saved_states_and_moved_layers_know_where_experts_are(folder: Path, tmp_path: Path) -> None:
    whole, split = _load(folder, gpu_experts=4), _load(folder)
    _run(split, _inputs(0, 2, 3))
    assert _moves(split).step() == 2
    given = _inputs(1)
    copied: RoutedExperts = copy.deepcopy(split)
    read: RoutedExperts = pickle.loads(pickle.dumps(split))
    fresh = _load(save(make_checkpoint("gptq", "actorder", seed=5), tmp_path / "n"))
    fresh.load_state_dict(split.state_dict())
    assert _moves(split).step() == 0, "experts stand still until the next call"
    for layer in (split, copied, read, fresh, split.to("cpu").to(torch.float16)):
        assert torch.equal(_run(layer, given), _run(whole, given))
    assert _moves(copied) is not _moves(split)
    _run(copied, _inputs(0, 0, 1))
    assert _moves(copied).step() == 2 and set(_moves(copied).held.experts) == {0, 1}
    assert set(_moves(split).held.experts) != {0, 1}


def test_pushed_and_expert_parallel_layers_move_their_experts(folder: Path) -> None:
    made = make_checkpoint("gptq", "actorder")
    for rank in range(2):
        placement = Placement(ep_rank=rank, ep_size=2, strategy=ROUND_ROBIN)
        whole = _load(folder, gpu_experts=2, placement=placement)
        loader = RoutedExperts.from_config(
            made.config, 0, tensors=made.headers, placement=placement, gpu_experts=1, moves="recency"
        )
        loader.load_weights((n, t) for n, t in made.tensors.items() if ".layers.0." in n)
        split = loader.finish()
        for seed, pair in enumerate([(0, 1), (3, 2), (1, 2), (0, 3)]):
            for _ in range(2):
                given = _inputs(seed, *pair)
                assert torch.equal(_run(split, given), _run(whole, given))
                _moves(split).step()
        assert _moves(split).moved > 1 and split.host_experts is not None
        assert split.host_experts.problem.experts == 2


@pytest.mark.parametrize("form", [0, 1], ids=["per-expert", "stacked"])
def test_a_refit_knows_experts_that_have_come_since_the_load(form: int, tmp_path: Path) -> None:
    """Without headers, the device's part has never seen the tensors of the host's experts."""
    made, other = (make_checkpoint("dense", "bf16", form=form, seed=seed) for seed in (0, 1))
    config = Checkpoint.open(save(made, tmp_path / "m")).config.model
    loader = RoutedExperts.from_config(config, 0, gpu_experts=1, moves="recency")
    loader.load_weights((n, t) for n, t in made.tensors.items() if ".layers.0." in n)
    split = loader.finish()
    _run(split, _inputs(0, 3, 3))
    assert _moves(split).step() == 1 and _moves(split).held == Residency((3,))
    split.load_weights((n, t) for n, t in other.tensors.items() if ".layers.0." in n)
    split.finish()
    whole = RoutedExperts.from_checkpoint(save(other, tmp_path / "o"), 0)
    for seed in range(4):
        assert torch.equal(_run(split, _inputs(seed)), _run(whole, _inputs(seed)))


def test_one_thread_moves_the_experts_of_all_layers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mover = Mover()
    monkeypatch.setattr(MOVER, "add", mover.add)
    layers = [_load(folder) for _ in range(3)]
    for layer in layers:
        _run(layer, _inputs(0, 2, 3))
    for layer in layers:
        _wait_for_experts(layer, {2, 3})
    movers = [thread for thread in threading.enumerate() if thread.name == "lancebill-mover"]
    assert [thread for thread in movers if thread is not MOVER._thread] == [mover._thread]
    gone = [weakref.ref(layer) for layer in layers]
    del layers, layer
    gc.collect()
    _wait_until(lambda: mover._thread is None and not any(each() for each in gone))
    mover.add(_moves(_load(folder)))
    mover.stop()
    assert mover._thread is None or not mover._thread.is_alive()


def test_what_cannot_move_is_refused(folder: Path) -> None:
    with pytest.raises(SpecError, match="off or recency"):
        _load(folder, moves="always")
    with pytest.raises(SpecError, match="not batch-invariant"):
        _load(folder, order="batch-invariant")
    none = _load(folder, gpu_experts=0)
    assert torch.equal(_run(none, _inputs(0)), _run(_load(folder, gpu_experts=4), _inputs(0)))
    assert _moves(none).step() == 0
