"""Runs the tests that hold figures of docs/reliability.md and counts them by figure.

    python tests/campaign/suite.py --record                  the files that hold figures; with a GPU, all of tests/gpu
    python tests/campaign/suite.py --only R1,R4 --record     the files of these figures
    python tests/campaign/suite.py --coverage 1 --record     all files, and the branches they reach (needs coverage)
    python tests/campaign/suite.py --optimized 1 --record    the files of `make test-O`, under python -O

Without a GPU one pytest runs all files with `--workers`; with one, every file is a process of its own, and so many run
at the same time. Files that are not done in `--seconds` are stopped; their figures are left out. `--reports FOLDER`
keeps what pytest printed and reported; with `--kept 1` that is judged again, and nothing is run.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
from bookkeeping import ROOT, Details, Figure, Part, Tallies, Tally
from figures import FIGURES, Target

NOT_HERE = ("tests/gpu", "tests/with_vllm", "tests/with_tools", "tests/campaign")  # need other machines or packages
# What runs only on a GPU, or only beside packages that the suite does not need.
NEED_MORE = (
    "*/kernels/*", "*/jit/driver.py", "*/jit/graph.py", "*/jit/load.py", "*/split/gpu_queues.py",
    "*/split/copy_lane.py", "*/split/measure_rates.py", "*/bench/sustained.py", "*/backends/humming/*",
    "*/bench/peers_*", "*/integrations/vllm/*",
)  # fmt: skip
STOPPED = "stopped"


@dataclass(frozen=True)
class Run:
    """How files of tests are run."""

    interpreter: tuple[str, ...]
    workers: int
    end: float  # time.monotonic()
    reports: Path
    variables: Mapping[str, str]  # of the environment, besides the caller's
    together: bool  # one pytest with so many workers; else one for each file, which shares the GPU with others

    def outcomes(self, files: Sequence[str]) -> dict[str, str]:
        """{test: passed, failed, skipped}, as pytest names tests."""
        if self.together:
            return self._run(files, "suite", "-n", str(self.workers))
        with ThreadPoolExecutor(self.workers) as pool:
            found = list(pool.map(lambda file: self._run([file], file.replace("/", "."), "-p", "no:xdist"), files))
        return {test: outcome for file in found for test, outcome in file.items()}

    def _run(self, files: Sequence[str], name: str, *options: str) -> dict[str, str]:
        report = self.reports / f"{name}.xml"
        command = [*self.interpreter, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "junit_family=xunit1"]
        try:
            with report.with_suffix(".log").open("w") as log:
                subprocess.run(
                    [*command, *options, f"--junitxml={report}", *files], cwd=ROOT, stdout=log, stderr=log,
                    env={**os.environ, **self.variables}, timeout=max(1.0, self.end - time.monotonic()),
                )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {f"{file}::{STOPPED}": STOPPED for file in files}
        return read_report(report) if report.exists() else {f"{file}::no report": "failed" for file in files}


def read_report(report: Path) -> dict[str, str]:
    outcomes = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        outcomes[f"{case.get('file')}::{case.get('name')}"] = outcome
    return outcomes


def count(outcomes: dict[str, str], tests: Sequence[str]) -> Counter[str]:
    """Outcomes of the tests of a figure: whole files, or single tests with all their parameters."""
    return Counter(
        outcome
        for node, outcome in outcomes.items()
        if any(node == test or node.startswith((f"{test}::", f"{test}[")) for test in tests)
    )


def held_files(targets: Sequence[Target], gpu: bool) -> list[str]:
    files = dict.fromkeys(test.split("::")[0] for target in targets for test in target.tests)
    return [file for file in files if file.startswith("tests/gpu") == gpu]


def test_files(folder: str = "tests") -> list[str]:
    """The largest first."""
    files = sorted((ROOT / folder).rglob("test_*.py"), key=lambda path: -path.stat().st_size)
    return [str(path.relative_to(ROOT)) for path in files]


def all_files() -> list[str]:
    """Those that need no GPU."""
    return [name for name in test_files() if not name.startswith(NOT_HERE)]


def chosen_files(targets: Sequence[Target], device: str, every: bool, only: bool) -> list[str]:
    if device == "cuda":
        return held_files(targets, gpu=True) if only else test_files("tests/gpu")
    return all_files() if every else held_files(targets, gpu=False)


def files_without_asserts() -> list[str]:
    """Those of `make test-O`, as the Makefile names them."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    match = re.search(r"^WITHOUT_ASSERTS := \$\(addprefix tests/unit/,(.*)\)", text, re.MULTILINE)
    assert match is not None
    named = tuple(f"tests/unit/{name}" for name in match[1].split())
    left_out = re.compile(r"/test_convert|tests/unit/formats/test_formats\.py")
    return [file for file in all_files() if file.startswith(named) and not left_out.search(file)]


def combine(folder: Path, reports: Path) -> None:
    """Write what all processes together reached to coverage.json."""
    tool, data = [sys.executable, "-m", "coverage"], f"--data-file={folder / 'all'}"
    parts = [str(path) for path in (folder / "data").iterdir()]
    subprocess.run([*tool, "combine", "-q", data, *parts], cwd=ROOT, check=True)
    subprocess.run([*tool, "json", "-q", "-i", data, "-o", str(reports / "coverage.json")], cwd=ROOT, check=True)


