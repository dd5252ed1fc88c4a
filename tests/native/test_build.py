"""The CPU kernels with and without a compiler: built whole, refused when stale, missed with a reason."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lancebill.backends.cpu import native
from lancebill.backends.cpu.native import build

COMPILER = build.compiler() is not None
LEVEL = "from lancebill.backends.cpu import native; print(native.state().why)"
CHOSEN = """
from lancebill.backends import oracle
from lancebill.moe.problem import Device
from lancebill.moe.model_shapes import parse_shape
from lancebill.numbers.spec_names import ACTIVATIONS, parse_spec
problem = parse_shape("4,64,64,2").problem(parse_spec("mxfp4"), ACTIVATIONS["bf16"])
choice = oracle.select(problem, Device("cpu"), tokens=1)
print(choice.backend.name)
print(choice.table())
"""


def run(code: str, **variables: str) -> str:
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ | variables
    )
    return told.stdout


def test_switched_off_plain_torch_computes_and_the_table_says_why() -> None:
    told = run(CHOSEN, LANCEBILL_NATIVE="off")
    assert told.startswith("torch-cpu\n")
    assert "cpu: switched off (LANCEBILL_NATIVE=off)" in told


@pytest.mark.skipif(native.library() is None, reason=native.state().why)
def test_a_level_can_be_named() -> None:
    assert run(LEVEL, LANCEBILL_NATIVE="portable") == "built, runs portable\n"
    told = subprocess.run(
        [sys.executable, "-c", LEVEL], capture_output=True, text=True, env=os.environ | {"LANCEBILL_NATIVE": "mmx"}
    )
    assert "no such level" in told.stderr and "got mmx" in told.stderr


@pytest.mark.skipif(native.library() is None, reason=native.state().why)
def test_built_kernels_are_chosen() -> None:
    assert run(CHOSEN, LANCEBILL_NATIVE="").startswith("cpu\n")


def test_without_a_compiler_the_build_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert build.compiler() is None
    with pytest.raises(build.BuildFailed, match="no C\\+\\+ compiler"):
        build.build(tmp_path / "lib.so")


def test_a_compiler_that_refuses_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuses = tmp_path / "cxx"
    refuses.write_text("#!/bin/sh\necho it will not >&2\nexit 1\n")
    refuses.chmod(0o755)
    monkeypatch.setenv("CXX", str(refuses))
    with pytest.raises(build.BuildFailed, match="it will not"):
        build.build(tmp_path / "made" / "lib.so")
    assert not (tmp_path / "made").exists()


@pytest.mark.skipif(not COMPILER, reason="no C++ compiler")
def test_a_flag_that_the_compiler_lacks_is_left_out_where_it_may_be(tmp_path: Path) -> None:
    cxx = build.compiler()
    assert cxx is not None
    assert build._usable_flags(cxx, ("-O1", "?-Wall", "?-mno-such-instructions"), tmp_path) == ("-O1", "-Wall")


def test_every_source_says_which_machine_it_is_for() -> None:
    for machine in ("x86_64", "aarch64", "riscv64"):
        for source in build.sources(machine):
            assert source.machine in (None, machine)
    here = {source.path for machine in ("x86_64", "aarch64") for source in build.sources(machine)}
    assert here == set(build.HERE.glob("*.cpp"))


@pytest.mark.skipif(native.library() is None, reason=native.state().why)
def test_a_library_of_other_sources_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its structs may be others: a stale build is told apart by the sources' fingerprint."""
    monkeypatch.setattr(build, "fingerprint", lambda: "another")
    native.state.cache_clear()
    try:
        assert native.state().library is None
        assert "other sources" in native.state().why
    finally:
        native.state.cache_clear()
