"""All cells."""

from __future__ import annotations

from collections.abc import Iterator

from cells import Cell
from command_cells import command_cells
from layer_cells import layer_cells
from model_cells import model_cells
from pytest_cells import pytest_cells
from timed_cells import timed_cells


def all_cells() -> Iterator[Cell]:
    """The slowest kinds come first, so that no long one is left alone at the end."""
    yield from timed_cells()
    yield from pytest_cells()
    yield from command_cells()
    yield from model_cells()
    yield from layer_cells()
