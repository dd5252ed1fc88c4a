"""Small checkpoints, and the commands in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from lancebill.checkpoint.resolve import naming as names
from lancebill.cli.main import app
from lancebill.formats import registry
from lancebill.formats.base import Example
from lancebill.testing.checkpoints import Geometry, generate, save

SIZE = Geometry(experts=4, hidden=256, intermediate=256, layers=2)
FINE, PROBLEM, USAGE = 0, 1, 2


def example_of(fmt: str, name: str) -> Example:
    return next(e for e in registry()[fmt].examples() if e.name == name)


def checkpoint(folder: Path, fmt: str = "dense", name: str = "bf16", family: str = "qwen3_moe") -> Path:
    row = next(row for row in names.TABLE if row.family == family)
    return save(generate(example_of(fmt, name), row, row.forms[0], SIZE), folder / f"{fmt}-{family}")


def call(*words: object) -> Result:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output
    return result


def parsed(result: Result) -> dict[str, Any]:
    """The one JSON object on stdout."""
    value = json.loads(result.stdout)
    assert isinstance(value, dict)
    return value
