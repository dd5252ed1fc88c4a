"""Benchmarks of the harness itself are quick."""

from __future__ import annotations

import pytest

from lancebill.bench import ceilings as rates
from lancebill.bench import timing


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use tiny ceilings and caches: these tests check the harness, not this machine."""
    monkeypatch.setattr(rates, "_READ_BYTES", {"cpu": 1 << 20, "cuda": 1 << 26})
    monkeypatch.setattr(rates, "_LARGEST", {"cpu": 128, "cuda": 512})
    monkeypatch.setattr(timing, "last_level_cache", lambda: 1 << 20)
