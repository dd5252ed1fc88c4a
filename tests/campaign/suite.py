"""Runs the tests that hold figures of docs/reliability.md and counts them by figure.

    python tests/campaign/suite.py --record

Figures whose tests are all skipped on this machine, such as those that need a GPU, are left out of the record.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest
from bookkeeping import ROOT, Figure, Part
from figures import FIGURES, Target


class Counting:
    """A pytest plugin: the outcome of every test."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.nodeid] = report.outcome

    def count(self, target: Target) -> Counter[str]:
        """Outcomes of the tests of a figure: whole files, or single tests with all their parameters."""
        return Counter(
            outcome
            for node, outcome in self.outcomes.items()
            if any(node == test or node.startswith((f"{test}::", f"{test}[")) for test in target.tests)
        )


def main() -> None:
    part = Part("suite", __doc__)
    os.chdir(ROOT)
    targets = [target for targets in FIGURES.values() for target in targets if target.tests]
    counting = Counting()
    tests = list(dict.fromkeys(test for target in targets for test in target.tests))
    pytest.main(["-q", "-p", "no:cacheprovider", *tests], plugins=[counting])
    figures = {}
    for target in targets:
        counts = counting.count(target)
        if counts["passed"] or counts["failed"]:
            reached = f"{counts['passed']:,} tests passed, {counts['failed']} failed"
            figures[target.name] = Figure(reached, counts["passed"] + counts["failed"], counts["failed"])
    part.finish(figures, {"tests": dict(Counter(counting.outcomes.values()))}, {})


if __name__ == "__main__":
    main()
