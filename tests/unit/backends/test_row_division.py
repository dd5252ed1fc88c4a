"""Rows are divided by their scale with one correction of the quotient; 8-bit numbers must come out as by division."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import pytest
import torch

ULP = Fraction(1, 1 << 23)  # of numbers from 1 to 2
NEAR = 32  # farther than derived in `quotients_near_ties`


def nearest(value: Fraction) -> Fraction:
    """The nearest fp32 number, ties to even. The exponent is not limited."""
    exponent = abs(value.numerator).bit_length() - value.denominator.bit_length()
    exponent -= abs(value) < Fraction(2) ** exponent
    unit = Fraction(2) ** (exponent - 23)
    return round(value / unit) * unit


def corrected(x: Fraction, by: Fraction, corrections: int) -> Fraction:
    """As in kernels/convert_row.py."""
    reciprocal = nearest(1 / by)
    q = nearest(x * reciprocal)
    for _ in range(corrections):
        q = nearest(q + nearest(x - q * by) * reciprocal)
    return q


def quotients_near_ties(bits: int) -> Iterator[tuple[Fraction, Fraction, Fraction]]:
    """All (x, by, tie) whose quotient may be rounded to another side of a tie, of numbers with so many bits.

    Powers of two change nothing, so `by` and the tie are from 1 to 2. The first quotient is off by less than 1.5 * ULP,
    and the reciprocal and the residual by less than 2**-24 of themselves, so the sum that is rounded at last is off by
    less than 2**-45. So x / by has to be that near to a middle between fp32 numbers, next to a tie: (tie + half) * by
    within 2**-44 of a multiple of ULP, or of half of it. tie * by is a multiple of ULP / 2**bits, so half * by, which
    is by * ULP / 2, must be as near to such a multiple: by within 8 * ULP of a multiple of 2**(1 - bits).
    """
    multiples = torch.arange(1 << 23, (1 << 24) + 1, 1 << (23 - bits)).view(-1, 1)
    by = (multiples + torch.arange(-NEAR, NEAR + 1)).view(-1, 1, 1)  # in ULP
    tie = torch.arange(1 << bits, 2 << bits).view(-1, 1)
    half = torch.tensor([-2, -1, 2])  # in ULP / 4; below a power of two, numbers are closer
    middle = tie * (1 << (25 - bits)) + half  # in ULP / 4
    product = middle * by  # in ULP**2 / 4
    unit = torch.where(product < 1 << 48, 1 << 24, torch.where(product < 1 << 49, 1 << 25, 1 << 26))
    near = (product + NEAR) % unit <= 2 * NEAR
    inside = (by >= 1 << 23) & (by < 1 << 24) & ((half != -1) == (tie > 1 << bits) | (half > 0))
    for i, j, k in (near & inside).nonzero().tolist():
        x = round(Fraction(int(product[i, j, k]), int(unit[i, j, k]))) * int(unit[i, j, k])
        yield x * ULP * ULP / 4, int(by[i, 0, 0]) * ULP, Fraction(int(tie[j]), 1 << bits)


def side(value: Fraction, tie: Fraction) -> int:
    return (value > tie) - (value < tie)


@pytest.mark.parametrize("bits", [4, 7], ids=["e4m3", "int8"])
def test_one_correction_is_enough(bits: int) -> None:
    cases = list(quotients_near_ties(bits))
    assert len(cases) > 100
    wrong = [[side(corrected(x, by, n), tie) != side(nearest(x / by), tie) for x, by, tie in cases] for n in (0, 1)]
    assert any(wrong[0]) and not any(wrong[1])
