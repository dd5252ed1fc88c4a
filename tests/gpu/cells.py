"""What a cell is: one thing that a user does on a device, run in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Notes = Mapping[str, Any]


@dataclass(frozen=True)
class Place:
    """Where a cell runs: a device and an empty folder."""

    device: str
    folder: Path


@dataclass(frozen=True)
class Cell:
    """`run` raises if something is wrong, and `unittest.SkipTest` with the reason if it cannot run here."""

    kind: str
    name: str
    part: int
    run: Callable[[Place], Notes | None]
    alone: bool = False  # nothing else runs beside it: it measures time

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


class Failed(AssertionError):
    """A failure with notes for the record."""

    def __init__(self, reason: str, notes: Notes) -> None:
        super().__init__(reason)
        self.notes = notes
