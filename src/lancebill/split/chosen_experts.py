"""The experts that the rows of a batch use, as the host sees them: everything that depends on them needs one wait."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from lancebill.split.cpu_rows import Rows


class ChosenExperts:
    """Physical ids [M, k] in host memory, from -1 to `known`: these two are of no expert."""

    def __init__(self, ids: Tensor, known: int) -> None:
        self._known, self._places = known, ids.numpy() + 1

    def counts(self, expert_map: Tensor) -> dict[int, float]:
        """How many rows each expert of a part has. The map is in host memory."""
        counts = np.bincount(self._places.ravel(), minlength=self._known + 2)[1:-1]
        tokens = np.bincount(expert_map.numpy() + 1, weights=counts)[1:].tolist()  # the first are those of no expert
        return {slot: count for slot, count in enumerate(tokens) if count}

    def rows(self, expert_map: Tensor) -> Rows:
        """The rows that use an expert of this map, which is in host memory."""
        is_used = np.zeros(self._known + 2, dtype=np.bool_)
        is_used[1:-1] = expert_map.numpy() >= 0
        return np.flatnonzero(is_used.take(self._places.T).any(0))  # by columns: numpy is slow along short rows
