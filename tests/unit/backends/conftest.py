"""The GPU kernels that tests compile: a sample, or all of them with `--all-kernels` (`make kernels`)."""

from __future__ import annotations

import pytest

from lancebill.jit.compile import KernelSource

NAMING_A_FAMILY = ("CODE", "SCALE", "ACT", "KIND")  # constants; other ones differ within a family


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-kernels", action="store_true", help="compile every shipped GPU kernel")


@pytest.fixture(scope="module")
def all_kernels(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--all-kernels", default=False))


@pytest.fixture(scope="module")
def shipped_kernels(all_kernels: bool) -> list[KernelSource]:
    """Of each family the last kernel, which has the largest tiles."""
    pytest.importorskip("triton")
    from lancebill.backends.hopper.shipped import shipped

    sources = list(shipped())
    if all_kernels:
        return sources
    return list({(source.kernel, _family(source)): source for source in sources}.values())


def _family(source: KernelSource) -> tuple[object, ...]:
    constants = dict(source.constants)
    return tuple(constants.get(name) for name in NAMING_A_FAMILY)
