"""Routing, dispatch, row conversion and combine of whole plans, in Triton's interpreter, against the reference."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from project import HELPERS

pytest.importorskip("triton")


WHOLE_PLANS = HELPERS / "interpreted.py"
SINGLE_KERNELS = sorted(HELPERS.glob("interpreted_*.py"))


def test_all_scripts_are_here() -> None:
    assert WHOLE_PLANS.exists() and len(SINGLE_KERNELS) == 5


@pytest.mark.parametrize("scripts", [[WHOLE_PLANS], SINGLE_KERNELS], ids=["whole-plans", "single-kernels"])
def test_plans_in_the_interpreter(scripts: list[Path]) -> None:
    """In separate processes, because Triton reads TRITON_INTERPRET only when it is imported."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *map(str, scripts)]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
