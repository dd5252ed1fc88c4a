"""Asserts of the helpers beside the tests are kept like those of the tests themselves.

pytest writes the asserts of test modules as raises, so that they hold under `python -O` too; of other
modules it does so only when told, and plain asserts there would vanish without a word.
"""

from __future__ import annotations

from pathlib import Path

import pytest

HELPERS = [path.stem for path in Path(__file__).parent.rglob("*.py") if not path.name.startswith(("test_", "conftest"))]
pytest.register_assert_rewrite(*HELPERS)
