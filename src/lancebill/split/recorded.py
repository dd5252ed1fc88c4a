"""GPU work that is the same every time, recorded once: the same kernels on the same memory.

Queueing a dozen kernels of torch takes the host longer than the GPU takes to run them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lancebill.numbers.unusual import any_set, assuming, unusual


@dataclass(frozen=True, eq=False)
class Recorded:
    """A CUDA graph of the work, and the flag of the questions that the work asks, if any."""

    graph: torch.cuda.CUDAGraph
    flag: Tensor | None

    def queue(self) -> bool:
        """Let the GPU do it. True: something was unusual, so it must be done again; inside `assuming` never."""
        self.graph.replay()
        if self.flag is None:
            return False
        # The next replay writes over it. By a kernel: a copy would go through a copy engine.
        return unusual(torch.bitwise_or(self.flag, self.flag))


def record(works: Iterable[Callable[[], None]], device: torch.device) -> list[Recorded | None]:
    """Each of these works, which never run at once; None: it waits for the GPU, or copies memory that is not pinned."""
    with torch.cuda.device(device):
        stream, pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
        return [_record(work, stream, pool) for work in works]


def _record(work: Callable[[], None], stream: torch.cuda.Stream, pool: Any) -> Recorded | None:
    with assuming():
        work()  # loads kernels and fills caches
    graph, flag = torch.cuda.CUDAGraph(), None
    try:
        with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"), assuming() as flags:
            work()
            if flags:
                flag = any_set(flags)
    except RuntimeError:
        return None
    return Recorded(graph, flag)
