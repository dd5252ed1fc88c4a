"""Routing, dispatch, row conversion and combine of whole plans, in Triton's interpreter, against the reference."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from project import HELPERS

pytest.importorskip("triton")


def test_plans_in_the_interpreter() -> None:
    """In a separate process, because Triton reads TRITON_INTERPRET only when it is imported."""
    scripts = [str(path) for path in sorted(HELPERS.glob("interpreted*.py"))]
    assert len(scripts) == 6
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *scripts]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
