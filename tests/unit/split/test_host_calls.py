"""The CPU's part of a call on a GPU: the host function called directly, queued by a stand-in for a CUDA stream."""

from __future__ import annotations

import copy
import ctypes
import time
import weakref
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import pytest
import torch
from layer_checkpoints import SIZE, make_checkpoint, make_inputs
from torch import Tensor

from lancebill.backends.cpu import native
from lancebill.backends.cpu.executor import CpuExecutor
from lancebill.backends.cpu.host_call import HostCall, HostShape
from lancebill.errors import LaunchError, UnsupportedProblem
from lancebill.layer.routed_experts import HostExperts, RoutedExperts
from lancebill.moe.dispatch import Indexed
from lancebill.split import host_calls, host_threads
from lancebill.split.cpu_rows import CpuRows
from lancebill.split.host_threads import HostThreads, allowed_by_quota, physical_cores
from lancebill.testing.checkpoints import save

pytestmark = pytest.mark.skipif(native.library() is None, reason="the CPU kernels are not built")


class DelayedQueue:
    """Runs its steps when it is told to, as a stream does; with `capturing`, as often as it is told to."""

    def __init__(self, capturing: bool = False) -> None:
        self.key = id(self)
        self.capturing, self.steps, self.allocated = capturing, [], 0  # type: ignore[var-annotated]

    def fork(self) -> None:
        """What the caller has queued has run already."""

    def mapped(self, memory: Tensor) -> Tensor:
        return memory

    def gather(self, target: Tensor, sources: Sequence[Tensor]) -> None:
        assert target.nbytes == sum(source.nbytes for source in sources)
        at = 0
        for source in sources:
            self.copy(target[at : at + source.nbytes], source)
            at += source.nbytes

    def fetched(self, memory: Tensor) -> Tensor:
        found = torch.empty_like(memory)
        self.copy(found, memory)
        return found

    def take_rows(self, target: Tensor, source: Tensor, numbers: Tensor) -> None:
        self.steps.append((partial(torch.index_select, source, 0, numbers, out=target),))

    def copy(self, target: Tensor, source: Tensor) -> None:
        assert source.is_contiguous() and target.nbytes == source.nbytes
        self.steps.append((ctypes.memmove, target.data_ptr(), source.data_ptr(), source.nbytes))

    def call(self, call: HostCall) -> None:
        self.steps.append((ctypes.CFUNCTYPE(None, ctypes.c_void_p)(call.function), call.argument))

    def allocate(self, size: int) -> Tensor:
        self.allocated += 1
        return torch.full((size,), 0xFF, dtype=torch.uint8)

    def run(self) -> None:
        for step, *arguments in self.steps:
            step(*arguments)

    def wait(self) -> None:
        self.run()
        self.steps.clear()

    def join(self) -> None:
        self.wait()


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers and threads of this test alone."""
    monkeypatch.setattr(host_calls, "_BUFFERS", WeakValueDictionary())
    monkeypatch.setattr(host_calls, "_THREADS", [HostThreads(2)])


def _host_part(folder: Path, **options: Any) -> HostExperts:
    layer = RoutedExperts.from_checkpoint(save(make_checkpoint(), folder / "m"), 0, gpu_experts=1, **options)
    assert layer.host_experts is not None
    return layer.host_experts


def _queue(queue: DelayedQueue, host: HostExperts, tokens: int, seed: int) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Where the result will be, the expected one, and what must be kept until it is there."""
    x, ids, weights = make_inputs(tokens, seed)
    assert host.expert_map is not None
    sums, result = (
        host.calls.queue(queue, host.executor, host.expert_map, x, Indexed(ids, weights)),
        torch.empty(x.shape),
    )
    queue.copy(result.fill_(torch.nan), sums)
    want = host.executor.run(x, Indexed(ids, weights, host.expert_map), torch.empty(x.shape))
    return result, want, (x, ids, weights, sums)


