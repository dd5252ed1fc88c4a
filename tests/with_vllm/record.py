"""Writes what the tests found to benchmarks/results/vllm-cpu, beside versions, machine and command.

A run that ends early is recorded too, with how many tests there were; a later one may run the rest.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import machine, runner
from benchmarks.runner import Case, Record, Row

COMMAND = "nox -s vllm -- all"


def passed_before() -> frozenset[str]:
    """Tests that passed in a run that was recorded on this machine, with this version of vLLM."""
    runs = runner.records("vllm-cpu", machine.machine_name("cpu"))
    same = [run for run in runs if run.facts["vllm"] == machine.package_version("vllm-cpu")]
    return frozenset(row["test"] for run in same for row in run.rows if row["outcome"] == "passed")


def name_of(node_id: str) -> str:
    return node_id.removeprefix("tests/with_vllm/").partition("@")[0]  # without the group of xdist


class Recorder:
    """A pytest plugin. No test starts after `seconds`, if they are given; tests in `without` are left out."""

    def __init__(self, seconds: float | None = None, without: frozenset[str] = frozenset()) -> None:
        self.rows: list[Row] = []
        self.commit = machine.commit()  # of the tests that start now
        self.collected = 0
        self.without = without
        self.deadline = None if seconds is None else time.monotonic() + seconds

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        self.collected = len(items)
        left_out = [item for item in items if name_of(item.nodeid) in self.without]
        items[:] = [item for item in items if name_of(item.nodeid) not in self.without]
        config.hook.pytest_deselected(items=left_out)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self.collected = len(ids)  # every worker collects all tests

    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        if self.deadline is not None and time.monotonic() > self.deadline:
            item.session.shouldstop = "stopped by time"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            figures = {"outcome": report.outcome, "seconds": round(report.duration, 1), **dict(report.user_properties)}
            self.rows.append(Row(Case.of(test=name_of(report.nodeid)), figures))

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if not self.rows:  # tests were listed, or none was left
            return
        path = runner.result_path("vllm-cpu")
        facts: dict[str, Any] = {
            "command": COMMAND, "commit": self.commit, "date": path.name[:10],
            "machine": machine.facts("cpu"), "vllm": machine.package_version("vllm-cpu"), "collected": self.collected,
        }  # fmt: skip
        stopped = session.shouldstop or ("interrupted" if exitstatus == pytest.ExitCode.INTERRUPTED else None)
        Record(path, facts | ({"stopped": stopped} if stopped else {}), self.rows).write()
