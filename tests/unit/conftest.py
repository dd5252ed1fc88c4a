"""Every run of the suite tries the same cases; `--hypothesis-profile=default` searches for new ones."""

from __future__ import annotations

import pytest
from hypothesis import settings


def pytest_configure(config: pytest.Config) -> None:
    """If pytest is given a folder above this one, it reads this file after Hypothesis has loaded the profile."""
    settings.register_profile("same-cases", derandomize=True, deadline=None)
    settings.load_profile(config.getoption("--hypothesis-profile") or "same-cases")
