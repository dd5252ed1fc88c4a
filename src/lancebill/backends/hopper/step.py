"""Launches as values: arguments name tensors instead of holding them. Pure, no GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lancebill.jit.compile import KernelSource

SCRATCH, CALL, COUNTERS = "scratch", "call", "counters"


@dataclass(frozen=True)
class Ref:
    """A tensor by name: in scratch memory, of the caller, or of a packed matrix ("w13", "w2").

    `mapped`: through a tensor map of this many columns (0: one-dimensional).
    """

    owner: str
    name: str
    offset: int = 0  # bytes
    mapped: int | None = None


Tokens = Callable[[int], int]
Grid = Callable[[int], tuple[int, int]]
Value = int | float | Ref | Tokens


@dataclass(frozen=True)
class Step:
    """One launch. Arguments that are functions, and the grid, follow the number of tokens."""

    source: KernelSource
    values: dict[str, Value]
    grid: Grid
    persistent: int = 0  # blocks on an SM: the grid is then no larger than what is resident


def scratch_ref(name: str, offset: int = 0) -> Ref:
    return Ref(SCRATCH, name, offset)
