"""Building and loading the CPU kernels: with and without a compiler, stale libraries, level selection."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lancebill.backends.cpu import native
from lancebill.backends.cpu.native import left_out
from lancebill.backends.cpu.native.abi import IsaLevel
from lancebill.native import build, load

COMPILER = build.compiler() is not None
PRINT_LEVEL = "from lancebill.backends.cpu import native; print(native.state().why)"
PRINT_CHOICE = """
from lancebill.backends import oracle
from lancebill.moe.device import Device
from lancebill.moe.model_shapes import parse_shape
from lancebill.numbers.spec_names import ACTIVATIONS, parse_spec
problem = parse_shape("4,64,64,2").problem(parse_spec("mxfp4"), ACTIVATIONS["bf16"])
choice = oracle.select(problem, Device("cpu"), tokens=1)
print(choice.backend.name)
print(choice.table())
"""
RUN_ANYWAY = """
from lancebill.backends.cpu import BACKEND
from lancebill.errors import LaunchError
try:
    BACKEND.executor(None, None, None)
except LaunchError as error:
    print(error)
"""


def run_python(code: str, **variables: str) -> str:
    finished = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ | variables
    )
    return finished.stdout


def test_switched_off_kernels_fall_back_to_torch_cpu() -> None:
    output = run_python(PRINT_CHOICE, LANCEBILL_NATIVE="off")
    assert output.startswith("torch-cpu\n")
    assert "cpu: switched off (LANCEBILL_NATIVE=off)" in output
    assert "switched off" in run_python(RUN_ANYWAY, LANCEBILL_NATIVE="off")


@pytest.mark.skipif(native.library() is None, reason=native.state().why)
def test_level_from_the_environment() -> None:
    assert run_python(PRINT_LEVEL, LANCEBILL_NATIVE="portable") == "built, runs portable\n"
    finished = subprocess.run(
        [sys.executable, "-c", PRINT_LEVEL],
        capture_output=True,
        text=True,
        env=os.environ | {"LANCEBILL_NATIVE": "mmx"},
    )
    assert "no such level" in finished.stderr and "got mmx" in finished.stderr


@pytest.mark.skipif(native.library() is None, reason=native.state().why)
def test_oracle_chooses_built_kernels() -> None:
    assert run_python(PRINT_CHOICE, LANCEBILL_NATIVE="").startswith("cpu\n")


def test_build_without_a_compiler_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert build.compiler() is None
    with pytest.raises(build.BuildFailed, match="no C\\+\\+ compiler"):
        build.build(build.KERNELS, tmp_path / "lib.so")


def test_a_library_that_is_not_built_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(load.SWITCH, raising=False)
    missing = build.NativeLibrary(tmp_path, "lib.so")
    hints = [load.open_library(missing, "kernels").hint]
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    opened = load.open_library(missing, "kernels")
    assert opened.calls is None and opened.why == "kernels are not built"
    assert opened.hint == f"install a C++ compiler, then: {build.COMMAND}"
    assert not COMPILER or hints == [build.COMMAND]


def test_failed_build_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "cxx"
    broken.write_text("#!/bin/sh\necho broken compiler >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(build.BuildFailed, match="broken compiler"):
        build.build(build.KERNELS, tmp_path / "made" / "lib.so")
    assert not (tmp_path / "made").exists()


@pytest.mark.skipif(not COMPILER, reason="no C++ compiler")
def test_unknown_optional_flags_are_dropped(tmp_path: Path) -> None:
    cxx = build.compiler()
    assert cxx is not None
    assert build._usable_flags(cxx, ("-O1", "?-Wall", "?-mno-such-instructions"), tmp_path) == ("-O1", "-Wall")


@pytest.mark.parametrize("library", build.LIBRARIES, ids=lambda library: library.name)
def test_every_source_belongs_to_a_machine(library: build.NativeLibrary) -> None:
    for machine in ("x86_64", "aarch64", "riscv64"):
        for source in library.sources(machine):
            assert source.machine in (None, machine)
    built = {source.path for machine in ("x86_64", "aarch64") for source in library.sources(machine)}
    assert built == set(library.folder.glob("*.cpp")) and built


@pytest.mark.skipif(native.library() is None, reason=native.state().why)
def test_stale_library_is_not_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Its structs may differ. The fingerprint of the sources detects it, and a warning says how to build it again."""
    monkeypatch.setattr(build.NativeLibrary, "fingerprint", "another")
    native.state.cache_clear()
    try:
        assert native.state().library is None
        assert "other sources" in native.state().why
        (warning,) = caplog.messages
        assert "other sources" in warning and build.COMMAND in warning
    finally:
        native.state.cache_clear()


