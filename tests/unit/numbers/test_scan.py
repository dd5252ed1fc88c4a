"""Searches for numbers that are not finite, against torch's own."""

from __future__ import annotations

import pytest
import torch

from lancebill.numbers import native
from lancebill.numbers.dtypes import F32
from lancebill.numbers.scan import Extent, all_finite, contains_any, extent


def test_every_code_is_found() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    for code in range(256):
        without = codes[codes != code].expand(2, 255)
        assert contains_any(codes, [code]) and not contains_any(without, [code])
        assert contains_any(without, [code, code ^ 1])
    assert not contains_any(codes, []) and not contains_any(codes[:0], [0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_every_exponent_is_judged_as_by_torch(dtype: torch.dtype) -> None:
    integer = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    top = (torch.arange(1 << 16) - (1 << 15)).to(torch.int32) << (8 * dtype.itemsize - 16)
    numbers = top.to(integer).view(dtype)
    finite = numbers.isfinite()
    assert all_finite(numbers[finite]) and not all_finite(numbers) and all_finite(numbers[:0])
    for number in numbers[~finite][::37]:
        assert not all_finite(torch.stack([numbers[0], number, numbers[1]]))


def test_nothing_has_no_extent() -> None:
    assert extent(F32, torch.empty(0)) == Extent(0.0, 0.0)


def test_torch_finds_the_same_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda: None)
    test_every_code_is_found()
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        test_every_exponent_is_judged_as_by_torch(dtype)


def test_integers_are_finite() -> None:
    assert all_finite(torch.tensor([-1, 0x7C00, 0x7F80], dtype=torch.int16))
