"""Questions about tensors that almost always have the same answer: does one contain a NaN, a wrong index?

On a GPU an answer makes the host wait for the device. So a load assumes the usual answer, and asks all questions
together when everything is launched; what was unusual is done again, with answers at once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


class _State(threading.local):
    """Of this thread."""

    flags: list[Tensor] | None = None  # of questions that are not answered yet; None: they are answered at once
    again: bool = False  # whether something is done for the second time


_state = _State()


def unusual(flag: Tensor) -> bool:
    """Whether a flag is set; inside `assuming` the answer is no, for now."""
    if _state.flags is None:
        return bool(flag)
    _state.flags.append(flag)
    return False


@contextmanager
def assuming() -> Iterator[list[Tensor]]:
    """Collects the flags of this thread's questions instead of answering them."""
    flags: list[Tensor] = []
    before, _state.flags = _state.flags, flags
    try:
        yield flags
    finally:
        _state.flags = before


@contextmanager
def repeating() -> Iterator[None]:
    """Around the second time: what was assumed was wrong."""
    before, _state.again = _state.again, True
    try:
        yield
    finally:
        _state.again = before


def first_time() -> bool:
    """Whether what is counted now was not counted before."""
    return not _state.again


def any_set(flags: Sequence[Tensor]) -> Tensor:
    """One flag for all of them."""
    return torch.stack([flag.reshape(()) for flag in flags]).any()
