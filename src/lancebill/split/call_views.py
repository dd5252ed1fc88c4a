"""What one call of a split layer sees of where its experts are, while they may move.

Both parts of a call must agree on which of them computes an expert, so a call begins with a copy of the map. It says
when it has begun and when it has ended: a place on the device is overwritten only when no call may still read it. A
call waits for nothing.
"""

from __future__ import annotations

import ctypes
import threading
from abc import ABC, abstractmethod
from collections.abc import Hashable

import torch
from torch import Tensor

from lancebill.jit.address import address_on
from lancebill.native.address import host_address
from lancebill.split.call_kernels import PTX, THREADS
from lancebill.split.gpu_queues import MailboxQueue, pinned
from lancebill.split.launch_ptx import launch_ptx
from lancebill.split.quiet_stream import done_at_once

_LINE = 8  # words of a cache line: what different streams write is in different lines


class Uses:
    """When each expert was last used, by the number of the layer's calls, in memory of the host."""

    def __init__(self, experts: int, device: torch.device) -> None:
        size = (experts + 1) * 8
        shared = device.type == "cuda"
        memory = pinned(size, device, True) if shared else torch.empty(size, dtype=torch.uint8, device="cpu")
        self.words = memory[:size].view(torch.int64).zero_()  # the number of calls, then the last use of each expert
        self._calls = ctypes.c_int64.from_address(host_address(self.words))  # reading a tensor takes much longer
        with done_at_once(device):
            self.clock = torch.zeros(1, dtype=torch.int64, device=device)
        self._one_at_a_time = threading.Lock()

    @property
    def calls(self) -> int:
        return self._calls.value

    def last(self) -> list[int]:
        """Of every expert; 0: never."""
        last: list[int] = self.words[1:].tolist()
        return last

    def note(self, ids: Tensor) -> None:
        """What the kernel does, which adds to the number of calls atomically: two threads must not lose one."""
        known = ids[(ids >= 0) & (ids < len(self.words) - 1)].long()
        with self._one_at_a_time:
            self.words[0] += 1
            self.words[1:][known] = self.words[0]


class CallView(ABC):
    """The maps of the calls that run one after the other: those of a thread, a stream, or a captured graph.

    `own` and `host` are the maps of the two parts, `words` the numbers of calls that have begun and ended.
    """

    own: Tensor
    host: Tensor
    words: Tensor

    @abstractmethod
    def begin(self, ids: Tensor) -> None:
        """Count the call and the experts it uses, and copy the map."""

    @abstractmethod
    def end(self) -> None: ...

    @property
    def begun(self) -> int:
        return int(self.words[0])

    @property
    def ended(self) -> int:
        return int(self.words[1])


class ThreadView(CallView):
    """Calls of a thread on the CPU."""

    def __init__(self, live: Tensor, everywhere: Tensor, uses: Uses) -> None:
        """`live` changes; `everywhere` is the map of the host's part, which has all experts."""
        self.live, self.everywhere, self.uses = live, everywhere, uses
        self.own, self.host = torch.empty_like(live), torch.empty_like(everywhere)
        self.words = torch.zeros(2, dtype=torch.int64, device="cpu")

    def begin(self, ids: Tensor) -> None:
        self.words[0] += 1
        self.own.copy_(self.live)
        self.host.copy_(self.everywhere.masked_fill(self.own >= 0, -1))
        self.uses.note(ids)

    def end(self) -> None:
        self.words[1] += 1


class StreamView(CallView):
    """Calls of a GPU's stream, or of a graph that is captured on it."""

    def __init__(self, live: Tensor, everywhere: Tensor, uses: Uses, queue: MailboxQueue) -> None:
        self.live, self.uses, self.device = live, uses, live.device.index or 0
        experts = live.numel()
        self._memory = pinned(_LINE * 8 + experts * 4, live.device, queue.capturing)
        self.words = self._memory[:16].view(torch.int64).zero_()
        self.host = self._memory[_LINE * 8 : _LINE * 8 + experts * 4].view(torch.int32)
        with done_at_once(live.device):  # and not captured: a replay must not reset what it counts
            self.count = torch.zeros(1, dtype=torch.int64, device=live.device)
            self.everywhere = everywhere.to(live.device)
            self.own = torch.full_like(live, -1)

    def begin(self, ids: Tensor) -> None:
        memory = [self.words, self.count, self.uses.clock, self.live, self.everywhere, self.own, self.host]
        wide = int(ids.dtype == torch.int64)
        self._launch("begin", *memory, self.live.numel(), ids, wide, ids.numel(), self.uses.words)

    def end(self) -> None:
        self._launch("end", self.words, self.count)

    def _launch(self, kernel: str, *values: int | Tensor) -> None:
        stream = torch.cuda.current_stream(self.live.device).cuda_stream
        numbers = [self._address(value) if isinstance(value, Tensor) else value for value in values]
        launch_ptx(PTX, kernel, THREADS, self.device, stream, *numbers)

    def _address(self, tensor: Tensor) -> int:
        """Of pinned memory, which the GPU reads under the host's address, or of its own."""
        pinned_here = self.words, self.host, self.uses.words
        shared = any(tensor is memory for memory in pinned_here)
        return host_address(tensor) if shared else address_on(tensor, self.live.device)


class CallViews:
    """The views of one layer. They are kept: a captured graph does not say when it ends."""

    def __init__(self, live: Tensor, everywhere: Tensor) -> None:
        self.live, self.everywhere = live, everywhere
        with torch.inference_mode(False):  # later calls write to it, in inference mode or not
            self.uses = Uses(live.numel(), live.device)
        self.held: dict[Hashable, CallView] = {}

    def current(self) -> CallView:
        """The view of this thread's calls, or of the current stream's."""
        queue = MailboxQueue(self.live.device) if self.live.device.type == "cuda" else None
        key = threading.get_ident() if queue is None else queue.key
        found = self.held.get(key)
        if found is None:
            given = self.live, self.everywhere, self.uses
            with torch.inference_mode(False):
                found = self.held[key] = ThreadView(*given) if queue is None else StreamView(*given, queue)
        return found

    def under_way(self) -> list[tuple[CallView, int]]:
        """The calls that have begun and not ended: their view, and their number in it."""
        return [(view, begun) for view in list(self.held.values()) if (begun := view.begun) > view.ended]
