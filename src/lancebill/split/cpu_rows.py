"""The rows of a large batch that use one of the CPU's experts: only those go to host memory and back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lancebill.moe.dispatch import Indexed

Rows = NDArray[np.intp]  # numbers of rows of a batch
MOST_SENT = 0.75  # of all rows: with more, choosing rows takes longer than it saves
STEP = 64  # numbers of rows are multiples of it, because each number has a call of its own


@dataclass(frozen=True, eq=False)
class CpuRows:
    """Some rows of a batch. The last ones may be repetitions without an expert."""

    numbers: Tensor  # in the batch
    x: Tensor
    dispatch: Indexed

    def add_to(self, total: Tensor, sums: Tensor) -> Tensor:
        """Add the sums of these rows to those of all rows."""
        return total.index_add_(0, self.numbers, sums)


def expected_rows(tokens: float, slots: NDArray[np.float64]) -> NDArray[np.float64]:
    """How many rows are sent, if so many of their slots are the CPU's and lie among them by chance."""
    used = tokens * -np.expm1(-slots / tokens) if tokens else np.zeros_like(slots)
    return np.where(used <= MOST_SENT * tokens, used, float(tokens))


def few_enough(used: int, tokens: int) -> bool:
    """Whether only the rows that use an expert of the CPU are sent."""
    return used <= MOST_SENT * tokens


def padded(rows: Rows) -> Rows:
    """With repetitions of the first row of the batch, so that few different numbers of rows come."""
    filled = np.zeros(len(rows) + -len(rows) % STEP, dtype=np.intp)
    filled[: len(rows)] = rows
    return filled


def take_rows(x: Tensor, dispatch: Indexed, numbers: Tensor, count: int) -> CpuRows:
    """The rows with these numbers, which are where the rows are. From `count` on they are repetitions."""
    chosen = dispatch.ids[numbers]
    chosen[count:].fill_(-1)  # not by assignment, which may copy the number to the GPU, behind all copies of experts
    return CpuRows(numbers, x[numbers], Indexed(chosen, dispatch.weights[numbers]))
