"""Under `python -O` asserts of the library are gone: what users can cause must be refused all the same.

`make test-O` runs most of the suite that way. Here a part of it runs in a process of its own, so that no
change slips through in between: the tests whose subject is refusing.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hostile import assert_refused

from lancebill.errors import CheckpointError

HERE = Path(__file__).parent
REFUSING = (
    "test_optimized.py", "test_corrupt.py", "test_corrupt_gguf.py", "test_files.py", "test_save.py", "test_config.py",
    "test_placement.py", "test_problem.py", "test_input_scales.py", "test_grammar.py", "test_dispatch.py",
    "test_activation.py", "test_routing.py", "test_values.py", "test_jit_cache.py",
)  # fmt: skip
SHORT = "not good_values and not add_up and not share_one_build"  # these refuse nothing, and take half of the time


def test_asserts_of_tests_and_their_helpers_are_kept(tmp_path: Path) -> None:
    """Else no test of this suite would prove anything under -O."""
    with pytest.raises(AssertionError):
        assert tmp_path is None
    with pytest.raises(AssertionError, match="a text that no error has"):
        assert_refused(tmp_path, CheckpointError, "a text that no error has")


@pytest.mark.skipif(not __debug__, reason="this is that run")
def test_what_is_refused_is_refused_without_asserts() -> None:
    runner = [sys.executable, "-O", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", SHORT]
    command = [*runner, *(str(HERE / f) for f in REFUSING)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE.parent.parent)
    assert done.returncode == 0, done.stdout[-3000:]
