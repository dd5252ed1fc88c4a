"""Weights in the order of the package's kernels for 16-bit inputs.

Codes are stored in blocks of 64 rows x 16 columns, 32 codes per thread. A thread has, in each of four bands of 16 rows,
one row of either half of 8 rows, and of it two columns of either half of 8 columns. Within a word the codes of even
columns come first. Scales are permuted the same way. Sizes are padded with zeros, and e8m0 scales, which have no zero,
with ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lancebill.moe.layout import Layout, MatrixShape, as_integer
from lancebill.numbers.bit_packing import pack_bits, unpack_bits
from lancebill.numbers.dtypes import BF16, E8M0, biased_type
from lancebill.numbers.spec import ALL
from lancebill.numbers.weight import LogicalWeight

PAD_ROWS, PAD_COLUMNS = 256, 128
_ONE = 127  # the code of 1 in e8m0
_GROUPED = [8 * row + first for first in range(8) for row in range(8)]  # 64 channels
_CHANNELS = [8 * band + first + half for first in range(0, 8, 2) for band in range(4) for half in range(2)]  # 32


@dataclass(frozen=True)
class HummingLayout(Layout):
    """`weight` and `weight_scale`, as the package names them."""

    def storage(self, shape: MatrixShape) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        n, k = padded(shape)
        level = shape.spec.scales[0]
        kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[level.dtype.storage.itemsize]
        high, wide = level.shape(n, k)
        return {
            "weight": ((k // 16, n * shape.spec.dtype.bits // 2), torch.int32),
            "weight_scale": ((wide, high), kind),
        }

    def _write(self, shape: MatrixShape, weight: LogicalWeight, out: Mapping[str, Tensor]) -> None:
        (n, k), bits = padded(shape), shape.spec.dtype.bits
        codes = torch.nn.functional.pad(weight.codes, (0, k - shape.k, 0, n - shape.n))
        codes = _reverse_lower_half(codes) if _stores_reversed(shape) else codes
        # band, half, row of 8 | half, pair, column of the pair
        spread = codes.reshape(-1, n // 64, 4, 2, 8, k // 16, 2, 4, 2).permute(0, 5, 1, 4, 7, 2, 3, 6, 8)
        words = spread.reshape(-1, k // 16, n // 64, 32, 32)[..., _order(bits, codes.device)]
        out["weight"].copy_(pack_bits(words, bits, torch.int32).view(out["weight"].shape))
        out["weight_scale"].copy_(self._scales(shape, as_integer(weight.scales[0])))

    def unpack(self, shape: MatrixShape, packed: Mapping[str, Tensor]) -> LogicalWeight:
        (n, k), bits, lead = padded(shape), shape.spec.dtype.bits, packed["weight"].shape[:-2]
        words = packed["weight"].reshape(-1, k // 16, n // 64, 32, bits)
        order = torch.argsort(_order(bits, words.device))
        spread = unpack_bits(words, bits, 32)[..., order].view(-1, k // 16, n // 64, 8, 4, 4, 2, 2, 2)
        codes = spread.permute(0, 2, 5, 6, 3, 1, 7, 4, 8).reshape(*lead, n, k)[..., : shape.n, : shape.k]
        codes = _restore_lower_half(codes) if _stores_reversed(shape) else codes
        level = shape.spec.scales[0]
        rows, columns = level.shape(shape.n, shape.k)
        scales = self._unpermuted(shape, packed["weight_scale"]).transpose(-1, -2)[..., :rows, :columns]
        stored = scales.contiguous().view(level.dtype.storage)
        return LogicalWeight(shape.spec, codes.contiguous(), (stored,))

    def _scales(self, shape: MatrixShape, scales: Tensor) -> Tensor:
        """[blocks along N, along K] to [along K, along N], padded, rows in the kernels' order."""
        level = shape.spec.scales[0]
        rows, columns = level.shape(*padded(shape))
        value = _ONE if level.dtype == E8M0 else 0
        size = (0, columns - scales.shape[-1], 0, rows - scales.shape[-2])
        turned = torch.nn.functional.pad(scales, size, value=value).transpose(-1, -2)
        order = _channel_order(shape)
        return turned if order is None else turned.unflatten(-1, (-1, len(order)))[..., order].flatten(-2)

    def _unpermuted(self, shape: MatrixShape, scales: Tensor) -> Tensor:
        order = _channel_order(shape)
        if order is None:
            return scales
        back = sorted(range(len(order)), key=order.__getitem__)
        blocks: Tensor = scales.unflatten(-1, (-1, len(order)))
        return blocks[..., back].flatten(-2)


def padded(shape: MatrixShape) -> tuple[int, int]:
    """Rows and columns as stored."""
    return -(-shape.n // PAD_ROWS) * PAD_ROWS, -(-shape.k // PAD_COLUMNS) * PAD_COLUMNS


def _order(bits: int, device: torch.device) -> Tensor:
    """The order of a thread's 32 codes in memory: in every word, even columns first."""
    per = 32 // bits
    places = [first + 2 * (i % (per // 2)) + i // (per // 2) for first in range(0, 32, per) for i in range(per)]
    return torch.tensor(places, dtype=torch.int64, device=device)


def _channel_order(shape: MatrixShape) -> list[int] | None:
    """The order of scales along N: by blocks unchanged, by channel and by group as the kernels apply them."""
    high, wide = shape.spec.scales[0].block
    if high > 1:
        return None
    return _CHANNELS if wide == ALL else _GROUPED


def _stores_reversed(shape: MatrixShape) -> bool:
    """Whether the kernels convert 8-bit integers to bf16. The lower half of the codes is then stored in reverse."""
    return shape.spec.dtype == biased_type(8) and shape.spec.scales[0].dtype == BF16


def _reverse_lower_half(codes: Tensor) -> Tensor:
    """128 .. 255 become 0 .. 127, and 0 .. 127 become 255 .. 128."""
    return torch.where(codes >= 128, codes - 128, 255 - codes)


def _restore_lower_half(codes: Tensor) -> Tensor:
    """The inverse of `_reverse_lower_half`."""
    return torch.where(codes < 128, codes + 128, 255 - codes)
