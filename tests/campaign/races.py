"""The native library under ThreadSanitizer: random layers and decode steps, from one caller and from several at once.

    python tests/campaign/races.py --cases 300 --jobs 2 --record

tests/native/driver.cpp is linked with the library's sources, all built with -fsanitize=thread. It runs without Python,
so everything that the tool sees is ours. Any report is a failure, as is a wrong result. The cases are cut into batches,
each a process of its own, `--jobs` of them at a time; `--seconds` after the build no further batch starts.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bookkeeping import ROOT, Details, Figure, Part, Tallies, Tally

from lancebill.native import build

FLAGS = ("-fsanitize=thread", "-g", "-O1")
CALLERS = 4
BATCH = 5  # cases of each caller
REPORT = "WARNING: ThreadSanitizer"


@dataclass(frozen=True)
class Batch:
    """Cases with seeds from `seed` on, of one caller or of several at once: each has its own."""

    seed: int
    cases: int
    callers: int

    @property
    def arguments(self) -> list[str]:
        several = ["callers", str(self.callers)] if self.callers > 1 else []
        return [*several, str(self.seed), str(self.cases)]


def batches(seed: int, cases: int) -> list[Batch]:
    """All cases of one caller, and as many of each of several, in turn; no seed twice for the same callers."""
    starts = range(0, cases, BATCH)
    return [
        Batch(seed + callers * start, min(BATCH, cases - start), callers)
        for start in starts
        for callers in (1, CALLERS)
    ]


def build_driver(cxx: str, folder: Path) -> Path:
    library, driver = build.KERNELS, folder / "driver"
    objects = build._compile_all(library, cxx, platform.machine(), folder, FLAGS)
    source = ROOT / "tests" / "native" / "driver.cpp"
    headers = [f"-I{build.HERE}", f"-I{library.folder}", f"-I{source.parent}"]
    everything = [str(source), *map(str, objects), "-o", str(driver)]
    build._run_compiler([cxx, *build.FLAGS, *FLAGS, *headers, *everything])
    return driver


def launcher(cxx: str, folder: Path) -> list[str]:
    """How programs with the tool start here: without random addresses, where the system lets us.

    The tool does not know every kernel's layout of addresses. Containers may forbid to choose one.
    """
    source, program = folder / "nothing.cpp", folder / "nothing"
    source.write_text("int main() { return 0; }\n")
    try:
        build._run_compiler([cxx, *FLAGS, str(source), "-o", str(program)])
    except build.BuildFailed as error:
        sys.exit(f"{cxx} cannot build with ThreadSanitizer; GCC needs libtsan: {error}")
    setarch = shutil.which("setarch")
    for start in ([setarch, "-R"] if setarch else [], []):
        tried = subprocess.run([*start, str(program)], capture_output=True, text=True)
        if tried.returncode == 0:
            return start
    sys.exit(f"programs with ThreadSanitizer do not start here: {tried.stderr.strip()}")


def run(command: Sequence[str]) -> tuple[int, str]:
    """Reports, and the whole output."""
    finished = subprocess.run(command, capture_output=True, text=True)
    text = finished.stdout + finished.stderr
    return text.count(REPORT) + (finished.returncode != 0 and REPORT not in text), text


def figures(tallies: Tallies, details: Sequence[Details]) -> dict[str, Figure]:
    total = Tally.total(tallies.values())
    one, several = tallies["one caller"].cases, tallies["several callers"].cases
    reached = (
        f"{one:,} random layers and decode steps from one caller and {several:,} from {CALLERS} at once, on"
        f" {', '.join(details[0]['levels'])}: {total.failures} reports"
    )
    return {"X2": total.figure(reached)}


def main() -> None:
    part = Part("races", __doc__, figures, cases=300, seed=1, jobs=1, seconds=36000.0)
    chosen = part.arguments
    cxx = build.compiler() or sys.exit("no C++ compiler")
    tallies, levels = {"one caller": Tally(), "several callers": Tally()}, dict[str, None]()
    with tempfile.TemporaryDirectory(prefix="lancebill-races-") as name, ThreadPoolExecutor(chosen.jobs) as pool:
        start = launcher(cxx, Path(name))
        driver = build_driver(cxx, Path(name))
        built, end = round(part.seconds), time.monotonic() + chosen.seconds

        def run_batch(batch: Batch) -> tuple[Batch, int, str] | None:
            if time.monotonic() > end:
                return None
            return batch, *run([*start, str(driver), *batch.arguments])

        for batch, reports, text in filter(None, pool.map(run_batch, batches(chosen.seed, chosen.cases))):
            tally = tallies["one caller" if batch.callers == 1 else "several callers"]
            tally.cases += batch.callers * batch.cases
            tally.failures += reports
            tally.examples += [text[-4000:]] if reports else []
            levels.update(dict.fromkeys(line.split()[0] for line in text.splitlines() if "worst error" in line))
            part.report_now_and_then(tallies, {"levels": list(levels)})
    part.finish(tallies, {"levels": list(levels), "jobs": chosen.jobs, "build_seconds": built})


if __name__ == "__main__":
    main()
