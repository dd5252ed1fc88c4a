"""The experts that the rows of a batch use, as the host sees them: everything that depends on them needs one wait."""

from __future__ import annotations

import numpy as np
from torch import Tensor


class ChosenExperts:
    """Physical ids [M, k]; those below 0, and from `known` on, are of no expert."""

    def __init__(self, ids: Tensor, known: int) -> None:
        """Waits until the device has chosen them."""
        self.top_k, self._known = ids.shape[1], known
        self._places = np.clip(ids.cpu().numpy().ravel(), -1, known) + 1  # the first and the last are of no expert

    def counts(self, expert_map: Tensor) -> dict[int, float]:
        """How many rows each expert of a part has. The map is in host memory."""
        counts = np.bincount(self._places, minlength=self._known + 2)[1:-1].tolist()
        used: dict[int, float] = {}
        for slot, count in zip(expert_map.tolist(), counts):
            if slot >= 0 and count:
                used[slot] = used.get(slot, 0.0) + count
        return used

    def rows(self, expert_map: Tensor) -> list[int]:
        """The rows that use an expert of this map, which is in host memory."""
        is_used = np.zeros(self._known + 2, dtype=np.bool_)
        is_used[1:-1] = expert_map.numpy() >= 0
        rows = np.flatnonzero(is_used.take(self._places)) // self.top_k
        first = np.append(True, rows[1:] != rows[:-1])[: len(rows)]
        return rows[first].tolist()  # type: ignore[no-any-return]
