"""Fast searches for numbers that are not finite.

`==` and `isfinite` write a bool for every number, and `any` and `all` read them one by one. A bitwise operation and a
minimum or maximum are vectorised: ten times as fast, which matters for the scales of every layer that is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

# Bits of the exponent, which are all set in NaN and infinity.
_EXPONENTS = {torch.float16: 0x7C00, torch.bfloat16: 0x7F80, torch.float32: 0x7F800000}
_INTEGERS = {2: torch.int16, 4: torch.int32}


def contains_any(codes: Tensor, wanted: Iterable[int]) -> bool:
    """Whether any of the `wanted` codes is in a uint8 tensor."""
    return codes.numel() > 0 and any(int((codes ^ code).min()) == 0 for code in wanted)


def all_finite(numbers: Tensor) -> bool:
    """Whether no number is NaN or infinite; true of integers."""
    exponent = _EXPONENTS.get(numbers.dtype)
    if exponent is None or numbers.numel() == 0:
        return True
    exponents = numbers.view(_INTEGERS[numbers.dtype.itemsize]) & exponent
    return int(exponents.max()) < exponent
