"""The library of CPU kernels, or the reason why it is missing.

`LANCEBILL_NATIVE=off` disables the kernels; `LANCEBILL_NATIVE=avx2` (or another level) uses that level only.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from ctypes import c_char_p, c_double, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from functools import lru_cache
from typing import NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lancebill.backends.cpu.native import abi
from lancebill.backends.cpu.native.abi import IsaLevel
from lancebill.backends.cpu.native.left_out import warn_of_left_out
from lancebill.errors import LaunchError, SpecError
from lancebill.native.address import host_address
from lancebill.native.build import KERNELS
from lancebill.native.load import OFF, SWITCH, open_library, setting

_MAX_KEPT_SCRATCH = 64 << 20  # bytes per thread
_STREAMS = 8  # concurrent memory streams per thread


class _Scratch(threading.local):
    """Scratch memory of one thread, reused from call to call: touching new pages is slow."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def at_least(self, count: int) -> Tensor:
        if self.memory.numel() >= count:
            return self.memory
        memory = torch.empty(count, dtype=torch.uint8, device="cpu")
        if count <= _MAX_KEPT_SCRATCH:
            self.memory = memory
        return memory


_scratch = _Scratch()


@dataclass(frozen=True)
class Library:
    """The loaded library and its levels on this machine."""

    calls: ctypes.CDLL
    levels: tuple[IsaLevel, ...]  # built, and supported by this machine
    best: IsaLevel

    def scratch_bytes(self, layer: abi.LayerStruct, work: abi.WorkStruct) -> int:
        """Scratch bytes of a call. They depend on the layer, the number of rows and the threads only."""
        size: int = self.calls.lancebill_scratch_bytes(ctypes.byref(layer), ctypes.byref(work))
        if size < 0:
            self.raise_status(-size)
        return size

    def dense_bytes(self, rows: int, columns: int) -> int:
        """Scratch bytes of a dense step of a decode program."""
        size: int = self.calls.lancebill_dense_bytes(rows, columns)
        return size

    def linear(self, weights: int, type: int, shape: tuple[int, int], bias: int | None, x: Tensor, out: Tensor) -> None:
        """Rows of fp32 times a matrix of this shape at an address, with an fp32 bias."""
        status = self.calls.lancebill_linear(
            weights, type, *shape, bias, host_address(x), x.stride(0), x.shape[0], host_address(out), out.stride(0),
            torch.get_num_threads(), self.best,
        )  # fmt: skip
        if status:
            self.raise_status(status)

    def run(self, layer: abi.LayerStruct, work: abi.WorkStruct, scratch_bytes: int) -> None:
        """Run one layer or linear."""
        scratch = _scratch.at_least(scratch_bytes)
        work.scratch = host_address(scratch)
        status = self.calls.lancebill_run(ctypes.byref(layer), ctypes.byref(work))
        if status:
            self.raise_status(status)

    def route(self, routing: abi.RoutingStruct) -> bool:
        """Choose experts; False if a token id is outside the hash table."""
        status = self.calls.lancebill_route(ctypes.byref(routing))
        if status and status != abi.BAD_TOKEN:
            self.raise_status(status)
        return not status

    def count_slots(self, slots: abi.SlotsStruct, counts: Tensor) -> None:
        """How many slots each expert has, in doubles."""
        self.calls.lancebill_count_slots(ctypes.byref(slots), counts.numel(), host_address(counts))

    def divide(
        self,
        costs: abi.BatchCostsStruct,
        worth: float,
        counts: NDArray[np.float64],
        begun: NDArray[np.uint8],
        order: NDArray[np.int32],
    ) -> tuple[int, abi.DivisionStruct]:
        """How many of the experts in `order`, which is written, the CPU computes; and what that costs."""
        found = abi.DivisionStruct()
        given = worth, counts.ctypes.data, begun.ctypes.data, len(counts), order.ctypes.data
        number: int = self.calls.lancebill_divide(ctypes.byref(costs), *given, ctypes.byref(found))
        return number, found

    def take_rows(self, slots: abi.SlotsStruct, rows: Tensor, ids: Tensor, weights: Tensor) -> int:
        """Numbers, ids and weights of the rows with a slot of an expert, into room for all rows; how many they are."""
        given = host_address(rows), host_address(ids), host_address(weights)
        taken: int = self.calls.lancebill_take_rows(ctypes.byref(slots), *given)
        return taken

    def raise_status(self, status: int) -> NoReturn:
        text: bytes = self.calls.lancebill_status_text(status)
        raise LaunchError(f"CPU kernel call failed: {text.decode()}")

    def use_openmp(self, wanted: bool = True) -> bool:
        """Compute on the threads of this process's OpenMP library instead of threads of our own; whether it has one.

        For engines that run OpenMP's loops between ours: its threads spin on the cores that ours need.
        """
        try:
            found = ctypes.cast(ctypes.CDLL(None).GOMP_parallel, c_void_p) if wanted else None
        except (AttributeError, OSError, TypeError):  # there is none, or no such lookup on this system
            return False
        self.calls.lancebill_use_openmp(found)
        return True

    def place_threads(self, cpus: Sequence[int], spin_us: int) -> None:
        """Run worker threads on any of these CPUs (none: of all); without a task they spin this long, then sleep."""
        self.calls.lancebill_place_threads((c_int32 * len(cpus))(*cpus), len(cpus), spin_us)

    def watch(self, mailbox: int) -> None:
        """Let a thread of the library serve the mailbox at this address from now on."""
        status = self.calls.lancebill_watch(mailbox)
        if status:
            self.raise_status(status)

    def unwatch(self, mailbox: int) -> None:
        """When this returns, nothing reads the mailbox any more."""
        self.calls.lancebill_unwatch(mailbox)

    @property
    def host_function(self) -> int:
        """The address of `lancebill_host_call`."""
        address = ctypes.cast(self.calls.lancebill_host_call, c_void_p).value
        assert address is not None
        return address

    def read(self, memory: Tensor, threads: int) -> None:
        """Read a buffer in the way the kernels read weights: measures bandwidth, flushes caches."""
        self.calls.lancebill_stream(host_address(memory), memory.numel() * memory.element_size(), threads, _STREAMS)

    def huge_pages(self, memory: Tensor) -> None:
        """Request huge pages. Call it before the first write. The system may ignore it."""
        self.calls.lancebill_huge_pages(host_address(memory), memory.numel() * memory.element_size())


