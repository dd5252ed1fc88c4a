"""The stream of the CPU's part: forked from the caller's and joined at the end, so the GPU computes at the same time.

A host function blocks the stream it is on, so it must not be on the one that the GPU's part uses.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from lancebill.errors import LaunchError
from lancebill.jit import driver

_STREAMS: dict[tuple[int, int], torch.cuda.Stream] = {}  # by device and the caller's stream


class _Mapped:
    """Pinned memory, which a GPU reads and writes under the same address, in the form that torch takes as a GPU's."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        kind = {torch.uint8: "|u1", torch.float32: "<f4"}[self.memory.dtype]
        address = self.memory.data_ptr(), False
        return {"shape": tuple(self.memory.shape), "typestr": kind, "data": address, "version": 3}


class SideStream:
    """A fork of the current stream of a device."""

    def __init__(self, device: torch.device) -> None:
        self.caller = torch.cuda.current_stream(device)
        self.capturing = bool(torch._C._cuda_isCurrentStreamCapturing())
        key = device.index or 0, self.caller.cuda_stream
        if key not in _STREAMS:
            with driver.uncaptured() if self.capturing else nullcontext():
                _STREAMS[key] = torch.cuda.Stream(device)
        self.stream = _STREAMS[key]
        self.number = self.stream.cuda_stream
        self.key: Hashable = self.number, driver.capture_id(self.caller.cuda_stream) if self.capturing else None
        self.stream.wait_stream(self.caller)

    def mapped(self, memory: Tensor) -> Tensor:
        view = torch.as_tensor(_Mapped(memory), device=self.stream.device)
        if view.data_ptr() != memory.data_ptr():  # it is mapped for another GPU
            raise LaunchError("this GPU cannot use the pinned memory in place", got=self.stream.device)
        return view

    def gather(self, target: Tensor, sources: Sequence[Tensor]) -> None:
        """One kernel that writes to host memory: for few rows faster than three copies."""
        with torch.cuda.stream(self.stream):
            torch.cat([source.reshape(-1).view(torch.int16) for source in sources], out=target.view(torch.int16))

    def copy(self, target: Tensor, source: Tensor) -> None:
        driver.copy_async(target.data_ptr(), source.data_ptr(), source.nbytes, self.number)

    def call(self, function: int, argument: int) -> None:
        driver.launch_host_function(self.number, function, argument)

    def allocate(self, size: int) -> Tensor:
        try:
            with driver.uncaptured() if self.capturing else nullcontext():
                return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            raise LaunchError("no pinned host memory is left for the CPU's part", got=f"{size} bytes") from error

    def wait(self) -> None:
        self.stream.synchronize()

    def join(self) -> None:
        """Let the caller's stream wait for this one."""
        self.caller.wait_stream(self.stream)
