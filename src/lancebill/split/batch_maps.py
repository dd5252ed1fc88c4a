"""What the host tells the device about one large batch: which way each expert goes, and which rows the CPU gets."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lancebill.split.gpu_queues import MailboxQueue


class BatchMaps:
    """Numbers that the host writes and the device reads in place: a copy would wait for those of experts."""

    def __init__(self, experts: int, known: int, tokens: int, device: torch.device) -> None:
        """Of a part with so many experts, for physical ids below `known` and batches of at most so many tokens."""
        queue, self.experts, self.known, self.tokens = MailboxQueue(device), experts, known, tokens
        self._written = queue.allocate(4 * (2 * known + tokens)).view(torch.int32)
        self._seen = queue.mapped(self._written)
        self._used = 0

    def write(self, expert_map: Tensor, copied: Sequence[int], on_cpu: Sequence[int]) -> Tensor:
        """The CPU's map for a batch, in host memory. The last batch has ended: the ids of this one were read."""
        numbers = np.full((2, self.experts + 1), -1, dtype=np.int32)  # of all experts; -1 finds the last number
        numbers[0, list(copied)] = np.arange(len(copied), dtype=np.int32)
        numbers[0, list(on_cpu)] = -1  # it was copied before this was known
        numbers[1, list(on_cpu)] = on_cpu
        self._used = 2 * self.known
        self._written.numpy()[: self._used] = numbers[:, expert_map.numpy()].ravel()
        return self._written[self.known : self._used]

    def add_rows(self, rows: Sequence[int]) -> None:
        """The rows of the batch that the CPU gets."""
        end = self._used + len(rows)
        self._written.numpy()[self._used : end] = rows
        self._used = end

    def on_device(self) -> tuple[Tensor, Tensor]:
        """For each physical id its number among the experts that are copied, or -1; and the rows of the CPU."""
        there = torch.add(self._seen[: self._used], 0)  # a kernel reads them, not a copy engine
        return there[: self.known], there[2 * self.known :].long()


def wave_maps(numbers: Tensor, waves: int, each: int) -> Tensor:
    """For every wave of `each` experts, the place of each physical id, or -1, given the numbers of copied experts."""
    wave = torch.arange(waves, dtype=torch.int32, device=numbers.device).unsqueeze(1)
    others = numbers.div(each, rounding_mode="floor") != wave
    return (numbers % each).expand(waves, -1).masked_fill(others, -1)
