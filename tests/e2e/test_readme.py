"""README.md, docs/results.md and summary.json contain the figures of benchmarks/results and nothing else."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from project import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import gpu_tables
import summary
import tables
from result_files import RESULTS, result_files

# Numbers of a row that say what was measured.
CONDITIONS = {
    "answers", "batch", "call", "clients", "concurrency", "gpu_percent", "intermediate", "k", "layers", "n", "prompts",
    "questions", "rows", "run", "sizes", "steps", "streams", "threads", "tokens", "tokens_in", "tokens_out",
}  # fmt: skip


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.name)
def test_page_matches_the_results(page: Path) -> None:
    written = page.read_text(encoding="utf-8")
    assert written == tables.fill_blocks(written), "run `python benchmarks/tables.py`"


def test_summary_matches_the_results() -> None:
    assert summary.PATH.read_text(encoding="utf-8") == summary.summary_text(), "run `python benchmarks/summary.py`"
    rows = json.loads(summary.summary_text())
    assert all((RESULTS / row["file"]).exists() and isinstance(row["peers"], dict) for row in rows)
    assert {row["table"] for row in rows} == {table for table in summary.TABLES if result_files(table)}


def test_every_folder_of_results_is_summarised_or_left_out_for_a_reason() -> None:
    folders = {path.name for path in RESULTS.iterdir() if path.is_dir()}
    assert not summary.TABLES.keys() & summary.LEFT_OUT.keys() and all(summary.LEFT_OUT.values())
    assert folders <= summary.TABLES.keys() | summary.LEFT_OUT.keys()
    assert summary.LEFT_OUT.keys() <= folders
    assert {table for table in summary.TABLES if result_files(table)} == folders - summary.LEFT_OUT.keys()


def test_every_row_of_the_summary_names_its_file_and_has_a_figure() -> None:
    for row in summary.summary_rows():
        assert row["file"].startswith(f"{row['table']}/{row['machine']}/")
        figures = [value for name, value in row.items() if name not in CONDITIONS and not isinstance(value, bool)]
        assert any(isinstance(value, (int, float)) for value in figures), row


def test_every_result_is_used() -> None:
    """A result file is a row of the summary or is linked from the pages of results.

    docs/reliability.md is made from all records below `reliability`, which tests/unit/test_documents.py checks.
    """
    used = {row["file"] for row in summary.summary_rows()}
    for page in tables.PAGES[1:]:
        used |= set(re.findall(r"benchmarks/results/([\w./-]+)", page.read_text(encoding="utf-8")))
    files = {path.relative_to(RESULTS).as_posix() for path in RESULTS.rglob("*") if path.is_file()}
    others = {name for name in files if name.startswith("reliability/")}
    assert files - others - {summary.PATH.name} <= used


def test_every_block_is_shown_and_a_wrong_figure_is_replaced() -> None:
    written = "".join(page.read_text(encoding="utf-8") for page in tables.PAGES)
    assert {match[1] for match in tables.BLOCK.findall(written)} == set(tables.BLOCKS)
    wrong = re.sub(r"1\.0\dx", "0.50x", written)
    assert wrong != written and tables.fill_blocks(wrong) == tables.fill_blocks(written)


def test_runs_with_different_peers_do_not_mix() -> None:
    """A cell comes from the newest run that timed its peer, even if a newer run timed another peer."""

    def run(peer: str, *tokens: int) -> dict[str, Any]:
        return {"rows": [{"part": "a", "tokens": count, "against": {peer: {"ratio": 2.0}}} for count in tokens]}

    cells = gpu_tables.newest_cells(
        {"first": run("humming", 1, 16), "second": run("humming", 1), "third": run("triton", 1)}
    )
    assert [(row["peer"], row["tokens"], row["run"]) for row in cells] == [
        ("humming", 1, "second"), ("humming", 16, "first"), ("triton", 1, "third"),
    ]  # fmt: skip


def test_batch_invariant_cost_is_that_of_the_worst_run() -> None:
    def run(tokens: int, us: float | None) -> dict[str, Any]:
        row = {"part": "a", "tokens": tokens, "ours": {"us": 20.0}}
        return {"rows": [row if us is None else row | {"batch_invariant": {"us": us}}]}

    text = gpu_tables.batch_invariant_cost(
        {"first": run(1, 25.0), "second": run(1, 24.0), "third": run(4, 22.0), "last": run(16, None)}
    )
    assert "a 25% at 1, 10% at 4." in text and "16" not in text
    assert gpu_tables.batch_invariant_cost({"only": run(16, None)}) == ""
