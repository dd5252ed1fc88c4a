"""Which tiles exist when decoding, and how their stages are cut into chunks (Gluon).

There are at most MOST_SLOTS slots, one for each lane of a warp. Padding and slots of other ranks' experts have no
tiles. The others, the local slots, are numbered in order: number i has tiles i * units to (i + 1) * units - 1. The
stages of all tiles form one sequence, which is cut into chunks of equal length. The part of a tile that is in one chunk
is a piece.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lancebill.backends.gpu.kernels import slots
from lancebill.backends.gpu.kernels.limits import MOST_SLOTS

load_experts = gluon.jit(slots.load_experts.fn)
LANES = gl.constexpr(MOST_SLOTS)


@gluon.jit
def count_bits(mask):
    return gl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [mask], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def find_local_slots(ids, top_k, total_slots, WARPS: gl.constexpr):
    """(mask of the local slots; by slot: its number among them, or -1; by slot: itself and its expert in one word)."""
    slot = gl.arange(0, LANES, gl.BlockedLayout([1], [32], [WARPS], [0]))
    token = slot // top_k
    e = load_experts(ids, token, slot - token * top_k, slot < total_slots)
    bit = 1 << slot
    mask = gl.sum(gl.where(e >= 0, bit, 0), 0)
    return mask, gl.where(e >= 0, count_bits(mask & (bit - 1)), -1), slot << 24 | gl.maximum(e, 0)


@gluon.jit
def number_of(mask, slot):
    """The number of a local slot among the local slots."""
    return count_bits(mask & ((1 << slot) - 1))


@gluon.jit
def chunk_length(local_slots, units, blocks, least, shares):
    """The stages of a chunk: `least`, or more if the stages of all tiles would not fit in `shares` chunks."""
    return gl.maximum(least, (local_slots * units * blocks + shares - 1) // shares)


@gluon.jit
def segment_at(local, at, end, units, blocks):
    """The part of a chunk that belongs to one tile: (tile, slot, expert, first stage of the tile, stages).

    `at` and `end` count the stages of all tiles; the segment ends with the tile or at `end`.
    """
    _, numbers, slots_and_experts = local
    tile = at // blocks
    first = at - tile * blocks
    found = gl.max(gl.where(numbers == tile // units, slots_and_experts, 0), 0)
    return tile, found >> 24, found & 0xFFFFFF, first, gl.minimum(blocks - first, end - at)


@gluon.jit
def pieces_of(tile, blocks, each):
    """The number of chunks that a tile's stages belong to."""
    return ((tile + 1) * blocks - 1) // each - tile * blocks // each + 1


@gluon.jit
def pieces_of_token(mask, token, unit, units, blocks, each, SLOTS: gl.constexpr):
    """The number of pieces of one unit over all of a token's local slots."""
    count = 0
    for i in gl.static_range(SLOTS):
        slot = token * SLOTS + i
        count += pieces_of(number_of(mask, slot) * units + unit, blocks, each) * ((mask >> slot) & 1)
    return count
