"""Codes of a matrix reshaped to one row per group; a word holds codes of rows that are far apart.

HQQ and Quanto store such words; they differ in which code is in the lowest bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lancebill.errors import CannotEncode
from lancebill.numbers.weight import LogicalWeight


def unpack_groups(words: Tensor, bits: int, shifts: Sequence[int]) -> Tensor:
    """Codes, one row per group: the first rows are at the first shift of all words, and so on."""
    return torch.cat([(words >> shift) & ((1 << bits) - 1) for shift in shifts]).to(torch.uint8)


def pack_groups(weight: LogicalWeight, size: int, shifts: Sequence[int]) -> Tensor:
    """The inverse, in int32 words where a byte is not enough."""
    if weight.k % size:
        raise CannotEncode("groups must end with their row", expected=f"a multiple of {size} columns", got=weight.k)
    groups = weight.codes.reshape(-1, size).to(torch.int32 if max(shifts) > 7 else torch.uint8)
    groups = torch.nn.functional.pad(groups, (0, 0, 0, -groups.shape[0] % len(shifts)))
    words = torch.zeros_like(groups[: groups.shape[0] // len(shifts)])
    for shift, piece in zip(shifts, groups.chunk(len(shifts))):
        words |= piece << shift
    return words
