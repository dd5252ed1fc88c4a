"""A split layer on a GPU that is not the current one. The GPUs are fakes, the CPU's part computes."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

import pytest
import torch
from layer_checkpoints import make_checkpoint, make_inputs
from torch import Tensor

from lancebill.backends.cpu import native
from lancebill.backends.cpu.host_call import HostCall
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.moe.dispatch import Indexed
from lancebill.split import call_views, executor, gpu_queues, host_calls, large_batches
from lancebill.testing.checkpoints import save

LAYERS, OTHER = 1, 0  # the GPU of the layer, and the one that is current


class OnGpu(Tensor):
    """Memory of the CPU that says it is a GPU's."""

    device = torch.device("cuda", LAYERS)


class Gpus:
    """Which GPU is current, and which one was when something was asked of the current one."""

    def __init__(self) -> None:
        self.current = OTHER
        self.asked: list[tuple[str, int]] = []

    @contextmanager
    def device(self, index: int) -> Iterator[None]:
        before, self.current = self.current, index
        try:
            yield
        finally:
            self.current = before

    def asks(self, what: str, answer: Any) -> Any:
        def ask(*rest: Any) -> Any:
            self.asked.append((what, self.current))
            return answer

        return ask


class Stream:
    """A queue whose steps run at once."""

    capturing = False

    def __init__(self, device: torch.device) -> None:
        assert device == OnGpu.device
        self.key = "capturing" if torch._C._cuda_isCurrentStreamCapturing() else "eager"

    def mapped(self, memory: Tensor) -> Tensor:
        return memory

    def fork(self) -> None:
        """The caller's steps have run."""

    def gather(self, target: Tensor, sources: Sequence[Tensor]) -> None:
        torch.cat([source.as_subclass(Tensor).reshape(-1).view(torch.uint8) for source in sources], out=target)

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def call(self, call: HostCall) -> None:
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(call.function)(call.argument)

    def allocate(self, size: int) -> Tensor:
        return gpu_queues.pinned(size, OnGpu.device, self.capturing)

    def wait(self) -> None:
        """All steps have run."""

    join = wait


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    fakes = Gpus()
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: fakes.current, raising=False)
    monkeypatch.setattr(torch.cuda, "device", fakes.device)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", fakes.asks("capture", False), raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", fakes.asks("capture", True))
    monkeypatch.setattr(torch, "empty", _unpinned(torch.empty, fakes))
    monkeypatch.setattr(executor, "MailboxQueue", Stream)
    monkeypatch.setattr(executor, "SideStream", Stream)
    monkeypatch.setattr(host_calls, "_BUFFERS", WeakValueDictionary())
    return fakes


def _unpinned(empty: Any, fakes: Gpus) -> Any:
    """`torch.empty` for machines without a GPU, which cannot pin."""

    def make(*size: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        if pin_memory:
            fakes.asked.append(("pinned memory", fakes.current))
        made: Tensor = empty(*size, **options)
        return made

    return make


@pytest.mark.skipif(native.library() is None, reason="the CPU kernels are not built")
@pytest.mark.parametrize("tokens", [3, large_batches.FEWEST, 1100])
def test_captures_are_asked_of_the_layers_gpu_and_memory_is_pinned_for_it(
    gpus: Gpus, tokens: int, tmp_path: Path
) -> None:
    layer = RoutedExperts.from_checkpoint(save(make_checkpoint(), tmp_path / "m"), 0, gpu_experts=0)
    host, split = layer.host_experts, layer.executor
    assert host is not None and host.expert_map is not None
    x, ids, weights = make_inputs(tokens)
    want = host.executor.run(x, Indexed(ids, weights, host.expert_map), torch.empty(x.shape))
    dispatch = Indexed(ids, weights, layer.expert_map)
    vars(split)["tensors"] = SimpleNamespace(device=OnGpu.device)  # none of its experts are there
    out = split.run(x.as_subclass(OnGpu), dispatch, torch.empty(x.shape).as_subclass(OnGpu))
    assert torch.equal(out, want)
    assert {what for what, _ in gpus.asked} == {"capture", "pinned memory"}
    assert {index for _, index in gpus.asked} == {LAYERS} and gpus.current == OTHER


def test_what_experts_that_move_share_with_a_gpu_is_pinned_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made when the layer is first called, perhaps while another GPU is current, and in no capture's pool."""
    pinned_for = []

    def outside_pools(device: torch.device, stream: int | None, make: Any) -> Tensor:
        pinned_for.append(device)
        return torch.empty(64, dtype=torch.uint8)

    @contextmanager
    def at_once(device: torch.device) -> Iterator[None]:
        yield

    monkeypatch.setattr(gpu_queues, "outside_pools", outside_pools)
    monkeypatch.setattr(call_views, "done_at_once", at_once)
    monkeypatch.setattr(torch, "zeros", lambda *size, device, **options: torch.empty(*size, **options))
    call_views.Uses(4, OnGpu.device)
    assert pinned_for == [OnGpu.device]
