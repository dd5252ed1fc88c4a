"""`lancebill kernels`: output and exit codes. The tests of the kernels test compilation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from lancebill.backends.gpu.kernels import triton_version
from lancebill.backends.hopper.shipped import shipped
from lancebill.cli.kernels import SHOWN, _require_all
from lancebill.cli.main import app
from lancebill.errors import CompileError
from lancebill.jit import build as builder
from lancebill.jit.cache import SUFFIX, Cache
from lancebill.jit.compile import Binary, compiler_version

CODE = Binary(b"\x7fELF", "kernel", 0, 256, 64)


def call(*words: object, code: int = 0) -> Any:
    done = CliRunner().invoke(app, ["kernels", *map(str, words)])
    assert done.exit_code == code, done.output
    assert "Traceback" not in done.output
    return json.loads(done.stdout) if "--json" in words else done.output


def test_list_shows_which_kernels_are_compiled(tmp_path: Path) -> None:
    some = list(shipped())[:2]
    for source in some:
        Cache(tmp_path / "kernels", tmp_path).get(source, lambda: CODE)
    summary = call("list", "--folder", tmp_path / "kernels", "--json")
    assert len(summary["kernels"]) == len(list(shipped()))
    by_key = {row["key"]: row for row in summary["kernels"]}
    for source in some:
        row = by_key[source.key(compiler_version())]
        assert row["bytes"] is not None and row["registers"] is not None and row["label"] == source.label
    compiled = sum(row["bytes"] is not None for row in summary["kernels"])
    assert f"{compiled} of {len(by_key)} kernels are compiled" in call("list", "--folder", tmp_path / "kernels")


def test_verify_finds_damaged_kernels(tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    assert call("verify", "--folder", folder, "--json")["damaged"] == []
    for source in list(shipped())[:3]:
        Cache(folder, tmp_path).get(source, lambda: CODE)
    path = sorted(folder.glob(f"*{SUFFIX}"))[1]
    path.write_bytes(path.read_bytes()[:-1])
    assert call("verify", "--folder", folder, "--json", code=1)["damaged"] == [str(path)]
    assert "rebuilt" in call("verify", "--folder", folder, code=1)
    for i in range(SHOWN):
        (folder / f"{i}{SUFFIX}").touch(0o600)
    text = call("verify", "--folder", folder, code=1)
    assert text.count("damaged:") == SHOWN and "... and 1 more (all of them with --json)\n2 kernels intact" in text
    folder.chmod(0o777)
    assert call("verify", "--folder", folder, "--json", code=1)["error"]["error"] == "CacheError"


def test_build_reports_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = next(shipped())
    monkeypatch.setattr(triton_version, "triton_version", lambda: "3.6.0")  # also where it is not installed
    monkeypatch.setattr(builder, "build_all", lambda *words: {failed: "it spills"})
    summary = call("build", "--folder", tmp_path, "--json", code=1)
    assert summary["failed"] == {failed.label: "it spills"} and summary["kernels"] == len(list(shipped())) - 1
    assert "it spills" in call("build", "--folder", tmp_path, "--ship", code=1)


def test_without_triton_there_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one for each kernel."""
    monkeypatch.setattr(triton_version, "triton_version", lambda: None)
    done = CliRunner().invoke(app, ["kernels", "build", "--folder", str(tmp_path)])
    assert done.exit_code == 1
    assert done.output.splitlines() == [
        "error: kernels cannot be compiled: Triton is not installed",
        "  hint     pip install 'lancebill[gpu]'",
    ]


def test_usage_errors_have_no_traceback(tmp_path: Path) -> None:
    assert "sm_90" in call("build", "--arch", "sm_70", "--json", code=2)["error"]["expected"]
    (tmp_path / "file").write_text("in the way")
    summary = call("build", "--folder", tmp_path / "file" / "kernels", "--json", code=1)
    assert summary["error"]["error"] == "CacheError"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_warmup_needs_a_gpu() -> None:
    assert call("warmup", "--json", code=2)["error"]["error"] == "SpecError"
    assert call("warmup", "--device", "sm_90", "--json", code=2)["error"]["error"] == "SpecError"


def test_a_kernel_that_does_not_compile_is_not_loaded() -> None:
    _require_all({})
    with pytest.raises(CompileError, match="it spills"):
        _require_all({next(shipped()): "it spills"})
