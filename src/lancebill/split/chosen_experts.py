"""The experts that the rows of a batch use, as the host sees them: everything that depends on them needs one wait."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lancebill.backends.cpu.native import Library, abi
from lancebill.native.address import host_address


@dataclass(frozen=True, eq=False)
class ChosenExperts:
    """Physical ids [M, k] in int32 and weights in fp32, both dense and in host memory."""

    native: Library
    ids: Tensor
    weights: Tensor

    def counts(self, expert_map: Tensor, experts: int) -> NDArray[np.float64]:
        """How many slots each expert of a part has. The map is in host memory."""
        counts = torch.empty(experts, dtype=torch.float64, device="cpu")
        self.native.count_slots(self._slots(expert_map), counts)
        found: NDArray[np.float64] = counts.numpy()
        return found

    def take(self, expert_map: Tensor, rows: Tensor, ids: Tensor, weights: Tensor) -> int:
        """Write numbers, ids and weights of the rows that use an expert of this map; returns how many they are."""
        return self.native.take_rows(self._slots(expert_map), rows, ids, weights)

    def _slots(self, expert_map: Tensor) -> abi.SlotsStruct:
        tokens, top_k = self.ids.shape
        ids, weights = host_address(self.ids), host_address(self.weights)
        return abi.SlotsStruct(ids, weights, tokens, top_k, host_address(expert_map), expert_map.numel())
