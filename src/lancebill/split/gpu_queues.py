"""How the CPU's part of a call is put into a GPU's queue: two ways, both without Python and fit for captured graphs.

`SideStream`: a stream forked from the caller's, on which CUDA calls a host function. It may hold several calls.
`MailboxQueue`: the caller's own stream. A kernel rings a mailbox, which a thread of ours watches, and another kernel
waits for the answer: one call, but it starts and ends tens of microseconds earlier.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from lancebill.backends.cpu.host_call import HostCall
from lancebill.backends.gpu.workspace import outside_pools
from lancebill.errors import LaunchError, NotEnoughMemory
from lancebill.jit import driver
from lancebill.jit.address import address_on
from lancebill.native.address import host_address
from lancebill.split.mailbox import PINNED, Mailbox

_STREAMS: dict[tuple[int, int], torch.cuda.Stream] = {}  # by device and the caller's stream


class _Mapped:
    """Pinned memory, which a GPU reads and writes under the same address, in the form that torch takes as a GPU's."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        kind = {torch.uint8: "|u1", torch.float32: "<f4", torch.int32: "<i4"}[self.memory.dtype]
        address = host_address(self.memory), False
        return {"shape": tuple(self.memory.shape), "typestr": kind, "data": address, "version": 3}


class _GpuQueue:
    """Steps on one stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.caller = torch.cuda.current_stream(device)
        self.capturing = bool(torch._C._cuda_isCurrentStreamCapturing())
        self.stream = self._own_stream()
        self.number = self.stream.cuda_stream
        capture = driver.capture_id(self.caller.cuda_stream) if self.capturing else None
        self.key: Hashable = device.index or 0, self.number, capture  # default streams have one number on all GPUs

    def _own_stream(self) -> torch.cuda.Stream:
        return self.caller

    def fork(self) -> None:
        """There is nothing to wait for: what is queued here is queued by the caller."""

    def mapped(self, memory: Tensor) -> Tensor:
        view = torch.as_tensor(_Mapped(memory), device=self.device)
        if address_on(view, self.device) != host_address(memory):  # it is mapped for another GPU
            raise LaunchError("this GPU cannot use the pinned memory in place", got=self.device)
        return view

    def gather(self, target: Tensor, sources: Sequence[Tensor]) -> None:
        """One kernel that writes to host memory: for few rows faster than three copies."""
        with torch.cuda.stream(self.stream):
            torch.cat([source.reshape(-1).view(torch.int16) for source in sources], out=target.view(torch.int16))

    def fetched(self, memory: Tensor) -> Tensor:
        with torch.cuda.stream(self.stream):
            return on_device(memory)

    def take_rows(self, target: Tensor, source: Tensor, numbers: Tensor) -> None:
        source = _wide(source)
        with torch.cuda.stream(self.stream):
            torch.index_select(source, 0, numbers, out=target.view(source.dtype))

    def copy(self, target: Tensor, source: Tensor) -> None:
        """By a kernel, as `on_device`."""
        with torch.cuda.stream(self.stream):
            torch.mul(source, 1.0, out=target)

    def allocate(self, size: int) -> Tensor:
        return pinned(size, self.device, self.capturing)

    def wait(self) -> None:
        self.stream.synchronize()

    def mark(self) -> torch.cuda.Event:
        """An event that passes when all that was queued so far has run."""
        event = torch.cuda.Event()
        event.record(self.stream)
        return event


class SideStream(_GpuQueue):
    """A fork of the current stream of a device. A host function blocks its stream, so the GPU's part has another."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.fork()

    def fork(self) -> None:
        self.stream.wait_stream(self.caller)

    def _own_stream(self) -> torch.cuda.Stream:
        key = self.device.index or 0, self.caller.cuda_stream
        if key not in _STREAMS:
            with driver.uncaptured() if self.capturing else nullcontext():
                _STREAMS[key] = torch.cuda.Stream(self.device)
        return _STREAMS[key]

    def call(self, call: HostCall) -> None:
        driver.launch_host_function(self.number, call.function, call.argument)

    def join(self) -> None:
        """Let the caller's stream wait for this one."""
        self.caller.wait_stream(self.stream)


class MailboxQueue(_GpuQueue):
    """The current stream of a device, for one call: from `call` to `join` the GPU computes what else is queued."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._asked: tuple[Mailbox, HostCall] | None = None

    def call(self, call: HostCall) -> None:
        box = PINNED.of_queue(self.key, call.native, self.allocate)
        call.mailbox = box
        box.ring(self.device.index or 0, self.number, call.argument)
        self._asked = box, call

    def join(self) -> None:
        """Let the stream wait for the call's sums."""
        if self._asked is not None:
            box, call = self._asked
            box.wait(self.device.index or 0, self.number, call.out)


def on_device(memory: Tensor) -> Tensor:
    """A copy that a kernel makes: a copy engine would do it after all copies of experts that are queued."""
    return torch.add(memory, 0)


def _wide(rows: Tensor) -> Tensor:
    """In words of 8 bytes, if rows are whole words: a kernel writes few large words faster than many small ones."""
    word = torch.int64.itemsize // rows.element_size()
    return rows if rows.shape[1] % word or rows.storage_offset() % word else rows.view(torch.int64)


def pinned(size: int, device: torch.device, capturing: bool) -> Tensor:
    """Bytes of host memory that a GPU can read and write in place.

    torch has pools of pinned memory for graphs, too, which end with the first graph that used them.
    """

    def make() -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    try:
        return outside_pools(device, None, make) if capturing else make()
    except RuntimeError as error:
        raise NotEnoughMemory(
            "no pinned host memory is left for the CPU's part of a call",
            expected=f"{size:,} bytes",
            hint="a smaller batch needs less; `ulimit -v` and the limits of a container count, too",
        ) from error
