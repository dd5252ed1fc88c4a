"""Everything the documents mention exists: commands, options, files, names and tests. Generated pages are current."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import typer

import lancebill
from benchmarks import __main__ as benchmarks
from benchmarks.report import BLOCK
from benchmarks.runner import SUBJECTS
from lancebill.cli.main import app
from lancebill.testing import tables

PACKAGE = Path(lancebill.__file__).parent
ROOT = PACKAGE.parent.parent
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FILES = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
FOREIGN = {"AssertionError", "PanguProMoE"}  # a class of Python, a model_type


def _commands() -> dict[str, Any]:
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    return dict(group.commands)


def test_mentioned_commands_exist() -> None:
    commands = set(_commands())
    texts = {path.name: path.read_text(encoding="utf-8") for path in (*DOCS, *FILES.values())}
    for name, text in texts.items():
        mentioned = set(re.findall(r"[`$] ?lancebill ([a-z-]+)\b", text))
        assert mentioned <= commands, f"{name} mentions {mentioned - commands}"


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_shown_commands_have_these_options(path: Path) -> None:
    """Checks the lines of code blocks that call `lancebill`, and all words that name a subject of the benchmarks."""
    commands = _commands()
    blocks = re.findall(r"^ *```\w*\n(.*?)^ *```", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    for line in re.findall(r"^ *(?:\$ )?(lancebill .*)", "\n".join(blocks), re.MULTILINE):
        _, name, *words = line.split()
        options = set(re.findall(r"(?<=[\[ ])--[a-z-]+", " ".join(["", *words])))
        assert name in commands, f"{path.name} shows `{line}`"
        existing = {option for parameter in commands[name].params for option in parameter.opts}
        assert options <= existing, f"{path.name} shows `{line}`, which has no {options - existing}"
    for words in re.findall(r"python -m benchmarks ([a-z-]+[^`\n]*)", path.read_text(encoding="utf-8")):
        _check_benchmark(re.split(r"   | #", words)[0].split(), path.name)


def _check_benchmark(words: list[str], where: str) -> None:
    """A subject, labels of its cases and options."""
    benchmarks.main(["--list"])  # registers the subjects
    name, *rest = words
    if name in ("report", "--list"):
        return
    assert name in SUBJECTS, f"{where} shows the benchmark {name}"
    given = benchmarks.parser_of(SUBJECTS[name]).parse_args(rest)
    labels = {label for case in SUBJECTS[name].cases() for label, _ in case.labels}
    assert {word.partition("=")[0] for word in given.cases} <= labels, f"{where} shows {words}"


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_mentioned_files_and_names_exist(path: Path) -> None:
    """Checks paths, module paths, links, tests, classes and members in the documents."""
    text = path.read_text(encoding="utf-8")
    for mentioned in re.findall(r"`((?:src|tests|docs|benchmarks|scripts)/[\w./-]+)`", text):
        assert (ROOT / mentioned).exists(), f"{path.name} mentions {mentioned}"
    for mentioned in re.findall(r"`(?!src/|tests/|docs/|benchmarks/|scripts/)(\w+(?:/\w+)*\.py)`", text):
        assert mentioned in FILES, f"{path.name} mentions {mentioned}"
    for target in re.findall(r"\]\(([\w./-]+)(?:#[\w-]*)?\)", text):
        assert (path.parent / target).is_file(), f"{path.name} links to {target}"
    for mentioned in re.findall(r"`(test_\w+)`", text):
        assert mentioned in _names("tests"), f"{path.name} mentions {mentioned}"
    for mentioned in re.findall(r"`([A-Z]\w*[a-z]\w*)(?:\.\w+)*`", text):
        assert mentioned in _names("src") or mentioned in FOREIGN, f"{path.name} mentions {mentioned}"
    for owner, member in re.findall(r"`([A-Z]\w+)\.([a-z_]\w*)`", text):
        assert member in _names("src"), f"{path.name} mentions {owner}.{member}"


@lru_cache
def _names(folder: str) -> frozenset[str]:
    """Every function, class, field and variable defined below a folder."""
    names: set[str] = set()
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names.add(node.name)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
    return frozenset(names)


def test_the_formats_page_is_up_to_date() -> None:
    written = (ROOT / tables.PAGE).read_text(encoding="utf-8")
    assert written == tables.page(), "run `python -m lancebill.testing.tables > docs/formats.md`"


def test_the_reliability_page_is_up_to_date() -> None:
    check = [sys.executable, str(ROOT / "tests" / "campaign" / "page.py"), "--check"]
    assert subprocess.run(check, capture_output=True).returncode == 0, "run `python tests/campaign/page.py`"


def test_every_feature_has_a_row() -> None:
    text = (ROOT / "docs" / "features.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([A-D]\d+) \|", text, re.MULTILINE)
    expected = [
        f"{letter}{i}" for letter, count in (("A", 15), ("B", 11), ("C", 11), ("D", 24)) for i in range(1, count + 1)
    ]
    assert rows == expected


def test_make_help_lists_every_target() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([\w-]+):(?!=| FLAGS)", text, re.MULTILINE))
    phony = {word for words in re.findall(r"^\.PHONY: (.*)", text, re.MULTILINE) for word in words.split()}
    assert targets == phony == set(re.findall(r"^([\w-]+):.*  ## \w", text, re.MULTILINE))
    assert len(text.splitlines()) <= 100


def test_mentioned_targets_and_sessions_exist() -> None:
    """Of the Makefile and of noxfile.py, which only nox can import."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    nox = ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8"))
    sessions = {node.name for node in nox.body if isinstance(node, ast.FunctionDef) and node.decorator_list}
    for path in (*DOCS, ROOT / "CONTRIBUTING.md", ROOT / "tests" / "README.md"):
        text = BLOCK.sub("", path.read_text(encoding="utf-8"))  # a record names the command that was run
        assert set(re.findall(r"`make ([a-zA-Z-]+)", text)) <= targets, path.name
        assert set(re.findall(r"nox -s ([a-z]+)", text)) <= sessions, path.name
    values = {target.id: node.value for node in nox.body if isinstance(node, ast.Assign)
              for target in node.targets if isinstance(target, ast.Name)}  # fmt: skip
    tools, parts = ast.literal_eval(values["TOOLS"]), ast.literal_eval(values["PARTS"])
    assert {f"test_{name}.py" for name in tools} == {
        path.name for path in (ROOT / "tests/with_tools").glob("test_*.py")
    }
    assert all((ROOT / "tests" / "campaign" / f"{part}.py").exists() for part in parts)
