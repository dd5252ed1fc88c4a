"""Mailboxes: words in host memory. Kernels write them to start calls of the CPU kernels, and poll them for the end.

The memory is never given back, because a thread of the library reads it; mailboxes are used again.
"""

from __future__ import annotations

import atexit
import ctypes
import weakref
from collections.abc import Callable, Hashable

from torch import Tensor

from lancebill.backends.cpu.native import Library, abi
from lancebill.errors import LaunchError
from lancebill.native.address import host_address
from lancebill.split.launch_ptx import launch_ptx
from lancebill.split.mailbox_kernels import PTX

LIMIT_S = 60.0  # that the GPU waits for the CPU's part, before its result is NaN
_BYTES, _POOL = 64, 64 << 10  # of a mailbox, which has a cache line of its own, and of the memory for many
_THREADS = 32
_watched: dict[int, Library] = {}


class Mailbox:
    """The mailbox of one queue: a stream, or the captured calls of a graph."""

    def __init__(self, native: Library, address: int, owner: Mailboxes) -> None:
        """`owner`, whose memory it is, gets the address back."""
        self.address, self._words = address, abi.MailboxStruct.from_address(address)
        ctypes.memset(address, 0, _BYTES)
        self._seen = 0  # the number of the last request that the GPU gave up, as far as it was told
        native.watch(address)
        _watched[address] = native
        weakref.finalize(self, _give_back, address, owner).atexit = False

    def ring(self, device: int, stream: int, call: int) -> None:
        """Queue: ask for this call."""
        launch_ptx(PTX, "ring", _THREADS, device, stream, self.address, call)

    def wait(self, device: int, stream: int, sums: Tensor) -> None:
        """Queue: wait until the call was made. If that takes too long, fill its sums with NaN."""
        given = self.address, host_address(sums), sums.numel(), int(LIMIT_S * 1e9)
        launch_ptx(PTX, "wait", _THREADS, device, stream, *given)

    @property
    def answered(self) -> bool:
        """Whether all calls were made that were asked for so far."""
        return bool(self._words.asked == self._words.done)

    def check(self) -> None:
        """Raise if the GPU has waited too long since the last check."""
        before, self._seen = self._seen, self._words.late
        if self._seen != before:
            raise LaunchError(
                f"the CPU did not compute its part within {LIMIT_S:g} seconds, so the result is NaN",
                hint="the process was stopped, or the thread that computes it has ended",
            )


class Mailboxes:
    """Mailboxes in one kind of memory."""

    def __init__(self) -> None:
        self.free: list[int] = []  # addresses that nobody uses
        self._memory: list[Tensor] = []
        self._of_queue: weakref.WeakValueDictionary[Hashable, Mailbox] = weakref.WeakValueDictionary()

    def of_queue(self, key: Hashable, native: Library, allocate: Callable[[int], Tensor]) -> Mailbox:
        """The mailbox of a queue. It lives as long as its calls do."""
        found = self._of_queue.get(key)
        if found is None:
            if not self.free:
                self._memory.append(allocate(_POOL))
                first = -(-host_address(self._memory[-1]) // _BYTES) * _BYTES
                self.free.extend(range(first, first + _POOL - _BYTES, _BYTES))
            found = self._of_queue[key] = Mailbox(native, self.free.pop(), self)
        return found


PINNED = Mailboxes()  # in memory that a GPU can use


def _give_back(address: int, owner: Mailboxes) -> None:
    _watched.pop(address).unwatch(address)
    owner.free.append(address)


def _stop() -> None:
    """Before the process ends, and with it the mapping of the memory."""
    for address, native in _watched.items():
        native.unwatch(address)


atexit.register(_stop)
