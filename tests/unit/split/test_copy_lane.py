"""Copies of experts on a GPU: which memory is locked, and until when. Without a GPU: stand-ins take note."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_gpus import on_gpu

from lancebill.errors import LaunchError
from lancebill.jit import driver
from lancebill.split import copy_lane
from lancebill.split.copy_lane import CudaLane, pin_in_place

SIZE = 1 << 16


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the driver was told."""
    said = list[Any]()

    def pin(address: int, size: int) -> bool:
        said.append(("pin", address, size))
        return size <= SIZE

    stream = SimpleNamespace(cuda_stream=7, synchronize=lambda: said.append("wait"), wait_event=lambda event: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda stream: None))
    for name, value in {
        "pin": pin, "unpin": lambda address: said.append(("unpin", address)), "uncaptured": nullcontext,
        "copy_together": lambda pieces, stream: said.append(("together", [*pieces])),
        "copy_each": lambda pieces, stream: said.append(("each", [*pieces])),
    }.items():  # fmt: skip
        monkeypatch.setattr(driver, name, value)
    monkeypatch.setattr(copy_lane, "_pinned", {})
    monkeypatch.setattr(copy_lane, "_LANES", [])
    return said


@pytest.mark.parametrize("same", [True, False])
def test_only_pieces_of_locked_memory_are_copied_together(
    same: bool, said: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And only by a GPU that reads locked pages under the host's addresses."""
    monkeypatch.setattr(driver, "reads_locked_pages", lambda device: same)
    lane, room = CudaLane(torch.device("cuda", 0)), on_gpu(torch.empty(3, 4, dtype=torch.uint8))
    locked, refused = torch.zeros(8, 4, dtype=torch.uint8), torch.zeros(SIZE, 4, dtype=torch.uint8)
    assert pin_in_place(locked) and not pin_in_place(refused)
    for _ in range(2):
        said.clear()
        lane.begin(0)
        lane.copy(room, 0, locked, 2, 2)
        lane.copy(room, 2, refused, 5, 1)
        lane.filled(0)
        pieces = [
            (room.data_ptr(), locked.data_ptr() + 8, 8),
            (room.data_ptr() + 8, refused.data_ptr() + 20, 4),
        ]
        together = int(same)
        assert said == [("together", pieces[:together]), ("each", pieces[together:])]


def test_copies_go_from_the_host_to_the_lanes_own_gpu(said: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "reads_locked_pages", lambda device: True)
    lane, memory = CudaLane(torch.device("cuda", 0)), torch.zeros(3, 4, dtype=torch.uint8)
    for target, source in ((memory, memory), (on_gpu(memory, 1), memory), (on_gpu(memory), on_gpu(memory))):
        with pytest.raises(LaunchError, match="is not where"):
            lane.copy(target, 0, source, 0, 1)
    with pytest.raises(LaunchError, match="not where the CPU reads"):
        pin_in_place(on_gpu(memory))


def test_memory_is_locked_until_it_is_freed(said: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter outlives its memory. Copies that are pending are waited for first."""
    monkeypatch.setattr(driver, "reads_locked_pages", lambda device: True)
    lane = CudaLane(torch.device("cuda", 0))
    held = torch.nn.Parameter(torch.zeros(SIZE, dtype=torch.uint8), requires_grad=False)
    address, alias = held.data_ptr(), held.detach()
    assert pin_in_place(held) and pin_in_place(alias) and lane
    held.data = torch.zeros(SIZE, dtype=torch.uint8)
    assert pin_in_place(held)
    assert said == [("pin", address, SIZE), ("pin", held.data_ptr(), SIZE)], "each once, and nothing is freed"
    del alias
    assert said[2:] == ["wait", ("unpin", address)] and address not in copy_lane._pinned
    held.data = torch.zeros(2 * SIZE, dtype=torch.uint8)
    said.clear()
    assert not pin_in_place(held)
    del held
    assert said[1:] == ["wait"], "what was not locked is copied, too"
