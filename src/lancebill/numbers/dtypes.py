"""What one stored code means.

A `DType` of up to eight bits is a table of 2**bits floats: integers, mini-floats, power-of-two
scales, codebooks and ternary digits all have the same form. 16- and 32-bit floats have no table;
their codes are the floats themselves.

`encode` follows the same rules for every type:
* Round to nearest. Ties go to the even integer for integer types, otherwise to the even code (for
  floats the even mantissa); between two even or two odd codes, to the lower value.
* Saturate beyond the largest finite value; infinities saturate too.
* NaN becomes a NaN code if the type has one. Otherwise it becomes the code nearest to zero; callers
  reject NaN beforehand (see `codec.quantize`).
* Types with a sign bit and two zeros keep the sign of a zero.
"""

from __future__ import annotations

import hashlib
import math
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING

from lancebill.errors import SpecError

if TYPE_CHECKING:  # slow to import, and names of types are checked first of all
    import torch
    from torch import Tensor

INTEGER, FLOAT, CODEBOOK = "integer", "float", "codebook"


@dataclass(frozen=True)
class DType:
    """A number type: `table[code]` is the value of a code. 16- and 32-bit types have an empty table."""

    name: str
    bits: int
    kind: str
    table: tuple[float, ...] = ()
    ieee: tuple[int, int] | None = None  # (mantissa bits, bias) of a sign-magnitude mini-float
    native_name: str | None = None  # of torch's one-byte float type with the same table
    wide_name: str | None = None  # of the torch dtype of a 16- or 32-bit type

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"DType({self.name})"

    # Compares tables by their bits: a NaN is not equal to itself.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, DType) and self.name == other.name and self._table_bits == other._table_bits

    def __hash__(self) -> int:
        return hash(self.name)

    @cached_property
    def _table_bits(self) -> bytes:
        return struct.pack(f"<{len(self.table)}f", *self.table)

    @cached_property
    def native(self) -> torch.dtype | None:
        """torch's one-byte float type with the same table."""
        from lancebill.numbers.coding import TORCH_TYPES

        return None if self.native_name is None else TORCH_TYPES[self.native_name]

    @cached_property
    def wide(self) -> torch.dtype | None:
        """The torch dtype of a 16- or 32-bit type."""
        from lancebill.numbers.coding import TORCH_TYPES

        return None if self.wide_name is None else TORCH_TYPES[self.wide_name]

    @cached_property
    def storage(self) -> torch.dtype:
        """The torch dtype of codes in a `LogicalWeight`: a byte, or the 16- or 32-bit type itself."""
        import torch

        return self.wide or torch.uint8

    @property
    def _limits(self) -> torch.finfo | torch.iinfo:
        import torch

        return torch.finfo(self.storage) if self.storage.is_floating_point else torch.iinfo(self.storage)

    @property
    def _float_limits(self) -> torch.finfo:
        import torch

        return torch.finfo(self.storage)

    @cached_property
    def max(self) -> float:
        """Largest finite value."""
        return max(self.table[c] for c in self.valid_codes) if self.table else float(self._limits.max)

    @cached_property
    def min(self) -> float:
        """Smallest (most negative) finite value."""
        return min(self.table[c] for c in self.valid_codes) if self.table else float(self._limits.min)

    @cached_property
    def min_positive(self) -> float:
        """Smallest positive value, else 0."""
        if self.kind == INTEGER:
            return 1.0 if self.max > 0 else 0.0
        if not self.table:
            info = self._float_limits
            return info.smallest_normal * info.eps  # the smallest subnormal
        return min((self.table[c] for c in self.valid_codes if self.table[c] > 0), default=0.0)

    @cached_property
    def max_exponent(self) -> int:
        """Exponent of the largest power of two <= `max`: emax in the MX specification."""
        return math.frexp(self.max)[1] - 1

    @cached_property
    def rounding_range(self) -> tuple[float, float]:
        """The values that round to a code: up to half a step beyond the outermost. Values outside saturate."""
        if not self.table:
            half = 2.0**self.max_exponent * self._float_limits.eps / 2 if self.kind == FLOAT else 0.5
            end = min(self.max + half, F32.max)
            return self.min + self.max - end, end
        values = sorted({self.table[c] for c in self.valid_codes})
        lowest, highest = values[:2], values[-2:]
        return values[0] - (lowest[-1] - lowest[0]) / 2, values[-1] + (highest[-1] - highest[0]) / 2

    @cached_property
    def nan_code(self) -> int | None:
        """The first code that is NaN; None if the type has no NaN."""
        return next((c for c, v in enumerate(self.table) if math.isnan(v)), None)

    @cached_property
    def nan_codes(self) -> tuple[int, ...]:
        """All codes that are NaN."""
        return tuple(c for c, v in enumerate(self.table) if math.isnan(v))

    @cached_property
    def valid_codes(self) -> tuple[int, ...]:
        """Codes with a finite value."""
        return tuple(c for c, v in enumerate(self.table) if math.isfinite(v))

    @cached_property
    def magnitude_mask(self) -> int:
        """The bits of a code without its sign bit, for a float or scale type that has one."""
        return len(self.table) // (2 if self.min < 0 else 1) - 1

    @cached_property
    def ordered(self) -> bool:
        """Whether codes without their sign are in the order of the magnitudes, followed by infinity and NaN."""
        half = self.table[: self.magnitude_mask + 1]
        finite = [v for v in half if math.isfinite(v)]
        mirrored = self.min >= 0 or all(a == -b for a, b in zip(half, self.table[len(half) :]) if math.isfinite(a))
        return self.kind == FLOAT and bool(half) and mirrored and list(half[: len(finite)]) == sorted(map(abs, finite))

    def decode(self, codes: Tensor) -> Tensor:
        """Codes to fp32 values."""
        from lancebill.numbers import coding

        return coding.decode(self, codes)

    def encode(self, values: Tensor) -> Tensor:
        """Values (converted to fp32) to the nearest codes, by the rules at the top of this file."""
        from lancebill.numbers import coding

        return coding.encode(self, values)

    def nearest(self, values: Tensor) -> Tensor:
        """decode(encode(values)) for finite fp32 values, but without codes; zeros may lose their sign."""
        from lancebill.numbers import coding

        return coding.nearest(self, values)


