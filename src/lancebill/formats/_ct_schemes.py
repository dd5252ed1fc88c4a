"""How compressed-tensors lays numbers out.

Three kinds cover every format name: integers packed into 32-bit words, integers in bytes of their
own, and mini-floats, which lie as everywhere (`_floats`). All stored integers are signed; the
canonical code is what they are above the smallest, so that zero points move along with them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lancebill.errors import BadValue
from lancebill.formats import _floats
from lancebill.formats._floats import WEIGHT as WEIGHT
from lancebill.formats._floats import FloatScheme, place, put, scale_axes, scale_part
from lancebill.formats.base import BIAS, SCALAR, Module, Part, Scheme, part
from lancebill.numbers.bit_packing import pack_bits, pack_padded, unpack_bits, unpack_padded
from lancebill.numbers.spec import TENSOR, Block, QuantSpec, Scale
from lancebill.numbers.weight import LogicalWeight

# Spellings after the module's name; the second is that of exports which join with an underscore.
PACKED = (".weight_packed", "_packed")
SCALE = (".weight_scale", "_scale")
GLOBAL_SCALE = (".weight_global_scale", "_global_scale")
ZERO = (".weight_zero_point", "_zero_point")
SHAPE = (".weight_shape", "_shape")
G_IDX = (".weight_g_idx", "_g_idx")

# How 3-, 5-, 6- and 7-bit codes lie in words. Old writers gave each word 32 // bits whole codes. The
# headers tell which it is where groups fix K; otherwise the packed tensor is read whole, and its
# width against K tells.
DENSE, PADDED, UNKNOWN = "dense", "padded", "unknown"


@dataclass(frozen=True)
class PackedInts(Scheme):
    """`weight_packed` along K; zero points packed the same way, but along N."""

    words: str = DENSE
    reordered: bool = False

    @property
    def act_order(self) -> bool:
        return self.reordered

    def unpack(self, stored: Mapping[str, Tensor], n: int, k: int) -> LogicalWeight:
        bits = self.spec.dtype.bits
        take = unpack_padded if self._padded(stored["codes"], k) else unpack_bits
        _check_shape(stored.get("shape"), n, k)
        codes = take(stored["codes"], bits, k)
        zero = None
        if self.spec.zero is not None:
            zero = take(stored["zero"].t(), bits, n).t().to(torch.int16).contiguous()
        else:
            _check_no_zero(stored.get("zero"))
        perm = None
        if "perm" in stored:
            perm = group_order(stored["perm"], self.spec.group or k, reordered=self.reordered)
        if perm is not None:
            codes = codes[:, perm.long()]
        scale = place(stored["scale"], self.spec.scales[0], n, k)
        return LogicalWeight(self.spec, codes, (scale,), zero, perm=perm)

    def pack(self, weight: LogicalWeight) -> dict[str, Tensor]:
        n, k, bits, codes = weight.n, weight.k, self.spec.dtype.bits, weight.codes
        stored = {
            "scale": put(weight.scales[0], self.part("scale"), n, k),
            "shape": torch.tensor([n, k], dtype=torch.int64),
        }
        if self.reordered:
            g_idx = torch.arange(k, dtype=torch.int32, device=codes.device) // (self.spec.group or k)
            stored["perm"] = g_idx
            if weight.perm is not None:
                order = weight.perm.long()
                codes, stored["perm"] = torch.empty_like(codes), torch.empty_like(g_idx)
                codes[:, order], stored["perm"][order] = weight.codes, g_idx
        stored["codes"] = self._words(codes, bits)
        if weight.zero is not None:
            stored["zero"] = self._words(weight.zero.to(torch.uint8).t(), bits).t().contiguous()
        return stored

    def told_size(self, stored: Callable[[str], Tensor | None]) -> tuple[int, int] | None:
        shape = stored("shape")
        return (int(shape[0]), int(shape[1])) if shape is not None and shape.numel() == 2 else None

    def _words(self, codes: Tensor, bits: int) -> Tensor:
        return pack_padded(codes, bits) if self.words == PADDED else pack_bits(codes, bits, torch.int32)

    def _padded(self, packed: Tensor, k: int) -> bool:
        """Where the two widths are equal (K below 32 or uneven) the dense form of today's writers."""
        if self.words != UNKNOWN:
            return self.words == PADDED
        dense, padded = widths(self.spec.dtype.bits, k)
        return packed.shape[-1] == padded != dense


@dataclass(frozen=True)
class PlainInts(Scheme):
    """`weight` as int8, whatever its number of bits; zero points as int8 beside the scales."""

    def unpack(self, stored: Mapping[str, Tensor], n: int, k: int) -> LogicalWeight:
        codes = self._codes(stored["codes"], "weights").to(torch.uint8)
        scale = place(stored["scale"], self.spec.scales[0], n, k)
        zero = None
        if self.spec.zero is not None:
            zero = place(self._codes(stored["zero"], "zero points"), self.spec.zero, n, k)
        else:
            _check_no_zero(stored.get("zero"))
        return LogicalWeight(self.spec, codes, (scale,), zero)

    def pack(self, weight: LogicalWeight) -> dict[str, Tensor]:
        n, k, half = weight.n, weight.k, 1 << (self.spec.dtype.bits - 1)
        stored = {
            "codes": (weight.codes.to(torch.int16) - half).to(torch.int8),
            "scale": put(weight.scales[0], self.part("scale"), n, k),
        }
        if weight.zero is not None:
            stored["zero"] = put((weight.zero - half).to(torch.int8), self.part("zero"), n, k)
        return stored

    def _codes(self, signed: Tensor, what: str) -> Tensor:
        bits = self.spec.dtype.bits
        half = 1 << (bits - 1)
        codes = signed.to(torch.int16) + half
        if bits < 8 and codes.numel() and (int(codes.min()) < 0 or int(codes.max()) >= 2 * half):
            raise BadValue(
                f"{what} outside the {bits} bits the config gives them",
                expected=f"{-half} to {half - 1}",
                got=f"{int(signed.min())} to {int(signed.max())}",
            )
        return codes


