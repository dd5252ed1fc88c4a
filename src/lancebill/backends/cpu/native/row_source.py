"""Where the packing functions read: an address for each expert, or for its gate and its up, and the order of memory.

Codes are read as checkpoints store them, in any of the orders of pack.h, and experts whose codes are tensors of their
own are not stacked: a transposition or a stack would pass over them once more than packing does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from torch import Tensor

from lancebill.native.address import host_address
from lancebill.numbers.bit_packing import Nibbles


class Order(IntEnum):
    """How codes or numbers lie in memory."""

    BY_ROW = 0
    BY_WORD = 1
    BY_COLUMN = 2


@dataclass(frozen=True)
class RowSource:
    """Rows of one matrix of several experts. Valid as long as the tensors that it was made from."""

    order: Order
    stride: int  # bytes from a row, a line of words or a column to the next
    addresses: Sequence[int]  # of each expert's parts: one, or gate and up
    experts: int
    rows: int
    columns: int


def source_of(rows: Tensor | Nibbles, *, gated: bool) -> RowSource | None:
    """The rows [..., n, k] of codes or numbers; None if the library cannot read them where they are."""
    if rows.device.type != "cpu":
        return None
    if isinstance(rows, Tensor):
        return _source(Order.BY_ROW, rows.unsqueeze(-3), (), rows.shape, gated)
    found = None
    if rows.columns is not None:
        found = _source(Order.BY_COLUMN, rows.columns, rows.apart, rows.shape, gated)
    elif rows.turn is None:
        found = _source(Order.BY_ROW, rows.source.unsqueeze(-3), rows.apart, rows.shape, gated)
    elif rows.turn.words is not None:
        words = rows.words
        order = Order.BY_ROW if words.stride(-1) == 1 else Order.BY_WORD
        found = _source(order, words, rows.apart, rows.shape, gated)
    return found or _source(Order.BY_ROW, rows.data.unsqueeze(-3), (), rows.shape, gated)


def _source(order: Order, view: Tensor, apart: Sequence[Tensor], shape: Sequence[int], gated: bool) -> RowSource | None:
    """`view`: [experts, parts, rows or words of rows, elements], without experts if it is one matrix; of matrices that
    are apart, as the first is read."""
    view = view if view.dim() == 4 else view.unsqueeze(0)
    if gated and view.shape[1] == 1 and view.shape[2] % 2 == 0:
        view = view.squeeze(1).unflatten(1, (2, -1))
    side_by_side, along = (-1, -2) if order is Order.BY_ROW else (-2, -1)
    if view.shape[1] != 1 + gated or view.stride(side_by_side) != 1:
        return None
    size = view.element_size()
    stride, (n, k) = view.stride(along) * size, shape[-2:]
    return RowSource(order, stride, _addresses(view, apart, size), len(view), n, k)


def _addresses(view: Tensor, apart: Sequence[Tensor], size: int) -> list[int]:
    experts, parts = view.shape[:2]
    expert, part = (stride * size for stride in view.stride()[:2])
    if not apart:
        first = host_address(view)
        return [first + i * expert + j * part for i in range(experts) for j in range(parts)]
    first = host_address(view) - host_address(apart[0])
    within = parts * experts // len(apart)  # parts that one tensor has
    return [host_address(tensor) + first + j * part for tensor in apart for j in range(within)]
