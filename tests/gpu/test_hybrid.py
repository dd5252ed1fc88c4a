"""Layers split between a GPU and host memory: against the whole layer on the GPU, eager and captured."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import pytest
import torch
from torch import Tensor

from lancebill.backends.base import Executor, TensorTable
from lancebill.backends.cpu import layout as cpu_layout
from lancebill.backends.cpu import native
from lancebill.backends.cpu.layout import CpuLayout
from lancebill.backends.cpu.native import abi
from lancebill.backends.cpu.unpack_on_gpu import unpack_nibbles
from lancebill.backends.oracle import select
from lancebill.bench.workload import Weights
from lancebill.checkpoint.resolve import naming as names
from lancebill.errors import LaunchError, NotEnoughMemory
from lancebill.formats import registry
from lancebill.jit import driver
from lancebill.layer.gpu_room import check_room, free_bytes
from lancebill.layer.model_experts import ModelExperts
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.moe.device import parse_device
from lancebill.moe.layout import Packed
from lancebill.moe.problem import Problem
from lancebill.numbers.bit_packing import Nibbles
from lancebill.numbers.unusual import assuming
from lancebill.split import divide_batch, gpu_queues, host_calls, large_batches, mailbox, streamed
from lancebill.split import executor as executors
from lancebill.split.recorded import record
from lancebill.split.ways import Rates, Ways
from lancebill.testing.checkpoints import Generated, Geometry, generate, save
from lancebill.testing.layers import layer_problem, worst_row

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or native.library() is None, reason="needs a GPU and the CPU kernels"
)
SIZE = Geometry(experts=16, hidden=512, intermediate=256, layers=1, top_k=4)
TOKENS = (1, 16, 1500)
SPLITS = (0, 5, 15)


def plans() -> Iterator[tuple[Problem, int]]:
    problem = layer_problem("mxfp4", hidden=512, intermediate=256, experts=16, top_k=4)
    yield from ((problem, tokens) for tokens in TOKENS)


@cache
def made(seed: int = 0) -> Generated:
    row = next(row for row in names.TABLE if row.family == "qwen3_moe")
    example = next(example for example in registry()["compressed-tensors"].examples() if "mxfp4" in example.name)
    return generate(example, row, row.forms[0], SIZE, seed=seed)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(made(), tmp_path_factory.mktemp("m") / "m")


def load(folder: Path, **options: Any) -> RoutedExperts:
    return RoutedExperts.from_checkpoint(folder, 0, device="cuda", **options)


def inputs(tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(tokens, SIZE.hidden, generator=g, device="cuda").bfloat16()
    ids = torch.rand(tokens, SIZE.experts, generator=g, device="cuda").topk(SIZE.top_k).indices
    return x, ids, torch.rand(tokens, SIZE.top_k, generator=g, device="cuda")


def run(layer: RoutedExperts, given: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    out: Tensor = layer(given[0], topk_ids=given[1], topk_weights=given[2])
    return out


@pytest.mark.parametrize("on_gpu", SPLITS)
def test_a_split_layer_computes_the_whole_layer(folder: Path, on_gpu: int) -> None:
    whole, split = load(folder), load(folder, gpu_experts=on_gpu)
    assert split.host_experts is not None and next(split.host_experts.parameters()).device.type == "cpu"
    for tokens in TOKENS:
        for seed in range(3):
            given = inputs(tokens, seed)
            assert worst_row(run(split, given), run(whole, given)) < 1.5e-2, (tokens, seed)
    moved = split.to("cuda")
    assert next(moved.host_experts.parameters()).device.type == "cpu"  # type: ignore[union-attr]


@pytest.mark.parametrize("way", ["mailbox", "host function"])
def test_both_ways_to_the_cpu_give_the_same(folder: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    split, given = load(folder, gpu_experts=5), inputs(16)
    want = run(split, given)
    monkeypatch.setattr(executors, "MAILBOX_ROWS", 0 if way == "host function" else 1024)
    for _ in range(20):
        assert torch.equal(run(split, given), want)


@contextmanager
def stopped() -> Iterator[list[Any]]:
    """Inside, no thread watches the mailboxes, as in a process that is suspended. Yields their words."""
    torch.cuda.synchronize()
    watched = dict(mailbox._watched)
    for address, library in watched.items():
        library.unwatch(address)
    words = [abi.MailboxStruct.from_address(address) for address in watched]
    try:
        yield words
    finally:
        for address, library in watched.items():
            library.watch(address)
    end = time.perf_counter() + 10
    while any(each.asked != each.done for each in words):
        assert time.perf_counter() < end
        time.sleep(1e-3)


def test_a_late_answer_is_not_taken_for_that_of_the_next_call(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU gives up a call, goes on to the next one, and only then the first is answered."""
    split = load(folder, gpu_experts=0)
    first, second = inputs(3, 1), inputs(3, 2)
    want = run(split, second)
    with stopped() as words:
        monkeypatch.setattr(mailbox, "LIMIT_S", 0.0)
        assert run(split, first).isnan().all()
        monkeypatch.undo()
        (late,) = [each for each in words if each.asked != each.done]
        number = late.asked
        with pytest.raises(LaunchError, match="did not compute its part"):
            run(split, second)
        got = run(split, second)  # it waits
        while late.asked == number:
            time.sleep(1e-4)
        late.done = number  # of the first
        time.sleep(0.2)
        assert not torch.cuda.current_stream().query(), "the second call went on with the first one's answer"
    assert torch.equal(got, want)