def test_queued_calls_give_what_a_direct_call_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_calls, "MOST_ROWS", 4)
    host, queue = _host_part(tmp_path), DelayedQueue()
    made = [_queue(queue, host, tokens, seed) for seed, tokens in enumerate((3, 9, 3, 1, 9))]
    assert all(sums.isnan().all() for sums, _, _ in made), "nothing runs before the stream does"
    queue.wait()
    for sums, want, _ in made:
        assert torch.equal(sums, want)
    assert len(host.calls.eager) == 3 and queue.allocated <= 2, "3, 4 and 1 rows share buffers"
    copied = copy.deepcopy(host)
    assert not copied.calls.eager
    sums, want, _ = _queue(queue, copied, 3, 9)
    queue.wait()
    assert torch.equal(sums, want)


@pytest.mark.parametrize("some", [True, False])
def test_a_prepared_call_computes_the_rows_that_are_sent(some: bool, tmp_path: Path) -> None:
    host, queue = _host_part(tmp_path), DelayedQueue()
    assert isinstance(host.executor, CpuExecutor) and host.expert_map is not None
    x, ids, weights = make_inputs(11, 0)
    for chosen in ([0, 2, 3, 5, 6, 7, 8, 9, 10], [1, 4]) if some else ([*range(11)],):
        call = host.calls.prepare_rows(queue, host.executor, host.expert_map, x)
        numbers = torch.tensor(chosen, dtype=torch.int32) if some else None
        on_cpu = call.send(CpuRows(ids[chosen].int(), weights[chosen].float(), numbers))
        queue.join()
        given = Indexed(ids[chosen], weights[chosen], host.expert_map)
        want = host.executor.run(x[chosen], given, torch.empty(len(chosen), x.shape[1]))
        assert torch.equal(on_cpu.sums, want)
        total = on_cpu.add_to(torch.ones(x.shape))
        assert torch.equal(total[chosen], 1 + want) and float(total.sub(1).abs().sum(1).count_nonzero()) <= len(chosen)
    assert len(host.calls.eager) == 1 and queue.allocated == 1, "few rows take the call of many"
    whole, want, kept = _queue(queue, host, 16, 1)
    queue.wait()
    assert torch.equal(whole, want) and kept, "a call of as many rows is another one"


def test_the_time_and_the_failure_of_a_call_are_known(tmp_path: Path) -> None:
    host, queue = _host_part(tmp_path), DelayedQueue()
    assert isinstance(host.executor, CpuExecutor) and host.expert_map is not None
    x, ids, weights = make_inputs(11, 0)
    call = host.calls.prepare_rows(queue, host.executor, host.expert_map, x)
    sent, last = [], 0.0
    for number in (1, 2):
        sent.append(call.send(CpuRows(ids.int(), weights.float(), None)))
        assert call.computed_us() == last, "nothing has run yet"
        start = time.perf_counter()
        call.wait()
        assert 0 < call.computed_us() - last <= (time.perf_counter() - start) * 1e6
        assert call.mapped.call.call.count == number
        last = call.computed_us()
    call.mapped.call.work.threads = 0
    sent.append(call.send(CpuRows(ids.int(), weights.float(), None)))
    with pytest.raises(LaunchError, match="number of threads"):
        call.wait()
    assert sent


