"""The rows of a large batch that use one of the CPU's experts: only those go to host memory and back."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from lancebill.moe.dispatch import Indexed

MOST_SENT = 0.75  # of all rows: with more, choosing rows takes longer than it saves
_STEP = 64  # numbers of rows are multiples of it, because each number has a call of its own


@dataclass(frozen=True, eq=False)
class CpuRows:
    """Some rows of a batch. The last ones may be repetitions without an expert."""

    numbers: Tensor  # in the batch
    x: Tensor
    dispatch: Indexed

    def add_to(self, total: Tensor, sums: Tensor) -> Tensor:
        """Add the sums of these rows to those of all rows."""
        return total.index_add_(0, self.numbers, sums)


def expected_rows(tokens: float, slots: float) -> float:
    """How many rows are sent, if so many of their slots are the CPU's and lie among them by chance."""
    used = tokens * -math.expm1(-slots / tokens) if tokens else 0.0
    return used if used <= MOST_SENT * tokens else tokens


def rows_of_experts(x: Tensor, dispatch: Indexed, expert_map: Tensor) -> CpuRows:
    """The rows that use an expert of this map, which is where the rows are. Waits for their number."""
    ids, experts = dispatch.ids, expert_map.numel()
    mapped = expert_map[ids.clamp(0, experts - 1).long()] >= 0
    used = (mapped & (ids >= 0) & (ids < experts)).any(1).nonzero().flatten()
    count = used.numel()
    numbers = used.new_zeros(-(-count // _STEP) * _STEP)
    numbers[:count] = used
    chosen = ids[numbers]
    chosen[count:].fill_(-1)  # not by assignment, which may copy the number to the GPU, behind all copies of experts
    return CpuRows(numbers, x[numbers], Indexed(chosen, dispatch.weights[numbers]))
