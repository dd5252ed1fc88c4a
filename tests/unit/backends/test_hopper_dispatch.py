"""Dispatch, rows and combine of whole plans, run in Triton's interpreter against the reference."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from project import HELPERS

pytest.importorskip("triton")


def test_plans_in_the_interpreter() -> None:
    """In a process of its own: Triton decides once, when it is imported."""
    script = HELPERS / "interpreted.py"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(script)]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
