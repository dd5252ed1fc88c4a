"""The sizes of the waves in which experts are copied."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from lancebill.split.waves import WaveCosts, last_waves, shortest_wave, wave_sizes, waves_of

# Two layers of 96 MiB waves on an H200, and a GPU that takes longer for a wave than its copy.
WIDE, NARROW, SLOW = WaveCosts(246, 30, 175), WaveCosts(187, 22, 214), WaveCosts(10, 1, 500)


def tail_us(sizes: Sequence[int], costs: WaveCosts) -> float:
    """From the end of the last copy until the GPU has computed the last wave, copied and computed one by one."""
    copied = computed = 0.0
    for size in sizes:
        copied += size * costs.copy
        computed = max(computed, copied) + costs.fixed + size * costs.pack
    return computed - copied


def test_sizes_are_halves_of_what_fits() -> None:
    assert wave_sizes(10) == (10, 5, 3, 2, 1) and wave_sizes(7) == (7, 4, 2, 1) and wave_sizes(1) == (1,)
    assert [shortest_wave(10, NARROW, us) for us in (0, 187, 188, 1000, 1e6)] == [1, 1, 2, 10, 10]


def test_the_last_waves_are_what_the_gpu_manages_while_the_next_one_is_copied() -> None:
    assert last_waves(7, WIDE) == (2, 1) and last_waves(10, NARROW) == (5, 2)
    assert last_waves(10, SLOW) == () and last_waves(1, WIDE) == ()


@pytest.mark.parametrize("count", [1, 3, 9, 39, 64, 85, 128])
@pytest.mark.parametrize(("most", "costs"), [(7, WIDE), (10, NARROW), (10, SLOW)])
def test_every_expert_is_in_one_wave_and_little_is_left_after_the_last_copy(
    count: int, most: int, costs: WaveCosts
) -> None:
    slots = range(100, 100 + count)
    first = list(slots)[::2][:2]
    for waves in (waves_of(slots, most, costs), waves_of(slots, most, costs, first)):
        assert sorted(slot for wave in waves for slot in wave) == list(slots)
        assert all(0 < len(wave) <= most for wave in waves)
    assert waves[0] == first
    sizes = [len(wave) for wave in waves]
    whole = [len(first), *[most] * ((count - len(first)) // most), (count - len(first)) % most]
    assert tail_us(sizes, costs) <= tail_us([size for size in whole if size], costs)
    if count > 2 * most and costs is not SLOW:
        assert tail_us(sizes, costs) <= costs.fixed + 2 * costs.pack
