"""The native library under ThreadSanitizer: random layers and decode steps, from one caller and from several at once.

    python tests/campaign/races.py --cases 300 --record

tests/native/driver.cpp is linked with the library's sources, all built with -fsanitize=thread. It runs without Python,
so everything that the tool sees is ours. Any report is a failure, as is a wrong result.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bookkeeping import ROOT, Details, Figure, Part, Tallies, Tally

from lancebill.native import build

FLAGS = ("-fsanitize=thread", "-g", "-O1")
CALLERS = 4
REPORT = "WARNING: ThreadSanitizer"


def build_driver(folder: Path) -> Path:
    cxx = build.compiler()
    if cxx is None:
        sys.exit("no C++ compiler")
    library, driver = build.KERNELS, folder / "driver"
    objects = build._compile_all(library, cxx, platform.machine(), folder, FLAGS)
    source = ROOT / "tests" / "native" / "driver.cpp"
    headers = [f"-I{build.HERE}", f"-I{library.folder}", f"-I{source.parent}"]
    everything = [str(source), *map(str, objects), "-o", str(driver)]
    build._run_compiler([cxx, *build.FLAGS, *FLAGS, *headers, *everything])
    return driver


def run(driver: Path, arguments: Sequence[str]) -> tuple[int, str]:
    """Reports, and the whole output. Addresses are not randomised: the tool does not know every kernel's layout."""
    fixed = [shutil.which("setarch") or "setarch", "-R"] if shutil.which("setarch") else []
    finished = subprocess.run([*fixed, str(driver), *arguments], capture_output=True, text=True)
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
    part = Part("races", __doc__, figures, cases=300, seed=1)
    cases, seed, tallies = part.arguments.cases, str(part.arguments.seed), dict[str, Tally]()
    with tempfile.TemporaryDirectory(prefix="lancebill-races-") as folder:
        driver = build_driver(Path(folder))
        one, text = run(driver, [seed, str(cases)])
        tallies["one caller"] = Tally(cases, one, [text[-4000:]] if one else [])
        levels = [line.split()[0] for line in text.splitlines() if "worst error" in line]
        several, text = run(driver, ["callers", str(CALLERS), seed, str(cases)])
        tallies["several callers"] = Tally(CALLERS * cases, several, [text[-4000:]] if several else [])
    part.finish(tallies, {"levels": levels})


if __name__ == "__main__":
    main()
