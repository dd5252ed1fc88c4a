"""The pipelines of token tiles with mma.sync: stages, blocks per SM and registers, within a card's shared memory.

Cards differ in the shared memory of an SM: 164 KB on sm_80, 100 KB on sm_86, sm_89 and sm_120, 228 KB on Hopper.
"""

from __future__ import annotations

from functools import cache

from lancebill.backends.gpu.kernels.weight_form import WeightForm
from lancebill.backends.gpu.tiles import Tile

_RESERVED = 1024  # shared memory per block that the driver reserves
_OTHER = 1024  # the next tile's number, and alignment
_MOST_STAGES, _FEWEST_STAGES = 6, 3
_THREADS, _REGISTERS = 128, 65536  # of a block, of an SM
# Token tile: slices per stage of 4-bit weights, blocks per SM, registers per thread if fewer than there are. Large
# tiles keep their accumulators in registers; with a higher limit the assembler moves so many loads ahead that it
# spills.
_SHAPES = {
    8: (4, 3, 168),
    16: (4, 3, 168),
    24: (2, 3, 168),
    32: (2, 3, 168),
    48: (2, 2, 255),
    64: (2, 2, 255),
    96: (1, 2, 224),
    112: (1, 2, 240),
}
LARGEST = max(_SHAPES)
_DECODE_SLICES, _DECODE_BLOCKS = 4, 3


def stage_bytes(form: WeightForm, tokens: int, slices: int) -> int:
    """Shared memory of one stage. Rows of tokens are padded to a power of two."""
    rows = 1 << (tokens - 1).bit_length()
    return slices * (rows + form.slice_rows) * 128 + 4 * form.stage_scale_words(slices)


@cache
def tile(form: WeightForm, sizes: tuple[int, ...], gated: bool, slices: int, shared: int) -> Tile:
    """The pipeline of a launch, for a matrix of so many slices and SMs with `shared` bytes of shared memory."""
    tokens = max(sizes)
    staging = min(tokens, 32) * (64 if gated else 128) * 2
    wanted, blocks, registers = _SHAPES[tokens]
    return _fitting(form, sizes, tokens, wanted * 4 // form.bits, blocks, registers, slices, shared, staging)


@cache
def decode_tile(form: WeightForm, slices: int, shared: int) -> Tile:
    """The pipeline when decoding: long stages keep many bytes in flight."""
    wanted = _DECODE_SLICES * 4 // form.bits
    return _fitting(form, (8,), 1, wanted, _DECODE_BLOCKS, 168, slices, shared, 0)


def _fitting(
    form: WeightForm, sizes: tuple[int, ...], tokens: int, wanted: int, blocks: int, registers: int, slices: int,
    shared: int, staging: int,
) -> Tile:  # fmt: skip
    """As many stages as fit. With too few of them, stages get shorter first, then fewer blocks share an SM."""
    for each in range(blocks, 0, -1):
        room = shared // each - _RESERVED - _OTHER - staging
        stage_slices = max(1, wanted)
        while True:
            stages = room // stage_bytes(form, tokens, stage_slices)
            if stages >= _FEWEST_STAGES or stage_slices == 1:
                break
            stage_slices //= 2
        if stages >= _FEWEST_STAGES or each == 1:
            break
    # The copies run at most one tile ahead.
    stages = min(stages, _MOST_STAGES, 1 + -(-slices // stage_slices))
    most = min(255, _REGISTERS // (_THREADS * each) // 8 * 8)
    return Tile(sizes, stages, stage_slices, each, min(registers, most))
