"""Which GPU is current around launches on another one."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from typing import Any

import pytest

from lancebill.jit import driver


class FakeContexts:
    """A driver whose context of GPU i is 100 + i."""

    def __init__(self, current: int | None) -> None:
        self.current = current

    def cuCtxGetCurrent(self, context: Any) -> int:
        context._obj.value = self.current
        return 0

    def cuCtxSetCurrent(self, context: ctypes.c_void_p) -> int:
        self.current = context.value
        return 0


@pytest.mark.parametrize(("before", "after"), [(None, 101), (100, 100), (101, 101)])
@pytest.mark.parametrize("fails", [False, True])
def test_the_caller_s_gpu_stays_current(
    monkeypatch: pytest.MonkeyPatch, before: int | None, after: int, fails: bool
) -> None:
    """A thread that had none keeps the new one, as after torch's own first use."""
    fake = FakeContexts(before)
    monkeypatch.setattr(driver, "library", lambda: fake)
    monkeypatch.setattr(driver, "_context", lambda device: ctypes.c_void_p(100 + device))
    with pytest.raises(KeyError) if fails else nullcontext(), driver.in_context(1):
        assert fake.current == 101
        if fails:
            raise KeyError
    assert fake.current == after
