"""How large the project is: limits that only fall, and figures without limits that `pytest -s` prints.

Who adds removes, or argues in the commit that raises a limit. The aims are what one person can own.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

import pytest
import typer

from lancebill.cli.main import app

ROOT = Path(__file__).parents[2]
GENERATED = {"formats.md", "results.md", "errors.md"}  # pages that a command writes


def _files(folder: str, *suffixes: str) -> list[Path]:
    return [path for path in sorted((ROOT / folder).rglob("*")) if path.suffix in suffixes]


def _lines(files: Iterable[Path]) -> int:
    return sum(path.read_text(encoding="utf-8").count("\n") for path in files)


def _statements(files: Iterable[Path]) -> int:
    """Also counts several statements on one line, so that packing lines gains nothing."""
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in files)
    return sum(isinstance(node, ast.stmt) for tree in trees for node in ast.walk(tree))


def _totals() -> dict[str, tuple[int, int, int]]:
    """Present figure, limit, aim."""
    source, docs = _files("src", ".py"), [path for path in _files("docs", ".md") if path.name not in GENERATED]
    records = sum(path.stat().st_size for path in _files("benchmarks/results", ".json"))
    return {
        "lines of Python in src": (_lines(source), LIMITS[0], 47_000),
        "statements in src": (_statements(source), LIMITS[1], 30_200),
        "lines of C++": (_lines(_files("src", ".cpp", ".h")), LIMITS[2], 8_000),
        "lines of benchmarks": (_lines(_files("benchmarks", ".py")), LIMITS[3], 5_000),
        "lines of tests": (_lines(_files("tests", ".py")), LIMITS[4], 45_000),
        "lines of written docs": (_lines(docs), LIMITS[5], 3_000),
        "kilobytes of records": (records // 1000, LIMITS[6], 1_200),
    }


LIMITS = (62_900, 39_700, 8_500, 5_950, 57_000, 2_460, 550)


@pytest.mark.parametrize("name", _totals())
def test_the_project_does_not_grow(name: str) -> None:
    present, limit, aim = _totals()[name]
    print(f"{name}: {present:,}, limit {limit:,}, aim {aim:,}")
    assert present <= limit, f"{name}: {present:,}, more than {limit:,}"
    assert present > 0.97 * limit, f"{name}: {present:,}; lower the limit of {limit:,}"


def test_figures_without_limits() -> None:
    """Modules, and the options that a command's help shows."""
    commands = typer.main.get_command(app)
    assert isinstance(commands, typer.core.TyperGroup)
    options = {name: len(command.params) for name, command in commands.commands.items()}
    print(f"modules: {len(_files('src', '.py'))}, aim 380; options: {options}, aim 12")
    assert options
