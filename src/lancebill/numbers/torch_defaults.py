"""torch's default device and dtype, which engines and users change while they build models.

Our own tensors name both. What depends on the defaults is code of other packages that we call, transformers' above all,
and where a layer goes if its caller names no device.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch


class _PlainDtype:
    """torch's own default dtype, for as long as any thread needs it: the default belongs to the process."""

    def __init__(self) -> None:
        self._lock, self._users = threading.Lock(), 0
        self._before = torch.float32

    @contextmanager
    def used(self) -> Iterator[None]:
        with self._lock:
            if not self._users:
                self._before = torch.get_default_dtype()
                torch.set_default_dtype(torch.float32)
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    torch.set_default_dtype(self._before)


_PLAIN = _PlainDtype()


@contextmanager
def torch_defaults() -> Iterator[None]:
    """Inside, tensors for which nothing else is said are fp32 on the CPU.

    Where the CPU is the default, nothing is entered: within a device's context every call of torch takes longer.
    """
    with _PLAIN.used(), nullcontext() if default_device().type == "cpu" else torch.device("cpu"):
        yield


def default_device() -> torch.device:
    """Where a layer or a model goes if its caller names no device: torch's default, as for torch's own modules."""
    return torch.get_default_device()
