"""Routing, dispatch, row conversion and combine of whole plans, in Triton's interpreter, against the reference."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from project import HELPERS

pytest.importorskip("triton")


SCRIPTS = sorted(HELPERS.glob("interpreted*.py"))


def test_all_scripts_are_here() -> None:
    assert len(SCRIPTS) == 6


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_plans_in_the_interpreter(script: Path) -> None:
    """In separate processes, because Triton reads TRITON_INTERPRET only when it is imported."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(script)]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
