"""What host and device tell each other about one large batch: which experts the rows use and which way each goes.

All of it is in host memory that the device reads and writes in place: a copy would wait for those of experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lancebill.moe.dispatch import Indexed
from lancebill.split.chosen_experts import ChosenExperts
from lancebill.split.cpu_rows import CpuRows, few_enough
from lancebill.split.gpu_queues import MailboxQueue, on_device


class BatchMaps:
    """Room for the numbers of one batch at a time: the last one has ended when the next begins (`CudaLane.batch`)."""

    def __init__(self, experts: int, known: int, tokens: int, top_k: int, device: torch.device) -> None:
        """Of a part with so many experts, for physical ids below `known` and batches of at most so many tokens."""
        self.experts, self.known, self.tokens, self.device = experts, known, tokens, device
        queue, sizes = MailboxQueue(device), [2 * tokens * top_k, tokens, known, 1]
        memory = queue.allocate(4 * sum(sizes)).view(torch.int32)
        self._slots, self._rows, self._copied, self._flag = memory.split(sizes)
        self._seen_slots, self._seen_rows, self._seen_copied, self._seen_flag = queue.mapped(memory).split(sizes)
        self.cpu_map = torch.empty(known, dtype=torch.int32, device="cpu")  # of the experts that the CPU computes
        self._sent_ids = torch.empty((tokens, top_k), dtype=torch.int32, device="cpu")
        self._sent_weights = torch.empty_like(self._sent_ids, dtype=torch.float32)
        self._asked: torch.cuda.Event | None = None

    def ask(self, dispatch: Indexed) -> None:
        """Queue that ids and weights go to host memory: by one kernel, if they have the usual types."""
        ids, weights = dispatch.ids, dispatch.weights.float()
        small = ids if ids.dtype == torch.int32 else ids.clamp(-1, self.known).int()  # both ends are no expert
        words = small.view(-1), weights.view(-1).view(torch.int32)
        torch.cat(words, out=self._seen_slots[: 2 * ids.numel()])

    def fetch(self, dispatch: Indexed) -> tuple[Tensor, Tensor]:
        """Ids and weights in host memory, as asked for. Waits until the current stream of the device is there."""
        MailboxQueue(self.device).wait()
        ids, weights = self._slots[: 2 * dispatch.ids.numel()].view(2, *dispatch.ids.shape)
        return ids, weights.view(torch.float32)

    def ask_whether(self, flag: Tensor) -> None:
        """Queue that a flag goes to host memory: in the current stream.

        Copies are slower while a further stream waits for packed waves.
        """
        torch.add(flag.int().view(1), 0, out=self._seen_flag)
        self._asked = MailboxQueue(self.device).mark()

    def answer(self) -> bool:
        """Whether the flag is set. Waits until the stream has come so far."""
        assert self._asked is not None
        self._asked.synchronize()
        return bool(self._flag)

    def cpu_rows(self, chosen: ChosenExperts, expert_map: Tensor, on_cpu: Sequence[int]) -> CpuRows:
        """The rows that use one of these experts; `expert_map` is that of the part."""
        self.cpu_map.numpy()[:] = _with_places(self.experts, on_cpu, on_cpu)[expert_map.numpy()]
        used = chosen.take(self.cpu_map, self._rows, self._sent_ids, self._sent_weights)
        if not few_enough(used, len(chosen.ids)):
            return CpuRows(chosen.ids, chosen.weights, None)
        return CpuRows(self._sent_ids[:used], self._sent_weights[:used], self._seen_rows[:used])

    def copied(self, expert_map: Tensor, waves: Sequence[Sequence[int]], each: int, on_cpu: Sequence[int]) -> Tensor:
        """For each physical id `each` times its wave and its place there, or -1, on the device.

        `waves` have at most `each` experts. What is the CPU's was copied before this was known.
        """
        slots = [slot for wave in waves for slot in wave]
        numbers = [number * each + place for number, wave in enumerate(waves) for place in range(len(wave))]
        places = _with_places(self.experts, slots, numbers)
        places[list(on_cpu)] = -1
        self._copied.numpy()[:] = places[expert_map.numpy()]
        return on_device(self._seen_copied)


def _with_places(experts: int, these: Sequence[int], places: Sequence[int]) -> NDArray[np.int32]:
    """Places by expert, or -1. One more number, which -1 finds, is of no expert."""
    found = np.full(experts + 1, -1, dtype=np.int32)
    found[list(these)] = places
    return found


def wave_maps(numbers: Tensor, waves: int, each: int) -> Tensor:
    """For every wave of at most `each` experts, the place of each physical id, or -1."""
    wave = torch.arange(waves, dtype=torch.int32, device=numbers.device).unsqueeze(1)
    others = numbers.div(each, rounding_mode="floor") != wave
    return (numbers % each).expand(waves, -1).masked_fill(others, -1)
