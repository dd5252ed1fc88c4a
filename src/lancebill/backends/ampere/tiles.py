"""The pipeline of a token tile: stages, blocks per SM and registers, within a card's shared memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """The token tiles of one launch and their pipeline."""

    sizes: tuple[int, ...]
    stages: int
    slices: int  # of K, per stage
    blocks: int  # resident per SM
    registers: int  # per thread
