"""The rows of a large batch that use one of the CPU's experts: only those go to host memory and back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

MOST_ROWS = 2048  # of one call of the CPU: its buffers have room for so many
MOST_SENT = 0.75  # of a batch that fits one call: with more, choosing rows takes longer than it saves


@dataclass(frozen=True, eq=False)
class CpuRows:
    """Rows of a batch that the CPU gets.

    Ids [n, k] in int32 and weights in fp32 stay where they are in host memory until the batch has ended.
    """

    ids: Tensor
    weights: Tensor
    numbers: Tensor | None  # in the batch, in host memory that the device can read; None: all rows are sent


@dataclass(frozen=True, eq=False)
class CpuSums:
    """What the CPU computed for rows of a batch, and their numbers, on the device."""

    sums: Tensor
    numbers: Tensor | None  # None: of all rows

    def add_to(self, total: Tensor) -> Tensor:
        """Add the sums of these rows to those of all rows."""
        return total.add_(self.sums) if self.numbers is None else total.index_add_(0, self.numbers, self.sums)


def expected_rows(tokens: float, slots: NDArray[np.float64]) -> NDArray[np.float64]:
    """How many rows are sent, if so many of their slots are the CPU's and lie among them by chance."""
    used = tokens * -np.expm1(-slots / tokens) if tokens else np.zeros_like(slots)
    return np.where(used <= most_chosen(tokens), used, float(tokens))


def few_enough(used: int, tokens: int) -> bool:
    """Whether only the rows that use an expert of the CPU are sent."""
    return used <= most_chosen(tokens)


def most_chosen(tokens: float) -> float:
    """The most rows that are chosen. Of a batch that does not fit one call, all that the call has room for."""
    return MOST_SENT * tokens if tokens <= MOST_ROWS else MOST_ROWS
