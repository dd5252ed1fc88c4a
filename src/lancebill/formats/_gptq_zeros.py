"""How GPTQ files store zero points.

Version 2 stores them as they are. Version 1 stores them minus one, and a zero point of 0 has no such code. GPTQModel
subtracts one from all codes of a word in one subtraction: a 0 becomes all ones and borrows one from the next code.
Neural Compressor keeps the lowest bits of each difference. AutoGPTQ overwrites the rest of the word. Without a code of
all ones these files are alike; with one, only the name of the tool in the config says which one is meant.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from lancebill.errors import BadValue
from lancebill.numbers.bit_packing import pack_bits, unpack_bits
from lancebill.numbers.unusual import unusual


class Zeros(Enum):
    """How zero points are stored."""

    PLAIN = "as they are"  # version 2; all others are version 1
    BORROWING = "minus one, by one subtraction for all codes of a word"
    SWAPPED = "as BORROWING, with the ones of the first and the third of three words exchanged"
    MASKED = "minus one, the lowest bits of each code"
    UNNAMED = "minus one, by an unknown tool"

    def range(self, bits: int) -> tuple[int, int]:
        """The smallest and largest zero point."""
        return int(self is Zeros.UNNAMED), (1 << bits) - 1


def version_1(quant: Mapping[str, Any], bits: int) -> Zeros:
    """What the tools that a config names make of version 1."""
    for tool, release in _tools(quant):
        if tool == "gptqmodel" and bits == 3 and release >= (0, 9):
            return Zeros.MASKED if release >= (7, 0) else Zeros.SWAPPED
        first = {"gptqmodel": (0, 9), "auto-round": (0, 13)}.get(tool)
        if bits != 3 and first is not None and release >= first:
            return Zeros.BORROWING
    return Zeros.UNNAMED


def _tools(quant: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, int]]]:
    """Names and releases of the tools that wrote a checkpoint."""
    meta = quant.get("meta")
    named = meta.get("quantizer") if isinstance(meta, Mapping) else None
    entries = [*named] if isinstance(named, list) else [named]
    for entry in (*entries, f"auto-round:{quant.get('autoround_version')}"):
        if match := re.match(r"([\w-]+):(\d+)\.(\d+)", str(entry)):
            yield match[1], (int(match[2]), int(match[3]))


def unpack_zeros(words: Tensor, bits: int, n: int, zeros: Zeros, *, symmetric: bool) -> Tensor:
    """The zero points [..., n] of packed words; those of symmetric weights are checked by the caller."""
    if zeros in (Zeros.BORROWING, Zeros.SWAPPED):
        return unpack_bits(words + _ones(words, bits, n, zeros), bits, n)
    codes = unpack_bits(words, bits, n)
    if zeros is Zeros.PLAIN:
        return codes
    largest = (1 << bits) - 1
    if zeros is Zeros.UNNAMED and not symmetric and unusual((codes == largest).any()):
        raise BadValue(
            "zero points of 0 in version 1: tools store them in different ways, and the config names no tool",
            expected='"meta": {"quantizer": ["gptqmodel:..."]} or autoround_version in the config',
            got=f"{int((codes == largest).sum())} of {codes.numel()} stored codes are {largest}",
            hint="name the tool in the config if you know it, or export the checkpoint again as gptq_v2",
        )
    return (codes + 1).bitwise_and_(largest)


def pack_zeros(zero: Tensor, bits: int, zeros: Zeros) -> Tensor:
    """The inverse: zero points [..., n] as words."""
    codes = zero.to(torch.uint8)
    if zeros is Zeros.PLAIN:
        return pack_bits(codes, bits, torch.int32)
    if zeros in (Zeros.BORROWING, Zeros.SWAPPED):
        words = pack_bits(codes, bits, torch.int32)
        return words - _ones(words, bits, codes.shape[-1], zeros)
    return pack_bits((codes - 1).bitwise_and_((1 << bits) - 1), bits, torch.int32)


def _ones(words: Tensor, bits: int, n: int, zeros: Zeros) -> Tensor:
    """The words of n codes of one."""
    ones = torch.ones(n + -n % 32, dtype=torch.uint8, device=words.device)
    packed = pack_bits(ones, bits, torch.int32)
    if zeros is Zeros.SWAPPED:
        packed = packed.unflatten(0, (-1, 3)).flip(1).flatten()
    return packed[: words.shape[-1]]
