"""`python -O` removes the library's asserts; wrong input must raise errors all the same.

`make test-O` runs most of the suite under -O. The tests here run the part that tests error handling, in a subprocess,
so that `make test` covers it too.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from hostile import assert_refused
from project import ROOT

from lancebill.errors import CheckpointError

REFUSING = (
    "test_optimized.py", "checkpoint/test_corrupt.py", "checkpoint/test_corrupt_gguf.py", "checkpoint/test_files.py",
    "checkpoint/test_save.py", "checkpoint/test_config.py", "checkpoint/test_check_values.py", "jit/test_jit_cache.py",
    "moe/test_placement.py", "moe/test_problem.py", "moe/test_dispatch.py", "moe/test_activation.py",
    "moe/test_routing.py", "layer/test_input_scales.py", "numbers/test_spec_names.py",
)  # fmt: skip
SLOW = ("valid_weights", "add_up", "share_one_build")  # parts of the names of slow tests that test no errors


def test_asserts_of_tests_and_their_helpers_are_kept(tmp_path: Path) -> None:
    """Without this, the tests would pass under -O whatever the code does."""
    with pytest.raises(AssertionError):
        assert tmp_path is None
    with pytest.raises(AssertionError, match="a text that no error has"):
        assert_refused(tmp_path, CheckpointError, "a text that no error has")


@pytest.mark.skipif(not __debug__, reason="already running under -O")
def test_errors_do_not_depend_on_asserts() -> None:
    files = [ROOT / "tests" / "unit" / file for file in REFUSING]
    names = re.findall(r"def (test_\w+)", "".join(file.read_text(encoding="utf-8") for file in files))
    assert all(any(word in name for name in names) for word in SLOW), "a slow test has another name now"
    chosen = " and ".join(f"not {word}" for word in SLOW)
    command = [sys.executable, "-O", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen, *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-3000:]
