"""What one stored code means.

A `DType` of up to eight bits is nothing but a table of 2**bits floats: integers, mini-floats,
power-of-two scales, codebooks and ternary digits are all the same kind of thing. Sixteen- and
32-bit floats have no table; their codes are the floats themselves.

Rules of `encode`, the same for every type:
* round to nearest; a tie goes to the even integer for integer types, to the even code otherwise
  (for floats that is the even mantissa; between two even or two odd codes, to the lower value);
* beyond the largest finite value: saturate, infinities included;
* NaN becomes a NaN code where the type has one; where it has none it is the caller's error and
  becomes the code of zero, or of what is nearest to it (callers check, see `codec.quantize`);
* the sign of a zero is kept by the types that have a sign bit and two zeros.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, cached_property, lru_cache

import torch
from torch import Tensor

from lancebill.errors import SpecError

INTEGER, FLOAT, CODEBOOK = "integer", "float", "codebook"


@dataclass(frozen=True)
class DType:
    """One kind of number: `table[code]` is its value. Wide floats have an empty table."""

    name: str
    bits: int
    kind: str
    table: tuple[float, ...] = ()
    ieee: tuple[int, int] | None = None  # (mantissa bits, bias) of a sign-magnitude mini-float
    native: torch.dtype | None = None  # torch's own one-byte float with this very table
    wide: torch.dtype | None = None

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"DType({self.name})"

    # By bits, since a NaN in a table is not equal to itself.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, DType) and self.name == other.name and self._table_bits == other._table_bits

    def __hash__(self) -> int:
        return hash(self.name)

    @cached_property
    def _table_bits(self) -> bytes:
        return struct.pack(f"<{len(self.table)}f", *self.table)

    @property
    def storage(self) -> torch.dtype:
        """How one code is held in a `LogicalWeight`: a byte, or the wide float itself."""
        return self.wide or torch.uint8

    @cached_property
    def max(self) -> float:
        """Largest finite value."""
        return max(self.table[c] for c in self.valid_codes) if self.table else float(_limits(self.storage).max)

    @cached_property
    def min(self) -> float:
        """Smallest (most negative) finite value."""
        return min(self.table[c] for c in self.valid_codes) if self.table else float(_limits(self.storage).min)

    @cached_property
    def min_positive(self) -> float:
        """Smallest value above zero; 0 where there is none."""
        if self.kind == INTEGER:
            return 1.0 if self.max > 0 else 0.0
        if not self.table:
            info = torch.finfo(self.storage)
            return info.smallest_normal * info.eps  # the smallest subnormal
        return min((self.table[c] for c in self.valid_codes if self.table[c] > 0), default=0.0)

    @cached_property
    def max_exponent(self) -> int:
        """Exponent of the largest power of two that is not above `max`: MX calls it emax."""
        return math.frexp(self.max)[1] - 1

    @cached_property
    def rounding_range(self) -> tuple[float, float]:
        """The values that round to a code: up to half a step beyond the outermost. The rest saturates."""
        if not self.table:
            half = 2.0**self.max_exponent * torch.finfo(self.storage).eps / 2 if self.kind == FLOAT else 0.5
            end = min(self.max + half, torch.finfo(torch.float32).max)
            return self.min + self.max - end, end
        values = sorted({self.table[c] for c in self.valid_codes})
        first, last = values[:2], values[-2:]
        return values[0] - (first[-1] - first[0]) / 2, values[-1] + (last[-1] - last[0]) / 2

    @cached_property
    def nan_code(self) -> int | None:
        """The first code that is NaN; None where the type has no NaN."""
        return next((c for c, v in enumerate(self.table) if math.isnan(v)), None)

    @cached_property
    def valid_codes(self) -> tuple[int, ...]:
        """Codes with a finite value."""
        return tuple(c for c, v in enumerate(self.table) if math.isfinite(v))

    def decode(self, codes: Tensor) -> Tensor:
        """Codes to fp32 values."""
        if self.wide is not None:
            return codes.float()
        if self.native is not None:
            return codes.view(self.native).float()
        if self.kind == INTEGER and self.nan_code is None:
            return _decode_integer(self, codes)
        return _table_on(self, codes.device).index_select(0, codes.reshape(-1).int()).view(codes.shape)

    def encode(self, values: Tensor) -> Tensor:
        """Values (taken as fp32) to the nearest codes, by the rules at the top of this file."""
        if self.wide is not None:
            rounded = values.nan_to_num(nan=0.0).round() if self.kind == INTEGER else values
            return rounded.clamp(self.min, self.max).to(self.wide)
        values = values.float()
        if self.native is not None:
            return values.clamp(self.min, self.max).to(self.native).view(torch.uint8)
        if self.kind == INTEGER:
            codes = _encode_integer(self, values)
        elif self.ieee is not None:
            codes = _encode_minifloat(self, *self.ieee, values)
        else:
            codes = _encode_table(self, values)
        return codes if self.nan_code is None else codes.masked_fill_(values.isnan(), self.nan_code)


def _limits(dtype: torch.dtype) -> torch.finfo | torch.iinfo:
    return torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)


def _twos_complement(dtype: DType) -> bool:
    return dtype.table[0] == 0 and dtype.table[-1] < 0


def _decode_integer(dtype: DType, codes: Tensor) -> Tensor:
    if _twos_complement(dtype):  # sign-extend
        half = 1 << (dtype.bits - 1)
        return (codes ^ half).float().sub_(half)
    return codes.float().add_(dtype.table[0])


def _encode_integer(dtype: DType, values: Tensor) -> Tensor:
    """torch.round is half-to-even, so integers need no search."""
    rounded = values.nan_to_num(nan=0.0).clamp_(dtype.min, dtype.max).round_()
    if _twos_complement(dtype):
        return rounded.to(torch.int32).bitwise_and_((1 << dtype.bits) - 1).to(torch.uint8)
    return rounded.sub_(dtype.table[0]).to(torch.int32).to(torch.uint8)


def _encode_minifloat(dtype: DType, mantissa: int, bias: int, values: Tensor) -> Tensor:
    """What the table search gives, in arithmetic: several times as fast.

    Adding 2**(23 - mantissa) times the value's own power of two makes fp32 round it to the type's
    mantissa, half to even; what that added to the bits is the code within its binade. Below the
    smallest normal the binade is fixed, which gives the subnormals.
    """
    magnitude = values.abs().nan_to_num_(nan=0.0).clamp_(max=dtype.max)
    smallest = (128 - bias) << 23
    exponent = (magnitude.view(torch.int32) & 0x7F800000).clamp_(min=smallest)
    shifter = exponent + ((23 - mantissa) << 23)
    code = magnitude.add_(shifter.view(torch.float32)).view(torch.int32).sub_(shifter)
    code += exponent.sub_(smallest).bitwise_right_shift_(23 - mantissa)
    if dtype.min == 0:
        return code.masked_fill_(values < 0, 0).to(torch.uint8)
    sign = values.view(torch.int32) >> (32 - dtype.bits)
    return code.bitwise_or_(sign.bitwise_and_(1 << (dtype.bits - 1))).to(torch.uint8)


def _encode_table(dtype: DType, values: Tensor) -> Tensor:
    """Nearest entry of any table, by one look-up and one comparison instead of a search.

    The top 16 bits of an fp32 number name an interval that seldom holds more than one decision
    boundary: the look-up gives the lower of the two candidates and the boundary between them.
    """
    boundaries, codes, cells = _search_tables(dtype, values.device)
    values = values.nan_to_num(nan=0.0)
    if cells is None:
        rank = torch.bucketize(values.contiguous(), boundaries, out_int32=True)
    else:
        below, limit = cells
        cell = (values.view(torch.int32) >> 16).bitwise_and_(0xFFFF).reshape(-1)
        rank = below.index_select(0, cell).view(values.shape)
        rank += values > limit.index_select(0, cell).view(values.shape)
    if codes is None:
        return rank.to(torch.uint8)
    return codes.index_select(0, rank.reshape(-1).int()).view(values.shape)


@lru_cache(maxsize=512)
def _table_on(dtype: DType, device: torch.device) -> Tensor:
    return torch.tensor(dtype.table, dtype=torch.float32, device=device)


@lru_cache(maxsize=512)
def _search_tables(dtype: DType, device: torch.device) -> tuple[Tensor, Tensor | None, tuple[Tensor, Tensor] | None]:
    """Sorted decision boundaries (fp32), the code of each interval (None: its rank), the cells.

    A value equal to a boundary goes down. Where the tie must go up, the boundary is moved to the
    next float below; a midpoint that fp32 cannot hold is rounded down, which no fp32 value can tell.
    """
    codes = sorted(dtype.valid_codes, key=lambda c: (dtype.table[c], c))
    codes = [c for i, c in enumerate(codes) if i == 0 or dtype.table[c] != dtype.table[codes[i - 1]]]
    edges = []
    for low, high in itertools.pairwise(codes):
        exact = (Fraction(dtype.table[low]) + Fraction(dtype.table[high])) / 2
        middle = torch.tensor(float(exact), dtype=torch.float32)
        if Fraction(middle.item()) > exact or (Fraction(middle.item()) == exact and low % 2 == 1 and high % 2 == 0):
            middle = torch.nextafter(middle, torch.tensor(-math.inf))
        edges.append(middle.item())
    boundaries = torch.tensor(edges, dtype=torch.float32)
    code_of = None if codes == list(range(len(codes))) else torch.tensor(codes, dtype=torch.uint8, device=device)
    cells = _cells(boundaries)
    return boundaries.to(device), code_of, cells and (cells[0].to(device), cells[1].to(device))


def _cells(boundaries: Tensor) -> tuple[Tensor, Tensor] | None:
    """For each pattern of the top 16 bits: the lowest rank and the boundary above it.

    None where two boundaries share a cell, which a well-spread table does not have.
    """
    top = torch.arange(1 << 16, dtype=torch.int64) << 16
    ends = torch.stack([top, top + 0xFFFF]).to(torch.int32).view(torch.float32)
    ends = torch.where(ends.isfinite().all(0), ends, torch.zeros_like(ends))  # cells that are never looked up
    ranks = torch.bucketize(ends, boundaries)
    below, above = ranks.amin(0), ranks.amax(0)
    if int((above - below).amax()) > 1:
        return None
    return below.to(torch.uint8), torch.cat([boundaries, torch.tensor([math.inf])])[below]


def minifloat(
    name: str,
    exponent: int,
    mantissa: int,
    *,
    bias: int | None = None,
    signed: bool = True,
    nans: Sequence[int] = (),
    infinities: Sequence[int] = (),
    native: torch.dtype | None = None,
) -> DType:
    """A table for sign / exponent / mantissa. `nans` and `infinities` list positive codes."""
    bias = (1 << (exponent - 1)) - 1 if bias is None else bias
    table = []
    for code in range(1 << (exponent + mantissa)):
        e, m = code >> mantissa, code & ((1 << mantissa) - 1)
        value = m * 2.0 ** (1 - bias - mantissa) if e == 0 else (1 + m / (1 << mantissa)) * 2.0 ** (e - bias)
        value = math.nan if code in nans else math.inf if code in infinities else value
        table.append(value)
    if signed:
        table += [-v for v in table]
    return DType(name, exponent + mantissa + int(signed), FLOAT, tuple(table), (mantissa, bias), native)


@cache
def int_type(bits: int) -> DType:
    """Two's complement."""
    half = 1 << (_width(bits) - 1)
    return DType(f"int{bits}", bits, INTEGER, tuple(float((c ^ half) - half) for c in range(2 * half)))