def test_no_call_is_wrong_after_one_that_was_given_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU gives up calls while they are computed. Each later one is right, or NaN and an error."""
    split = load(folder, gpu_experts=0)
    given = [inputs(63, seed) for seed in range(4)]
    want = [run(split, each) for each in given]
    good = 0
    for number in range(200):
        if number % 8 == 0:
            monkeypatch.setattr(mailbox, "LIMIT_S", 0.0)
        try:
            got = run(split, given[number % 4])
        except LaunchError:
            continue
        finally:
            monkeypatch.undo()
        right = torch.equal(got, want[number % 4])
        assert right or got.isnan().any(), number
        good += right
    assert good >= 50
    with suppress(LaunchError):
        split.host_experts.calls.check()  # type: ignore[union-attr]


def test_a_thread_that_has_ended_gives_nan_and_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that watches mailboxes ends when there are none: here they are taken from it."""
    split, given = load(folder, gpu_experts=5), inputs(3)
    want = run(split, given)
    with stopped():
        monkeypatch.setattr(mailbox, "LIMIT_S", 0.2)
        start = time.perf_counter()
        assert run(split, given).isnan().all()
        assert time.perf_counter() - start < 10
        with pytest.raises(LaunchError, match="the thread that computes it has ended"):
            run(split, given)
        monkeypatch.undo()
    assert torch.equal(run(split, given), want)


def test_a_worker_that_has_ended_is_an_error_and_is_replaced(folder: Path) -> None:
    split, given = load(folder, gpu_experts=5), inputs(16)
    want, library = run(split, given), native.library()
    assert library is not None
    torch.cuda.synchronize()
    library.calls.lancebill_end_worker()
    start = time.perf_counter()
    with pytest.raises(LaunchError, match="a thread of the library ended before its task"):
        while time.perf_counter() - start < 20:
            run(split, given)
            torch.cuda.synchronize()
    for _ in range(20):
        assert torch.equal(run(split, given), want)


def test_experts_that_do_not_fit_the_gpu_are_an_error(folder: Path) -> None:
    """This process may have no more memory than it has: the free part of it is soon used."""
    held, want = [load(folder, gpu_experts=5)], inputs(1)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-9)
    try:
        with pytest.raises(NotEnoughMemory, match=r"layer 0, .*do not fit the GPU.*gpu_memory="):
            for _ in range(1000):
                held.append(load(folder))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        del held[1:]
    assert run(held[0], want).isfinite().all() and run(load(folder), want).isfinite().all()


def test_more_gpu_memory_than_is_free_is_an_error(folder: Path) -> None:
    with pytest.raises(NotEnoughMemory, match="gpu_memory: the GPU has less free memory"):
        check_room(free_bytes(torch.device("cuda", 0)) + (1 << 30), parse_device("cuda"))
    check_room(1 << 20, parse_device("cuda"))
    assert ModelExperts.from_checkpoint(folder, device="cuda", gpu_memory="100TB").layer(0).problem.experts == 16


