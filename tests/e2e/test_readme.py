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


def test_what_batch_invariant_order_costs_is_told_of_the_worse_run() -> None:
    module = tables()

    def run(tokens: int, us: float | None) -> dict[str, Any]:
        row = {"part": "a", "tokens": tokens, "ours": {"us": 20.0}}
        return {"rows": [row if us is None else row | {"batch_invariant": {"us": us}}]}

    told = module._invariant(
        {"first": run(1, 25.0), "second": run(1, 24.0), "third": run(4, 22.0), "last": run(16, None)}
    )
    assert "a 25% at 1, 10% at 4." in told and "16" not in told
    assert module._invariant({"only": run(16, None)}) == ""
