"""Many kernels are compiled in several processes, of which one may die."""

from __future__ import annotations

from pathlib import Path

import pytest
from dying_builder import DEADLY, build

from lancebill.jit import build as building
from lancebill.jit.compile import KernelSource


def named(kernel: str) -> KernelSource:
    return KernelSource("lancebill.jit.compile", kernel, (), ())


def test_a_process_that_dies_fails_one_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The kernels that it and others had not compiled yet are compiled again, and each is reported once."""
    monkeypatch.setattr(building, "_build", build)
    sources = [named(kernel) for kernel in ("a", DEADLY, "b", "wrong", "c")]
    reported: list[KernelSource] = []
    failed = building.build_all(sources, tmp_path / "kernels", 2, lambda source, error: reported.append(source))
    assert {source.kernel: error for source, error in failed.items()} == {
        DEADLY: "the compiling process died, perhaps out of memory",
        "wrong": "does not compile",
    }
    assert sorted(source.kernel for source in reported) == sorted(source.kernel for source in sources)
    assert building.build_all([], tmp_path / "kernels", 2, lambda source, error: reported.append(source)) == {}
