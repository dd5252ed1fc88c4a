"""Work on a GPU beside everything else: on a stream that nobody captures, from any thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from lancebill.jit import driver


@contextmanager
def done_at_once(device: torch.device) -> Iterator[None]:
    """What is queued inside is done when this ends, and is never part of a graph. On a CPU nothing changes."""
    if device.type != "cuda":
        yield
        return
    index = device.index or 0
    with driver.in_context(index), driver.uncaptured(), torch.cuda.device(index):
        stream = _stream(index)
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()


@cache
def _stream(device: int) -> torch.cuda.Stream:
    """Not one of torch's, which are few and shared: another thread could be capturing it."""
    return torch.cuda.ExternalStream(driver.own_stream(device), device=torch.device("cuda", device))
