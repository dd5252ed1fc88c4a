"""Kernels that the compiler accepts and we do not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from lancebill.errors import CompileError
from lancebill.jit import compile as compiler

KERNEL = """
import triton
import triton.language as tl

@triton.jit
def copy_tile(source, target, rows):
    inputs = tl.make_tensor_descriptor(source, [rows, 64], [64, 1], [16, 64])
    outputs = tl.make_tensor_descriptor(target, [rows, 64], [64, 1], [16, 64])
    outputs.store([0, 0], inputs.load([0, 0]))

@triton.jit
def add_one(source, target, rows):
    tl.store(target, tl.load(source) + rows)
"""
ARGUMENTS = (("source", "*fp32"), ("target", "*fp32"), ("rows", "i32"))


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "kernels_refused.py").write_text(KERNEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "kernels_refused", raising=False)
    compiler.source_digest.cache_clear()
    return "kernels_refused"


def test_a_kernel_that_needs_scratch_memory(module: str) -> None:
    with pytest.raises(CompileError, match="needs scratch memory"):
        compiler.compile_kernel(compiler.KernelSource(module, "copy_tile", ARGUMENTS, ()))


def test_sources_that_change_while_they_are_compiled(module: str, tmp_path: Path) -> None:
    source = compiler.KernelSource(module, "add_one", ARGUMENTS, ())
    assert compiler.compile_kernel(source).registers
    (tmp_path / "kernels_refused.py").write_text(KERNEL + "# changed\n")
    with pytest.raises(CompileError, match="changed while it was compiled"):
        compiler.compile_kernel(source)


@pytest.mark.parametrize("arch", [80, 90])
def test_spilled_registers(arch: int, module: str, caplog: pytest.LogCaptureFixture) -> None:
    source = compiler.KernelSource(module, "add_one", ARGUMENTS, (), arch=arch)
    report = "ptxas info : Used 32 registers, 8 bytes spill stores"
    if arch == 90:
        with pytest.raises(CompileError, match="spills 8 bytes"):
            compiler._check_report(source, report)
    else:
        assert compiler._check_report(source, report) == (32, 8) and "spills 8 bytes" in caplog.text


def test_newer_compilers_ask_for_the_name_of_our_stage() -> None:
    name, digest = compiler._add_ptx_pass() or ("", "")
    assert name and digest == compiler._own_digest()


def test_without_triton_nothing_is_compiled(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)  # as if it were not installed
    with pytest.raises(CompileError, match="Triton is not installed"):
        compiler.compile_kernel(compiler.KernelSource(module, "add_one", ARGUMENTS, ()))


def test_another_number_of_parameters_is_refused(module: str) -> None:
    source = compiler.KernelSource(module, "add_one", ARGUMENTS, ())
    with pytest.raises(CompileError, match="another number of parameters"):
        compiler._check_parameters(source, ".param .u64 add_one_param_0\n")