@cache
def uint_type(bits: int) -> DType:
    """Unsigned; what a zero point is subtracted from."""
    return DType(f"uint{bits}", bits, INTEGER, tuple(float(c) for c in range(1 << _width(bits))))


@cache
def biased_type(bits: int) -> DType:
    """Offset binary, value = code - 2**(bits-1): the canonical form of every signed integer."""
    half = 1 << (_width(bits) - 1)
    return DType(f"uint{bits}b{half}", bits, INTEGER, tuple(float(c - half) for c in range(2 * half)))


def codebook(values: Sequence[float], name: str | None = None) -> DType:
    """Any table of up to 256 entries (a power of two). Without a name, one made from the values."""
    count = len(values)
    bits = max(1, (count - 1).bit_length())
    if count != 1 << bits or bits > 8:
        raise SpecError("a codebook has 2, 4, 8 ... 256 entries", got=count)
    table = tuple(torch.tensor(list(values), dtype=torch.float32).tolist())
    if not all(map(math.isfinite, table)):
        raise SpecError("the entries of a codebook are finite", got=[v for v in table if not math.isfinite(v)])
    if name is None:
        known = next((known for known in (NF4, BNB_FP4, IQ4) if known.table == table), None)
        if known is not None:
            return known
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
E4M3 = minifloat("e4m3fn", 4, 3, bias=7, nans=(0x7F,), native=torch.float8_e4m3fn)
E5M2 = minifloat("e5m2", 5, 2, bias=15, nans=(0x7D, 0x7E, 0x7F), infinities=(0x7C,), native=torch.float8_e5m2)
UE5M3 = minifloat("ue5m3", 5, 3, bias=15, signed=False, nans=(0xFF,))
E8M0 = DType("e8m0", 8, FLOAT, tuple(2.0 ** (b - 127) for b in range(255)) + (math.nan,))


