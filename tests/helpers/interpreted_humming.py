"""Humming's slot grouping and row sums, and the bandwidth kernel of the benchmarks, in Triton's interpreter.

Not collected by pytest: `test_hopper_dispatch.py` runs it in a separate process, where TRITON_INTERPRET is set before
Triton is imported.
"""

from __future__ import annotations

from functools import reduce
from operator import xor

import pytest
import torch
from interpreted import scalars

from lancebill.backends.humming import rows
from lancebill.bench import read_kernel as reading


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convert loop bounds for newer numpy."""
    for module in (rows, reading):
        monkeypatch.setattr(module, "range", scalars, raising=False)


CASES = [(1, 6, 256, 16), (5, 2, 8, 1), (100, 8, 32, 64), (130, 6, 20, 48), (7, 3, 5, 8)]


def routing(tokens: int, top_k: int, experts: int) -> torch.Tensor:
    """Random ids; a fifth of the slots have no expert."""
    ids = torch.rand(tokens, experts).topk(top_k, 1).indices.to(torch.int32)
    return torch.where(torch.rand(ids.shape) < 0.2, -1, ids)


@pytest.mark.parametrize(("tokens", "top_k", "experts", "align"), CASES)
def test_slots_of_an_expert_are_contiguous(tokens: int, top_k: int, experts: int, align: int) -> None:
    ids = routing(tokens, top_k, experts)
    groups, flat, start = rows.group_slots(ids, experts, align), ids.flatten(), 0
    for expert in range(experts):
        mine = (flat == expert).nonzero().flatten()
        blocks = -(-len(mine) // align)
        end = start + blocks * align
        assert int(groups.edges[expert]) == start
        assert torch.equal(groups.slots[start : start + len(mine)].long(), mine)
        assert bool((groups.slots[start + len(mine) : end] == flat.numel()).all())
        assert bool((groups.owners[start // align : end // align] == expert).all())
        start = end
    assert int(groups.edges[-1]) == start
    places = groups.places.flatten()
    assert bool(((places >= 0) == (flat >= 0)).all())
    kept = (flat >= 0).nonzero().flatten()
    assert torch.equal(groups.slots[places[kept].long()].long(), kept)


@pytest.mark.parametrize("in_order", [True, False])
def test_rows_are_weighted_and_summed(in_order: bool) -> None:
    ids = routing(9, 3, 8)
    places = ids if in_order else rows.group_slots(ids, 8, 4).places
    y, weights = torch.randn(64, 40), torch.rand(9, 3)
    y[27:] = y[27:] if not in_order else torch.nan
    where = torch.arange(27).view(9, 3) if in_order else places.long()
    expected = torch.where((ids >= 0)[..., None], y[where.clamp(min=0)] * weights[..., None], 0).sum(1)
    got = rows.weighted_sum(y, places, weights, torch.full((9, 40), torch.nan), in_order=in_order)
    assert torch.allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize("count", [5, 4096, 3 * 4096 + 7])
def test_the_bandwidth_kernel_reads_every_word(count: int) -> None:
    words = torch.randint(-(2**31), 2**31 - 1, (count,), dtype=torch.int32)
    sink = reading.read_words(words, torch.zeros(2, dtype=torch.int32))
    assert int(sink[0] ^ sink[1]) == reduce(xor, words.tolist())


@pytest.mark.parametrize("length", [5, 3000])
def test_the_bandwidth_kernel_reads_every_word_of_some_rows(length: int) -> None:
    words = torch.randint(-(2**31), 2**31 - 1, (6, length), dtype=torch.int32)
    rows_read = torch.tensor([4, 1, 5], dtype=torch.int32)
    sink = reading.read_rows(words, rows_read, torch.zeros(5, dtype=torch.int32), reading.Reader(block=1024))
    assert reduce(xor, sink.tolist()) == reduce(xor, words[[4, 1, 5]].flatten().tolist())
