"""Cells of tests that pytest runs: each function of tests/gpu, with all its parameters; and the judge of backends."""

from __future__ import annotations

import ast
import importlib.util
import os
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import SkipTest

from cells import Cell, Notes, Place

from lancebill.backends.registry import registry
from lancebill.moe.device import parse_device
from lancebill.testing import judge

TESTS = Path(__file__).resolve().parents[1]


def pytest_cells() -> Iterator[Cell]:
    for file in sorted((TESTS / "gpu").glob("test_*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                where = f"{file.name}::{node.name}"
                yield Cell("pytest", where, 2, partial(run_pytest, where))
    for number, case in enumerate(judge.cases()):
        yield Cell("judge", f"{number} {case.name}", 2, partial(run_judge, case))


class Counts:
    """A plugin that counts outcomes, and remembers why tests were skipped."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.skips: Counter[str] = Counter()
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.outcome] += 1
        if report.skipped:
            self.skips[str(report.longrepr[2]).removeprefix("Skipped: ")] += 1
        if report.failed:
            self.failed.append(report.nodeid.partition("::")[2])

    def pytest_collectreport(self, report: Any) -> None:
        if report.skipped:
            self.skips[str(report.longrepr[2]).removeprefix("Skipped: ")] += 1


def run_judge(case: judge.Case, place: Place) -> Notes:
    """Every backend that computes this case on the device, in every form of dispatch: tests/backends on a GPU."""
    device, ran = parse_device(place.device), []
    for backend in registry().values():
        for form in (judge.INDEXED, judge.CONTIGUOUS, judge.BATCHED):
            formed = case if form == judge.INDEXED or not case.problem.weight_on_input else None
            if formed is not None and not list(backend.reasons(judge.in_form(formed, form).problem, device)):
                judge.check_case(backend, device, judge.in_form(formed, form))
                ran.append(backend.name)
    if not ran:
        raise SkipTest("no backend computes this")
    return {"judged": sorted(set(ran))}


def run_pytest(where: str, place: Place) -> Notes:
    if importlib.util.find_spec("pytest") is None:
        raise SkipTest("needs pytest")
    import pytest

    os.environ.setdefault("KERNEL_JOBS", "2")
    counts = Counts()
    options = ["-q", "--maxfail=3", "-p", "no:cacheprovider", "-W", "ignore", f"--basetemp={place.folder / 'tmp'}"]
    code = pytest.main([*options, str(TESTS / "gpu" / where)], plugins=[counts])
    if counts.skips and not counts.outcomes["passed"] and not counts.failed:
        raise SkipTest("; ".join(counts.skips))
    failed = ", ".join(counts.failed) or "pytest did not end"
    assert code == 0 and counts.outcomes["passed"], failed
    return {"passed": counts.outcomes["passed"], "skips": dict(counts.skips)}
