"""A split as a value: by number, by bytes, over layers, and the maps of its parts."""

from __future__ import annotations

import pytest
import torch

from lancebill.errors import NotEnoughMemory, SpecError
from lancebill.layer.check_split import check_split
from lancebill.split import host_threads
from lancebill.split.gpu_queues import pinned
from lancebill.split.host_threads import HostThreads
from lancebill.split.split import Split, parse_bytes, part_map, share_budget


def test_splits_cover_every_slot_once() -> None:
    for count in range(7):
        split = Split.by_number(5, count)
        assert split.device + split.host == tuple(range(5)) and len(split.device) == min(5, count)
    assert Split.by_bytes(5, 100, 299) == Split.by_number(5, 2)
    for device, host in (((0, 1), (1, 2)), ((0,), (2,)), ((-1,), (0,))):
        with pytest.raises(SpecError, match="exactly one part"):
            Split(device, host)
    with pytest.raises(SpecError, match="not a number of experts"):
        Split.by_number(5, -1)


def test_an_expert_of_the_other_part_is_like_one_of_another_rank() -> None:
    rank = (2, -1, 0, 1, -1, 3)  # the slot of every physical id on this rank
    split = Split((3, 0), (1, 2))
    device, host = part_map(rank, split.device), part_map(rank, split.host)
    assert device == (-1, -1, 1, -1, -1, 0) and host == (1, -1, -1, 0, -1, -1)
    assert all((d >= 0) + (h >= 0) == (slot >= 0) for d, h, slot in zip(device, host, rank))


def test_a_budget_is_spent_evenly_and_never_exceeded() -> None:
    assert share_budget(50, [(8, 10), (8, 10)]) == (3, 2)
    assert share_budget(10_000, [(8, 10), (4, 10)]) == (8, 4)
    assert share_budget(65, [(8, 10), (2, 25)]) == (4, 1)
    assert share_budget(9, [(8, 10)]) == (0,)
    assert share_budget(5, []) == ()


def test_amounts_of_memory() -> None:
    assert [parse_bytes(given) for given in (7, "7B", "2 KB", "2kB", "1.5GiB", "1gib", "3 B")] == [
        7, 7, 2000, 2000, 3 << 29, 1 << 30, 3,
    ]  # fmt: skip
    for wrong in ("", "GiB", "-1GiB", "1e9", "1 XB", -5, 2.5, True):
        with pytest.raises(SpecError, match="amount of memory"):
            parse_bytes(wrong)  # type: ignore[arg-type]
    assert parse_bytes("0") == 0 and parse_bytes("4000000") == 4000000
    with pytest.raises(SpecError, match=r"--gpu: .*needs a unit.*24GiB"):
        parse_bytes("24", "--gpu")
    for experts in (True, 2.5, "4", -1):
        with pytest.raises(SpecError, match=f"gpu_experts: .*got {experts!r}"):
            Split.by_number(8, experts)  # type: ignore[arg-type]


def test_the_hosts_part_needs_a_thread_and_memory_that_a_gpu_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpecError, match="needs a thread"):
        HostThreads.choose(0)
    monkeypatch.setattr(host_threads, "_allowed", lambda: range(8))
    monkeypatch.setattr(host_threads, "physical_cores", lambda topology, allowed: (0, 2, 4, 6))
    with pytest.raises(SpecError, match=r"cpu_threads: .*expected 1 to 8; got 9"):
        HostThreads.choose(9)
    assert str(HostThreads.choose(4)) == "4 threads on the cores of one socket"
    assert str(HostThreads.choose(5)) == "5 threads on all CPUs"
    monkeypatch.setattr(host_threads, "physical_cores", lambda topology, allowed: pytest.fail("reads the topology"))
    check_split(None, 1, "off", 8)
    if not torch.cuda.is_available():
        with pytest.raises(NotEnoughMemory, match="no pinned host memory"):
            pinned(64, torch.device("cuda", 0), capturing=False)
