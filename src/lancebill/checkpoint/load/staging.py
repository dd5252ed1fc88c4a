"""Where the threads of a load work: on the CPU, or each on a stream of its own of a GPU.

On a GPU a thread reads into pinned memory, from which copies to the device run asynchronously, and decodes and packs
there. What it launches is ordered by its stream, so nothing has to wait: while one thread reads, the copies and kernels
of the others run.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lancebill.checkpoint.read.slices import Index, Reader

PINNED_BYTES = 16 << 20  # of each buffer; every thread has two
_ALIGNED = 64


class DeviceReader:
    """Reads tensors to a device. Threads call `working` around the reads of one piece of work."""

    def __init__(self, read: Reader, device: torch.device) -> None:
        self._read, self.device = read, device
        self._stages: list[_Stage] = []
        self._own = _OwnStage()
        self._lock = threading.Lock()
        self._start = torch.cuda.current_stream(device) if device.type == "cuda" else None

    @property
    def asynchronous(self) -> bool:
        """Whether the device works while the host goes on."""
        return self._start is not None

    def __call__(self, name: str, index: Index) -> Tensor:
        tensor = self._read(name, index)
        return tensor if self._start is None else self._stage().to_device(tensor)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Inside, this thread's work on the device goes to its own stream."""
        if self._start is None:
            yield
            return
        with torch.cuda.stream(self._stage().stream):
            yield

    def finish(self) -> None:
        """Later work of the caller's stream waits for what the threads launched."""
        if self._start is not None:
            for stage in self._stages:
                self._start.wait_stream(stage.stream)
                if stage.reads_callers_memory:
                    stage.stream.synchronize()  # the caller may release it

    def _stage(self) -> _Stage:
        stage = self._own.stage
        if stage is None:
            assert self._start is not None
            stage = self._own.stage = _Stage(self.device)
            stage.stream.wait_stream(self._start)  # buffers may be in use by earlier work of the caller's stream
            with self._lock:
                self._stages.append(stage)
        return stage


class _OwnStage(threading.local):
    """The stage of each thread."""

    stage: _Stage | None = None


class _Stage:
    """One thread's stream and pinned buffers. A buffer is written again when the copies from it are done."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)
        self._buffers: list[Tensor] = []  # made when the first tensor comes from the CPU
        self._copied = [torch.cuda.Event() for _ in range(2)]
        self._turn, self._used = 0, 0
        self.reads_callers_memory = False  # tensors that the caller has pinned are copied from where they are

    def to_device(self, tensor: Tensor) -> Tensor:
        """A copy on the device, on this stage's stream. Tensors that are on a device already stay as they are."""
        if tensor.device.type != "cpu":
            return tensor
        tensor = tensor.contiguous()
        if tensor.is_pinned():
            self.reads_callers_memory = True
            return tensor.to(self.device, non_blocking=True)
        out = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
        source, target = (t.view(-1).view(torch.uint8) if t.numel() else t for t in (tensor, out))
        done, size = 0, tensor.nbytes
        while done < size:
            piece = self._room(size - done)
            piece.copy_(source[done : done + len(piece)])
            target[done : done + len(piece)].copy_(piece, non_blocking=True)
            done += len(piece)
        return out

    def _room(self, most: int) -> Tensor:
        """The next free bytes of a pinned buffer, `most` or fewer."""
        if not self._buffers:
            self._buffers = [torch.empty(PINNED_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        if self._used >= PINNED_BYTES:
            self._copied[self._turn].record(self.stream)
            self._turn, self._used = 1 - self._turn, 0
            self._copied[self._turn].synchronize()
        start = self._used
        count = min(most, PINNED_BYTES - start)
        self._used = -(-(start + count) // _ALIGNED) * _ALIGNED
        return self._buffers[self._turn][start : start + count]
