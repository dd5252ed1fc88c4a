"""The byte layout of each GGUF block type, as a table.

Every number of a block, code or scale, is assembled from `Plane`s of bits. Reading and writing are
two loops over the planes, so `split` and `join` are inverses by construction. Scales keep their small
types as levels of the spec. The products in the dequantisation formula are then exact in fp32 (at
most 8 + 6 + 11 bits), so it rounds only where the definition of the type does.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from functools import cached_property

import torch
from torch import Tensor

from lancebill.numbers import native
from lancebill.numbers.bit_packing import Nibbles
from lancebill.numbers.dtypes import E2M1, E4M3, E8M0, F16, IQ4, UINT2B1, DType, biased_type, int_type, uint_type
from lancebill.numbers.spec import QuantSpec, Scale, group


@dataclass(frozen=True)
class Plane:
    """A bit field of many numbers, stored in the bytes [start, start + size).

    The bytes are divided into runs of `run` bytes. Each byte has `lanes` pieces of `width` bits, the
    first at bit `bit`. Piece j of byte i of a run belongs to number j * run + i of the run. A piece
    provides the bits of its number from bit `shift` up. The plane's first number is number `first` of
    the field.
    """

    start: int
    size: int
    width: int = 8
    run: int = 1
    bit: int = 0
    lanes: int = 1
    first: int = 0
    shift: int = 0

    @property
    def numbers(self) -> slice:
        return slice(self.first, self.first + self.size * self.lanes)

    def pieces(self, blocks: Tensor) -> Tensor:
        """The pieces of this plane, shifted to their position in their numbers."""
        runs = blocks[..., self.start : self.start + self.size].contiguous().unflatten(-1, (-1, self.run))
        mask = (1 << self.width) - 1
        lanes = [((runs >> shift) & mask) << self.shift for shift in self._shifts]
        return torch.stack(lanes, dim=-2).flatten(-3)

    @property
    def holds_nibbles(self) -> bool:
        """Whether every byte holds two whole 4-bit numbers, a run apart."""
        return self.width == 4 and self.lanes == 2 and self.shift == 0 and self.run in (8, 16, 32, 64)

    def nibbles(self, blocks: Tensor) -> Nibbles:
        """`pieces` without unpacking them: from two neighbouring bytes, the low nibbles and the high nibbles."""
        used = blocks[..., self.start : self.start + self.size]
        low = used.clone(memory_format=torch.contiguous_format).view(torch.int16)
        high = low >> 4
        runs = (*used.shape[:-1], -1, self.run // 2)
        unit = torch.int64 if self.run % 16 == 0 else torch.int32  # copying large units is faster
        lanes = []
        for nibbles in (low, high):
            nibbles &= 0x0F0F
            nibbles |= nibbles >> 4  # the lower byte of each pair now has both nibbles
            lanes.append(nibbles.to(torch.uint8).view(runs).view(unit))
        return Nibbles(torch.stack(lanes, dim=-2).view(torch.uint8).flatten(-3))

    def bytes(self, numbers: Tensor) -> Tensor:
        """The inverse of `pieces`: the bits that this plane contributes to its bytes."""
        pieces = (numbers[..., self.numbers] >> self.shift) & ((1 << self.width) - 1)
        lanes = pieces.unflatten(-1, (-1, self.lanes, self.run)).unbind(-2)
        merged = torch.zeros_like(lanes[0])
        for lane, shift in zip(lanes, self._shifts):
            merged |= lane << shift
        return merged.flatten(-2)

    @cached_property
    def struct(self) -> native.PlaneStruct:
        return native.PlaneStruct(*astuple(self))

    @property
    def _shifts(self) -> range:
        """The first bit of each lane in a byte."""
        return range(self.bit, self.bit + self.lanes * self.width, self.width)


@dataclass(frozen=True)
class Field:
    """The numbers of one kind in a block, one per `columns` columns.

    `flipped` numbers are stored with the top bit inverted: two's complement instead of our offset
    binary, or the minimum m instead of -m.
    """

    dtype: DType
    columns: int
    planes: tuple[Plane, ...]
    flipped: bool = False

    @cached_property
    def nibbles(self) -> Plane | None:
        """The only plane, if its numbers need not be unpacked."""
        only = self.planes[0]
        return only if len(self.planes) == 1 and only.holds_nibbles and not self.flipped else None

    def struct(self, count: int) -> native.FieldStruct:
        """For a block of `count` numbers."""
        planes, flip = [plane.struct for plane in self.planes], self._bytes if self.flipped else 0
        size = count * self._bytes if self.nibbles is None else self.nibbles.size
        return native.field_struct(planes, flip, size, nibbles=self.nibbles is not None)

    def of_bytes(self, data: Tensor) -> Tensor | Nibbles:
        """What `read` returns, of the bytes that the library has read."""
        return data.view(self.dtype.storage) if self.nibbles is None else Nibbles(data)

    def read(self, blocks: Tensor, count: int) -> Tensor | Nibbles:
        """The numbers of each block, [..., blocks, count]."""
        if self.nibbles is not None:
            return self.nibbles.nibbles(blocks)
        only = self.planes[0] if len(self.planes) == 1 else None
        if only is not None and only.width == 8:
            numbers = blocks[..., only.start : only.start + only.size].clone(memory_format=torch.contiguous_format)
            return self._flip(numbers).view(self.dtype.storage)
        numbers = torch.zeros(*blocks.shape[:-1], count * self._bytes, dtype=torch.uint8, device=blocks.device)
        for plane in self.planes:
            numbers[..., plane.numbers] |= plane.pieces(blocks)
        return self._flip(numbers).view(self.dtype.storage)

    def write(self, numbers: Tensor, blocks: Tensor) -> None:
        numbers = self._flip(numbers.contiguous().view(torch.uint8))
        for plane in self.planes:
            blocks[..., plane.start : plane.start + plane.size] |= plane.bytes(numbers)

    def _flip(self, numbers: Tensor) -> Tensor:
        if not self.flipped:
            return numbers
        if self._bytes == 1:
            return numbers ^ 0x80
        top = torch.tensor([0] * (self._bytes - 1) + [0x80], dtype=torch.uint8, device=numbers.device)
        flipped: Tensor = numbers.unflatten(-1, (-1, self._bytes)) ^ top
        return flipped.flatten(-2)

    @property
    def _bytes(self) -> int:
        return self.dtype.storage.itemsize


@dataclass(frozen=True)
class BlockType:
    """One row of the table: `columns` codes and their scales in `size` bytes."""

    name: str
    columns: int
    size: int
    codes: Field
    scales: tuple[Field, ...]
    minimum: tuple[Field, ...] = ()

    @property
    def spec(self) -> QuantSpec:
        return QuantSpec(self.codes.dtype, _levels(self.scales), None, _levels(self.minimum))

    @property
    def fields(self) -> tuple[Field, ...]:
        return (self.codes, *self.scales, *self.minimum)

    @cached_property
    def _structs(self) -> list[native.FieldStruct]:
        return [f.struct(self.columns // f.columns) for f in self.fields]

    def split(self, blocks: Tensor) -> tuple[Tensor | Nibbles, list[Tensor]]:
        """[..., n, blocks, size] bytes to the codes [..., n, k], and one [..., n, numbers] tensor per other field."""
        found = native.read_fields(blocks, self._structs)
        if found is None:
            codes, *levels = (f.read(blocks, self.columns // f.columns) for f in self.fields)
        else:
            codes, *levels = (f.of_bytes(data) for f, data in zip(self.fields, found))
        flat = Nibbles(codes.data.flatten(-2)) if isinstance(codes, Nibbles) else codes.flatten(-2)
        return flat, [level.flatten(-2) for level in levels if isinstance(level, Tensor)]

    def join(self, numbers: list[Tensor]) -> Tensor:
        n, k = numbers[0].shape
        blocks = torch.zeros(n, k // self.columns, self.size, dtype=torch.uint8, device=numbers[0].device)
        for field, tensor in zip(self.fields, numbers):
            field.write(tensor.reshape(n, -1, self.columns // field.columns), blocks)
        return blocks


def _levels(fields: tuple[Field, ...]) -> tuple[Scale, ...]:
    return tuple(Scale(f.dtype, group(f.columns)) for f in fields)


def _codes(dtype: DType, *planes: Plane) -> Field:
    return Field(dtype, 1, planes)


def _f16(start: int, columns: int, *, flipped: bool = False) -> Field:
    return Field(F16, columns, (Plane(start, 2),), flipped)


def _bits(width: int, start: int, size: int, run: int, *, shift: int = 0) -> Plane:
    """A plane that uses all bits of its bytes."""
    return Plane(start, size, width, run, lanes=8 // width, shift=shift)


def _six_bits(whole: int, bit: int) -> Field:
    """One of the two sets of eight 6-bit numbers that Q4_K and Q5_K store in twelve bytes.

    Numbers 0 to 3 are the low six bits of the four bytes from `whole`. Numbers 4 to 7 take their top two bits from
    the top of these bytes, and their low four bits from the nibble at `bit` of the four bytes from 12.
    """
    planes = (
        Plane(whole, 4, 6, run=4),
        Plane(12, 4, 4, run=4, bit=bit, first=4),
        Plane(whole, 4, 2, run=4, bit=6, first=4, shift=4),
    )
    return Field(uint_type(6), 32, planes)


_Q4 = _bits(4, 2, 16, 16)  # byte j: columns j and j + 16
_K_SCALES, _K_MINIMUM = (_six_bits(4, 0), _f16(0, 256)), (_six_bits(8, 4), _f16(2, 256))
_INT4, _INT5, _INT8 = biased_type(4), biased_type(5), biased_type(8)
_UINT2, _UINT4, _UINT5 = uint_type(2), uint_type(4), uint_type(5)
_Q3_SCALE = Field(biased_type(6), 16, (_bits(4, 96, 8, 8), _bits(2, 104, 4, 4, shift=4)))
_XS_SCALE = Field(biased_type(6), 32, (_bits(4, 4, 4, 1), _bits(2, 2, 2, 1, shift=4)))

BLOCK_TYPES = {
    row.name: row
    for row in (
        BlockType("Q4_0", 32, 18, _codes(_INT4, _Q4), (_f16(0, 32),)),
        BlockType("Q4_1", 32, 20, _codes(_UINT4, _bits(4, 4, 16, 16)), (_f16(0, 32),), (_f16(2, 32, flipped=True),)),
        BlockType("Q5_0", 32, 22, _codes(_INT5, _bits(4, 6, 16, 16), _bits(1, 2, 4, 1, shift=4)), (_f16(0, 32),)),
        BlockType(
            "Q5_1",
            32,
            24,
            _codes(_UINT5, _bits(4, 8, 16, 16), _bits(1, 4, 4, 1, shift=4)),
            (_f16(0, 32),),
            (_f16(2, 32, flipped=True),),
        ),
        BlockType("Q8_0", 32, 34, Field(_INT8, 1, (Plane(2, 32),), flipped=True), (_f16(0, 32),)),
        BlockType(
            "Q2_K",
            256,
            84,
            _codes(_UINT2, _bits(2, 16, 64, 32)),
            (Field(_UINT4, 16, (Plane(0, 16, 4, 16),)), _f16(80, 256)),
            (Field(_UINT4, 16, (Plane(0, 16, 4, 16, bit=4),)), _f16(82, 256)),
        ),
        BlockType(
            "Q3_K",
            256,
            110,
            _codes(biased_type(3), _bits(2, 32, 64, 32), _bits(1, 0, 32, 32, shift=2)),
            (_Q3_SCALE, _f16(108, 256)),
        ),
        BlockType("Q4_K", 256, 144, _codes(_UINT4, _bits(4, 16, 128, 32)), _K_SCALES, _K_MINIMUM),
        BlockType(
            "Q5_K",
            256,
            176,
            _codes(_UINT5, _bits(4, 48, 128, 32), _bits(1, 16, 32, 32, shift=4)),
            _K_SCALES,
            _K_MINIMUM,
        ),
        BlockType(
            "Q6_K",
            256,
            210,
            _codes(biased_type(6), _bits(4, 0, 128, 64), _bits(2, 128, 64, 32, shift=4)),
            (Field(int_type(8), 16, (Plane(192, 16),)), _f16(208, 256)),
        ),
        BlockType("TQ2_0", 256, 66, _codes(UINT2B1, _bits(2, 0, 64, 32)), (_f16(64, 256),)),
        BlockType("IQ4_NL", 32, 18, _codes(IQ4, _Q4), (_f16(0, 32),)),
        BlockType("IQ4_XS", 256, 136, _codes(IQ4, _bits(4, 8, 128, 16)), (_XS_SCALE, _f16(0, 256))),
        BlockType("MXFP4", 32, 17, _codes(E2M1, _bits(4, 1, 16, 16)), (Field(E8M0, 32, (Plane(0, 1),)),)),
        BlockType("NVFP4", 64, 36, _codes(E2M1, _bits(4, 4, 32, 8)), (Field(E4M3, 16, (Plane(0, 4),)),)),
    )
}
