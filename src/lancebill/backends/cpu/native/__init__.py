"""The CPU kernels as a library: found, checked and loaded, or the reason why not.

`LANCEBILL_NATIVE=off` leaves them aside; the name of a level (`avx2`, `portable` ...) keeps them to it.
"""

from __future__ import annotations

import ctypes
import os
import re
import threading
from ctypes import c_char_p, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from lancebill.backends.cpu.native import abi, build
from lancebill.backends.cpu.native.abi import IsaLevel
from lancebill.errors import LaunchError, SpecError

SWITCH = "LANCEBILL_NATIVE"
OFF = "off"
_MOST_KEPT = 64 << 20  # bytes of scratch memory
_STREAMS = 8  # pieces that a thread reads at once


class _Scratch(threading.local):
    """Memory of one thread's calls."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)

    def at_least(self, count: int) -> Tensor:
        if self.memory.numel() >= count:
            return self.memory
        made = torch.empty(count, dtype=torch.uint8)
        if count <= _MOST_KEPT:
            self.memory = made
        return made


_scratch = _Scratch()


@dataclass(frozen=True)
class Library:
    """The loaded library and what it can do here."""

    calls: ctypes.CDLL
    levels: tuple[IsaLevel, ...]  # that were built and that this machine runs
    best: IsaLevel

    @property
    def openmp(self) -> bool:
        """Whether it shares its work among threads."""
        return bool(self.calls.lancebill_has_openmp())

    def scratch_bytes(self, layer: abi.LayerStruct, work: abi.WorkStruct) -> int:
        """What a call needs: the same for all with as many rows and threads."""
        need: int = self.calls.lancebill_scratch_bytes(ctypes.byref(layer), ctypes.byref(work))
        if need < 0:
            self._refuse(-need)
        return need

    def run(self, layer: abi.LayerStruct, work: abi.WorkStruct, need: int) -> None:
        """One layer. A thread keeps the scratch memory of its largest call, up to a limit: new pages are slow."""
        scratch = _scratch.at_least(need)
        work.scratch = scratch.data_ptr()
        status = self.calls.lancebill_run(ctypes.byref(layer), ctypes.byref(work))
        if status:
            self._refuse(status)

    def _refuse(self, status: int) -> NoReturn:
        text: bytes = self.calls.lancebill_status_text(status)
        raise LaunchError(f"the CPU kernels refuse: {text.decode()}")

    def read(self, memory: Tensor, threads: int) -> None:
        """Read a buffer as the kernels read weights."""
        self.calls.lancebill_stream(memory.data_ptr(), memory.numel() * memory.element_size(), threads, _STREAMS)

    def huge_pages(self, memory: Tensor) -> None:
        """Ask for large pages, before the memory is first written; a wish that may go unheard."""
        self.calls.lancebill_huge_pages(memory.data_ptr(), memory.numel() * memory.element_size())


@dataclass(frozen=True)
class State:
    """The library, or why there is none and what to do."""

    library: Library | None
    why: str
    hint: str | None = None


@lru_cache(maxsize=1)
def state() -> State:
    """Loaded once; `LANCEBILL_NATIVE` is read here and nowhere else."""
    wanted = os.environ.get(SWITCH, "")
    if wanted == OFF:
        return State(None, f"switched off ({SWITCH}={OFF})")
    path = build.HERE / build.LIBRARY
    if not path.exists():
        return State(None, "the CPU kernels were not built", _how_to_build())
    try:
        calls = _load(path)
    except OSError as error:
        return State(None, f"the CPU kernels do not load: {error}", _how_to_build())
    if calls.lancebill_sources().decode() != build.fingerprint() or calls.lancebill_abi() != abi.ABI:
        return State(None, "the CPU kernels were built from other sources", _how_to_build())
    levels = tuple(level for level in IsaLevel if calls.lancebill_levels() >> level & 1)
    best = max(levels) if not wanted else _named(wanted, levels)
    return State(Library(calls, levels, best), f"built, runs {best}")


def library() -> Library | None:
    return state().library


def _named(wanted: str, levels: tuple[IsaLevel, ...]) -> IsaLevel:
    for level in levels:
        if str(level) == wanted:
            return level
    raise SpecError(
        "no such level of CPU kernels here", where=SWITCH, expected=f"{OFF} or one of {', '.join(map(str, levels))}",
        got=wanted,
    )  # fmt: skip


def _how_to_build() -> str:
    if build.compiler() is None:
        return f"install a C++ compiler, then: {build.COMMAND}"
    return build.COMMAND


def _load(path: Path) -> ctypes.CDLL:
    """OpenMP's functions come from the copy that torch brought, which must be visible to ours first."""
    for copy in _openmp_loaded():
        ctypes.CDLL(copy, mode=ctypes.RTLD_GLOBAL)
    calls = ctypes.CDLL(str(path))
    calls.lancebill_sources.restype = c_char_p
    calls.lancebill_levels.restype = c_uint32
    calls.lancebill_status_text.restype = c_char_p
    calls.lancebill_scratch_bytes.restype = c_int64
    calls.lancebill_stream.restype = c_uint64
    calls.lancebill_stream.argtypes = [c_void_p, c_int64, c_int32, c_int32]
    calls.lancebill_huge_pages.argtypes = [c_void_p, c_int64]
    return calls


def _openmp_loaded() -> list[str]:
    """OpenMP libraries in this process: torch's own where it brought one."""
    maps = Path("/proc/self/maps")
    text = maps.read_text() if maps.exists() else ""
    found = sorted(set(re.findall(r"(/\S*/lib(?:gomp|omp|iomp5)\b\S*\.so\S*)", text)))
    home = str(Path(torch.__file__).parent)
    return [copy for copy in found if copy.startswith(home)] or found