def _fp32(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(array("f", values))


def minifloat(
    name: str,
    exponent: int,
    mantissa: int,
    *,
    bias: int | None = None,
    signed: bool = True,
    nans: Sequence[int] = (),
    infinities: Sequence[int] = (),
    native_name: str | None = None,
) -> DType:
    """A sign / exponent / mantissa float. `nans` and `infinities` list non-negative codes."""
    bias = (1 << (exponent - 1)) - 1 if bias is None else bias
    table = []
    for code in range(1 << (exponent + mantissa)):
        e, m = code >> mantissa, code & ((1 << mantissa) - 1)
        value = m * 2.0 ** (1 - bias - mantissa) if e == 0 else (1 + m / (1 << mantissa)) * 2.0 ** (e - bias)
        value = math.nan if code in nans else math.inf if code in infinities else value
        table.append(value)
    if signed:
        table += [-v for v in table]
    return DType(name, exponent + mantissa + int(signed), FLOAT, tuple(table), (mantissa, bias), native_name)


@cache
def int_type(bits: int) -> DType:
    """Two's complement."""
    half = 1 << (_width(bits) - 1)
    return DType(f"int{bits}", bits, INTEGER, tuple(float((c ^ half) - half) for c in range(2 * half)))


@cache
def uint_type(bits: int) -> DType:
    """Unsigned; the codes of weights with a zero point."""
    return DType(f"uint{bits}", bits, INTEGER, tuple(float(c) for c in range(1 << _width(bits))))


@cache
def biased_type(bits: int) -> DType:
    """Offset binary, value = code - 2**(bits-1): the canonical form of signed integers."""
    half = 1 << (_width(bits) - 1)
    return DType(f"uint{bits}b{half}", bits, INTEGER, tuple(float(c - half) for c in range(2 * half)))


def codebook(values: Sequence[float], name: str | None = None) -> DType:
    """Any table of up to 256 entries (a power of two). An unnamed table is named by a hash of its values."""
    count = len(values)
    bits = max(1, (count - 1).bit_length())
    if count != 1 << bits or bits > 8:
        raise SpecError("a codebook has 2, 4, 8 ... 256 entries", got=count)
    table = _fp32(values)
    if not all(map(math.isfinite, table)):
        raise SpecError("the entries of a codebook are finite", got=[v for v in table if not math.isfinite(v)])
    if name is None:
        for standard in (NF4, BNB_FP4, IQ4):
            if standard.table == table:
                return standard
        name = f"codebook{count}#{hashlib.sha256(struct.pack(f'<{count}f', *table)).hexdigest()[:12]}"
    return DType(name, bits, CODEBOOK, table)


def _width(bits: int) -> int:
    if not 1 <= bits <= 8:
        raise SpecError("integer types have 1 to 8 bits", got=bits)
    return bits


E2M1 = minifloat("e2m1", 2, 1, bias=1)
E2M3 = minifloat("e2m3", 2, 3, bias=1)
E3M2 = minifloat("e3m2", 3, 2, bias=3)
E3M4 = minifloat("e3m4", 3, 4, bias=3)
E4M3 = minifloat("e4m3fn", 4, 3, bias=7, nans=(0x7F,), native_name="float8_e4m3fn")
E5M2 = minifloat("e5m2", 5, 2, bias=15, nans=(0x7D, 0x7E, 0x7F), infinities=(0x7C,), native_name="float8_e5m2")
UE5M3 = minifloat("ue5m3", 5, 3, bias=15, signed=False, nans=(0xFF,))
E8M0 = DType("e8m0", 8, FLOAT, tuple(2.0 ** (b - 127) for b in range(255)) + (math.nan,))


def _e4m3fnuz() -> DType:
    """Bias 8; the only NaN is the code of minus zero."""
    positive = minifloat("", 4, 3, bias=8).table[:128]
    table = positive + (math.nan,) + tuple(-v for v in positive[1:])
    return DType("e4m3fnuz", 8, FLOAT, table, native_name="float8_e4m3fnuz")


E4M3FNUZ = _e4m3fnuz()
NF4 = codebook(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
        0.7229568362236023, 1.0,
    ],
    "nf4",
)  # fmt: skip
# bitsandbytes' fp4: its code order is not that of e2m1, and its largest value is one.
BNB_FP4 = codebook(
    [v / 12 for v in (0, 0.0625, 8, 12, 4, 6, 2, 3, 0, -0.0625, -8, -12, -4, -6, -2, -3)],
    "bnbfp4",
)
IQ4 = codebook([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], "iq4")  # GGUF's
# GGUF's types with a grid: magnitudes (the fourth is never stored) and the same with the other sign. IQ1's values lie
# an eighth above or below -1, 0 and 1.
IQ1 = codebook([-0.875, 0.125, 1.125, 1.125, -1.125, -0.125, 0.875, 0.875], "iq1")
IQ2 = codebook([s * v for s in (1, -1) for v in (1, 3.125, 5.375, 5.375)], "iq2")
IQ3 = codebook([s * v for s in (1, -1) for v in (1, 3, 5, 7, 9, 11, 13, 15.5)], "iq3")
IQ3S = codebook([s * v for s in (1, -1) for v in range(1, 16, 2)], "iq3s")
ODD3, ODD4 = codebook(range(1, 16, 2), "odd3"), codebook(range(1, 32, 2), "odd4")  # their inner scales
UINT2B1 = DType("uint2b1", 2, INTEGER, (-1.0, 0.0, 1.0, 2.0))  # GGUF's TQ2_0
# A constant scale: bitsandbytes multiplies int8 rows by their maximum and then by fp32(1/127).
INV127 = DType("inv127", 1, FLOAT, _fp32([1 / 127]) * 2)
# Codes 0, 1, 2 are -1, 0, 1; the fourth code has no meaning.
TERNARY = DType("ternary", 2, INTEGER, (-1.0, 0.0, 1.0, math.nan))

F16 = DType("fp16", 16, FLOAT, wide_name="float16")
BF16 = DType("bf16", 16, FLOAT, wide_name="bfloat16")
F32 = DType("fp32", 32, FLOAT, wide_name="float32")
# Integer zero points can be 2**bits (GPTQ v1), which does not fit in eight bits for 8-bit codes.
ZERO16 = DType("zero16", 16, INTEGER, wide_name="int16")
