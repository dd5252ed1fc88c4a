"""Act-order: columns quantised in another order than they are stored.

GPTQ and compressed-tensors store the columns in natural order and the group of each column as
`g_idx`. A `LogicalWeight` has its columns sorted by group instead, with the permutation as `perm`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lancebill.errors import BadValue
from lancebill.numbers.weight import LogicalWeight


def unlike_natural(g_idx: Tensor, size: int) -> Tensor:
    """A flag: whether any column j of any expert is not in group j // size."""
    return (g_idx != _natural(g_idx.shape[-1], size, g_idx.device)).any()


def group_order(g_idx: Tensor, size: int) -> Tensor | None:
    """The permutation that sorts columns by group; None if they are sorted already."""
    if not bool(unlike_natural(g_idx, size)):
        return None
    order = torch.argsort(g_idx, stable=True)
    if bool(unlike_natural(g_idx[order], size)):
        raise BadValue(
            f"g_idx does not assign {size} columns to each group",
            expected=f"{size} columns for each of 0 to {(len(g_idx) - 1) // size}",
            got=f"indices {int(g_idx.min())} to {int(g_idx.max())}, {g_idx.unique().numel()} different",
        )
    return order.to(torch.int32)


def reordered(weight: LogicalWeight, perm: Tensor | None) -> LogicalWeight:
    """A weight whose columns are in natural order, with its columns in act-order `perm` (of one expert)."""
    return weight if perm is None else replace(weight, stored=weight.codes[:, perm.long()], perm=perm)


def to_natural_order(weight: LogicalWeight, size: int) -> tuple[Tensor, Tensor]:
    """The codes with their columns in natural order, and the `g_idx` of these columns."""
    g_idx = _natural(weight.k, size, weight.codes.device)
    if weight.perm is None:
        return weight.codes, g_idx
    order = weight.perm.long()
    codes, reordered = torch.empty_like(weight.codes), torch.empty_like(g_idx)
    codes[:, order], reordered[order] = weight.codes, g_idx
    return codes, reordered


def _natural(k: int, size: int, device: torch.device) -> Tensor:
    return torch.arange(k, dtype=torch.int32, device=device) // size
