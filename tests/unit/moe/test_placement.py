"""Which rank holds which shard: worked examples, and invariants for any sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lancebill.errors import ShardError
from lancebill.moe.placement import LINEAR, ROUND_ROBIN, Placement


def _experts(total: int, ep: int, strategy: str = LINEAR, redundant: int = 0) -> list[tuple[int, ...]]:
    return [
        Placement(ep_rank=rank, ep_size=ep, strategy=strategy, redundant=redundant).experts(total) for rank in range(ep)
    ]


def test_ten_experts_over_four_ranks() -> None:
    assert _experts(10, 4) == [(0, 1, 2), (3, 4, 5), (6, 7), (8, 9)]
    assert _experts(10, 4, ROUND_ROBIN) == [(0, 4, 8), (1, 5, 9), (2, 6), (3, 7)]
    assert Placement(ep_rank=2, ep_size=4).expert_map(10) == (-1,) * 6 + (0, 1, -1, -1)


def test_redundant_experts_repeat_the_first_ones() -> None:
    assert Placement(redundant=2).physical(6) == (0, 1, 2, 3, 4, 5, 0, 1)
    assert _experts(6, 4, redundant=2) == [(0, 1), (2, 3), (4, 5), (0, 1)]
    with pytest.raises(ShardError, match="multiple of 4"):
        _experts(6, 4, redundant=1)


@given(st.integers(1, 70), st.integers(1, 9), st.sampled_from([LINEAR, ROUND_ROBIN]))
def test_every_expert_is_on_exactly_one_rank(experts: int, ep: int, strategy: str) -> None:
    if ep > experts:
        with pytest.raises(ShardError):
            _experts(experts, ep, strategy)
        return
    shares = _experts(experts, ep, strategy)
    assert sorted(e for share in shares for e in share) == list(range(experts))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize(
    ("tp", "sizes"),
    [(1, [2880]), (2, [1440, 1440]), (4, [736, 736, 736, 672]), (8, [384] * 7 + [192])],
)
def test_gpt_oss_cuts_keep_blocks_whole(tp: int, sizes: list[int]) -> None:
    cuts = [Placement(tp_rank=r, tp_size=tp).cut(2880, block=32, uneven=True) for r in range(tp)]
    assert [c.stop - c.start for c in cuts] == sizes
    assert len({c.size for c in cuts}) == 1, "buffers have the same size on all ranks"
    assert cuts[0].start == 0 and cuts[-1].stop == 2880


def test_blocks_are_split_if_there_are_fewer_blocks_than_ranks() -> None:
    cut = Placement(tp_rank=3, tp_size=4).cut(256, block=128, uneven=True)
    assert (cut.start, cut.stop, cut.size, cut.granule) == (192, 256, 64, 64)


def test_padding_and_its_granule() -> None:
    cut = Placement(tp_rank=1, tp_size=2, pad_to=4).cut(6)
    assert (cut.start, cut.stop, cut.size, cut.granule) == (3, 6, 4, 3)
    assert Placement().cut(6).granule == 0


def test_impossible_cuts_name_the_legal_sizes() -> None:
    with pytest.raises(ShardError, match="1, 2, 3, 6"):
        Placement(tp_size=4).cut(6)
    with pytest.raises(ShardError, match="size of 1, 2, 3, 4, 6, 8"):
        Placement(tp_size=5).cut(96, block=32, uneven=True)
    for wrong in ({"tp_rank": 2, "tp_size": 2}, {"ep_rank": -1}, {"strategy": "random"}, {"redundant": -1}):
        with pytest.raises(ShardError):
            Placement(**wrong)  # type: ignore[arg-type]
