"""The maps of one large batch: which experts the CPU computes, and the place of each copied one in its wave."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lancebill.split.gpu_queues import MailboxQueue


class BatchMaps:
    """Maps that the host writes and the device reads in place: a copy would wait for those of experts."""

    def __init__(self, experts: int, known: int, device: torch.device) -> None:
        """Of a part with so many experts, for physical ids below `known`."""
        queue, self.experts = MailboxQueue(device), experts
        self._written = queue.allocate(8 * known).view(torch.int32).view(2, known)
        self._seen = queue.mapped(self._written)

    def write(self, expert_map: Tensor, copied: Sequence[int], on_cpu: Sequence[int]) -> Tensor:
        """The CPU's map for a batch, in host memory. The last batch has ended: the ids of this one were read."""
        places = expert_map.long()  # of all experts of the part; -1 finds the last number below
        numbers = torch.full((2, self.experts + 1), -1, dtype=torch.int32, device="cpu")
        numbers[0, list(copied)] = torch.arange(len(copied), dtype=torch.int32, device="cpu")
        chosen = list(on_cpu)
        numbers[1, chosen] = torch.tensor(chosen, dtype=torch.int32, device="cpu")
        self._written.copy_(numbers[:, places])
        return self._written[1]

    def on_device(self) -> tuple[Tensor, Tensor]:
        """For each physical id, its number among the experts that are copied, and its place for the CPU; or -1."""
        copied, on_cpu = torch.add(self._seen, 0)  # a kernel reads them, not a copy engine
        return copied, on_cpu


def wave_maps(numbers: Tensor, waves: int, each: int) -> Tensor:
    """For every wave of `each` experts, the place of each physical id, or -1, given the numbers of copied experts."""
    wave = torch.arange(waves, dtype=torch.int32, device=numbers.device).unsqueeze(1)
    others = numbers.div(each, rounding_mode="floor") != wave
    return (numbers % each).expand(waves, -1).masked_fill(others, -1)
