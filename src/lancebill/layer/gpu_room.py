"""Whether experts fit a GPU: asked before anything is loaded, and told if they do not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lancebill.errors import NotEnoughMemory
from lancebill.moe.device import Device


def free_bytes(device: torch.device) -> int:
    """Bytes of a GPU that this process could still use: free ones, and those that torch keeps and does not use."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + unused


@contextmanager
def fitting(where: str, needed: int, device: torch.device) -> Iterator[None]:
    """Around what allocates experts of so many bytes: says which ones do not fit."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise NotEnoughMemory(
            "the experts do not fit the GPU",
            where=where,
            expected=f"{needed:,} bytes",
            got=f"{free_bytes(device):,} bytes that are free",
            hint="gpu_memory= leaves more experts in host memory",
        ) from error


def check_room(needed: int, device: Device) -> None:
    """Raise if a GPU has less than the bytes of the experts that gpu_memory= puts there."""
    if device.kind == "cpu" or not torch.cuda.is_available():
        return
    free = free_bytes(device.torch)
    if needed > free:
        raise NotEnoughMemory(
            "the GPU has less free memory than its experts need",
            where="gpu_memory",
            expected=f"at most {free:,} bytes",
            got=f"{needed:,} bytes",
            hint="the attention, the cache and the captured graphs need memory, too",
        )
