"""A thread of the CPU kernels that ends with a task: one clear error instead of a hang; the next call is right."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from layer_checkpoints import make_checkpoint, make_inputs
from torch import Tensor

from lancebill.backends.cpu import native
from lancebill.backends.cpu.executor import CpuExecutor
from lancebill.backends.cpu.host_call import HostCall, HostShape
from lancebill.backends.cpu.native import abi
from lancebill.errors import LaunchError
from lancebill.layer.routed_experts import HostExperts, RoutedExperts
from lancebill.moe.dispatch import Indexed
from lancebill.split.mailbox import Mailboxes
from lancebill.testing.checkpoints import save

pytestmark = pytest.mark.skipif(native.library() is None, reason="the CPU kernels are not built")
THREADS, ROWS, PATIENCE_S = 3, 64, 20.0


@pytest.fixture
def host(tmp_path: Path) -> HostExperts:
    layer = RoutedExperts.from_checkpoint(save(make_checkpoint(), tmp_path / "m"), 0, gpu_experts=1)
    assert layer.host_experts is not None
    return layer.host_experts


def _bytes(size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.uint8)


def _call(host: HostExperts) -> tuple[HostCall, Tensor]:
    """A call of several threads, and its right result."""
    assert isinstance(host.executor, CpuExecutor) and host.expert_map is not None
    x, ids, weights = make_inputs(ROWS)
    call = host.executor.host_call(HostShape(ROWS, x.dtype, ids.dtype, weights.dtype, THREADS), host.expert_map, _bytes)
    for target, source in zip((call.x, call.ids, call.weights), (x, ids, weights)):
        target.copy_(source)
    return call, host.executor.run(x, Indexed(ids, weights, host.expert_map), torch.empty(x.shape))


def _until_it_fails(call: HostCall, make: Callable[[], None]) -> None:
    """Beside other load the caller may do all tasks before a worker wakes: then no worker has ended."""
    end = time.monotonic() + PATIENCE_S
    while not call.call.status:
        assert time.monotonic() < end, "no worker took a task"
        make()


def test_a_call_whose_worker_has_ended_fails_and_the_next_one_does_not(host: HostExperts) -> None:
    call, want = _call(host)
    for _ in range(2):
        call.native.calls.lancebill_end_worker()
        _until_it_fails(call, call.run)
        assert call.out.isnan().all()
        with pytest.raises(LaunchError, match="a thread of the library ended before its task"):
            call.check()
        for _ in range(20):
            call.run()
            call.check()
            assert torch.equal(call.out, want)


def test_a_call_that_a_gpu_asks_for_is_answered_all_the_same(host: HostExperts) -> None:
    call, want = _call(host)
    box = Mailboxes().of_queue("lost", call.native, _bytes)
    words = abi.MailboxStruct.from_address(box.address)

    def ask() -> None:
        words.request = call.argument
        words.asked += 1
        end = time.monotonic() + PATIENCE_S
        while words.done != words.asked:
            assert time.monotonic() < end, "the GPU would wait for a minute"
            time.sleep(1e-4)

    call.native.calls.lancebill_end_worker()
    _until_it_fails(call, ask)
    assert call.out.isnan().all()
    with pytest.raises(LaunchError, match="ended before its task"):
        call.check()
    ask()
    call.check()
    assert torch.equal(call.out, want)


def test_calls_are_timed(host: HostExperts) -> None:
    call, _ = _call(host)
    start = time.perf_counter_ns()
    for _ in range(3):
        call.run()
    assert call.call.count == 3 and 0 < call.call.nanoseconds <= time.perf_counter_ns() - start
