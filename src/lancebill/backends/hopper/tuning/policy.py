"""The policy of the Hopper backend: from sizes to tiles. Pure; numbers that were measured are data.

A rule of the data says, up to how many rows an expert gets on average, which token tiles are used: full
tiles of the first size, and for what remains of an expert the smallest that holds it. A last size above
the first takes a full tile and a small remainder together.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lancebill.backends.hopper.kernels.weight_form import E4M3, WeightForm

SHARED_PER_SM = 228 * 1024
RESERVED = 1024  # the driver's share of each block's shared memory
_BARRIERS = 512  # barriers and alignment
_MOST_STAGES = 8
_DECODE_BLOCKS = 3  # on an SM, with few tokens
_RESIDENT = _DECODE_BLOCKS * 132
_MOST_HELD = 128  # slices of an fp8 row that a block of few tokens keeps: fit even with the room of eight for each
MOST_PROMOTED = 96
# Token tile: (slices in a stage for 16-bit and for fp8 activations, blocks on an SM).
_SHAPES = {
    8: ((4, 2), 4),
    16: ((4, 1), 4),
    24: ((4, 1), 3),
    32: ((4, 2), 2),
    40: ((2, 1), 2),
    48: ((2, 1), 2),
    64: ((2, 1), 2),
    80: ((2, 1), 2),
    96: ((2, 1), 2),
    112: ((2, 1), 2),
    128: ((2, 2), 2),
    144: ((1, 1), 2),
    160: ((1, 1), 2),
}
# Tiles that may take two units: (slices in a stage as above, blocks on an SM).
_PAIRED = {8: ((2, 1), 3), 16: ((2, 1), 3), 24: ((2, 1), 2), 32: ((2, 1), 2)}
_REGISTERS = {4: 64, 3: 80, 2: 128}  # a thread's share of 65536 with blocks of 256 threads


@dataclass(frozen=True)
class Tile:
    """One class of token tiles, and the pipeline that suits it."""

    tokens: int
    stages: int
    slices: int
    blocks: int  # resident on an SM
    registers: int
    units: int = 1
    held: int = 0  # slices of a row that stay, when decoding

    @property
    def box(self) -> int:
        """Tokens one copy brings: the most that all copies of a tile can have."""
        return self.tokens & -self.tokens


@dataclass(frozen=True)
class Rule:
    """What the data say for a number of rows per expert."""

    sizes: tuple[int, ...]
    overlap: bool  # programmatic dependent launch
    paired: bool = False  # small tiles take two units where the matrix has an even number of them


@cache
def data() -> dict[str, Any]:
    text = (Path(__file__).parent / "hopper.json").read_text()
    return dict(json.loads(text))


def rule(activations: str, slots: int, experts: int, units: int) -> Rule:
    """The rule for `slots` rows spread over `experts`, which have `units` units between them: with few, large tiles
    leave SMs without work at the end."""
    rows = slots / experts
    for entry in data()["8-bit" if activations == E4M3 else "16-bit"]:
        fits = entry["rows_up_to"] is None or rows <= entry["rows_up_to"]
        if fits and units >= entry.get("units_from", 0):
            paired = bool(entry.get("paired", False))
            return Rule(tuple(entry["tiles"]), entry["overlap"], paired)
    raise AssertionError("the last rule has no limit")


def decodes(activations: str, slots: int) -> bool:
    """Whether there are so few slots that each is a tile."""
    return slots <= int(data()["decode_slots"]["8-bit" if activations == E4M3 else "16-bit"])


def graphed(tokens: int) -> bool:
    """Whether a call's launches are handed over as one: with so few tokens it may be the host that is waited for."""
    return tokens <= int(data()["graph_tokens"])


def promotes(form: WeightForm) -> bool:
    """Whether sums are carried to fp32 after every slice: what groups need, and fp8 where the data ask for it."""
    return form.promoted or (form.activations == E4M3 and bool(data()["promote"]))


def fitting(sizes: tuple[int, ...], forms: Iterable[WeightForm]) -> tuple[int, ...]:
    """Tile sizes that every form has registers for: carrying sums takes a further set of accumulators."""
    if not any(promotes(form) for form in forms):
        return sizes
    return tuple(size for size in sizes if size <= MOST_PROMOTED) or (MOST_PROMOTED,)


def stage_bytes(form: WeightForm, tokens: int, slices: int, units: int = 1) -> int:
    """Shared memory of one pipeline stage."""
    return slices * (tokens + units * form.slice_rows) * 128 + units * 4 * form.stage_scale_words(slices)


@cache
def tile(form: WeightForm, tokens: int, gated: bool, paired: bool = False) -> Tile:
    """The pipeline of a tile size: as many stages as fit beside the other blocks of the SM."""
    (wide, narrow), blocks = _SHAPES[tokens]
    together = 2 if paired and tokens in _PAIRED and form.bits == 4 and not promotes(form) else 1
    if together == 2:
        (wide, narrow), blocks = _PAIRED[tokens]
    elif form.bits == 8 or form.activations == E4M3 or (form.scale_words > 1 and tokens > 8):
        # More words in flight: more registers a thread.
        blocks = min(blocks, 3)
    slices = narrow if form.activations == E4M3 else wide
    if tokens == 24 and together == 1 and form.scale_words > 1:
        slices = min(slices, 2)  # with four it spills
    room = SHARED_PER_SM // blocks - RESERVED - _BARRIERS - min(tokens, 32) * (64 if gated else 128) * 2
    while slices > 1 and room // stage_bytes(form, tokens, slices, together) < 2:
        slices //= 2
    stages = min(_MOST_STAGES, room // stage_bytes(form, tokens, slices, together))
    assert stages >= 2, (form, tokens)
    return Tile(tokens, stages, slices, blocks, _REGISTERS[blocks], together)


@cache
def decode_tile(form: WeightForm, slices: int, split: int) -> Tile:
    """The pipeline of a slot: long stages, three blocks on an SM; beside it a block's part of an fp8 row."""
    narrow = form.activations == E4M3
    together = (2 if narrow else 4) * 4 // form.bits
    held = max(8, power_of_two(-(-slices // (split * together)) * together)) if narrow else 0
    room = SHARED_PER_SM // _DECODE_BLOCKS - RESERVED - _BARRIERS - (held + 8) * 128 * narrow
    stages = min(_MOST_STAGES, room // stage_bytes(form, 0 if narrow else 8, together))
    return Tile(8, stages, together, _DECODE_BLOCKS, _REGISTERS[_DECODE_BLOCKS], held=held)


def split(form: WeightForm, tiles: int, slices: int) -> int:
    """Parts of K for so many tiles: two where one would leave many blocks without work in their last turn, and as many
    as make a block's part of an fp8 row fit."""
    least = -(-slices // _MOST_HELD) if form.activations == E4M3 else 1
    return max(least, 2 if _busy(2 * tiles) > 1.25 * _busy(tiles) else 1)


def _busy(pieces: int) -> float:
    """The share of blocks that have work, on average over their turns."""
    return pieces / (-(-pieces // _RESIDENT) * _RESIDENT)


def power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def bucket(tokens: int) -> int:
    """Token counts share a plan: four to an octave, rounded up."""
    step = max(1, 1 << max(0, (tokens - 1).bit_length() - 3))
    return -(-tokens // step) * step


def buckets(most: int) -> tuple[int, ...]:
    """All of them up to `most` tokens."""
    found = [1]
    while found[-1] < most:
        found.append(bucket(found[-1] + 1))
    return tuple(found)
