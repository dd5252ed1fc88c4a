"""A checkpoint for tests of commands."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import checkpoint


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return checkpoint(tmp_path)
