"""The levels of a matrix as one number per row and packed group."""

from __future__ import annotations

import torch
from torch import Tensor

from lancebill.moe.layout import MatrixShape
from lancebill.numbers.spec import ALL, DIV, Level, Scale
from lancebill.numbers.weight import LogicalWeight


def repeat_to_groups(shape: MatrixShape, group: int, level: Level, stored: Tensor) -> Tensor:
    """The numbers of a level, repeated for every row and packed group."""
    stored, columns = repeat_to_rows(shape, level, stored), level.block[1]
    count = -(-shape.k // group)
    if columns == ALL:
        return stored.expand(*stored.shape[:-1], count).contiguous()
    repeats = columns // group
    return (stored if repeats == 1 else stored.repeat_interleave(repeats, dim=-1))[..., :count].contiguous()


def repeat_to_rows(shape: MatrixShape, level: Level, stored: Tensor) -> Tensor:
    rows = level.block[0]
    if rows == 1:
        return stored
    if rows == ALL:
        return stored.expand(*stored.shape[:-2], shape.n, stored.shape[-1])
    return stored.repeat_interleave(rows, dim=-2)[..., : shape.n, :]


def scale_product(shape: MatrixShape, group: int, levels: list[tuple[Scale, Tensor]]) -> Tensor:
    """The product of scale levels, fp32 [..., N, groups]; 1 if there are none."""
    device = levels[0][1].device if levels else "cpu"
    product = torch.ones(shape.n, -(-shape.k // group), dtype=torch.float32, device=device)
    for level, stored in levels:
        numbers = repeat_to_groups(shape, group, level, level.dtype.decode(stored))
        product = product.to(stored.device)
        product = product / numbers if level.op == DIV else product * numbers
    return product


def row_scale(shape: MatrixShape, weight: LogicalWeight) -> Tensor:
    """fp32 [..., N, 1]: the product of all scales that cover whole rows."""
    product = torch.ones(shape.n, 1, dtype=torch.float32, device=weight.device)
    for level, stored in zip(shape.spec.scales, weight.scales):
        if level.block[1] == ALL:
            numbers = repeat_to_rows(shape, level, level.dtype.decode(stored))
            product = product / numbers if level.op == DIV else product * numbers
    return product
