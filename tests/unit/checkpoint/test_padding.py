"""Matrices that cannot be padded with zeros."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lancebill.checkpoint.load.padding import pad
from lancebill.errors import ShardError
from lancebill.formats.quanto import grouped_scheme
from lancebill.numbers.codec import quantize
from lancebill.numbers.dtypes import BF16, E8M0, IQ4, ZERO16, uint_type
from lancebill.numbers.spec import TENSOR, QuantSpec, Scale, Zero, group
from lancebill.numbers.weight import LogicalWeight

WITHOUT_ZERO = QuantSpec(IQ4, (Scale(E8M0, group(32)),))
ONE_ZERO_POINT = QuantSpec(uint_type(4), (Scale(BF16, TENSOR),), Zero(ZERO16, TENSOR))


def _matrix(spec: QuantSpec) -> LogicalWeight:
    return quantize(torch.randn(8, 96), spec)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (_matrix(grouped_scheme(4, 64, "BF16").spec), "inside a block"),
        (_matrix(WITHOUT_ZERO), "a scale of each row that is zero"),
        (replace(_matrix(ONE_ZERO_POINT), zero=torch.tensor([[16]], dtype=torch.int16)), "valid code"),
    ],
    ids=["minimum", "no zero", "zero point"],
)
def test_what_has_no_zeros_cannot_be_padded(weight: LogicalWeight, message: str) -> None:
    assert pad(weight, 8, 96) is weight
    with pytest.raises(ShardError, match=message):
        pad(weight, 16, 128)
