"""The forms in which the Hopper kernels take weights: a row of a table each, plain values.

The matrix product sees one *unit* at a time: 128 output features by one *slice* of K, where a slice
is 128 bytes of a token's row (64 columns of 16-bit activations, 128 of fp8). A unit is two halves of
64 features, one for each accumulator, so that gate and up rows of the same features meet in one
thread.

A form is a code, a scale and an activation type:

* the code says how a unit's words become numbers in wgmma's A registers;
* the scale says what those numbers are multiplied by on the way, per row and group of columns;
* scales that cover all of K never enter the loop: they are one fp32 factor a row, applied to the
  accumulator at the end.
"""

from __future__ import annotations

from dataclasses import dataclass

BF16, F16, E4M3 = "bf16", "fp16", "e4m3"  # activations as the tensor cores see them
ROWS = 128  # output features of a unit
HALF = 64  # output features of one accumulator
BOX = 256  # 32-bit words that one copy of scales brings at most

# Codes.
E2M1_CODE, INT4_CODE, INT8_CODE, E4M3_CODE = "e2m1", "int4", "int8", "e4m3"
CODE_BITS = {E2M1_CODE: 4, INT4_CODE: 4, INT8_CODE: 8, E4M3_CODE: 8}

# Scales that are applied inside the loop.
NO_SCALE = "none"  # only a factor a row
E8M0_G32 = "e8m0"  # a power of two for 32 columns, its exponent relative to the row's
E4M3_G16 = "e4m3"  # an e4m3 number for 16 columns
BF16_GROUP, F16_GROUP, F32_GROUP = "bf16", "fp16", "fp32"  # one number a group, in its stored type


@dataclass(frozen=True)
class WeightForm:
    """How one matrix is held: `group` is the columns that share a scale (0: none in the loop)."""

    code: str
    scale: str
    group: int
    activations: str
    zero: bool = False  # a zero point beside each scale

    @property
    def name(self) -> str:
        group = f"g{self.group}" if self.group else "row"
        return f"{self.code}-{self.scale}-{group}{'-zp' if self.zero else ''}-{self.activations}"

    @property
    def bits(self) -> int:
        return CODE_BITS[self.code]

    @property
    def subnormal(self) -> bool:
        """Whether codes become subnormal numbers, with no magic number to take off: see `ptx.NIBBLE_UNIT`."""
        return self.code == INT4_CODE and not self.zero and self.scale == self.activations

    @property
    def wide(self) -> bool:
        """Whether a group's scale has more bits than the activations' type: it then multiplies in two parts.

        Rounded first, it would put the same error on every weight of its group.
        """
        return not self.promoted and (self.scale == F32_GROUP or (self.scale, self.activations) == (F16_GROUP, BF16))

    @property
    def promoted(self) -> bool:
        """Whether a group's scale multiplies the sums of its columns, in fp32, and no code is ever rounded.

        With fp8 activations numbers have four significant bits: codes go to the tensor cores as they are.
        """
        return self.activations == E4M3 and self.scale == F32_GROUP

    @property
    def slice_columns(self) -> int:
        """Columns of K in one slice: 128 bytes of a token's row."""
        return 128 if self.activations == E4M3 else 64

    @property
    def slice_rows(self) -> int:
        """128-byte rows of packed codes in one slice of one unit."""
        return self.slice_columns * self.bits // 8

    @property
    def scale_words(self) -> int:
        """32-bit words of scales (and zero points) for a pair of rows, r and r + 8, in one block."""
        if self.scale == NO_SCALE and not self.zero:
            return 0
        if self.scale == E8M0_G32:
            return self.slice_columns // 64
        if self.scale == E4M3_G16:
            return 2
        if self.promoted:
            return 2  # a zero point hides in the lowest bits of its scale
        parts = 2 if self.group == 32 else 1
        words = {NO_SCALE: 0, F32_GROUP: 2 * parts}.get(self.scale, parts)
        return words + self.zero_words

    @property
    def zero_words(self) -> int:
        """The last of them that are zero points."""
        if self.promoted:
            return 0
        return (2 if self.group == 32 else 1) if self.zero else 0

    @property
    def block_columns(self) -> int:
        """Columns covered by one block of scales: a slice, or a whole group where that is larger.

        0 where one block serves all of K: a zero point per row.
        """
        if self.scale in (E8M0_G32, E4M3_G16):
            return self.slice_columns
        return max(self.group, self.slice_columns) if self.group else 0

    def stage_blocks(self, slices: int) -> int:
        """Blocks of scales in a pipeline stage of so many slices; a group wider than the stage is loaded again."""
        return max(1, slices * self.slice_columns // self.block_columns) if self.block_columns else 1

    def stage_scale_words(self, slices: int) -> int:
        """32-bit words of one unit's scales in such a stage."""
        return HALF * self.scale_words * self.stage_blocks(slices)
