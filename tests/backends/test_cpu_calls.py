"""Calls of layers on the CPU: the fast path, calls from several threads, forks, odd arguments."""

from __future__ import annotations

import copy
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from cpu_work import BOUNDS, CPU, LIBRARY, Work, repeat_from_two_threads, work
from torch import Tensor

from lancebill.backends import oracle
from lancebill.backends.cpu import BACKEND, native
from lancebill.errors import LaunchError
from lancebill.layer.parts import LayerParts
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.moe.dispatch import Indexed

pytestmark = pytest.mark.skipif(LIBRARY is None, reason=native.state().why)


def module(layer_work: Work) -> RoutedExperts:
    return RoutedExperts(LayerParts(oracle.select(layer_work.problem, CPU, "cpu"), layer_work.packed))


@pytest.fixture
def slow_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens of each call that did not take the fast path."""
    tokens: list[int] = []
    compute = RoutedExperts.compute

    def recording_compute(layer: RoutedExperts, x: Tensor, *args: Tensor) -> Tensor:
        tokens.append(x.shape[0])
        return compute(layer, x, *args)

    monkeypatch.setattr(RoutedExperts, "compute", recording_compute)
    return tokens


@pytest.mark.parametrize("tokens", [1, 40])
def test_loops_on_threads_of_openmp_have_the_same_bits(tokens: int) -> None:
    layer_work, library, before = work("mxfp4", "bf16", tokens), native.library(), torch.get_num_threads()
    assert library is not None
    want = layer_work.run(BACKEND)
    if not library.use_openmp():
        pytest.skip("no OpenMP library with GOMP_parallel in this process")
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(layer_work.run(BACKEND), want), threads
    finally:
        library.use_openmp(False)
        torch.set_num_threads(before)


@pytest.mark.parametrize("activations", BOUNDS)
def test_second_call_is_fast_and_bit_identical(slow_calls: list[int], activations: str) -> None:
    """Also with other tensors and other thread counts."""
    layer_work, before = work("int4-g32", activations, 5), torch.get_num_threads()
    layer, batch = module(layer_work), layer_work.batch
    results = [layer(batch.x, topk_ids=batch.ids, topk_weights=batch.weights)]
    try:
        for threads in (before, 1, 2):
            torch.set_num_threads(threads)
            out = torch.full_like(batch.x, torch.nan)
            layer(batch.x.clone(), topk_ids=batch.ids.clone(), topk_weights=batch.weights.clone(), out=out)
            results.append(out)
    finally:
        torch.set_num_threads(before)
    assert slow_calls == [5] and all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("what", ["int64 ids", "ids apart", "fp16 weights", "rows apart", "fp32 out", "memory", "copy"])
def test_calls_that_do_not_fit_the_fast_path(slow_calls: list[int], what: str) -> None:
    layer_work = work("int4-g32", "bf16", 5)
    layer, batch, out = module(layer_work), layer_work.batch, torch.empty_like(layer_work.batch.x)
    want = layer(batch.x, topk_ids=batch.ids, topk_weights=batch.weights)
    x, ids, weights = batch.x, batch.ids, batch.weights
    if what == "int64 ids":
        ids = ids.long()
    elif what == "ids apart":
        ids = ids.t().contiguous().t()
    elif what == "fp16 weights":
        want = layer(x, topk_ids=ids, topk_weights=weights.half().float())
        weights = weights.half()
    elif what == "rows apart":
        x = torch.cat([x, x], 1)[:, : x.shape[1]]
    elif what == "fp32 out":
        out = out.float()
    elif what == "memory":
        layer.w13_codes.data = layer.w13_codes.data.clone()
    else:
        layer = copy.deepcopy(layer)
    slow_calls.clear()
    got = layer(x, topk_ids=ids, topk_weights=weights, out=out)
    as_routers_give_them = what in ("int64 ids", "ids apart", "fp16 weights")
    assert slow_calls == ([] if as_routers_give_them else [5]) and torch.equal(got.to(want.dtype), want)


@pytest.mark.parametrize("name", ["x", "topk_ids", "topk_weights", "out"])
def test_meta_tensors_are_rejected(name: str) -> None:
    layer_work = work("int4-g32", "bf16", 5)
    layer = module(layer_work)
    given = {"x": layer_work.batch.x, "topk_ids": layer_work.batch.ids, "topk_weights": layer_work.batch.weights}
    given["out"] = torch.zeros_like(layer_work.batch.x)
    for _ in range(2):
        layer(**given)
    given[name] = given[name].to("meta")
    with pytest.raises(LaunchError):
        layer(**given)


def test_one_layer_from_two_threads_at_once(slow_calls: list[int]) -> None:
    """The fast path is shared between threads, but each call has its own struct."""
    layer_work = work("int4-g32", "bf16", 5)
    layer, ids, weights = module(layer_work), layer_work.batch.ids, layer_work.batch.weights
    inputs = [layer_work.batch.x, layer_work.batch.x.flip(0).contiguous()]
    alone = [layer(x, topk_ids=ids, topk_weights=weights) for x in inputs]
    repeat_from_two_threads(lambda which: layer(inputs[which], topk_ids=ids, topk_weights=weights), alone, 40)
    assert slow_calls == [5]


def test_a_forked_child_starts_threads_of_its_own() -> None:
    """Threads do not survive a fork. (torch's own operations wait for theirs for ever; this batch is too small.)"""
    layer_work, threads = work("int4-g32", "bf16", 5), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        want = layer_work.run(BACKEND)
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            before = len(list(Path("/proc/self/task").iterdir()))
            same = torch.equal(layer_work.run(BACKEND), want)
            os._exit(0 if same and len(list(Path("/proc/self/task").iterdir())) == before + 1 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert torch.equal(layer_work.run(BACKEND), want)
    finally:
        torch.set_num_threads(threads)


def test_idle_threads_sleep_and_an_interrupt_reaches_the_caller() -> None:
    """Threads spin for microseconds after a call, then use no CPU time; signals are not delivered to them."""
    layer_work, threads = work("int4-g32", "bf16", 5), torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        want = layer_work.run(BACKEND)
        time.sleep(0.02)
        start = time.process_time()
        time.sleep(0.1)
        assert time.process_time() - start < 0.05
        assert torch.equal(layer_work.run(BACKEND), want), "they wake"
    finally:
        torch.set_num_threads(threads)
    tasks = [task.read_text() for task in Path("/proc/self/task").glob("*/status")]
    blocked = [int(mask, 16) for text in tasks for mask in re.findall(r"SigBlk:\s*(\w+)", text)]
    assert sum(bool(mask >> (signal.SIGINT - 1) & 1) for mask in blocked) >= 2


def test_ids_out_of_range_contribute_nothing() -> None:
    layer_work = work("mxfp4", "bf16", 5)
    layer, ids = module(layer_work), layer_work.batch.ids.clone()
    ids[:, 1] = -1
    want = layer(layer_work.batch.x, topk_ids=ids, topk_weights=layer_work.batch.weights)
    ids[:, 1] = torch.tensor([6, 7, -9, 1 << 20, -(1 << 31)], dtype=torch.int32)
    for _ in range(2):
        assert torch.equal(layer(layer_work.batch.x, topk_ids=ids, topk_weights=layer_work.batch.weights), want)
    ids[:] = 6
    assert not layer(layer_work.batch.x, topk_ids=ids, topk_weights=layer_work.batch.weights).any()


def test_strided_rows() -> None:
    layer_work = work("mxfp4", "bf16", 5)
    want = layer_work.run(BACKEND)
    wide, out = torch.zeros(5, 2048, dtype=torch.bfloat16), torch.full((5, 1030), torch.nan, dtype=torch.bfloat16)
    wide[:, 512:1536] = layer_work.batch.x
    plan = BACKEND.plan(layer_work.problem, 5, CPU)
    dispatch = Indexed(layer_work.batch.ids, layer_work.batch.weights)
    BACKEND.run(plan, wide[:, 512:1536], dispatch, layer_work.packed, out[:, 3:1027])
    assert torch.equal(out[:, 3:1027], want)
    assert out[:, :3].isnan().all() and out[:, 1027:].isnan().all()


def test_no_tokens() -> None:
    layer_work = work("mxfp4", "bf16", 5)
    none = Indexed(layer_work.batch.ids[:0], layer_work.batch.weights[:0])
    out = BACKEND.run(
        BACKEND.plan(layer_work.problem, 0, CPU),
        layer_work.batch.x[:0],
        none,
        layer_work.packed,
        layer_work.batch.x[:0].clone(),
    )
    assert out.shape == (0, 1024)
