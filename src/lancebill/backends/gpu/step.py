"""Launches as values: arguments refer to tensors by name. Needs no GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from lancebill.jit.compile import KernelSource

SCRATCH, CALL, COUNTERS = "scratch", "call", "counters"


@dataclass(frozen=True)
class Ref:
    """A tensor by name: in scratch memory, from the caller, or of a packed matrix ("w13", "w2").

    `mapped`: passed as a tensor map with this many columns (0: one-dimensional).
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
    """One launch. The grid, and arguments that are functions, depend on the number of tokens."""

    source: KernelSource
    values: dict[str, Value]
    grid: Grid
    persistent: int = 0  # blocks per SM; if not 0, the grid is limited to the resident blocks

    def compiled_for(self, arch: int) -> Step:
        """The same launch of a kernel for GPUs of this compute capability."""
        return replace(self, source=replace(self.source, arch=arch))


def scratch_ref(name: str, offset: int = 0) -> Ref:
    return Ref(SCRATCH, name, offset)
