"""Each test file needs a tool with an environment of its own: `nox -s tools`. Other runs skip them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import judge
import pytest


@pytest.fixture(autouse=True)
def _report_formats(record_property: Callable[[str, object], None]) -> Iterator[None]:
    """tests/campaign/tools.py counts the checkpoints of each format."""
    judge.READ.clear()
    yield
    for name in judge.READ:
        record_property("format", name)