def test_no_pinned_memory_left_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's own failure: it is asked for more than there are addresses.

    The limit of locked memory (RLIMIT_MEMLOCK) does not count for what the driver allocates.
    """
    allocate, split, given = gpu_queues.pinned, load(folder, gpu_experts=5), inputs(16)
    with pytest.raises(NotEnoughMemory, match="no pinned host memory is left"):
        allocate(1 << 60, torch.device("cuda", 0), capturing=False)
    monkeypatch.setattr(gpu_queues, "pinned", lambda size, device, capturing: allocate(size << 40, device, capturing))
    monkeypatch.setattr(host_calls, "_BUFFERS", WeakValueDictionary())
    with pytest.raises(NotEnoughMemory, match="no pinned host memory is left"):
        run(split, given)
    monkeypatch.undo()
    assert worst_row(run(split, given), run(load(folder), given)) < 1.5e-2


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("spec", ["mxfp4", "int4-g128"])
def test_codes_of_the_cpu_are_unpacked_as_defined(spec: str, gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = layer_problem(spec, hidden=1024, intermediate=384, experts=3, top_k=2)
    shape, layout = problem.matrices["w13" if gated else "w2"], CpuLayout(problem)
    held = {
        name: torch.randint(0, 256, (3, *size), dtype=torch.uint8, device="cuda")
        for name, (size, dtype) in layout.storage(shape).items()
        if name == "codes"
    }["codes"]
    found = unpack_nibbles(held, shape.n, shape.k, gated=gated)
    assert found is not None
    monkeypatch.setattr(cpu_layout, "unpack_nibbles", lambda *given, **how: None)
    want = layout._unpack_codes(shape, layout.form(shape), held)
    assert isinstance(want, Nibbles) and torch.equal(found, want.data)


@pytest.mark.parametrize("tokens", TOKENS)
def test_replays_equal_eager_calls(folder: Path, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit where nothing is copied; a graph never copies experts, which changes the last bits."""
    monkeypatch.setattr(large_batches, "FEWEST", 1 << 30)
    split, given = load(folder, gpu_experts=5), inputs(tokens)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # never warmed up
        first = run(split, given)
        second = run(split, (first, *given[1:]))
    for seed in (1, 2, 3):
        for held, new in zip(given, inputs(tokens, seed)):
            held.copy_(new)
        graph.replay()
        want = run(split, (run(split, given), *given[1:]))
        torch.cuda.synchronize()
        assert torch.equal(second, want), seed


def test_calls_on_two_streams_and_many_steps(folder: Path) -> None:
    """Streams do not share buffers, and memory does not grow."""
    split = load(folder, gpu_experts=5)
    given = [inputs(4, seed) for seed in range(2)]
    want = [run(split, each) for each in given]
    streams = [torch.cuda.Stream() for _ in given]
    torch.cuda.synchronize()
    for step in range(300):
        made = []
        for stream, each in zip(streams, given):
            with torch.cuda.stream(stream):
                made.append(run(split, each))
        if step % 50 == 0:
            torch.cuda.synchronize()
            assert all(torch.equal(a, b) for a, b in zip(made, want))
            held = torch.cuda.memory_allocated()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= held and len(split.host_experts.calls.eager) <= 3  # type: ignore[union-attr]