def test_a_compiler_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(build.BuildFailed, match="No such file"):
        build.build(build.NUMBERS, tmp_path / "lib.so", cxx=str(tmp_path / "c++"))


def test_building_again_builds_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    if all(library.is_current(everywhere=False) for library in build.LIBRARIES):
        build.main([])
        assert capsys.readouterr().out.count("is up to date") == len(build.LIBRARIES)


@pytest.mark.skipif(not COMPILER, reason="no C++ compiler")
@pytest.mark.parametrize(("everywhere", "left_out"), [(True, True), (False, True), (False, False)])
def test_a_library_says_whether_it_lacks_levels_of_other_machines(
    everywhere: bool, left_out: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not if this machine runs all that the compiler can build: then a warning of a lesser machine would be wrong."""
    (tmp_path / "level.cpp").write_text("")
    library = build.NativeLibrary(tmp_path, "lib.so")
    if left_out:
        monkeypatch.setattr(build, "runnable_here", lambda sources, cxx, folder: [])
    build.build(library, library.path, everywhere=everywhere)
    assert library.is_current(everywhere=False)
    assert library.is_current(everywhere=True) == (everywhere or not left_out)


@pytest.mark.skipif(not COMPILER, reason="no C++ compiler")
def test_a_folder_that_cannot_be_written_is_an_error_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(build, "LIBRARIES", (build.NativeLibrary(tmp_path / "file", "lib.so"),))
    with pytest.raises(SystemExit, match=r"lib\.so was not built: .*file"):
        build.main([])


@pytest.mark.skipif(native.library() is None, reason=native.state().why)
def test_levels_that_run_here_are_built_and_the_others_compile(tmp_path: Path) -> None:
    """An installation in place has only the first. The others are checked without generating code."""
    cxx, library = build.compiler(), native.library()
    assert cxx is not None and library is not None
    sources = build.buildable(build.KERNELS, cxx, platform.machine(), tmp_path)
    here = build.runnable_here(sources, cxx, tmp_path)
    levels = {f"level_{level}" for level in library.levels}
    assert levels == {source.path.stem for source in here if source.path.stem.startswith("level_")}
    for source in sources:
        if source not in here:
            command = [cxx, *build.FLAGS, f"-I{build.HERE}", *source.flags, "-fsyntax-only", str(source.path)]
            assert subprocess.run(command, capture_output=True, text=True).stderr == ""


@pytest.mark.skipif(native.library() is None, reason=native.state().why)
@pytest.mark.skipif(platform.machine() != "x86_64" or sys.platform != "linux", reason="its names are Linux's, on x86")
def test_the_instructions_of_a_level_are_those_that_the_library_asks_for() -> None:
    library = native.library()
    assert library is not None and set(library.levels) == {
        level for level in IsaLevel if left_out.needed(level) <= left_out._instructions()
    }


@pytest.mark.skipif(native.library() is None, reason=native.state().why)
@pytest.mark.parametrize("machines", [build.HERE_ONLY, build.EVERYWHERE])
def test_a_library_from_a_lesser_machine_is_used_with_a_warning(
    machines: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In a shared folder, or in the image of a container. If all levels were built, the compiler lacks the others."""
    every = {flag for level in IsaLevel for flag in left_out.needed(level)}
    monkeypatch.setattr(left_out, "_CPUINFO", tmp_path / "cpuinfo")
    left_out._CPUINFO.write_text(f"flags\t\t: {' '.join(every)}\n")
    monkeypatch.delenv(load.SWITCH, raising=False)
    opened = replace(load.open_library(build.KERNELS, "kernels"), only_here=machines == build.HERE_ONLY)
    monkeypatch.setattr(native, "open_library", lambda *given: opened)
    native.state.cache_clear()
    try:
        best = native.state().library.best  # type: ignore[union-attr]
        warnings = [message for message in caplog.messages if "--everywhere" in message]
        assert bool(warnings) == (machines == build.HERE_ONLY and best < IsaLevel.AMX)
    finally:
        native.state.cache_clear()
