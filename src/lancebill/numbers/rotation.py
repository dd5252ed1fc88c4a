"""Hadamard rotations: a matrix that is rotated before it is rounded has no outliers, and its inputs are rotated alike.

Columns are rotated in blocks of a power of two: x -> x H / sqrt(block), with Sylvester's H. That matrix is its own
inverse, so a rotated input times a rotated matrix is the product without rotations.
"""

from __future__ import annotations

import math

from torch import Tensor


def rotate(rows: Tensor, block: int) -> Tensor:
    """fp32 rows [..., k] with every `block` columns rotated; itself if `block` is 0.

    Adds in the order of the fast transform, pairs at distance 1 first, so that the bits do not depend on other rows.
    """
    if block < 2:
        return rows
    shape, distance = rows.shape, 1
    while distance < block:
        first, second = rows.reshape(-1, 2, distance).unbind(1)
        rows = rows.new_empty(first.shape[0], 2, distance)
        rows[:, 0], rows[:, 1] = first + second, first - second
        distance *= 2
    return rows.reshape(shape) * (1 / math.sqrt(block))
