"""Kernels of all collected tests are compiled first, on all cores: one by one they would take longer than the tests."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def compiled(request: pytest.FixtureRequest) -> None:
    """A module of tests that launches kernels has `plans()`: problems and numbers of tokens.

    What does not compile fails in the test that wants it.
    """
    if not torch.cuda.is_available():
        return
    modules = {item.module for item in request.session.items if isinstance(item, pytest.Function)}
    planned = [found for module in modules if "plans" in vars(module) for found in module.plans()]
    if planned:
        from calls import sources_of

        from lancebill.jit.build import build_all

        build_all(sources_of(planned))
