"""Every test draws the same random numbers in every run, and asserts in tests/helpers stay under `python -O`.

pytest rewrites asserts in test modules, so that they work under -O too. Other modules must be registered, or their
asserts would be removed.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch

HELPERS = [path.stem for path in Path(__file__).parent.rglob("*.py") if not path.name.startswith(("test_", "conftest"))]
pytest.register_assert_rewrite(*HELPERS)
os.environ["no_proxy"] = "127.0.0.1,localhost"  # the servers of tests are here, also behind a proxy


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """A test that fails fails again, whatever ran before it. Campaigns are where seeds vary."""
    _seed()


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object]) -> None:
    """What several tests share does not depend on which of them comes first."""
    if fixturedef.scope != "function":
        _seed()


# Without a GPU, `torch.manual_seed` notes for later from where each call came: that is a millisecond.
_seed_torch = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed


def _seed() -> None:
    random.seed(0)
    _seed_torch(0)
