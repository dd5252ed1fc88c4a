"""The tests of the C++ libraries under AddressSanitizer and UndefinedBehaviorSanitizer: `nox -s native`, counted.

    python tests/campaign/sanitizers.py --jobs 2 --record

Every job is a process with its share of the tests. A report ends its process, so there is one at most for each job.
Jobs that are not done in `--seconds` are stopped, which is a failure.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from bookkeeping import Details, Figure, Part, Tallies, Tally
from sanitized_tests import build_libraries, command, settings

REPORTS = ("ERROR: AddressSanitizer", "runtime error:")


@dataclass(frozen=True)
class Job:
    """What one process printed, and its tests by outcome: none if it ended before pytest wrote its report."""

    text: str
    exit_code: int
    tests: Counter[str]

    @property
    def reports(self) -> int:
        return sum(self.text.count(words) for words in REPORTS)

    @property
    def failures(self) -> int:
        """Reports and failed tests; a process that ended in another way is one."""
        found = self.reports + self.tests["failed"]
        return found or int(self.exit_code != 0)

    @property
    def levels(self) -> list[str]:
        """sanitized_tests.py prints `kernels: <state> ['portable', 'neon']`."""
        line = next((line for line in self.text.splitlines() if line.startswith("kernels:")), "")
        return [word.strip(" '") for word in line.partition("[")[2].rstrip("]").split(",") if word]


def run_job(words: Sequence[str], environment: Mapping[str, str], report: Path, end: float) -> Job:
    with report.with_suffix(".log").open("w+") as log:
        try:
            exit_code = subprocess.run(
                [*words, f"--junitxml={report}"], stdout=log, stderr=log, env=dict(environment),
                timeout=max(1.0, end - time.monotonic()),
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            exit_code = -1
            log.write("\nstopped: the time is over\n")
        log.seek(0)
        return Job(log.read(), exit_code, outcomes(report))


def outcomes(report: Path) -> Counter[str]:
    cases = ElementTree.parse(report).getroot().iter("testcase") if report.exists() else ()
    kinds = [{child.tag for child in case} for case in cases]
    return Counter(
        "failed" if kind & {"failure", "error"} else "skipped" if "skipped" in kind else "passed" for kind in kinds
    )


def figures(tallies: Tallies, details: Sequence[Details]) -> dict[str, Figure]:
    tally, found = tallies["X1"], details[0]
    where = ", ".join(found["levels"])
    return {
        "X1": tally.figure(f"{tally.cases:,} tests on {where}: {found['reports']} reports, {found['failed']} failed")
    }


def main() -> None:
    part = Part("sanitizers", __doc__, figures, jobs=1, seconds=3600.0)
    count, end = part.arguments.jobs, time.monotonic() + part.arguments.seconds
    environment = os.environ | settings()
    with tempfile.TemporaryDirectory(prefix="lancebill-sanitizers-") as name, ThreadPoolExecutor(count) as pool:
        folder = Path(name)
        libraries = build_libraries(folder)
        built = round(part.seconds)

        def run_share(shard: int) -> Job:
            return run_job(command(libraries, (), shard, count), environment, folder / f"tests-{shard}.xml", end)

        jobs = list(pool.map(run_share, range(count)))
    failures, tests = sum(job.failures for job in jobs), sum((job.tests for job in jobs), Counter[str]())
    details = {
        "levels": jobs[0].levels,
        "jobs": count,
        "build_seconds": built,
        "reports": sum(job.reports for job in jobs),
        **{name: tests[name] for name in ("failed", "skipped")},
    }
    failed = [job.text[-4000:] for job in jobs if job.failures]
    part.finish({"X1": Tally(tests["passed"] + failures, failures, failed)}, details)


if __name__ == "__main__":
    main()