def covered(reports: Path) -> dict[str, Any]:
    """Lines and branches of the package that were reached; modules that tests write are not part of it."""
    files = json.loads((reports / "coverage.json").read_text())["files"]
    package = {name: each for name, each in files.items() if name.startswith("src/")}
    raises = [site for name, each in package.items() for site in raise_sites(ROOT / name, each["executed_lines"])]
    worst = sorted(package.items(), key=lambda item: -item[1]["summary"]["missing_branches"])[:25]
    counted = ("covered_branches", "num_branches", "covered_lines", "num_statements")
    return {
        "raises": [len(raises), sum(raises)],
        "totals": {count: sum(each["summary"][count] for each in package.values()) for count in counted},
        "most missing": {name: each["summary"]["missing_branches"] for name, each in worst},
    }


def raise_sites(path: Path, executed: Sequence[int]) -> list[bool]:
    """For every `raise` of a new error: whether a test reaches it."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return [
        node.lineno in set(executed) for node in nodes if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
    ]


def measuring(folder: Path) -> dict[str, str]:
    """Variables with which every Python process measures what it reaches, those that tests start included."""
    (folder / "data").mkdir()
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text("import coverage\n\ncoverage.process_startup()\n")
    settings = folder / "coveragerc"
    settings.write_text(
        f"[run]\nbranch = true\nparallel = true\nsource = lancebill\ndata_file = {folder / 'data' / 'part'}\n"
        "concurrency = multiprocessing, thread\nsigterm = true\n"
        "disable_warnings = no-data-collected, module-not-imported\n"
        "omit =\n" + "".join(f"  {pattern}\n" for pattern in NEED_MORE)
    )
    path = [str(folder / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"COVERAGE_PROCESS_START": str(settings), "PYTHONPATH": os.pathsep.join(path)}


def figures(tallies: Tallies, details: Sequence[Details]) -> dict[str, Figure]:
    out = {
        name: tally.figure(f"{tally.cases - tally.failures:,} tests passed, {tally.failures} failed")
        for name, tally in tallies.items()
        if name not in ("E1", "E4", "all")
    }
    if "E1" in tallies:
        sites, reached = details[0]["coverage"]["raises"]
        out["E1"] = tallies["E1"].figure(f"{reached:,} of {sites:,} places that raise are reached by a test")
    if "E4" in tallies:
        totals = details[0]["coverage"]["totals"]
        share = 100 * totals["covered_branches"] / totals["num_branches"]
        lines = 100 * totals["covered_lines"] / totals["num_statements"]
        out["E4"] = tallies["E4"].figure(
            f"{share:.1f} % of {totals['num_branches']:,} branches, {lines:.1f} % of lines"
        )
    return out


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    part = Part(
        "suite", __doc__, figures, device=device, workers=2, seconds=3600.0, coverage=0, optimized=0, only="",
        reports="", kept=0,
    )  # fmt: skip
    chosen, tallies, details = part.arguments, dict[str, Tally](), dict[str, Any]()
    os.environ["OMP_NUM_THREADS"] = "1"
    only = chosen.only.split(",") if chosen.only else None
    every = [target for targets in FIGURES.values() for target in targets if target.tests]
    targets = [target for target in every if only is None or target.name in only]
    with tempfile.TemporaryDirectory() as name:
        folder, interpreter = Path(name), [sys.executable, *(["-O"] if chosen.optimized else [])]
        reports = Path(chosen.reports or name)
        reports.mkdir(parents=True, exist_ok=True)
        variables = measuring(folder) if chosen.coverage else {}
        run = Run(
            tuple(interpreter), chosen.workers, time.monotonic() + chosen.seconds, reports, variables, device == "cpu"
        )
        if chosen.optimized:
            outcomes = run.outcomes(files_without_asserts())
            tallies["E2"] = _tally(Counter(outcomes.values()), outcomes)
        else:
            files = chosen_files(targets, device, bool(chosen.coverage), only is not None)
            outcomes = read_report(reports / "suite.xml") if chosen.kept else run.outcomes(files)
            for target in targets:
                counts = count(outcomes, target.tests)
                if (counts["passed"] or counts["failed"]) and not _stopped(target, outcomes):
                    tallies[target.name] = _tally(counts, outcomes, target.tests)
        if chosen.coverage:
            if not chosen.kept:
                combine(folder, reports)
            details["coverage"] = covered(reports)
            totals = details["coverage"]["totals"]
            sites, reached = details["coverage"]["raises"]
            tallies["E1"] = Tally(sites, sites - reached)
            tallies["E4"] = Tally(1, int(totals["covered_branches"] < 0.95 * totals["num_branches"]))
    tallies["all"] = _tally(Counter(outcomes.values()), outcomes)
    part.finish(tallies, {**details, "tests": dict(Counter(outcomes.values()))})


def _stopped(target: Target, outcomes: dict[str, str]) -> bool:
    """Whether a file of this figure was not done in time."""
    return any(f"{test.split('::')[0]}::{STOPPED}" in outcomes for test in target.tests)


def _tally(counts: Counter[str], outcomes: dict[str, str], tests: Sequence[str] = ("",)) -> Tally:
    failed = [test for test, outcome in outcomes.items() if outcome == "failed" and test.startswith(tuple(tests))]
    return Tally(counts["passed"] + counts["failed"], counts["failed"], failed[:20])


if __name__ == "__main__":
    main()
