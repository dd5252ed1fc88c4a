"""The weight forms that the GPU kernels read, as plain values.

The GEMM processes a *unit* of 128 output features by a *slice* of K at a time. A slice is 128 bytes of a token's row:
64 columns of 16-bit activations, or 128 of fp8 or int8. A unit is two halves of 64 features, one for each accumulator,
so that one thread has the gate and up rows of the same features.

A form is a code, a scale and an activation type:

* the code defines how packed words become numbers in the registers of the tensor cores' operand A;
* the scale, one per row and group of columns, multiplies those numbers in the main loop;
* scales that cover all of K stay out of the loop: each row has one fp32 factor, which the epilogue applies.
"""

from __future__ import annotations

from dataclasses import dataclass

BF16, F16, E4M3, S8 = "bf16", "fp16", "e4m3", "s8"  # activations as the tensor cores see them
ROWS = 128  # output features of a unit
HALF = 64  # output features of one accumulator
BOX = 256  # most 32-bit words in one copy of scales (the limit of a TMA box)

# Codes.
E2M1_CODE, INT4_CODE, INT8_CODE, E4M3_CODE = "e2m1", "int4", "int8", "e4m3"
INT2_CODE, INT3_CODE = "int2", "int3"
NF4_CODE, IQ4_CODE = "nf4", "iq4"  # tables of 16 numbers
CODE_BITS = {
    E2M1_CODE: 4, INT2_CODE: 2, INT3_CODE: 3, INT4_CODE: 4, INT8_CODE: 8, E4M3_CODE: 8, NF4_CODE: 4, IQ4_CODE: 4,
}  # fmt: skip
SMALL_INTEGERS = (INT2_CODE, INT3_CODE, INT4_CODE)  # offset binary, or unsigned with a zero point
CODEBOOKS = {NF4_CODE: 0, IQ4_CODE: 7}  # the power of two above the largest magnitude

# Scales that are applied inside the main loop.
NO_SCALE = "none"  # only one factor per row
E8M0_G32 = "e8m0"  # a power of two for 32 columns; its exponent is relative to the row's
E4M3_G16 = "e4m3"  # an e4m3 number for 16 columns
BF16_GROUP, F16_GROUP, F32_GROUP = "bf16", "fp16", "fp32"  # one number per group, in its stored type


@dataclass(frozen=True)
class WeightForm:
    """How one matrix is stored. `group`: columns that share a scale (0: no scales in the loop)."""

    code: str
    scale: str
    group: int
    activations: str
    zero: bool = False  # each scale has a zero point

    @property
    def name(self) -> str:
        group = f"g{self.group}" if self.group else "row"
        return f"{self.code}-{self.scale}-{group}{'-zp' if self.zero else ''}-{self.activations}"

    @property
    def bits(self) -> int:
        return CODE_BITS[self.code]

    @property
    def simple(self) -> bool:
        """Whether codes are unpacked in few registers: four bits, no table."""
        return self.bits == 4 and self.code not in CODEBOOKS

    @property
    def space(self) -> int:
        """The bits of a code, rounded up to a power of two: stages have power-of-two numbers of slices."""
        return 4 if self.bits == 3 else self.bits

    @property
    def planes(self) -> tuple[int, ...]:
        """Bits of a code that are stored together. Tensors have power-of-two sizes, so three bits are two and one."""
        return (2, 1) if self.bits == 3 else (self.bits,)

    @property
    def code_copies(self) -> int:
        """Copies of equal size that bring a stage's codes: of 3-bit codes two of the first plane, one of the second."""
        return 3 if self.bits == 3 else 1

    @property
    def fine(self) -> bool:
        """Whether the two halves of a slice with 16-bit activations have scales of their own."""
        return self.group == 32

    @property
    def byte_inputs(self) -> bool:
        """Whether activations have 8 bits: rows are quantised, and each has a scale."""
        return self.activations in (E4M3, S8)

    @property
    def subnormal(self) -> bool:
        """Whether codes become subnormal numbers, without a magic number to subtract: see `unpack_codes.BYTE_UNIT`."""
        return self.code in SMALL_INTEGERS and not self.zero and self.scale == self.activations

    @property
    def two_part_scale(self) -> bool:
        """Whether a group's scale has more bits than the activations' type and is applied as a sum of two numbers.

        Rounding it would put the same error on every weight of the group.
        """
        return not self.promoted and (self.scale == F32_GROUP or (self.scale, self.activations) == (F16_GROUP, BF16))

    @property
    def promoted(self) -> bool:
        """Whether a group's scale multiplies the fp32 sum of its columns instead of the codes.

        8-bit numbers have few significant bits: scaled codes would have to be rounded, plain codes are exact.
        """
        return self.byte_inputs and self.scale == F32_GROUP

    @property
    def integer_sums(self) -> bool:
        """Whether sums over all of K are integers: int8 products without scales in the loop."""
        return self.activations == S8 and not self.promoted

    @property
    def sixteenfold(self) -> bool:
        """Whether unpacked codes are 16 times too large: see `unpack_ptx_int8`."""
        return self.activations == S8 and self.bits == 4 and not self.zero

    @property
    def slice_columns(self) -> int:
        """Columns of K in one slice: 128 bytes of a token's row."""
        return 128 if self.byte_inputs else 64

    @property
    def slice_rows(self) -> int:
        """128-byte rows of packed codes in one slice of one unit."""
        return self.slice_columns * self.bits // 8

    @property
    def scale_words(self) -> int:
        """32-bit words of scales and zero points for a pair of rows, r and r + 8, in one block of columns."""
        if self.scale == NO_SCALE and not self.zero:
            return 0
        if self.scale == E8M0_G32:
            return self.slice_columns // 64
        if self.scale == E4M3_G16:
            return 2
        if self.promoted:
            return 2  # the zero point is in the lowest bits of its scale
        parts = 2 if self.fine else 1
        words = {NO_SCALE: 0, F32_GROUP: 2 * parts}.get(self.scale, parts)
        return words + self.zero_words

    @property
    def zero_words(self) -> int:
        """How many of the `scale_words`, at their end, are zero points."""
        if self.promoted:
            return 0
        return (2 if self.fine else 1) if self.zero else 0

    @property
    def block_columns(self) -> int:
        """Columns covered by one block of scales: a slice or a group, whichever is larger.

        0 if one block serves all of K (a zero point per row).
        """
        if self.scale in (E8M0_G32, E4M3_G16):
            return self.slice_columns
        return max(self.group, self.slice_columns) if self.group else 0

    def stage_blocks(self, slices: int) -> int:
        """Blocks of scales in a stage of `slices` slices. Every stage loads the scales of a group that spans stages."""
        return max(1, slices * self.slice_columns // self.block_columns) if self.block_columns else 1

    def box_rows(self, slices: int) -> int:
        """128-byte rows in one copy of codes for a stage of `slices` slices."""
        return slices * self.slice_rows // self.code_copies

    def stage_scale_words(self, slices: int) -> int:
        """32-bit words of one unit's scales in a stage of `slices` slices."""
        return HALF * self.scale_words * self.stage_blocks(slices)
