"""Mailboxes: the kernels, interpreted in the place of a GPU, and the library's thread."""

from __future__ import annotations

import ctypes
import gc
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from assembler import TARGETS, assert_assembles
from layer_checkpoints import make_checkpoint, make_inputs
from ptx_interpreter import Kernel, variables
from torch import Tensor

from lancebill.backends.cpu import native
from lancebill.backends.cpu.executor import CpuExecutor
from lancebill.backends.cpu.host_call import HostCall, HostShape
from lancebill.backends.cpu.native import abi
from lancebill.errors import LaunchError
from lancebill.jit import driver
from lancebill.layer.routed_experts import HostExperts, RoutedExperts
from lancebill.moe.dispatch import Indexed
from lancebill.split import launch_ptx, mailbox
from lancebill.split.host_calls import HostCalls
from lancebill.split.mailbox import Mailbox, Mailboxes
from lancebill.split.mailbox_kernels import PTX
from lancebill.testing.checkpoints import save

needs_kernels = pytest.mark.skipif(native.library() is None, reason="the CPU kernels are not built")
LONG = 10_000  # rows of a call that takes some tenths of a second


def _bytes(size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.uint8)


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches run at once, in an interpreter, on memory of the CPU."""

    def launch(kernel: str, threads: int, *rest: Any) -> Callable[[int], None]:
        values = [int.from_bytes(value, "little") for _, value in rest[2]]
        return lambda stream: Kernel(PTX, kernel).run(values, threads)

    monkeypatch.setattr(driver, "in_context", lambda device: nullcontext())
    monkeypatch.setattr(launch_ptx, "_function", lambda ptx, kernel, device: kernel)
    monkeypatch.setattr(driver, "Launch", launch)


@pytest.fixture
def host(tmp_path: Path) -> HostExperts:
    layer = RoutedExperts.from_checkpoint(save(make_checkpoint(), tmp_path / "m"), 0, gpu_experts=1)
    assert layer.host_experts is not None
    return layer.host_experts


def _call(host: HostExperts, rows: int, seed: int = 0) -> tuple[HostCall, Tensor]:
    """A call in memory of its own, and its right result."""
    assert isinstance(host.executor, CpuExecutor) and host.expert_map is not None
    x, ids, weights = make_inputs(rows, seed)
    call = host.executor.host_call(HostShape(rows, x.dtype, ids.dtype, weights.dtype, 1), host.expert_map, _bytes)
    for target, source in zip((call.x, call.ids, call.weights), (x, ids, weights)):
        target.copy_(source)
    call.out.fill_(torch.nan)
    return call, host.executor.run(x, Indexed(ids, weights, host.expert_map), torch.empty(x.shape))


def _box(host: HostExperts, key: str = "it") -> Mailbox:
    assert isinstance(host.executor, CpuExecutor)
    return Mailboxes().of_queue(key, host.executor.native, _bytes)


def _words(box: Mailbox) -> Any:
    return abi.MailboxStruct.from_address(box.address)


def _ask(box: Mailbox, call: HostCall) -> None:
    call.mailbox = box
    box.ring(0, 7, call.argument)


def _wait(box: Mailbox, call: HostCall) -> Tensor:
    """The sums when the kernel lets the stream go on."""
    box.wait(0, 7, call.out)
    return call.out.clone()


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(1e-4)


@needs_kernels
def test_calls_that_are_asked_for_are_made(host: HostExperts) -> None:
    assert isinstance(host.executor, CpuExecutor)
    library, all_boxes = host.executor.native, Mailboxes()
    boxes = [all_boxes.of_queue(i, library, _bytes) for i in range(2)]
    assert all_boxes.of_queue(0, library, _bytes) is boxes[0] is not boxes[1]
    for seed in range(6):  # the last ones after a pause, in which the thread has gone to sleep
        call, want = _call(host, 3, seed)
        _ask(boxes[seed % 2], call)
        assert torch.equal(_wait(boxes[seed % 2], call), want), seed
        assert boxes[seed % 2].answered
        time.sleep(0.3 if seed > 3 else 0)
    address = boxes[0].address
    del boxes, call
    gc.collect()
    assert address in all_boxes.free and address not in mailbox._watched
    assert address not in mailbox.PINNED.free, "a GPU never gets memory that it cannot use"
    again, (call, want) = all_boxes.of_queue(2, library, _bytes), _call(host, 3)
    assert (_words(again).asked, _words(again).done) == (0, 0)
    _ask(again, call)
    assert torch.equal(_wait(again, call), want), "the thread starts again"


@needs_kernels
def test_a_call_that_was_given_up_before_it_was_made_is_not_made(
    host: HostExperts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread was stopped, with the whole process perhaps; the next call is right."""
    assert isinstance(host.executor, CpuExecutor)
    box, (first, _), (second, want) = _box(host), _call(host, 3, 1), _call(host, 3, 2)
    host.executor.native.unwatch(box.address)
    _ask(box, first)
    with monkeypatch.context() as impatient:
        impatient.setattr(mailbox, "LIMIT_S", 0.05)
        assert _wait(box, first).isnan().all()
    assert not box.answered and first.may_be_made
    with pytest.raises(LaunchError, match="within 60 seconds"):
        first.check()
    first.check()  # it was told
    host.executor.native.watch(box.address)
    _until(lambda: box.answered)
    assert first.call.count == 0 and not first.may_be_made
    _ask(box, second)
    assert torch.equal(_wait(box, second), want)
    second.check()


