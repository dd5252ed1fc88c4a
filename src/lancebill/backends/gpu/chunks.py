"""How the work of few tokens is cut, so that all SMs read weights at the same time. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass

_UNLIMITED = 1 << 30
_LEAST_STAGES = 4  # of a chunk
_MOST_PIECES = 8
_UNEVEN = 1.12  # how much longer than equal chunks whole tiles may be


@dataclass(frozen=True)
class Chunks:
    """How the stages of all tiles are cut, when decoding."""

    stages: int  # of a chunk
    shares: int  # chunks are made longer if there would be more than this
    pieces: int  # the most chunks that share a tile


def cut(tiles: int, blocks: int, resident: int, *, known: bool = True) -> Chunks:
    """Whole tiles if they keep all `resident` thread blocks about equally busy, else equal chunks.

    A tile has `blocks` stages. `known`: there are not more tiles. Otherwise the kernel makes chunks longer where it
    finds more.
    """
    whole = blocks * -(-tiles // resident)
    even = max(_LEAST_STAGES, -(-tiles * blocks // resident), -(-(blocks - 1) // (_MOST_PIECES - 1)))
    if not known:
        return Chunks(even, resident, -(-(blocks - 1) // even) + 1)
    each = whole if whole <= _UNEVEN * even else even
    if each % blocks == 0:
        return Chunks(each, _UNLIMITED, 1)
    return Chunks(each, _UNLIMITED, blocks // each if blocks % each == 0 else -(-(blocks - 1) // each) + 1)