def test_the_gpu_computes_while_the_cpu_does(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host does not wait for the CPU's part. (Where experts are copied, it waits for the router.)"""
    monkeypatch.setattr(large_batches, "FEWEST", 1 << 30)
    split, given = load(folder, gpu_experts=5), inputs(1500)
    run(split, given)
    torch.cuda.synchronize()
    start = time.perf_counter()
    run(split, given)
    queued = time.perf_counter() - start
    torch.cuda.synchronize()
    assert queued < (time.perf_counter() - start) / 2, "the host does not wait for the CPU's part"


RATES = {
    "all copied": Rates(copy_gbs=50, cpu_gbs=1e-3, cpu_gflops=1e-3, pack_gbs=200),
    "both": Rates(copy_gbs=50, cpu_gbs=50, cpu_gflops=5000, pack_gbs=200, call_us=0, wait_us=0, divide_us=0),
}


@pytest.mark.parametrize("rates", RATES)
@pytest.mark.parametrize("on_gpu", SPLITS)
def test_copied_experts_compute_the_whole_layer(
    folder: Path, rates: str, on_gpu: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large_batches, "measure_rates", lambda *given: RATES[rates])
    monkeypatch.setattr(large_batches, "_RATES", {})
    monkeypatch.setattr(large_batches, "_STAGES", {})
    each = load(folder, gpu_experts=on_gpu).host_experts.report.bytes // (16 - on_gpu)  # type: ignore[union-attr]
    monkeypatch.setattr(streamed, "WAVE_BYTES", 3 * each)
    whole, split = load(folder), load(folder, gpu_experts=on_gpu)
    sent, choose = list[Ways](), divide_batch.choose_ways
    monkeypatch.setattr(divide_batch, "choose_ways", lambda *a, **b: sent.append(choose(*a, **b)) or sent[-1])
    for tokens in (100, 1500, 5000):
        for seed in range(3):
            given = inputs(tokens, seed)
            assert worst_row(run(split, given), run(whole, given)) < 2e-2, (tokens, seed)
    assert any(ways.streamed for ways in sent)
    if rates == "both" and on_gpu < 15:
        assert any(ways.streamed and ways.cpu for ways in sent), sent
    given = inputs(100)
    assert torch.equal(run(split, given), run(split, given))


@pytest.mark.parametrize("why", ["not locked", "other addresses"])
def test_pages_that_the_gpu_cannot_read_in_place_are_copied_one_by_one(
    folder: Path, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large_batches, "measure_rates", lambda *given: RATES["all copied"])
    monkeypatch.setattr(large_batches, "_RATES", {})
    monkeypatch.setattr(large_batches, "_STAGES", {})
    given, together, copy = inputs(1500), list[Any](), driver.copy_together
    monkeypatch.setattr(driver, "copy_together", lambda p, stream: together.extend(p) or copy(p, stream))
    want = run(load(folder, gpu_experts=5), given)
    assert together, "usually pages are locked"
    together.clear()
    if why == "not locked":
        monkeypatch.setattr(driver, "pin", lambda *given: False)
    else:
        monkeypatch.setattr(large_batches.lane_of(0), "_reads_locked", False)
    for _ in range(2):
        assert torch.equal(run(load(folder, gpu_experts=5), given), want) and not together


def test_large_batches_of_two_streams_do_not_share_buffers_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One stream is kept busy, so that its batch would still be packing when the other one fills the buffers."""
    monkeypatch.setattr(large_batches, "measure_rates", lambda *given: RATES["all copied"])
    monkeypatch.setattr(large_batches, "_RATES", {})
    monkeypatch.setattr(large_batches, "_STAGES", {})
    split, first = load(folder, gpu_experts=5), inputs(1500)
    others = 8 + torch.rand(1500, 8, device="cuda").topk(SIZE.top_k).indices  # so waves have other experts
    given = [first, (first[0], others, first[2])]
    monkeypatch.setattr(streamed, "WAVE_BYTES", 3 * split.host_experts.report.bytes // 11)  # type: ignore[union-attr]
    want, own = [run(split, each) for each in given], split.executor.own  # type: ignore[attr-defined]
    streams, compute = [torch.cuda.Stream() for _ in given], own.run
    torch.cuda.synchronize()

    pack = streamed.Stage.pack_wave

    def slowly(*arguments: Any) -> Tensor:
        torch.cuda._sleep(20_000_000)
        return compute(*arguments)

    def unasked(*arguments: Any) -> None:
        with assuming():  # the answer to a question would make the host wait for the end of the batch
            pack(*arguments)

    monkeypatch.setattr(own, "run", slowly)
    monkeypatch.setattr(streamed.Stage, "pack_wave", unasked)
    for _ in range(3):
        made = []
        for stream, each in zip(streams, given):
            with torch.cuda.stream(stream):
                made.append(run(split, each))
        torch.cuda.synchronize()
        assert all(torch.equal(*pair) for pair in zip(made, want))


STREAMED = ("mxfp4", "int4-g128", "int4-g32-zp", "int8-channel", "fp8-block")


def packed_experts(problem: Problem, where: str, weights: Weights) -> Executor:
    """The same experts in the layout of a device."""
    backend = select(problem, where).backend
    layout, held = backend.layout(problem), dict[str, Packed]()
    for matrix, shape in problem.matrices.items():
        held[matrix] = layout.allocate(shape, problem.experts, where)
        for expert in range(problem.experts):
            row = {name: tensor[expert] for name, tensor in held[matrix].items()}
            layout.pack(shape, weights.logical(matrix, expert).to(torch.device(where)), row)
    return backend.executor(problem, parse_device(where), TensorTable.of(held))


@pytest.mark.parametrize("spec", STREAMED)
def test_recorded_packing_is_packing(spec: str) -> None:
    problem = layer_problem(spec, hidden=512, intermediate=256, experts=3, top_k=2)
    weights = Weights(problem, torch.device("cuda"))
    own, host = (packed_experts(problem, where, weights) for where in ("cuda", "cpu"))
    stage = streamed.Stage.make(own, host, torch.device("cuda", 0))
    assert len(stage.recorded) == streamed.BUFFERS
    assert all(list(held) == [3, 2, 1] and all(held.values()) for held in stage.recorded), "each is one launch"
    for buffer in range(streamed.BUFFERS):
        for matrix, tensors in host.tensors.packed().items():
            for name, tensor in tensors.items():
                stage.raw[buffer][matrix][name].copy_(tensor)
        for tensors in stage.packed.values():
            for tensor in tensors.values():
                tensor.zero_()
        for count in (1, 2, 3):
            stage.pack_wave(buffer, count)
            for matrix, tensors in own.tensors.packed().items():
                for name, tensor in tensors.items():
                    assert torch.equal(stage.packed[matrix][name][:count], tensor[:count]), (buffer, matrix, name)


def test_work_that_waits_for_the_gpu_is_not_recorded() -> None:
    """And what follows is not disturbed."""
    device, out = torch.device("cuda", 0), torch.zeros(4, device="cuda")

    def waits() -> None:
        out.add_(float(out.sum()))

    def counts() -> None:
        out.add_(1.0)

    assert record([waits], device) == [None]
    (found,) = record([counts], device)
    assert found is not None and not found.queue()
    assert out.tolist() == [2.0] * 4, "once before it was recorded, once after"
    assert float(torch.ones(1 << 20, device="cuda").sum()) == 1 << 20


def test_rates_are_measured(folder: Path) -> None:
    split = load(folder, gpu_experts=5)
    ways = split.executor.large_batches.expected(4096, torch.device("cuda", 0))  # type: ignore[attr-defined]
    assert len(ways.cpu) + len(ways.streamed) == 11 and ways.estimate_us > 0
    assert split.executor.large_batches._measured(torch.device("cuda", 0)).copy_gbs > 0.1  # type: ignore[attr-defined]


def test_a_failure_is_told_at_the_next_call(folder: Path) -> None:
    split, given = load(folder, gpu_experts=5), inputs(2)
    want = run(split, given)
    torch.cuda.synchronize()
    calls = split.host_experts.calls  # type: ignore[union-attr]
    call = next(iter(calls.eager.values()))[1].call
    threads, call.work.threads = call.work.threads, 0
    assert run(split, given).isnan().any()
    torch.cuda.synchronize()
    with pytest.raises(LaunchError, match="earlier call"):
        run(split, given)
    call.work.threads = threads
    assert torch.equal(run(split, given), want)


def test_refit_fills_both_parts(folder: Path, tmp_path: Path) -> None:
    split, other = load(folder, gpu_experts=5), made(1)
    run(split, inputs(3))
    split.load_weights(other.tensors.items())
    split.finish()
    whole = load(save(other, tmp_path / "o"))
    assert worst_row(run(split, inputs(16)), run(whole, inputs(16))) < 1.5e-2


def test_threads_are_chosen_once(folder: Path) -> None:
    run(load(folder, gpu_experts=5), inputs(1))
    assert len(host_calls._THREADS) == 1 and host_calls._THREADS[0].count >= 1