@contextmanager
def _under_way(box: Mailbox, call: HostCall) -> Iterator[None]:
    """Inside, the library's thread computes a long call, and is not done when this ends."""
    _ask(box, call)
    number = _words(box).asked
    _until(lambda: call.call.count > 0)
    yield
    assert number > _words(box).done, "the call was too short for this test"


@needs_kernels
def test_a_late_answer_is_not_taken_for_that_of_the_next_call(host: HostExperts) -> None:
    box, (first, _), (second, want) = _box(host), _call(host, LONG, 1), _call(host, LONG, 2)
    with _under_way(box, first):
        _ask(box, second)
    assert torch.equal(_wait(box, second), want)
    assert first.call.count == second.call.count == 1


@needs_kernels
def test_a_call_after_one_that_was_given_up_while_it_was_made_fails(
    host: HostExperts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls share memory: sums of the late one may have been written over the rows of the next."""
    box, (first, _), (second, _), (third, want) = _box(host), _call(host, LONG), _call(host, 9, 2), _call(host, 9, 3)
    with _under_way(box, first):
        with monkeypatch.context() as impatient:
            impatient.setattr(mailbox, "LIMIT_S", 0.0)
            box.wait(0, 7, first.out[:0])  # interpreted, to fill all would take longer than the call
        _ask(box, second)
    assert _wait(box, second).isnan().all() and second.call.count == 0
    with pytest.raises(LaunchError, match="within 60 seconds"):
        first.check()
    with pytest.raises(LaunchError, match="an earlier call came too late"):
        second.check()
    _ask(box, third)
    assert torch.equal(_wait(box, third), want)
    third.check()


class StreamOfOne:
    """A queue whose steps run at once; its calls go through a mailbox."""

    key, capturing = "it", False

    def __init__(self, box: Mailbox) -> None:
        self.box = box

    def mapped(self, memory: Tensor) -> Tensor:
        return memory

    def gather(self, target: Tensor, sources: Sequence[Tensor]) -> None:
        torch.cat([source.reshape(-1).view(torch.uint8) for source in sources], out=target)

    def call(self, call: HostCall) -> None:
        _ask(self.box, call)

    def allocate(self, size: int) -> Tensor:
        return _bytes(size)

    def wait(self) -> None:
        """All steps have run."""


@needs_kernels
def test_a_call_that_was_given_up_is_kept_until_nobody_makes_it_any_more(host: HostExperts) -> None:
    """Its layer may be gone before: the thread would compute with memory that was freed."""
    assert isinstance(host.executor, CpuExecutor) and host.expert_map is not None
    library, box, calls = host.executor.native, _box(host), HostCalls()
    library.unwatch(box.address)
    queue: Any = StreamOfOne(box)
    x, ids, weights = make_inputs(3)
    calls.queue(queue, host.executor, host.expert_map, x, Indexed(ids, weights))
    ((_, made),) = calls.eager.values()
    freed = list[bool]()
    weakref.finalize(made.call, freed.append, True)
    del calls, made
    gc.collect()
    assert not freed and not box.answered
    library.watch(box.address)
    _until(lambda: box.answered)
    HostCalls().__del__()  # of any layer
    gc.collect()
    assert freed


@needs_kernels
def test_requests_have_different_numbers_and_none_is_0(host: HostExperts) -> None:
    """0 is the number of a mailbox that nobody has asked yet."""
    assert isinstance(host.executor, CpuExecutor)
    box, (call, _) = _box(host), _call(host, 1)
    host.executor.native.unwatch(box.address)
    variables(PTX)["numbers"].value = 0xFFFFFFFD
    numbers = []
    for _ in range(4):
        _ask(box, call)
        numbers.append(_words(box).asked)
    assert numbers == [0xFFFFFFFE, 0xFFFFFFFF, 1, 2]


@pytest.mark.parametrize("target", TARGETS)
def test_the_kernels_assemble(target: str, tmp_path: Path) -> None:
    assert_assembles(PTX, target, tmp_path)


def test_offsets_are_those_of_the_kernels() -> None:
    struct = abi.MailboxStruct
    offsets = [struct.request.offset, struct.asked.offset, struct.done.offset, struct.late.offset]
    assert offsets == [0, 8, 12, 16] and ctypes.sizeof(struct) <= 64
