"""The three storage schemes of Quark, each with its inverse.

Integers and zero points are two's complement; flipping the top bit makes them offset binary. Grouped
integers are stored transposed, floats as a bit stream along K, and `mx` stores each block's exponent
in front of its codes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lancebill.errors import BadValue, CannotEncode
from lancebill.formats._floats import LEVEL_ROLES, from_level, scale_axes, to_level
from lancebill.formats._quark_config import INT_BITS, MX_BLOCK, QuarkPlan
from lancebill.formats.base import BIAS, FLOAT_NAMES, SCALAR, Part, Scheme, codes_of, part
from lancebill.formats.stored import TORCH_DTYPES
from lancebill.numbers.bit_packing import (
    Nibbles,
    as_bytes,
    pack_awq,
    pack_bits,
    transposed,
    turn_awq,
    unpack_awq,
    unpack_bits,
)
from lancebill.numbers.dtypes import E4M3, E5M2, E8M0, UE5M3, DType
from lancebill.numbers.spec import ALL, CHANNEL, TENSOR, Block, QuantSpec
from lancebill.numbers.weight import LogicalWeight

WORDS: dict[str, tuple[str, ...]] = {
    "int2": ("I32",), "int3": ("U8",), "int4": ("I32",), "uint4": ("I32",), "int8": ("I8",), "uint8": ("U8", "I8"),
    "fp4": ("U8",), "fp6_e2m3": ("U8",), "fp6_e3m2": ("U8",), "fp8_e4m3": ("F8_E4M3",), "fp8_e5m2": ("F8_E5M2",),
}  # fmt: skip
SCALE_WORDS: dict[DType, tuple[str, ...]] = {
    E8M0: ("U8", "F8_E8M0"), UE5M3: ("U8",), E4M3: ("F8_E4M3",), E5M2: ("F8_E5M2",),
}  # fmt: skip


@dataclass(frozen=True)
class QuarkScheme(Scheme):
    """Floats: codes as a bit stream along K. Base class of the other schemes."""

    plan: QuarkPlan

    def unpack(self, stored: Mapping[str, Tensor], n: int, k: int) -> LogicalWeight:
        codes = unpack_bits(stored["codes"], self.spec.dtype.bits, k)
        return LogicalWeight(self.spec, codes, self._scales(stored, n, k))

    def pack(self, weight: LogicalWeight) -> dict[str, Tensor]:
        word = TORCH_DTYPES[self._part("codes").dtypes[0]]
        packed = pack_bits(weight.codes, self.spec.dtype.bits, torch.uint8)
        return {"codes": packed.view(word), **self._stored_scales(weight)}

    def _scales(self, stored: Mapping[str, Tensor], n: int, k: int) -> tuple[Tensor, ...]:
        inner = stored["scale"].t() if self.plan.transposed else stored["scale"]
        levels = [inner, stored["scale_2"]] if self.plan.outer is not None else [inner]
        return tuple(to_level(tensor, level, n, k).contiguous() for level, tensor in zip(self.spec.scales, levels))

    def _stored_scales(self, weight: LogicalWeight) -> dict[str, Tensor]:
        stored = {}
        for role, scale in zip(LEVEL_ROLES, weight.scales):
            tensor = scale.t() if role == "scale" and self.plan.transposed else scale
            stored[role] = from_level(tensor.contiguous(), self._part(role), weight.n, weight.k)
        return stored

    def _part(self, role: str) -> Part:
        found = self.part(role)
        assert found is not None, f"no part '{role}'"
        return found


@dataclass(frozen=True)
class QuarkInteger(QuarkScheme):
    """Two's complement or unsigned integers. 4-bit codes are packed eight per word, with `reorder` in AWQ's order."""

    reorder: bool = True

    def unpack(self, stored: Mapping[str, Tensor], n: int, k: int) -> LogicalWeight:
        codes = self._codes(stored["codes"], n, k)
        zero = self._read_zero(stored["zero"], n, k) if "zero" in stored else None
        if self.spec.zero is None:
            if zero is not None and bool((zero != self._half).any()):
                raise BadValue("the config says symmetric but some zero points are not 0")
            zero = None
        return LogicalWeight(self.spec, codes, self._scales(stored, n, k), zero)

    def pack(self, weight: LogicalWeight) -> dict[str, Tensor]:
        n, k, transposed = weight.n, weight.k, self.plan.transposed
        zero = weight.zero
        if zero is None:
            grid = self.spec.scales[0].shape(n, k)
            zero = torch.full(grid, self._half, dtype=torch.int16, device=weight.codes.device)
        return {
            "codes": self._write(weight.codes.t() if transposed else weight.codes),
            "zero": self._write_zero(zero.to(torch.uint8), n),
            **self._stored_scales(weight),
        }

    @property
    def _signed(self) -> bool:
        return self.plan.dtype.startswith("int")

    @property
    def _half(self) -> int:
        """The code of a stored 0: the middle for signed integers, 0 for unsigned ones."""
        return 1 << (self.spec.dtype.bits - 1) if self._signed else 0

    def _codes(self, words: Tensor, n: int, k: int) -> Tensor | Nibbles:
        if not self.plan.transposed:
            return self._read(words, k)
        if self.spec.dtype.bits == 4 and self.reorder:
            return turn_awq((as_bytes(words) ^ self._half * 0x11).view(torch.int32), n)
        return transposed(self._read(words, n))

    def _read(self, words: Tensor, count: int) -> Tensor:
        """`count` codes along the last axis, in offset binary (unsigned codes unchanged)."""
        bits = self.spec.dtype.bits
        if bits in (2, 8):
            return self._read_plain(words)
        codes = unpack_awq(words)[..., :count] if bits == 4 and self.reorder else unpack_bits(words, bits, count)
        return codes ^ self._half

    def _write(self, codes: Tensor) -> Tensor:
        bits = self.spec.dtype.bits
        if bits in (2, 8):
            return self._write_plain(codes)
        codes = codes ^ self._half
        if bits == 4 and self.reorder:
            return pack_awq(torch.nn.functional.pad(codes, (0, -codes.shape[-1] % 8)))
        return pack_bits(codes, bits, torch.uint8 if bits == 3 else torch.int32)

    def _read_plain(self, words: Tensor) -> Tensor:
        """Codes stored one per word: int8, int32, or the single zero point of a tensor."""
        bits = self.spec.dtype.bits
        if words.dtype.itemsize == 1 and bits == 8:
            return codes_of(words) ^ self._half
        low, high = (-self._half, self._half - 1) if self._signed else (0, (1 << bits) - 1)
        value = (words.view(torch.int8) if self._signed and words.dtype == torch.uint8 else words).int()
        if bool(((value < low) | (value > high)).any()):
            raise BadValue(
                f"an {self.plan.dtype} outside its range",
                expected=f"{low} to {high}",
                got=f"{int(value.min())} to {int(value.max())}",
            )
        return (value + self._half).to(torch.uint8)

    def _write_plain(self, codes: Tensor) -> Tensor:
        word = TORCH_DTYPES[self._part("codes").dtypes[0]]
        return (codes.int() - self._half).to(word).contiguous()

    def _write_zero(self, zero: Tensor, n: int) -> Tensor:
        if self.plan.block == TENSOR:
            return self._write_plain(zero).reshape(())
        if self.plan.block == CHANNEL:
            return self._write(zero.reshape(n))
        return self._write(zero.t() if self.plan.transposed else zero)

    def _read_zero(self, words: Tensor, n: int, k: int) -> Tensor:
        rows, columns = self.spec.scales[0].shape(n, k)
        if self.plan.block == TENSOR:
            zero = self._read_plain(words)
        elif self.plan.transposed:
            zero = self._read(words, n).t()
        else:
            zero = self._read(words, rows if self.plan.block[1] == ALL else columns)
        return zero.reshape(rows, columns).to(torch.int16).contiguous()


@dataclass(frozen=True)
class QuarkMx(QuarkScheme):
    """Blocks of 32 codes, each preceded by a signed exponent byte.

    4-bit codes fill 16 bytes in order. 6-bit codes are split: four codes take one byte of their high
    two bits and then two bytes of their low four bits, with the first code in the highest bits.
    """

    def unpack(self, stored: Mapping[str, Tensor], n: int, k: int) -> LogicalWeight:
        blocks = stored["codes"].reshape(n, k // MX_BLOCK, -1)
        exponent = blocks[..., 0].contiguous().view(torch.int8).to(torch.int16) + 127
        if bool((exponent < 0).any()):
            raise BadValue("an exponent of -128 is not a valid scale", expected="-127 to 127")
        payload = blocks[..., 1:]
        if self.spec.dtype.bits == 4:
            codes = unpack_bits(payload, 4, MX_BLOCK)
        else:
            fours = payload.unflatten(-1, (8, 3))
            high = torch.stack([(fours[..., 0] >> s) & 3 for s in (6, 4, 2, 0)], dim=-1)
            low = torch.stack([(fours[..., 1 + s // 2] >> (4 - s % 2 * 4)) & 15 for s in range(4)], dim=-1)
            codes = ((high << 4) | low).flatten(-2)
        return LogicalWeight(self.spec, codes.reshape(n, k), (exponent.to(torch.uint8),))

    def pack(self, weight: LogicalWeight) -> dict[str, Tensor]:
        if weight.k % MX_BLOCK:
            expected = f"a multiple of {MX_BLOCK} columns"
            raise CannotEncode("embedded MX needs rows of whole blocks", expected=expected, got=weight.k)
        exponent = (weight.scales[0].to(torch.int16) - 127).to(torch.int8).view(torch.uint8)
        codes = weight.codes.unflatten(-1, (-1, MX_BLOCK))
        if self.spec.dtype.bits == 4:
            payload = pack_bits(codes, 4, torch.uint8)
        else:
            c = codes.unflatten(-1, (8, 4))
            h, low = c >> 4, c & 15
            high = (h[..., 0] << 6) | (h[..., 1] << 4) | (h[..., 2] << 2) | h[..., 3]
            pairs = [(low[..., 0] << 4) | low[..., 1], (low[..., 2] << 4) | low[..., 3]]
            payload = torch.stack([high, *pairs], dim=-1).flatten(-2)
        return {"codes": torch.cat([exponent.unsqueeze(-1), payload], dim=-1).flatten(-2)}


def quark_scheme(
    plan: QuarkPlan, spec: QuantSpec, inputs: tuple[Part, ...] = (), *, reorder: bool = True
) -> QuarkScheme:
    """The scheme of a weight with this plan."""
    bits = spec.dtype.bits
    if plan.embedded:
        codes = part("codes", ".weight", "U8", f"n k/{MX_BLOCK}*{1 + bits * MX_BLOCK // 8}")
        return QuarkMx(spec, (codes, BIAS, *inputs), plan)
    packed = "" if bits in (2, 8) else "^"
    inner, outer = scale_names(plan)
    level = _level_axes(plan.block, transposed=plan.transposed)
    parts = [
        part("codes", ".weight", WORDS[plan.dtype], f"k n{packed}" if plan.transposed else f"n k{packed}", bits=bits),
        part("scale", inner, _scale_words(spec.scales[0].dtype), level),
    ]
    if plan.outer is not None:
        parts.append(part("scale_2", outer, _scale_words(spec.scales[1].dtype), _level_axes(plan.outer)))
    if plan.dtype not in INT_BITS:
        return QuarkScheme(spec, (*parts, BIAS, *inputs), plan)
    zero_axes = SCALAR if plan.block == TENSOR else (f"{level[0]}{packed}",)
    zero_name = inner.replace("scale", "zero_point")
    parts.append(part("zero", zero_name, WORDS[plan.dtype], zero_axes, bits=bits, optional=not plan.zero))
    return QuarkInteger(spec, (*parts, BIAS, *inputs), plan, reorder)


def scale_names(plan: QuarkPlan) -> tuple[str, str]:
    """The suffixes of the element's scale and of the second scale."""
    return (".weight_scale_2", ".weight_scale") if plan.swapped else (".weight_scale", ".weight_scale_2")


def _level_axes(block: Block, *, transposed: bool = False) -> tuple[str, ...]:
    if block == CHANNEL:
        return ("n", "n 1")
    axes = scale_axes(block)
    return tuple(" ".join(reversed(spelled.split())) for spelled in axes) if transposed else axes


def _scale_words(dtype: DType) -> tuple[str, ...]:
    return SCALE_WORDS.get(dtype) or (FLOAT_NAMES[dtype],)