def packed_ints(
    spec: QuantSpec, inputs: tuple[Part, ...], *, words: str = DENSE, reordered: bool = False
) -> PackedInts:
    """pack-quantized."""
    bits = spec.dtype.bits
    dense, padded = "n k^", f"n k/{32 // bits}"
    codes_axes = {DENSE: (dense,), PADDED: (padded,), UNKNOWN: (dense, padded)}[words]
    zero = part("zero", ZERO, "I8", _axes(spec.scales[0].block), optional=True)
    if spec.zero is not None:
        column = "1" if spec.group == 0 else f"k/{spec.group}"
        dense, padded = f"n^ {column}", f"n/{32 // bits} {column}"
        zero_axes = {DENSE: (dense,), PADDED: (padded,), UNKNOWN: (dense, padded)}[words]
        zero = part("zero", ZERO, "I32", zero_axes, bits=bits, whole=words == UNKNOWN)
    parts = (
        part("codes", PACKED, "I32", codes_axes, bits=bits, whole=words == UNKNOWN),
        _scale("scale", SCALE, spec.scales[0]),
        zero,
        part("shape", SHAPE, ("I64", "I32"), "2", optional=True),
        part("perm", G_IDX, "I32", "k", optional=not reordered, whole=reordered),
        *inputs,
        BIAS,
    )
    return PackedInts(spec, parts, words, reordered)


def plain_ints(spec: QuantSpec, inputs: tuple[Part, ...]) -> PlainInts:
    """int-quantized and naive-quantized integers."""
    parts = (
        part("codes", WEIGHT, "I8", "n k"),
        _scale("scale", SCALE, spec.scales[0]),
        part("zero", ZERO, "I8", _axes(spec.scales[0].block), optional=spec.zero is None),
        *inputs,
        BIAS,
    )
    return PlainInts(spec, parts)


def floats(spec: QuantSpec, inputs: tuple[Part, ...]) -> FloatScheme:
    """float-, nvfp4-pack-, mxfp4-pack-, mxfp6-pack- and mxfp8-quantized."""
    bits = spec.dtype.bits
    parts = [
        part("codes", WEIGHT, "F8_E4M3", "n k") if bits == 8 else part("codes", PACKED, "U8", "n k^", bits=bits),
        _scale("scale", SCALE, spec.scales[0]),
    ]
    if len(spec.scales) == 2:
        parts.append(_scale("scale_2", GLOBAL_SCALE, spec.scales[1]))
    return FloatScheme(spec, (*parts, *inputs, BIAS))


def stored_plain(module: Module) -> bool:
    """Whether the file holds plain floats for this module."""
    return _floats.stored_plain(module, SCALE)


def _scale(role: str, suffix: tuple[str, ...], level: Scale) -> Part:
    return scale_part(role, suffix, level, _axes(level.block))


def _axes(block: Block) -> tuple[str, ...]:
    """This format's shapes: a scalar is written as [1]."""
    return SCALAR[::-1] if block == TENSOR else scale_axes(block)


def widths(bits: int, k: int) -> tuple[int, int]:
    """Words of a row of K codes: dense, and with whole codes only."""
    return -(-k * bits // 32), -(-k // (32 // bits))


def group_order(g_idx: Tensor, size: int, *, reordered: bool) -> Tensor | None:
    """The permutation that sorts columns by their group; None where they are in natural order.

    Writers that reorder nothing leave -1 or the natural groups, which in a slice of columns start
    anywhere.
    """
    natural = torch.arange(len(g_idx), dtype=torch.int32, device=g_idx.device) // size
    start = 0 if reordered else g_idx[:1]
    if bool((g_idx == -1).all()) or torch.equal(g_idx - start, natural):
        return None
    if not reordered:
        raise BadValue(
            "g_idx reorders columns but the config's actorder does not",
            hint="actorder 'group' reorders; with 'weight' columns are stored in natural order",
        )
    order = torch.argsort(g_idx, stable=True)
    if not torch.equal(g_idx[order], natural):
        raise BadValue("g_idx does not give each group its share of columns", expected=f"{size} columns a group")
    return order.to(torch.int32)


def _check_shape(shape: Tensor | None, n: int, k: int) -> None:
    """`weight_shape` is the whole matrix's, of which [n, k] may be a part."""
    if shape is None:
        return
    rows, columns = (int(v) for v in shape.tolist())
    if rows < n or columns < k:
        raise BadValue("weight_shape is smaller than the matrix", expected=[n, k], got=[rows, columns])


def _check_no_zero(zero: Tensor | None) -> None:
    if zero is not None and bool(zero.any()):
        raise BadValue(
            "the config says symmetric but the zero points are not all 0",
            got=f"{int(zero.min())} to {int(zero.max())}",
            hint="set symmetric to false",
        )