def _e4m3fnuz() -> DType:
    """Bias 8, and the code of minus zero is the only NaN."""
    positive = minifloat("", 4, 3, bias=8).table[:128]
    table = positive + (math.nan,) + tuple(-v for v in positive[1:])
    return DType("e4m3fnuz", 8, FLOAT, table, native=torch.float8_e4m3fnuz)


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
# bitsandbytes' own fp4: its codes are not those of e2m1, and it is scaled to reach one.
BNB_FP4 = codebook(
    [v / 12 for v in (0, 0.0625, 8, 12, 4, 6, 2, 3, 0, -0.0625, -8, -12, -4, -6, -2, -3)],
    "bnbfp4",
)
IQ4 = codebook([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], "iq4")  # GGUF's
# A constant as a scale type: bitsandbytes multiplies int8 rows by their maximum and then by fp32(1/127).
INV127 = DType("inv127", 1, FLOAT, (torch.tensor(1 / 127, dtype=torch.float32).item(),) * 2)
# Codes 0, 1, 2 are -1, 0, 1; the fourth code has no meaning.
TERNARY = DType("ternary", 2, INTEGER, (-1.0, 0.0, 1.0, math.nan))

F16 = DType("fp16", 16, FLOAT, wide=torch.float16)
BF16 = DType("bf16", 16, FLOAT, wide=torch.bfloat16)
F32 = DType("fp32", 32, FLOAT, wide=torch.float32)
# Integer zero points reach 2**bits (GPTQ v1), one more than eight bits hold.
ZERO16 = DType("zero16", 16, INTEGER, wide=torch.int16)
