"""`make test-O` runs tests under `python -O`, which removes the library's asserts. Those of tests must stay."""

from __future__ import annotations

from pathlib import Path

import pytest
from hostile import assert_refused

from lancebill.errors import CheckpointError


def test_asserts_of_tests_and_their_helpers_are_kept(tmp_path: Path) -> None:
    """Without this, the tests would pass under -O whatever the code does."""
    with pytest.raises(AssertionError):
        assert tmp_path is None
    with pytest.raises(AssertionError, match="a text that no error has"):
        assert_refused(tmp_path, CheckpointError, "a text that no error has")
