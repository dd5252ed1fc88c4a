"""Questions about tensors that almost always have the same answer: does one contain a NaN, a wrong index?

On a GPU an answer makes the host wait for the device. So a load assumes the usual answer, and asks all questions
together when everything is launched; what was unusual is done again, with answers at once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class _Assumed(threading.local):
    """The questions of this thread that are not answered yet; None: they are answered at once."""

    flags: list[Tensor] | None = None


_assumed = _Assumed()


def unusual(flag: Tensor) -> bool:
    """Whether a flag is set; inside `assuming` the answer is no, for now."""
    if _assumed.flags is None:
        return bool(flag)
    _assumed.flags.append(flag)
    return False


@contextmanager
def assuming() -> Iterator[list[Tensor]]:
    """Collects the flags of this thread's questions instead of answering them."""
    flags: list[Tensor] = []
    before, _assumed.flags = _assumed.flags, flags
    try:
        yield flags
    finally:
        _assumed.flags = before


def any_set(flags: list[Tensor]) -> Tensor:
    """One flag for all of them."""
    return torch.stack([flag.reshape(()) for flag in flags]).any()
