"""The tests of the C++ libraries under AddressSanitizer and UndefinedBehaviorSanitizer: `make test-native`, counted.

    python tests/campaign/sanitizers.py --record

A report ends the run, so there is one at most.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from bookkeeping import ROOT, Details, Figure, Part, Tallies, Tally

RUN = ROOT / "tests" / "native" / "sanitize.py"
REPORTS = ("ERROR: AddressSanitizer", "runtime error:")


def outcomes(report: Path) -> Counter[str]:
    """Tests by outcome; none if the run ended before pytest wrote its report."""
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


def levels_in(line: str) -> list[str]:
    """sanitize.py prints `kernels: <state> ['portable', 'neon']`."""
    return [word.strip(" '") for word in line.partition("[")[2].rstrip("]").split(",") if word]


def main() -> None:
    part = Part("sanitizers", __doc__, figures)
    with tempfile.TemporaryDirectory(prefix="lancebill-sanitizers-") as folder:
        report = Path(folder) / "tests.xml"
        finished = subprocess.run([sys.executable, str(RUN), f"--junitxml={report}"], capture_output=True, text=True)
        counts = outcomes(report)
    text = finished.stdout + finished.stderr
    reports = sum(text.count(words) for words in REPORTS)
    broken = bool(finished.returncode) and not reports and not counts["failed"]  # ended in another way
    failures = reports + counts["failed"] + broken
    kernels = next((line for line in text.splitlines() if line.startswith("kernels:")), "")
    details = {
        "levels": levels_in(kernels),
        "reports": reports,
        **{name: counts[name] for name in ("failed", "skipped")},
    }
    tally = Tally(counts["passed"] + failures, failures, [text[-4000:]] if failures else [])
    part.finish({"X1": tally}, details)


if __name__ == "__main__":
    main()
