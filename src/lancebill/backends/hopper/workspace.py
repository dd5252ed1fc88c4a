"""Scratch memory: one buffer for each (device, stream), shared by all layers. It cannot grow during graph capture."""

from __future__ import annotations

from threading import Lock

import torch
from torch import Tensor

from lancebill.errors import LaunchError

_ALIGN = 256
FIRST, SECOND, COUNTERS = 0, 1 << 15, 1 << 16  # counters of the first GEMM's tiles and of the second's
_buffers: dict[tuple[int, int], Tensor] = {}
_counters: dict[tuple[int, int], Tensor] = {}
_locks: dict[tuple[int, int], Lock] = {}


def counters(device: torch.device, stream: int) -> Tensor:
    """Counters, all zero between calls: the block that sees a full counter resets it."""
    key = (device.index or 0, stream)
    if key not in _counters:
        _counters[key] = torch.zeros(COUNTERS, dtype=torch.int32, device=device)
    return _counters[key]


def lock(device: torch.device, stream: int) -> Lock:
    """Held while a call queues its launches: threads on one stream share scratch, so their launches must not mix."""
    return _locks.setdefault((device.index or 0, stream), Lock())


def pieces(sizes: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> tuple[dict[str, int], int]:
    """Offsets of named tensors in one buffer, and its size."""
    offsets, at = {}, 0
    for name, (shape, dtype) in sizes.items():
        offsets[name] = at
        count = dtype.itemsize
        for side in shape:
            count *= side
        at += -(-count // _ALIGN) * _ALIGN
    return offsets, at


def buffer(device: torch.device, stream: int, size: int) -> Tensor:
    """At least `size` bytes, zeroed when new. A buffer that was outgrown lives as long as launches refer to it."""
    key = (device.index or 0, stream)
    held = _buffers.get(key)
    if held is None or held.numel() < size:
        if torch.cuda.is_current_stream_capturing():
            raise LaunchError(
                "the workspace is too small and cannot grow during graph capture",
                expected=f"{size} bytes",
                got=0 if held is None else held.numel(),
                hint="run the layer once with this many tokens before capturing",
            )
        held = torch.zeros(size, dtype=torch.uint8, device=device)
        _buffers[key] = held
    return held


def views(held: Tensor, sizes: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> dict[str, Tensor]:
    """The named tensors inside a buffer."""
    offsets, _ = pieces(sizes)
    out = {}
    for name, (shape, dtype) in sizes.items():
        count = dtype.itemsize
        for side in shape:
            count *= side
        out[name] = held[offsets[name] : offsets[name] + count].view(dtype).view(shape)
    return out
