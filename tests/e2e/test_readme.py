"""README's figures are those of the files in benchmarks/results, and nothing else."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

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


def test_runs_beside_different_peers_do_not_mix() -> None:
    """The newest run that raced a peer tells of that peer, whatever a newer one raced."""
    module = tables()

    def run(peer: str, *tokens: int) -> dict[str, Any]:
        return {"rows": [{"part": "a", "tokens": at, "against": {peer: {"ratio": 2.0}}} for at in tokens]}

    found = module.newest({"first": run("humming", 1, 16), "second": run("humming", 1), "third": run("triton", 1)})
    assert [(row["peer"], row["tokens"], row["run"]) for row in found] == [
        ("humming", 1, "second"), ("humming", 16, "first"), ("triton", 1, "third"),
    ]  # fmt: skip
