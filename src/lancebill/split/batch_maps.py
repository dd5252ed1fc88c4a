"""What host and device tell each other about one large batch: which experts the rows use and which way each goes.

All of it is in host memory that the device reads and writes in place: a copy would wait for those of experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lancebill.split.cpu_rows import Rows
from lancebill.split.gpu_queues import MailboxQueue


class BatchMaps:
    """Room for the numbers of one batch at a time."""

    def __init__(self, experts: int, known: int, tokens: int, top_k: int, device: torch.device) -> None:
        """Of a part with so many experts, for physical ids below `known` and batches of at most so many tokens."""
        self.experts, self.known, self.tokens, self.device = experts, known, tokens, device
        queue, read = MailboxQueue(device), 2 * known + tokens
        memory = queue.allocate(4 * (read + tokens * top_k)).view(torch.int32)
        seen = queue.mapped(memory)  # by the device
        self._written, self._seen = memory[:read], seen[:read]
        self._fetched, self._fetched_seen = memory[read:], seen[read:]
        self._used = 0

    def fetch(self, numbers: Tensor) -> Tensor:
        """Ids or a flag in host memory, until the next ones. Waits until the current stream of the device is there."""
        size, shape = numbers.numel(), numbers.shape
        torch.add(numbers.clamp(-1, self.known), 0, out=self._fetched_seen[:size].view(shape))  # also from int64
        MailboxQueue(self.device).wait()
        return self._fetched[:size].view(shape)

    def write(self, expert_map: Tensor, waves: Sequence[Sequence[int]], each: int, on_cpu: Sequence[int]) -> Tensor:
        """The CPU's map for a batch, in host memory. The last batch has ended: the ids of this one were read.

        `waves` have at most `each` experts.
        """
        numbers = np.full((2, self.experts + 1), -1, dtype=np.int32)  # of all experts; -1 finds the last number
        for wave, copied in enumerate(waves):
            numbers[0, list(copied)] = np.arange(wave * each, wave * each + len(copied), dtype=np.int32)
        numbers[0, list(on_cpu)] = -1  # it was copied before this was known
        numbers[1, list(on_cpu)] = on_cpu
        self._used = 2 * self.known
        self._written.numpy()[: self._used] = numbers[:, expert_map.numpy()].ravel()
        return self._written[self.known : self._used]

    def add_rows(self, rows: Rows) -> None:
        """The rows of the batch that the CPU gets."""
        end = self._used + len(rows)
        self._written.numpy()[self._used : end] = rows
        self._used = end

    def on_device(self) -> tuple[Tensor, Tensor]:
        """For each physical id `each` times its wave and its place there, or -1; and the rows of the CPU."""
        there = torch.add(self._seen[: self._used], 0)  # a kernel reads them, not a copy engine
        return there[: self.known], there[2 * self.known :].long()


def wave_maps(numbers: Tensor, waves: int, each: int) -> Tensor:
    """For every wave of at most `each` experts, the place of each physical id, or -1."""
    wave = torch.arange(waves, dtype=torch.int32, device=numbers.device).unsqueeze(1)
    others = numbers.div(each, rounding_mode="floor") != wave
    return (numbers % each).expand(waves, -1).masked_fill(others, -1)
