"""Compiles the kernels of all selected tests first, on all cores; one by one it would take longer than the tests.

`KERNEL_JOBS` limits the cores: for many pytests at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from lancebill.moe.problem import Problem

JOBS = "KERNEL_JOBS"


@pytest.fixture(scope="session", autouse=True)
def compiled(request: pytest.FixtureRequest) -> None:
    """A kernel that does not compile fails in the test that launches it."""
    if not torch.cuda.is_available():
        return
    planned = [plan for item in request.session.items if isinstance(item, pytest.Function) for plan in plans_of(item)]
    if planned:
        from calls import sources_of

        from lancebill.jit.build import build_all

        build_all(sources_of(planned), jobs=int(os.environ.get(JOBS, 0)) or None)


def plans_of(item: pytest.Function) -> Iterator[tuple[Problem, int]]:
    """The problems and numbers of tokens of a test: from its mark `plans`, a function of its parameters; else from
    `plans()` of its module."""
    mark = item.get_closest_marker("plans")
    if mark is not None:
        yield from mark.args[0](**(item.callspec.params if "callspec" in vars(item) else {}))
    elif "plans" in vars(item.module):
        yield from item.module.plans()
