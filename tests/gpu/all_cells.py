"""All cells."""

from __future__ import annotations

from collections.abc import Iterator

from cells import Cell
from model_cells import model_cells


def all_cells() -> Iterator[Cell]:
    yield from model_cells()