def test_sums_are_allocated_before_the_queue_waits_for_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their memory may have belonged to work that another thread queued after the queue was made."""
    monkeypatch.setattr(host_calls, "MOST_ROWS", 8)
    host, queue, said = _host_part(tmp_path), DelayedQueue(), list[str]()
    monkeypatch.setattr(queue, "fork", lambda: said.append(f"fork before step {len(queue.steps)}"))
    for where, name in ((Tensor, "new_empty"), (torch, "empty_like")):
        make = getattr(where, name)
        monkeypatch.setattr(where, name, lambda *a, make=make, name=name, **b: (said.append(name), make(*a, **b))[1])
    assert isinstance(host.executor, CpuExecutor) and host.expert_map is not None
    x, ids, weights = make_inputs(11, 0)
    call = host.calls.prepare_rows(queue, host.executor, host.expert_map, x[:8])
    said.clear()
    made = [call.send(CpuRows(ids[:8].int(), weights[:8].float(), None)).sums]
    assert said == ["new_empty", "fork before step 0"] and queue.steps
    queue.wait()
    said.clear()
    made.append(host.calls.queue(queue, host.executor, host.expert_map, x, Indexed(ids, weights)))
    assert said[:2] == ["empty_like", "fork before step 0"] and queue.steps
    queue.wait()
    assert torch.equal(made[0], made[1][:8])


def test_one_call_has_room_for_some_of_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_calls, "MOST_ROWS", 4)
    host, queue = _host_part(tmp_path), DelayedQueue()
    assert isinstance(host.executor, CpuExecutor) and host.expert_map is not None
    call = host.calls.prepare_rows(queue, host.executor, host.expert_map, make_inputs(11, 0)[0])
    assert len(call.mapped.x) == len(call.mapped.out) == 4
    with pytest.raises(LaunchError, match="fit one call"):
        call.send(CpuRows(torch.zeros(5, 2, dtype=torch.int32), torch.zeros(5, 2), None))


def test_a_queued_call_keeps_the_ids_and_weights_of_its_rows(tmp_path: Path) -> None:
    """Nobody else may: a layer makes new rooms for its batches when its parameters change."""
    host, queue = _host_part(tmp_path), DelayedQueue()
    assert isinstance(host.executor, CpuExecutor) and host.expert_map is not None
    x, ids, weights = make_inputs(5, 0)
    arrays = [ids.int().numpy(), weights.float().numpy()]
    held = [weakref.ref(array) for array in arrays]
    on_cpu = host.calls.prepare_rows(queue, host.executor, host.expert_map, x).send(
        CpuRows(*map(torch.from_numpy, arrays), None)
    )
    del arrays
    assert all(array() is not None for array in held)
    queue.wait()
    assert torch.equal(on_cpu.sums, host.executor.run(x, Indexed(ids, weights, host.expert_map), torch.empty(x.shape)))


def test_a_captured_call_is_replayed_with_new_rows(tmp_path: Path) -> None:
    host, queue = _host_part(tmp_path), DelayedQueue(capturing=True)
    sums, want, (x, ids, weights, _) = _queue(queue, host, 3, 0)
    other = DelayedQueue(capturing=True)
    _queue(other, host, 3, 1)
    first, second = (mapped.call.memory for mapped in host.calls.captured)
    assert first.data_ptr() != second.data_ptr(), "graphs that may run at the same time share nothing"
    _queue(other, host, 2, 2)
    assert host.calls.captured[2].call.memory is second, "calls of one graph share their buffers"
    for seed in (0, 5):
        for held, new in zip((x, ids, weights), make_inputs(3, seed)):
            held.copy_(new)
        queue.run()
        want = host.executor.run(x, Indexed(ids, weights, host.expert_map), torch.empty(x.shape))
        assert torch.equal(sums, want)


def test_a_failed_call_gives_nan_and_an_error_at_the_next(tmp_path: Path) -> None:
    host, queue = _host_part(tmp_path), DelayedQueue()
    sums, _, kept = _queue(queue, host, 3, 0)
    call = next(iter(host.calls.eager.values()))[1].call
    call.work.threads = 0
    queue.wait()
    assert sums.isnan().all() and call.call.count == 1 and kept
    with pytest.raises(LaunchError, match=r"earlier call.*number of threads"):
        _queue(queue, host, 3, 0)
    call.work.threads = 1
    sums, want, kept = _queue(queue, host, 3, 0)
    queue.wait()
    assert torch.equal(sums, want) and kept, "the error is told once"


def test_replaced_weights_are_used_and_other_backends_refused(tmp_path: Path) -> None:
    host, queue = _host_part(tmp_path), DelayedQueue()
    first, _, kept = _queue(queue, host, 3, 0)
    host.w13_codes.data = host.w13_codes.data.flip(0).contiguous()
    second, want, more = _queue(queue, host, 3, 0)
    queue.wait()
    assert torch.equal(second, want) and not torch.equal(first, second) and kept and more
    with pytest.raises(UnsupportedProblem, match="CPU kernels"):
        plain = _host_part(tmp_path / "plain")
        plain.choice = RoutedExperts.from_checkpoint(tmp_path / "m", 0, backend="reference").choice
        _queue(queue, plain, 3, 0)


def test_calls_with_replaced_weights_are_waited_for_like_others(tmp_path: Path) -> None:
    host, queue = _host_part(tmp_path), DelayedQueue()
    made = [_queue(queue, host, 3, 0)]
    host.w13_codes.data = host.w13_codes.data.flip(0).contiguous()
    made.append(_queue(queue, host, 3, 1))
    assert queue.steps, "the new call is pending"
    host.calls.__del__()
    assert not queue.steps and torch.equal(*made[1][:2])


def test_a_queued_call_keeps_the_weights_that_it_reads(tmp_path: Path) -> None:
    """A parameter that gets other data lives on, but its memory does not. Nothing is kept longer than that."""
    host, queue = _host_part(tmp_path), DelayedQueue()
    freed = list[bool]()
    weakref.finalize(host.w13_codes.untyped_storage(), freed.append, True)
    first, want, kept = _queue(queue, host, 3, 0)
    host.w13_codes.data = host.w13_codes.data.flip(0).contiguous()
    assert not freed
    more = _queue(queue, host, 2, 1)
    assert freed and torch.equal(first, want) and kept, "the new call waited, although it has other rows"
    queue.wait()
    assert torch.equal(*more[:2])


def test_buffers_do_not_overlap(tmp_path: Path) -> None:
    host = _host_part(tmp_path)
    assert isinstance(host.executor, CpuExecutor) and host.expert_map is not None
    shape = HostShape(5, torch.bfloat16, torch.int64, torch.float32, 2)
    call = host.executor.host_call(shape, host.expert_map, lambda size: torch.zeros(size, dtype=torch.uint8))
    views = [call.x, call.ids, call.weights, call.out]
    assert call.given.data_ptr() == call.x.data_ptr() and call.given.nbytes == sum(v.nbytes for v in views[:3])
    assert all(a.data_ptr() + a.nbytes <= b.data_ptr() for a, b in pairwise(views))
    assert call.x.shape == call.out.shape == (5, SIZE.hidden)
    assert not call.x.data_ptr() % 64 and not call.out.data_ptr() % 64


def test_threads_run_on_the_physical_cores_of_one_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for cpu in range(12):  # two sockets of three cores with two threads each
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{cpu // 3 % 2}\n")
        (folder / "core_id").write_text(f"{cpu % 3}\n")
    assert physical_cores(tmp_path, range(12)) == (0, 1, 2)
    assert physical_cores(tmp_path, {1, 3, 4, 9, 10}) == (3, 4), "only what the process may use"
    assert physical_cores(tmp_path / "nothing", {2, 5}) == (2, 5)
    quota = tmp_path / "cpu.max"
    for text, want in (("250000 100000", 2), ("max 100000", None), ("50000 100000", 1), ("", None)):
        quota.write_text(text)
        assert allowed_by_quota(quota) == want
    monkeypatch.setattr(host_threads, "TOPOLOGY", tmp_path)
    monkeypatch.setattr(host_threads, "QUOTA", tmp_path / "none")
    monkeypatch.setattr(host_threads, "_allowed", lambda: range(12))
    assert HostThreads.choose() == HostThreads(2, (0, 1, 2)), "a core stays free"
    assert HostThreads.choose(3) == HostThreads(3, (0, 1, 2))
    monkeypatch.setattr(host_threads, "physical_cores", lambda topology, allowed: tuple(range(16)))
    assert HostThreads.choose().count == 14, "of many cores two"
    monkeypatch.setattr(host_threads, "physical_cores", physical_cores)
    assert not HostThreads.choose(4).cpus, "more threads than cores may use all CPUs"
    monkeypatch.setattr(host_threads, "QUOTA", quota)
    quota.write_text("200000 100000")
    assert HostThreads.choose() == HostThreads(1, (0, 1, 2)), "no more threads than the quota allows"