@dataclass(frozen=True)
class State:
    """The library, or the reason why it is missing and a hint."""

    library: Library | None
    why: str
    hint: str | None = None


@lru_cache(maxsize=1)
def state() -> State:
    """Loads the library once."""
    opened = open_library(KERNELS, "the CPU kernels")
    calls = opened.calls
    if calls is None:
        return State(None, opened.why, opened.hint)
    _declare(calls)
    levels = tuple(level for level in IsaLevel if calls.lancebill_levels() >> level & 1)
    chosen = setting()
    best = _parse_level(chosen, levels) if chosen else max(levels)
    if opened.only_here and not chosen:
        warn_of_left_out(best)
    return State(Library(calls, levels, best), f"built, runs {best}")


def library() -> Library | None:
    return state().library


def _parse_level(name: str, levels: tuple[IsaLevel, ...]) -> IsaLevel:
    for level in levels:
        if str(level) == name:
            return level
    expected = f"{OFF} or one of {', '.join(map(str, levels))}"
    raise SpecError("no such level of CPU kernels on this machine", where=SWITCH, expected=expected, got=name)


def _declare(calls: ctypes.CDLL) -> None:
    """The types that ctypes does not assume."""
    calls.lancebill_levels.restype = c_uint32
    calls.lancebill_status_text.restype = c_char_p
    calls.lancebill_scratch_bytes.restype = c_int64
    calls.lancebill_dense_bytes.restype = c_int64
    calls.lancebill_dense_bytes.argtypes = [c_int64, c_int64]
    calls.lancebill_linear.argtypes = [
        c_void_p, c_int32, c_int32, c_int32, c_void_p, c_void_p, c_int64, c_int32, c_void_p, c_int64, c_int32, c_int32,
    ]  # fmt: skip
    calls.lancebill_stream.restype = c_uint64
    calls.lancebill_stream.argtypes = [c_void_p, c_int64, c_int32, c_int32]
    calls.lancebill_huge_pages.argtypes = [c_void_p, c_int64]
    calls.lancebill_use_openmp.argtypes = [c_void_p]
    calls.lancebill_place_threads.argtypes = [c_void_p, c_int32, c_int32]
    calls.lancebill_watch.argtypes = [c_void_p]
    calls.lancebill_unwatch.argtypes = [c_void_p]
    calls.lancebill_unwatch.restype = None
    calls.lancebill_count_slots.argtypes = [c_void_p, c_int32, c_void_p]
    calls.lancebill_count_slots.restype = None
    calls.lancebill_divide.argtypes = [c_void_p, c_double, c_void_p, c_void_p, c_int32, c_void_p, c_void_p]
    calls.lancebill_take_rows.argtypes = [c_void_p, c_void_p, c_void_p, c_void_p]
    calls.lancebill_take_rows.restype = c_int64
    calls.lancebill_host_call.argtypes = [c_void_p]
    calls.lancebill_host_call.restype = None
