"""Keeps the asserts in tests/helpers under `python -O`.

pytest rewrites asserts in test modules, so that they work under -O too. Other modules must be registered, or their
asserts would be removed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

HELPERS = [path.stem for path in Path(__file__).parent.rglob("*.py") if not path.name.startswith(("test_", "conftest"))]
pytest.register_assert_rewrite(*HELPERS)
