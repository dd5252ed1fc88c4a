"""GGUF's IQ1, IQ2 and IQ3 types, which store eight or four columns as an index into a grid, and TQ1_0.

A grid entry selects a magnitude for each column; a byte per eight columns has their signs (IQ1: on which side of the
magnitude the value lies). Both together are the canonical code, so a weight has 3 or 4 bits here and 1.6 to 3.4 in the
file. Only codes that are in the grid can be written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lancebill.errors import CannotEncode
from lancebill.formats._gguf_blocks import Field
from lancebill.formats._gguf_grid_tables import grid
from lancebill.numbers.dtypes import F16, IQ1, IQ2, IQ3, IQ3S, ODD3, ODD4, TERNARY, DType
from lancebill.numbers.spec import QuantSpec, Scale, group

COLUMNS = 256
_DELTA = 0xFF  # IQ1: all eight columns have the same side


class GridParts(NamedTuple):
    """The numbers of blocks, int32 along the last axis: grid indices, sign bytes, inner scales, bits of the fp16."""

    entries: Tensor
    signs: Tensor
    scales: Tensor
    outer: Tensor


@dataclass(frozen=True)
class GridType:
    """A block type with a grid. `read` and `write` convert between bytes (as int32) and `GridParts`."""

    name: str
    size: int
    table: str  # the name of its grid
    codes: DType
    inner: Field
    read: Callable[[Tensor], GridParts]
    write: Callable[[GridParts], Tensor]
    columns: int = COLUMNS

    @property
    def scales(self) -> tuple[Field, ...]:
        return self.inner, Field(F16, COLUMNS, ())

    @property
    def spec(self) -> QuantSpec:
        return QuantSpec(self.codes, tuple(Scale(f.dtype, group(f.columns)) for f in self.scales))

    @property
    def _digit(self) -> int:
        """Bits of a magnitude."""
        return self.codes.bits - 1

    def split(self, blocks: Tensor) -> tuple[Tensor, list[Tensor]]:
        """[..., n, blocks, size] bytes to the codes [..., n, k] and the two levels of scales."""
        parts = self.read(blocks.int())
        selected = grid(self.table).to(blocks.device)[parts.entries]
        magnitudes = _pieces(selected, self._digit, 8 if self._digit == 2 else 4)
        codes = magnitudes | _pieces(parts.signs, 1, 8) << self._digit
        outer = parts.outer.to(torch.int16).view(torch.float16)
        return codes.to(torch.uint8).flatten(-2), [parts.scales.to(torch.uint8).flatten(-2), outer.flatten(-2)]

    def join(self, numbers: list[Tensor]) -> Tensor:
        codes, inner, outer = numbers
        n, k = codes.shape
        blocks = (n, k // COLUMNS, -1)
        wide = codes.int().reshape(blocks)
        entries = _joined(wide & ((1 << self._digit) - 1), self._digit, 8 if self._digit == 2 else 4)
        table = grid(self.table).to(codes.device)
        index = torch.searchsorted(table, entries.contiguous()).clamp(max=len(table) - 1).int()
        if not torch.equal(table[index], entries):
            raise CannotEncode(f"{self.name} stores only codes that are in its grid")
        signs = _joined(wide >> self._digit, 1, 8)
        bits = outer.reshape(blocks).view(torch.int16).int() & 0xFFFF
        written = GridParts(index, signs, inner.int().reshape(blocks), bits)
        made = self.write(written)
        if any(not torch.equal(a, b) for a, b in zip(self.read(made), written)):
            raise CannotEncode(f"{self.name} cannot store every combination of signs")
        return made.to(torch.uint8)


def _pieces(values: Tensor, width: int, count: int) -> Tensor:
    """`count` fields of `width` bits of each number, the lowest first."""
    mask = (1 << width) - 1
    return torch.stack([(values >> (width * i)) & mask for i in range(count)], dim=-1).flatten(-2)


def _joined(values: Tensor, width: int, count: int) -> Tensor:
    """The inverse of `_pieces`."""
    fields = values.unflatten(-1, (-1, count))
    shifts = torch.arange(0, width * count, width, device=values.device, dtype=values.dtype)
    joined: Tensor = (fields << shifts).sum(-1, dtype=values.dtype)
    return joined


def _bytes(values: Tensor, count: int) -> Tensor:
    """Numbers of `count` bytes as bytes, the lowest first."""
    return _pieces(values, 8, count)


def _words(blocks: Tensor, start: int, stop: int, count: int) -> Tensor:
    return _joined(blocks[..., start:stop], 8, count)


def _even(low: Tensor) -> Tensor:
    """Seven signs, and the eighth that makes the number of minus signs even."""
    parity: Tensor = _pieces(low, 1, 7).unflatten(-1, (-1, 7)).sum(-1, dtype=low.dtype) & 1
    return low | parity << 7


def _read_iq2_xxs(b: Tensor) -> GridParts:
    words = _words(b, 2, 66, 4).unflatten(-1, (-1, 2))
    high = words[..., 1]
    signs = _even(_pieces(high, 7, 4))
    return GridParts(_pieces(words[..., 0], 8, 4), signs, (high >> 28) & 15, _words(b, 0, 2, 2))


def _write_iq2_xxs(p: GridParts) -> Tensor:
    high = _joined(p.signs & 127, 7, 4) | p.scales << 28
    words = torch.stack([_joined(p.entries, 8, 4), high], dim=-1).flatten(-2)
    return torch.cat([_bytes(p.outer, 2), _bytes(words, 4)], dim=-1)


def _read_iq2_xs(b: Tensor) -> GridParts:
    words = _words(b, 2, 66, 2)
    return GridParts(words & 511, _even(words >> 9), _pieces(b[..., 66:74], 4, 2), _words(b, 0, 2, 2))


def _write_iq2_xs(p: GridParts) -> Tensor:
    words = p.entries | (p.signs & 127) << 9
    return torch.cat([_bytes(p.outer, 2), _bytes(words, 2), _joined(p.scales, 4, 2)], dim=-1)


def _read_iq2_s(b: Tensor) -> GridParts:
    index = b[..., 2:34] | _pieces(b[..., 66:74], 2, 4) << 8
    return GridParts(index, b[..., 34:66], _pieces(b[..., 74:82], 4, 2), _words(b, 0, 2, 2))


def _write_iq2_s(p: GridParts) -> Tensor:
    high = _joined(p.entries >> 8, 2, 4)
    return torch.cat([_bytes(p.outer, 2), p.entries & 255, p.signs, high, _joined(p.scales, 4, 2)], dim=-1)


def _read_iq3_xxs(b: Tensor) -> GridParts:
    words = _words(b, 66, 98, 4)
    return GridParts(b[..., 2:66], _even(_pieces(words, 7, 4)), (words >> 28) & 15, _words(b, 0, 2, 2))


def _write_iq3_xxs(p: GridParts) -> Tensor:
    words = _joined(p.signs & 127, 7, 4) | p.scales << 28
    return torch.cat([_bytes(p.outer, 2), p.entries, _bytes(words, 4)], dim=-1)


def _read_iq3_s(b: Tensor) -> GridParts:
    index = b[..., 2:66] | _pieces(b[..., 66:74], 1, 8) << 8
    return GridParts(index, b[..., 74:106], _pieces(b[..., 106:110], 4, 2), _words(b, 0, 2, 2))


def _write_iq3_s(p: GridParts) -> Tensor:
    high = _joined(p.entries >> 8, 1, 8)
    return torch.cat([_bytes(p.outer, 2), p.entries & 255, high, p.signs, _joined(p.scales, 4, 2)], dim=-1)


def _read_iq1_s(b: Tensor) -> GridParts:
    high = _words(b, 34, 50, 2)
    sides = (high >> 15).repeat_interleave(4, dim=-1) * _DELTA
    return GridParts(b[..., 2:34] | _pieces(high, 3, 4) << 8, sides, (high >> 12) & 7, _words(b, 0, 2, 2))


def _write_iq1_s(p: GridParts) -> Tensor:
    high = _joined(p.entries >> 8, 3, 4) | p.scales << 12 | (p.signs[..., ::4] & 1) << 15
    return torch.cat([_bytes(p.outer, 2), p.entries & 255, _bytes(high, 2)], dim=-1)


def _read_iq1_m(b: Tensor) -> GridParts:
    nibbles, words = _pieces(b[..., 32:48], 4, 2), _words(b, 48, 56, 2)
    outer = _joined(words >> 12, 4, 4)  # the fp16 is in the top nibbles of four words
    return GridParts(b[..., :32] | (nibbles & 7) << 8, (nibbles >> 3) * _DELTA, _pieces(words, 3, 4), outer)


def _write_iq1_m(p: GridParts) -> Tensor:
    nibbles = p.entries >> 8 | (p.signs & 1) << 3
    words = _joined(p.scales, 3, 4) | _pieces(p.outer, 4, 4) << 12
    return torch.cat([p.entries & 255, _joined(nibbles, 4, 2), _bytes(words, 2)], dim=-1)


_POWERS = (1, 3, 9, 27, 81)


@dataclass(frozen=True)
class TernaryType:
    """TQ1_0: five values -1, 0, 1 in a byte, as digits of a fraction in base 3."""

    name: str = "TQ1_0"
    columns: int = COLUMNS
    size: int = 54

    @property
    def scales(self) -> tuple[Field, ...]:
        return (Field(F16, COLUMNS, ()),)

    @property
    def spec(self) -> QuantSpec:
        return QuantSpec(TERNARY, (Scale(F16, group(COLUMNS)),))

    def split(self, blocks: Tensor) -> tuple[Tensor, list[Tensor]]:
        powers = torch.tensor(_POWERS, device=blocks.device, dtype=torch.int32)[:, None]
        runs = ((0, 32, 5), (32, 48, 5), (48, 52, 4))
        digits = [((blocks[..., None, a:b].int() * powers[:count] & 255) * 3 >> 8).flatten(-2) for a, b, count in runs]
        outer = blocks[..., 52:54].contiguous().view(torch.float16)
        return torch.cat(digits, dim=-1).to(torch.uint8).flatten(-2), [outer.flatten(-2)]

    def join(self, numbers: list[Tensor]) -> Tensor:
        codes, outer = numbers
        digits = codes.int().reshape(codes.shape[0], -1, COLUMNS)
        made = []
        for start, stop, width in ((0, 160, 32), (160, 240, 16), (240, 256, 4)):
            places = digits[..., start:stop].unflatten(-1, (-1, width))
            powers = torch.tensor(_POWERS[::-1], device=codes.device, dtype=torch.int32)[: places.shape[-2], None]
            made.append(((places * powers).sum(-2) * 256 + 242) // 243)
        scale = outer.reshape(*digits.shape[:-1], 1).view(torch.uint8)
        return torch.cat([*(part.to(torch.uint8) for part in made), scale], dim=-1)


GRID_TYPES = {
    row.name: row
    for row in (
        GridType("IQ2_XXS", 66, "IQ2_XXS", IQ2, Field(ODD4, 32, ()), _read_iq2_xxs, _write_iq2_xxs),
        GridType("IQ2_XS", 74, "IQ2_XS", IQ2, Field(ODD4, 16, ()), _read_iq2_xs, _write_iq2_xs),
        GridType("IQ2_S", 82, "IQ2_S", IQ2, Field(ODD4, 16, ()), _read_iq2_s, _write_iq2_s),
        GridType("IQ3_XXS", 98, "IQ3_XXS", IQ3, Field(ODD4, 32, ()), _read_iq3_xxs, _write_iq3_xxs),
        GridType("IQ3_S", 110, "IQ3_S", IQ3S, Field(ODD4, 32, ()), _read_iq3_s, _write_iq3_s),
        GridType("IQ1_S", 50, "IQ1_S", IQ1, Field(ODD3, 32, ()), _read_iq1_s, _write_iq1_s),
        GridType("IQ1_M", 56, "IQ1_S", IQ1, Field(ODD3, 16, ()), _read_iq1_m, _write_iq1_m),
    )
}
TERNARY_TYPE = TernaryType()
