"""What the documents say is there: commands, files, names, tests, and the tables that are generated."""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from pathlib import Path

import pytest
import typer

import lancebill
from lancebill.cli.main import app
from lancebill.testing import tables

PACKAGE = Path(lancebill.__file__).parent
ROOT = PACKAGE.parent.parent
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FILES = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
FOREIGN = {"AssertionError"}


def test_commands_that_are_spoken_of_exist() -> None:
    commands = set(vars(typer.main.get_command(app))["commands"])
    said = {path.name: path.read_text(encoding="utf-8") for path in (*DOCS, *FILES.values())}
    for name, text in said.items():
        spoken = set(re.findall(r"[`$] ?lancebill ([a-z-]+)\b", text))
        assert spoken <= commands, f"{name} speaks of {spoken - commands}"


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_commands_that_are_shown_have_these_options(path: Path) -> None:
    """Lines of code blocks that call `lancebill` or a script of the benchmarks."""
    commands = vars(typer.main.get_command(app))["commands"]
    blocks = re.findall(r"^ *```\w*\n(.*?)^ *```", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    for line in re.findall(r"^ *(?:\$ )?((?:lancebill|python benchmarks/).*)", "\n".join(blocks), re.MULTILINE):
        caller, name, *words = line.split()
        options = set(re.findall(r"(?<=[\[ ])--[a-z-]+", " ".join(["", *words])))
        if caller == "lancebill":
            assert name in commands, f"{path.name} shows `{line}`"
            known = {option for parameter in commands[name].params for option in parameter.opts}
        else:
            known = set(re.findall(r"\"(--[a-z-]+)\"", (ROOT / name).read_text(encoding="utf-8")))
        assert options <= known, f"{path.name} shows `{line}`, which has no {options - known}"


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_files_that_are_spoken_of_exist(path: Path) -> None:
    """Every `src/...`, `tests/...`, `docs/...` and every module path in the documents."""
    text = path.read_text(encoding="utf-8")
    for spoken in re.findall(r"`((?:src|tests|docs|benchmarks|scripts)/[\w./-]+)`", text):
        assert (ROOT / spoken).exists(), f"{path.name} speaks of {spoken}"
    for spoken in re.findall(r"`(?!src/|tests/|docs/|benchmarks/|scripts/)(\w+(?:/\w+)*\.py)`", text):
        assert spoken in FILES, f"{path.name} speaks of {spoken}"
    for target in re.findall(r"\]\(([\w./-]+)(?:#[\w-]*)?\)", text):
        assert (path.parent / target).exists(), f"{path.name} links to {target}"
    for spoken in re.findall(r"`(test_\w+)`", text):
        assert spoken in _names("tests"), f"{path.name} speaks of {spoken}"
    for spoken in re.findall(r"`([A-Z]\w*[a-z]\w*)(?:\.\w+)*`", text):
        assert spoken in _names("src") or spoken in FOREIGN, f"{path.name} speaks of {spoken}"
    for owner, member in re.findall(r"`([A-Z]\w+)\.([a-z_]\w*)`", text):
        assert member in _names("src"), f"{path.name} speaks of {owner}.{member}"


@lru_cache
def _names(folder: str) -> frozenset[str]:
    """Every function, class, field and variable defined below a folder."""
    found: set[str] = set()
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(node.name)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
    return frozenset(found)


def test_the_page_of_formats_is_up_to_date() -> None:
    written = (ROOT / tables.PAGE).read_text(encoding="utf-8")
    assert written == tables.page(), "run `python -m lancebill.testing.tables > docs/formats.md`"


def test_every_feature_has_its_row() -> None:
    text = (ROOT / "docs" / "features.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([A-D]\d+) \|", text, re.MULTILINE)
    wanted = [
        f"{letter}{i}" for letter, count in (("A", 15), ("B", 11), ("C", 11), ("D", 24)) for i in range(1, count + 1)
    ]
    assert rows == wanted
