"""The package as a whole: its errors, its public names, and what importing it costs."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from project import ROOT

import lancebill
from lancebill import errors

PACKAGE = Path(lancebill.__file__).parent

# Errors that no test here can cause.
UNREACHABLE = {
    "DriverError": "needs a CUDA driver that fails",
    "CompileError": "needs a compiler that rejects a kernel",
}


@cache
def _trees() -> dict[str, ast.Module]:
    paths = sorted(PACKAGE.rglob("*.py"))
    return {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def _error_classes() -> dict[str, str]:
    """Every subclass of LancebillError and the file that defines it."""
    classes = {"LancebillError": "errors.py"}
    for name in ("errors.py", *(n for n in _trees() if n != "errors.py")):
        for node in ast.walk(_trees()[name]):
            if isinstance(node, ast.ClassDef) and {ast.unparse(base) for base in node.bases} & set(classes):
                classes[node.name] = name
    return classes


def test_all_errors_are_defined_in_one_module() -> None:
    assert set(_error_classes().values()) == {"errors.py"}


def test_every_error_is_raised_tested_and_documented() -> None:
    calls = {
        ast.unparse(node.func) for tree in _trees().values() for node in ast.walk(tree) if isinstance(node, ast.Call)
    }
    tests = "\n".join(p.read_text(encoding="utf-8") for p in (ROOT / "tests").rglob("*.py") if p != Path(__file__))
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    for name in sorted(set(_error_classes()) - {"LancebillError"}):
        assert f"`{name}`" in page, f"docs/errors.md does not explain {name}"
        assert name in calls, f"nothing raises {name}"
        assert name in UNREACHABLE or re.search(rf"\b{name}\b", tests), f"no test uses {name}"


def test_errors_have_five_fields() -> None:
    error = errors.WrongShape("'scale' in t", where="layer 3", expected=[1, 2], got=[2, 1], hint="transpose it")
    assert str(error) == "layer 3: 'scale' in t; expected [1, 2]; got [2, 1] (transpose it)"
    outer = error.within("model.safetensors")
    assert isinstance(outer, errors.WrongShape)
    assert outer.facts() == {**error.facts(), "where": "model.safetensors, layer 3"}
    many = errors.CheckpointProblems([error] * 21, where="here")
    assert "21 problems" in str(many) and "... and 1 more" in str(many)
    assert many.within("there").where == "there, here"


def test_errors_are_short_and_printable_whatever_they_quote() -> None:
    bad = "\x1b[2J\ud800" + "x" * 10**6
    error = errors.BadValue(f"{bad}\nsecond line", where=bad, expected=bad, got=[bad])
    text = str(error.within("file"))
    text.encode("utf-8")
    assert "\\x1b[2J\\ud800xxx" in text and "\x1b" not in text and "\nsecond line" in text
    assert len(text) < 5 * errors.MAX_FACT and str(error.within("a")) == str(error.within("a"))


HEAVY = {"triton", "transformers", "gguf", "numpy", "compressed_tensors", "typer", "rich", "cuda", "vllm"}
IMPORT = """
import sys, time
import torch
before, start = set(sys.modules), time.process_time()
import lancebill
seconds, loaded = time.process_time() - start, set(sys.modules) - before
assert not torch.cuda.is_initialized()
print(seconds, *sorted({name.partition(".")[0] for name in loaded}))
print(*sorted(name for name in loaded if name.startswith("lancebill.")))
"""


def test_importing_is_cheap() -> None:
    """It initialises no CUDA, imports no heavy package, and none of our modules but `errors`."""
    done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()
    seconds, *roots = first.split()
    assert not set(roots) & HEAVY
    assert set(second.split()) <= {"lancebill.errors"}
    assert float(seconds) < 0.2


# Other rooms belong to an extra, or import what it brings when a kernel or a peer is first needed.
PLAIN_ROOMS = {"native", "numbers", "moe", "formats", "checkpoint", "split", "layer", "parallel", "cli"}


def test_a_plain_installation_has_what_it_imports() -> None:
    (line,) = re.findall(r"^dependencies = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M)
    allowed = {*re.findall(r'"(\w+)', line), *sys.stdlib_module_names, "lancebill"}
    for name, tree in _trees().items():
        if name.split("/")[0] in PLAIN_ROOMS:
            modules = [alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names]
            modules += [str(node.module) for node in tree.body if isinstance(node, ast.ImportFrom) and not node.level]
            assert {module.split(".")[0] for module in modules} <= allowed, name


def test_public_names_are_defined() -> None:
    for name in lancebill.__all__:
        assert getattr(lancebill, name) is not None
    assert set(lancebill.__all__) <= set(dir(lancebill))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        lancebill.nothing  # noqa: B018


def test_the_lock_file_has_every_development_package() -> None:
    """Each with a version and hashes; torch and Triton are installed apart, since users select their builds."""
    lock = (ROOT / "requirements" / "dev.txt").read_text(encoding="utf-8")
    entries = re.findall(r"^([\w.-]+)==\S+ .*\\\n +--hash=sha256:", lock, re.MULTILINE)
    locked = {name.lower().replace("_", "-") for name in entries}
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    lists = re.findall(r"^(?:dependencies|dev) = \[(.*?)\]$", project, re.MULTILINE | re.DOTALL)
    wanted = {name.lower().replace("_", "-") for text in lists for name in re.findall(r'"([\w.-]+)', text)}
    assert len(lists) == 2 and len(wanted) > 10
    assert wanted - {"torch", "triton"} <= locked, "run `nox -s lock`"
    assert len(entries) == len(re.findall(r"^\w", lock, re.MULTILINE)) and "://" not in lock
