"""The storage schemes of compressed-tensors.

Three schemes cover every format name: integers packed into 32-bit words, integers one per byte
(`_integers`), and mini-floats (`_floats`). All stored integers are signed. Codes and zero points are both
shifted by the smallest value, so that canonical codes start at 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lancebill.errors import BadValue
from lancebill.formats import _floats
from lancebill.formats._act_order import group_order, reordered, to_natural_order, unlike_natural
from lancebill.formats._floats import WEIGHT, FloatScheme, from_level, scale_axes, scale_part, to_level
from lancebill.formats._integers import PlainInts, check_no_zero
from lancebill.formats.base import BIAS, SCALAR, Module, Part, Scheme, part
from lancebill.numbers.bit_packing import pack_bits, pack_padded, stream_codes, unpack_bits, unpack_padded
from lancebill.numbers.spec import TENSOR, Block, QuantSpec, Scale
from lancebill.numbers.unusual import unusual
from lancebill.numbers.weight import LogicalWeight

# Suffixes of the module's name; the second is used by exports that join with an underscore.
PACKED = (".weight_packed", "_packed")
SCALE = (".weight_scale", "_scale")
GLOBAL_SCALE = (".weight_global_scale", "_global_scale")
ZERO = (".weight_zero_point", "_zero_point")
SHAPE = (".weight_shape", "_shape")
G_IDX = (".weight_g_idx", "_g_idx")

# How 3-, 5-, 6- and 7-bit codes are packed. Old writers put 32 // bits whole codes into each word (PADDED).
# With groups, K follows from the headers and the packed width tells which it is. Otherwise (UNKNOWN) the
# packed tensor is read whole and its width compared with K.
DENSE, PADDED, UNKNOWN = "dense", "padded", "unknown"


@dataclass(frozen=True)
class PackedInts(Scheme):
    """`weight_packed` along K; zero points packed the same way, but along N."""

    batched = True

    words: str = DENSE
    reordered: bool = False

    @property
    def act_order(self) -> bool:
        return self.reordered

    @property
    def views_codes(self) -> bool:
        return self.spec.dtype.bits == 4 and not self.reordered

    def unpack(self, stored: Mapping[str, Tensor], n: int, k: int) -> LogicalWeight:
        bits = self.spec.dtype.bits
        padded = self._padded(stored["codes"], k)
        _check_shape(stored.get("shape"), n, k)
        codes = unpack_padded(stored["codes"], bits, k) if padded else stream_codes(stored["codes"], bits, k)
        zero = None
        if self.spec.zero is not None:
            unpack = unpack_padded if padded else unpack_bits
            zero = unpack(stored["zero"].mT, bits, n).mT.to(torch.int16).contiguous()
        else:
            check_no_zero(stored.get("zero"))
        perm = self._perm(stored["perm"], k) if "perm" in stored else None
        scale = to_level(stored["scale"], self.spec.scales[0], n, k, self.lead(stored))
        return reordered(LogicalWeight(self.spec, codes, (scale,), zero), perm)

    def pack(self, weight: LogicalWeight) -> dict[str, Tensor]:
        n, k, bits, codes = weight.n, weight.k, self.spec.dtype.bits, weight.codes
        stored = {
            "scale": from_level(weight.scales[0], self.part("scale"), n, k),
            "shape": torch.tensor([n, k], dtype=torch.int64, device="cpu"),
        }
        if self.reordered:
            codes, stored["perm"] = to_natural_order(weight, self.spec.group or k)
        stored["codes"] = self._words(codes, bits)
        if weight.zero is not None:
            stored["zero"] = self._words(weight.zero.to(torch.uint8).t(), bits).t().contiguous()
        return stored

    def _perm(self, g_idx: Tensor, k: int) -> Tensor | None:
        """Without reordering, writers store -1 or the natural groups; in a shard these start at any group."""
        size = self.spec.group or k
        if self.reordered:
            return None if bool((g_idx == -1).all()) else group_order(g_idx, size)
        if unusual((g_idx != -1).any() & unlike_natural(g_idx - g_idx[..., :1], size)):
            raise BadValue(
                "g_idx reorders columns but the config's actorder does not",
                hint="actorder 'group' reorders; with 'weight' columns are stored in natural order",
            )
        return None

    def _words(self, codes: Tensor, bits: int) -> Tensor:
        return pack_padded(codes, bits) if self.words == PADDED else pack_bits(codes, bits, torch.int32)

    def _padded(self, packed: Tensor, k: int) -> bool:
        """If both widths are equal, as for small K, the codes are dense, as current writers store them."""
        if self.words != UNKNOWN:
            return self.words == PADDED
        dense, padded = widths(self.spec.dtype.bits, k)
        return packed.shape[-1] == padded != dense


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


def stores_plain_floats(module: Module) -> bool:
    """Whether the file stores unquantised floats for this module."""
    return _floats.stores_plain_floats(module, SCALE)


def _scale(role: str, suffix: tuple[str, ...], level: Scale) -> Part:
    return scale_part(role, suffix, level, _axes(level.block))


def _axes(block: Block) -> tuple[str, ...]:
    """The shapes of a level in this format: a scalar is written as [1]."""
    return SCALAR[::-1] if block == TENSOR else scale_axes(block)


def widths(bits: int, k: int) -> tuple[int, int]:
    """Words per row of K codes: dense, and padded."""
    return -(-k * bits // 32), -(-k // (32 // bits))


def _check_shape(shape: Tensor | None, n: int, k: int) -> None:
    """`weight_shape` is the size of the whole matrix; [n, k] may be a shard of it."""
    if shape is None:
        return
    sizes = shape.reshape(-1, 2)
    if unusual(((sizes[:, 0] < n) | (sizes[:, 1] < k)).any()):
        rows, columns = sizes.amin(0).tolist()
        raise BadValue("weight_shape is smaller than the matrix", expected=[n, k], got=[rows, columns])
