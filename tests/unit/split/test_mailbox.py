"""Mailboxes, with this thread in the place of a GPU's kernels."""

from __future__ import annotations

import ctypes
import gc
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from assembler import TARGETS, assert_assembles
from layer_checkpoints import make_checkpoint, make_inputs
from torch import Tensor

from lancebill.backends.cpu import native
from lancebill.backends.cpu.executor import CpuExecutor
from lancebill.backends.cpu.host_call import HostCall, HostShape
from lancebill.backends.cpu.native import abi
from lancebill.errors import LaunchError
from lancebill.jit import driver
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.moe.dispatch import Indexed
from lancebill.split import launch_ptx, mailbox
from lancebill.split.mailbox import Mailbox, Mailboxes
from lancebill.split.mailbox_kernels import PTX
from lancebill.testing.checkpoints import save

needs_kernels = pytest.mark.skipif(native.library() is None, reason="the CPU kernels are not built")


def _bytes(size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.uint8)


def _answered(box: Mailbox, call: HostCall, patience_s: float = 20.0) -> bool:
    """What the two kernels do, but with less patience."""
    words = abi.MailboxStruct.from_address(box.address)
    words.done = 0
    words.request = call.argument
    end = time.monotonic() + patience_s
    while not words.done and time.monotonic() < end:
        time.sleep(1e-4)
    return bool(words.done)


@needs_kernels
def test_calls_that_are_asked_for_are_made(tmp_path: Path) -> None:
    layer = RoutedExperts.from_checkpoint(save(make_checkpoint(), tmp_path / "m"), 0, gpu_experts=1)
    host = layer.host_experts
    assert host is not None and isinstance(host.executor, CpuExecutor) and host.expert_map is not None
    x, ids, weights = make_inputs(3)
    shape = HostShape(3, x.dtype, ids.dtype, weights.dtype, 2)
    call = host.executor.host_call(shape, host.expert_map, _bytes)
    all_boxes = Mailboxes()
    boxes = [all_boxes.of_queue(i, host.executor.native, _bytes) for i in range(2)]
    assert all_boxes.of_queue(0, host.executor.native, _bytes) is boxes[0] is not boxes[1]
    for seed in range(6):  # the last ones after a pause, in which the thread has gone to sleep
        x, ids, weights = make_inputs(3, seed)
        for target, source in zip((call.x, call.ids, call.weights), (x, ids, weights)):
            target.copy_(source)
        call.out.fill_(torch.nan)
        assert _answered(boxes[seed % 2], call)
        want = host.executor.run(x, Indexed(ids, weights, host.expert_map), torch.empty(x.shape))
        assert torch.equal(call.out, want), seed
        time.sleep(0.3 if seed > 3 else 0)
    address = boxes[0].address
    del boxes
    gc.collect()
    assert address in all_boxes.free and address not in mailbox._watched
    assert address not in mailbox.PINNED.free, "a GPU never gets memory that it cannot use"
    again = all_boxes.of_queue(2, host.executor.native, _bytes)
    assert _answered(again, call), "the thread starts again"
    host.executor.native.unwatch(again.address)
    assert not _answered(again, call, patience_s=0.1), "the thread has ended: nobody answers"
    host.executor.native.watch(again.address)
    assert _answered(again, call)


@needs_kernels
def test_a_late_answer_is_told_at_the_next_check() -> None:
    library = native.library()
    assert library is not None
    box = Mailboxes().of_queue("late", library, _bytes)
    box.check()
    abi.MailboxStruct.from_address(box.address).late = 1
    with pytest.raises(LaunchError, match="within 60 seconds"):
        box.check()
    box.check()


def test_kernels_have_the_parameters_they_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[str, int]] = []
    monkeypatch.setattr(driver, "in_context", lambda device: nullcontext())
    monkeypatch.setattr(launch_ptx, "_function", lambda ptx, kernel, device: kernel)
    monkeypatch.setattr(driver, "Launch", lambda kernel, *rest: lambda stream: launched.append((kernel, len(rest[3]))))
    box = Mailbox.__new__(Mailbox)
    box.address = 64
    box.ring(0, 7, 128)
    box.wait(0, 7, torch.zeros(2, 3))
    assert launched == [
        (name, PTX.split(f"entry {name}(")[1].split(")")[0].count(".param")) for name in ("ring", "wait")
    ]


@pytest.mark.parametrize("target", TARGETS)
def test_the_kernels_assemble(target: str, tmp_path: Path) -> None:
    assert_assembles(PTX, target, tmp_path)


def test_offsets_are_those_of_the_kernels() -> None:
    struct = abi.MailboxStruct
    assert (struct.request.offset, struct.done.offset, struct.late.offset) == (0, 8, 12)
    assert ctypes.sizeof(struct) <= 64
