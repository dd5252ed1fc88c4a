"""Pieces of memory that the driver copies together, with a fake driver that moves bytes in host memory."""

from __future__ import annotations

import ctypes

import pytest
import torch

from lancebill.errors import DriverError
from lancebill.jit import driver

STREAM = 1 << 33
_ADDRESS, _SIZE = ctypes.c_void_p, ctypes.c_size_t


class OldDriver:
    """Has no copies of many pieces."""

    def __init__(self, refuses: int = 0) -> None:
        self.calls, self.refuses = 0, refuses
        self.cuMemcpyAsync = ctypes.CFUNCTYPE(ctypes.c_int, _ADDRESS, _ADDRESS, _SIZE, _ADDRESS)(self._copy)

    def _copy(self, target: int, source: int, size: int, stream: int) -> int:
        self.calls += 1
        ctypes.memmove(target, source, size)
        return self.refuses or int(stream != STREAM)

    def cuGetErrorString(self, code: int, text: object) -> int:
        return 0


class NewDriver(OldDriver):
    def __init__(self, refuses: int = 0) -> None:
        super().__init__()
        arguments = *[_ADDRESS] * 3, _SIZE, *[_ADDRESS] * 2, _SIZE, *[_ADDRESS] * 2
        self.refused, self.asked = refuses, 0
        self.cuMemcpyBatchAsync = ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(self._batch)

    def _batch(self, *given: int) -> int:
        self.asked += 1
        targets, sources, sizes, count, attributes, first, kinds, _, stream = given
        assert kinds == 1 and ctypes.c_size_t.from_address(first).value == 0, "all pieces have the same attributes"
        assert list((ctypes.c_int * 6).from_address(attributes)) == [1, 0, 0, 0, 0, 1]
        pieces = ((ctypes.c_uint64 * count).from_address(each) for each in (targets, sources, sizes))
        for target, source, size in zip(*pieces) if not self.refused else ():
            ctypes.memmove(target, source, size)
        return self.refused or int(stream != STREAM)


@pytest.mark.parametrize(
    ("fake", "calls"), [(OldDriver(), 3), (NewDriver(), 0), (NewDriver(refuses=1), 3)], ids=["old", "new", "refused"]
)
def test_pieces_are_copied_together_where_the_driver_can(
    fake: OldDriver, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "library", lambda: fake)
    source, target = torch.arange(100, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
    places = [(5, 50, 10), (70, 0, 20), (95, 99, 1)]
    driver.copy_together([(target.data_ptr() + to, source.data_ptr() + at, size) for to, at, size in places], STREAM)
    want = torch.zeros_like(target)
    for to, at, size in places:
        want[to : to + size] = source[at : at + size]
    assert torch.equal(target, want) and fake.calls == calls
    driver.copy_together([], STREAM)
    assert fake.calls == calls and getattr(fake, "asked", 1) == 1, "nothing is no call"


def test_one_call_does_not_copy_any_number_of_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = NewDriver()
    monkeypatch.setattr(driver, "library", lambda: fake)
    monkeypatch.setattr(driver, "_MOST_PIECES", 4)
    source, target = torch.arange(10, dtype=torch.uint8), torch.zeros(10, dtype=torch.uint8)
    driver.copy_together([(target.data_ptr() + i, source.data_ptr() + i, 1) for i in range(10)], STREAM)
    assert torch.equal(target, source) and fake.asked == 3 and fake.calls == 0


def test_a_copy_that_fails_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "library", lambda: OldDriver(refuses=700))
    memory = torch.zeros(2, dtype=torch.uint8)
    with pytest.raises(DriverError, match="copying"):
        driver.copy_together([(memory.data_ptr(), memory.data_ptr() + 1, 1)], STREAM)
