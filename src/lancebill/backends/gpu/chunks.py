"""How the work of few tokens is cut, so that all SMs read weights at the same time. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass

from lancebill.backends.gpu.tiles import power_of_two

_UNLIMITED = 1 << 30
_LEAST_STAGES = 4  # of a chunk
_LEAST_PART = 3  # of a chunk that is an equal part of a tile
_MOST_PIECES = 8
_UNEVEN = 1.12  # how much longer than equal chunks whole tiles, or equal parts of them, may be
_LONGER = 1.05  # how much more an SM may have to do than with fewer blocks
_SPARE = 1.2  # how many SMs there may be for each that always has work, where blocks have whole tiles


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
    return Chunks(each, _UNLIMITED, _most_pieces(blocks, each))


def equal_parts(tiles: int, stages: int, resident: int) -> Chunks | None:
    """Equal parts of tiles that keep all `resident` thread blocks about equally busy; None if there are none.

    They may be shorter than other chunks: a chunk that ends inside the next tile has one more partial sum to store and
    to count.
    """
    least = max(_LEAST_PART, -(-tiles * stages // resident))
    lengths = [stages // parts for parts in range(_MOST_PIECES, 0, -1) if stages % parts == 0]
    each = next((each for each in lengths if least <= each <= _UNEVEN * least), None)
    return None if each is None else Chunks(each, _UNLIMITED, stages // each)


def one_tile_each(tiles: int, processors: int, blocks: int) -> bool:
    """Whether each block computes one whole tile, of one matrix; up to `blocks` share an SM.

    Pieces of tiles are stored and added, which costs more than a few SMs that have nothing to do: the others read
    about as fast as all.
    """
    busiest = -(-tiles // processors)
    return busiest <= blocks and busiest * processors <= _SPARE * tiles


def whole_tiles(stages: int) -> Chunks:
    """Chunks that are tiles of so many stages."""
    return Chunks(stages, _UNLIMITED, 1)


def even_chunks(tiles: int, stages: int, processors: int, blocks: int) -> Chunks:
    """Chunks of `tiles` tiles with which no SM has many more stages than the others; up to `blocks` share an SM.

    All blocks run at once, and the SM with the most stages ends last. More blocks keep more bytes in flight.
    """
    total = tiles * stages
    least = -(-(stages - 1) // (_MOST_PIECES - 1))
    lengths = [-(-total // (processors * share)) for share in range(blocks, 0, -1)]
    lengths = [each if _most_pieces(stages, each) <= _MOST_PIECES else max(each, least) for each in lengths]
    busiest = [each * -(-total // (each * processors)) for each in lengths]
    each = next(each for each, most in zip(lengths, busiest) if most <= _LONGER * min(busiest))
    return Chunks(each, _UNLIMITED, power_of_two(_most_pieces(stages, each)))


def _most_pieces(stages: int, each: int) -> int:
    """The most chunks of `each` stages that a tile of `stages` is part of."""
    if each % stages == 0:
        return 1
    return stages // each if stages % each == 0 else -(-(stages - 1) // each) + 1
