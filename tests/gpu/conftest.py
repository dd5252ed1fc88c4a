"""Compiles the kernels of all collected tests first, on all cores; one by one it would take longer than the tests."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def compiled(request: pytest.FixtureRequest) -> None:
    """A test module that launches kernels has `plans()`, which yields problems and numbers of tokens.

    A kernel that does not compile fails in the test that launches it.
    """
    if not torch.cuda.is_available():
        return
    modules = {item.module for item in request.session.items if isinstance(item, pytest.Function)}
    planned = [plan for module in modules if "plans" in vars(module) for plan in module.plans()]
    if planned:
        from calls import sources_of

        from lancebill.jit.build import build_all

        build_all(sources_of(planned))
