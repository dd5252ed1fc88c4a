"""4-bit codes of several matrices, each in memory of its own, in every order in which checkpoints store them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from lancebill.numbers.bit_packing import Nibbles, pack_awq, pack_bits, turn_awq, turned_stream_codes
from lancebill.numbers.weight import LogicalWeight


def codes_apart(weights: LogicalWeight, *, gated: bool) -> list[Nibbles]:
    """The codes of several experts; of gated matrices also with gate and up apart."""
    n, k = weights.n, weights.k
    matrices = [(weights.codes, n, 1)]
    if gated:
        matrices.append((weights.codes.unflatten(-2, (2, -1)).flatten(0, 1), n // 2, 2))
    out = []
    for codes, rows, count in matrices:
        for store, view in _orders(rows, k):
            tensors = tuple(store(matrix).clone() for matrix in codes)
            nibbles = view(tensors[0].expand(len(tensors), *tensors[0].shape))
            assert isinstance(nibbles, Nibbles)
            nibbles = replace(nibbles, apart=tensors)
            out.append(nibbles if count == 1 else nibbles.join_rows(count))
    return out


Store = Callable[[Tensor], Tensor]
View = Callable[[Tensor], Tensor | Nibbles]


def _orders(n: int, k: int) -> list[tuple[Store, View]]:
    return [
        (lambda codes: pack_bits(codes, 4, torch.uint8), Nibbles),
        (lambda codes: pack_bits(codes, 4, torch.int32).mT.contiguous(), lambda t: turned_stream_codes(t, 4, k)),
        (lambda codes: pack_awq(codes.mT.contiguous()), lambda t: turn_awq(t, n)),
    ]
