"""Two's complement integers, one per byte or two: the storage schemes that several formats share.

Codes and zero points are shifted by the smallest value, so that canonical codes start at 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lancebill.errors import BadValue, CannotEncode
from lancebill.formats._floats import from_level, to_level
from lancebill.formats.base import Scheme, codes_of
from lancebill.numbers.bit_packing import Nibbles, pack_bits
from lancebill.numbers.unusual import unusual
from lancebill.numbers.weight import LogicalWeight

_SIGNS = 0x88  # the sign bits of a byte's two codes
ROWS, COLUMNS = "rows", "columns"  # what the two codes of a byte belong to


@dataclass(frozen=True)
class PlainInts(Scheme):
    """One integer per int8, for any number of bits; zero points as int8 in the shape of the scales."""

    batched = True

    def unpack(self, stored: Mapping[str, Tensor], n: int, k: int) -> LogicalWeight:
        lead = self.lead(stored)
        codes = self._codes(stored["codes"], "weights")
        scale = to_level(stored["scale"], self.spec.scales[0], n, k, lead)
        zero = None
        if self.spec.zero is not None:
            zeros = self._codes(stored["zero"], "zero points").to(torch.int16)
            zero = to_level(zeros, self.spec.zero, n, k, lead)
        else:
            check_no_zero(stored.get("zero"))
        return LogicalWeight(self.spec, codes, (scale,), zero)

    def pack(self, weight: LogicalWeight) -> dict[str, Tensor]:
        n, k, half = weight.n, weight.k, 1 << (self.spec.dtype.bits - 1)
        stored = {
            "codes": (weight.codes.to(torch.int16) - half).to(torch.int8),
            "scale": from_level(weight.scales[0], self.part("scale"), n, k),
        }
        if weight.zero is not None:
            stored["zero"] = from_level((weight.zero - half).to(torch.int8), self.part("zero"), n, k)
        return stored

    def _codes(self, signed: Tensor, what: str) -> Tensor:
        bits = self.spec.dtype.bits
        half = 1 << (bits - 1)
        codes = codes_of(signed) + half  # modulo 256: what is too small becomes too large
        if bits < 8 and codes.numel() and unusual(codes.max() >= 2 * half):
            raise BadValue(
                f"{what} outside the range of the config's {bits} bits",
                expected=f"{-half} to {half - 1}",
                got=f"{int(signed.min())} to {int(signed.max())}",
            )
        return codes


@dataclass(frozen=True)
class SignedNibbles(Scheme):
    """Two 4-bit integers per byte, the first in the low nibble: of neighbouring columns, or of neighbouring rows."""

    batched = True

    pairs: str = COLUMNS

    def unpack(self, stored: Mapping[str, Tensor], n: int, k: int) -> LogicalWeight:
        lead = self.lead(stored)
        data = codes_of(stored["codes"]) ^ _SIGNS
        codes: Tensor | Nibbles = Nibbles(data)
        if self.pairs == ROWS:
            codes = torch.stack((data & 0xF, data >> 4), dim=-2).reshape(*lead, n, k)
        return LogicalWeight(self.spec, codes, (to_level(stored["scale"], self.spec.scales[0], n, k, lead),))

    def pack(self, weight: LogicalWeight) -> dict[str, Tensor]:
        codes, by_row = weight.codes, self.pairs == ROWS
        if codes.shape[-2 if by_row else -1] % 2:
            raise CannotEncode(f"two {self.pairs} share a byte", expected="an even number", got=list(codes.shape))
        data = codes[0::2] | codes[1::2] << 4 if by_row else pack_bits(codes, 4, torch.uint8)
        return {
            "codes": from_level(data ^ _SIGNS, self.part("codes"), weight.n, weight.k),
            "scale": from_level(weight.scales[0], self.part("scale"), weight.n, weight.k),
        }


def check_no_zero(zero: Tensor | None) -> None:
    """Raise if a scheme without zero points finds one that is not 0."""
    if zero is not None and unusual(zero.any()):
        raise BadValue(
            "the config says symmetric but some zero points are not 0",
            got=f"{int(zero.min())} to {int(zero.max())}",
            hint="set symmetric to false",
        )
