"""The stream of the CPU's part: forked from the caller's and joined at the end, so the GPU computes at the same time.

A host function blocks the stream it is on, so it must not be on the one that the GPU's part uses.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from lancebill.errors import LaunchError
from lancebill.jit import driver

_STREAMS: dict[tuple[int, int], torch.cuda.Stream] = {}  # by device and the caller's stream


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
        self.stream.wait_stream(self.caller)

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
