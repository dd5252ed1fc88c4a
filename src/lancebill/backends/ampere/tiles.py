"""The pipelines of token tiles with mma.sync: stages, blocks per SM and registers, within a card's shared memory.

Cards differ in the shared memory of an SM: 164 KB on sm_80, 100 KB on sm_86, sm_89 and sm_120, 228 KB on Hopper.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from lancebill.backends.gpu.kernels.weight_form import BF16, E2M1_CODE, E8M0_G32, WeightForm
from lancebill.backends.gpu.tiles import Tile

_RESERVED = 1024  # shared memory per block that the driver reserves
_OTHER = 1024  # the next tile's number, and alignment
_MOST_STAGES, _FEWEST_STAGES = 4, 3
_THREADS, _REGISTERS = 128, 65536  # of a block, of an SM
_SM80_SHARED = 164 << 10  # only sm_90 has more, for which the same code needs a few more registers


class _Shape(NamedTuple):
    """What a tile should have if shared memory allows it."""

    slices: int  # per stage of 4-bit weights; half as many of 8-bit weights
    blocks: int  # per SM


_SHAPES = {8: _Shape(4, 3), 16: _Shape(2, 4), 32: _Shape(2, 3), 64: _Shape(2, 2)}  # by tokens
PAIRED_BLOCKS = 3  # per SM
_PAIRED = {16: _Shape(2, PAIRED_BLOCKS), 32: _Shape(1, PAIRED_BLOCKS)}  # two units, which read their tokens once
_DECODE = _Shape(4, 3)
_FEWEST_BLOCKS = 2  # one alone has nothing that hides its waits
SIZES = tuple(_SHAPES)


def stage_bytes(form: WeightForm, tokens: int, slices: int, units: int = 1) -> int:
    """Shared memory of one stage. Rows of tokens are padded to a power of two."""
    rows = 1 << (tokens - 1).bit_length()
    return slices * (rows + units * form.slice_rows) * 128 + 4 * units * form.stage_scale_words(slices)


@cache
def tile(
    form: WeightForm, sizes: tuple[int, ...], gated: bool, slices: int, shared: int, paired: bool = False,
    most_blocks: int = 4,
) -> Tile:  # fmt: skip
    """The pipeline of a launch, for a matrix of so many slices and SMs with `shared` bytes of shared memory.

    `paired` tiles take two units if as many blocks as intended still share an SM. Where an SM gets few tiles, no more
    than `most_blocks` blocks share its memory, so that those have longer stages.
    """
    tokens = max(sizes)
    staging = min(tokens, 32) * (64 if gated else 128) * 2
    simple = form.simple and form.scale_words <= 1 and not form.two_part_scale
    if paired and tokens in _PAIRED and simple:
        found = _Share(form, tokens, 2, shared, staging).fill(sizes, _PAIRED[tokens], slices)
        if found.blocks == PAIRED_BLOCKS:
            return found
    shape = _SHAPES[tokens]
    if tokens == max(SIZES) and not (_needs_few_registers(form) and shared <= _SM80_SHARED):
        shape = shape._replace(blocks=2)
    shape = shape._replace(blocks=min(shape.blocks, max(_FEWEST_BLOCKS, most_blocks)))
    return _Share(form, tokens, 1, shared, staging).fill(sizes, shape, slices)


def _needs_few_registers(form: WeightForm) -> bool:
    """Whether three blocks with the largest tile have enough registers to unpack the form: MXFP4, bytes per channel."""
    mxfp4 = form.code == E2M1_CODE and form.scale == E8M0_G32 and form.activations == BF16
    return mxfp4 or (form.bits == 8 and not form.scale_words and not form.byte_inputs)


@cache
def decode_tile(form: WeightForm, slices: int, shared: int) -> Tile:
    """The pipeline when decoding: long stages keep many bytes in flight."""
    return _Share(form, 1, 1, shared, 0).fill((8,), _DECODE, slices)


@dataclass(frozen=True)
class _Share:
    """What a block does with its share of an SM's shared memory."""

    form: WeightForm
    tokens: int
    units: int
    shared: int  # of the SM
    staging: int  # of a block, for the epilogue

    def stages(self, slices: int, blocks: int) -> int:
        """Stages of so many slices that fit if `blocks` blocks share an SM."""
        room = self.shared // blocks - _RESERVED - _OTHER - self.staging
        return room // stage_bytes(self.form, self.tokens, slices, self.units)

    def fill(self, sizes: tuple[int, ...], wanted: _Shape, slices: int) -> Tile:
        """As many stages as fit. If those are too few, stages get shorter first, then fewer blocks share the SM.

        Two blocks with two short stages each are better than one block alone, whose waits nothing hides.
        """
        longest = max(1, wanted.slices * 4 // self.form.space)
        lengths = [longest >> i for i in range(longest.bit_length())]
        choices = [(blocks, length) for blocks in range(wanted.blocks, 1, -1) for length in lengths]
        last = (2, 1) if self.stages(1, 2) >= 2 else (1, 1)
        blocks, length = next(
            ((blocks, length) for blocks, length in choices if self.stages(length, blocks) >= _FEWEST_STAGES), last
        )
        # Copies run at most one tile ahead.
        stages = min(self.stages(length, blocks), _MOST_STAGES, 1 + -(-slices // length))
        registers = min(255, _REGISTERS // (_THREADS * blocks) // 8 * 8)
        return Tile(sizes, stages, length, blocks, registers, self.units)
