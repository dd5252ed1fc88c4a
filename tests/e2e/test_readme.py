"""README.md and the pages of results contain the figures of benchmarks/results and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks import report
from benchmarks.runner import RESULTS, SUBJECTS

ELSEWHERE = ("reliability", "gpu-suite")  # records of tests with tables of their own
RECORDED_BY_TESTS = {*ELSEWHERE, "vllm-cpu"}


@pytest.mark.parametrize("page", report.PAGES, ids=lambda page: page.name)
def test_page_matches_the_records(page: Path) -> None:
    written = page.read_text(encoding="utf-8")
    assert written == report.fill_blocks(written), "run `python -m benchmarks report`"


def test_every_block_is_shown_and_a_wrong_figure_is_replaced() -> None:
    written = "".join(page.read_text(encoding="utf-8") for page in report.PAGES)
    assert {match[1] for match in report.BLOCK.findall(written)} == set(report.BLOCKS)
    wrong = re.sub(r"1\.0\dx", "0.50x", written)
    assert wrong != written and report.fill_blocks(wrong) == report.fill_blocks(written)


def test_every_record_is_used() -> None:
    """docs/reliability.md is made from the records of the campaign, which tests/unit/test_documents.py checks."""
    files = {path.relative_to(RESULTS).as_posix() for path in RESULTS.rglob("*") if path.is_file()}
    files = {name for name in files if not name.startswith(ELSEWHERE)}
    linked = {
        name
        for page in report.PAGES
        for name in re.findall(r"benchmarks/results/([\w./-]+\.\w+)", page.read_text(encoding="utf-8"))
    }
    assert files == linked
    command.main(["--list"])  # registers the subjects
    assert {path.name for path in RESULTS.iterdir()} - RECORDED_BY_TESTS == set(SUBJECTS)
    assert sum((RESULTS / name).stat().st_size for name in files) < 1_200_000


def test_records_have_a_line_for_each_row() -> None:
    for path in (path for name in SUBJECTS for path in (RESULTS / name).glob("*/*.json")):
        text = path.read_text(encoding="utf-8")
        assert text.count('{"case": ') == sum(line.startswith('{"case": ') for line in text.splitlines()) > 0, path
