"""`nox -s families` judges every spelling of every family; `make test` one of each."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-spellings", action="store_true", help="the hub's names and transformers' own")
