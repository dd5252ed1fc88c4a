"""README's figures are those of the files in benchmarks/results, and nothing else."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("readme_tables", ROOT / "benchmarks" / "tables.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_readme_is_what_the_results_make_it() -> None:
    written = (ROOT / "README.md").read_text(encoding="utf-8")
    assert written == tables().filled(written), "run `python benchmarks/tables.py`"


def test_every_block_is_shown_and_a_wrong_figure_is_seen() -> None:
    module = tables()
    written = (ROOT / "README.md").read_text(encoding="utf-8")
    assert {match[1] for match in module.BLOCK.findall(written)} == set(module.BLOCKS)
    wrong = re.sub(r"1\.0\dx", "0.50x", written)
    assert wrong != written and module.filled(wrong) == module.filled(written)
