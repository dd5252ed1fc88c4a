"""How a part of the campaign reports: one JSON object with its figures, printed, or kept with --record or --out.

A record is benchmarks/results/reliability/<part>/<machine>/<date>t<time>-<commit>.json. docs/reliability.md is made
from the records by page.py, which shows the newest run of each figure. Runs with other seeds are shards of one run:
shards.py adds up their tallies, and the part words the figures from the sums.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / name) for name in (".", "tests/helpers", "tests/native", "tests/unit/checkpoint")]

from benchmarks import machine, runner  # noqa: E402

MOST_EXAMPLES = 20  # failures that a record keeps in full
REPORT_EVERY = 15.0  # seconds between the reports of a long run: what is known if it is stopped


@dataclass(frozen=True)
class Figure:
    """What was reached for one figure of figures.py: in words, how many cases, and how many of them failed."""

    reached: str
    cases: int
    failures: int


@dataclass
class Tally:
    """Cases and failures of one figure, counted while a part runs."""

    cases: int = 0
    failures: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, failure: str | None = None, cases: int = 1) -> None:
        self.cases += cases
        if failure is not None:
            self.failures += 1
            if len(self.examples) < MOST_EXAMPLES:
                self.examples.append(failure)
                print(f"FAILED: {failure}", file=sys.stderr, flush=True)

    def figure(self, reached: str) -> Figure:
        return Figure(reached, self.cases, self.failures)

    @classmethod
    def total(cls, tallies: Iterable[Tally]) -> Tally:
        """All of them as one, with the first examples."""
        every = list(tallies)
        examples = [example for tally in every for example in tally.examples][:MOST_EXAMPLES]
        return cls(sum(tally.cases for tally in every), sum(tally.failures for tally in every), examples)


Tallies = Mapping[str, Tally]
Details = Mapping[str, Any]
# Words the figures of a part, from its tallies and the details of the run, or of each of its shards.
Figures = Callable[[Tallies, Sequence[Details]], Mapping[str, Figure]]


class Part:
    """One script of the campaign: its arguments, its time, its record."""

    def __init__(
        self, name: str, description: str | None, figures: Figures, *, device: str = "cpu", **options: float | str
    ) -> None:
        """`options` with their defaults, such as minutes=120."""
        self.name, self.started, self._figures, self._device = name, time.time(), figures, device
        parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        for option, default in options.items():
            parser.add_argument(f"--{option}", type=type(default), default=default)
        parser.add_argument("--record", action="store_true", help="keep the record below benchmarks/results")
        parser.add_argument("--out", type=Path, help="write the record to this file")
        self.arguments = parser.parse_args()
        self._commit = machine.commit()  # now: a long run's sources are those it started with
        path = runner.result_path(f"reliability/{name}", device) if self.arguments.record else None
        self._path: Path | None = self.arguments.out or path
        self._reported = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.time() - self.started

    def report(self, tallies: Tallies, details: Details | None = None) -> Mapping[str, Figure]:
        """Write or print the record; may be called again and again during a long run."""
        figures = self._figures(tallies, [details or {}])
        record = {
            "part": self.name,
            "command": " ".join(["python", f"tests/campaign/{self.name}.py", *_words()]),
            "commit": self._commit,
            "date": time.strftime("%Y-%m-%d"),
            "time": time.strftime("%H:%M", time.gmtime()),
            "machine": _machine(self._device),
            "seconds": round(self.seconds),
            "cpu_seconds": round(time.process_time()),
            "figures": {name: vars(figure) for name, figure in figures.items()},
            "details": dict(details or {}),
            "tallies": {name: [tally.cases, tally.failures] for name, tally in tallies.items()},
            "failed": {name: tally.examples for name, tally in tallies.items() if tally.examples},
        }
        write_record(self._path, record)
        return figures

    def report_now_and_then(self, tallies: Tallies, details: Details | None = None) -> None:
        """For loops: a report if the last one is old, so that a run that is stopped has counted."""
        if self._path is not None and time.monotonic() - self._reported > REPORT_EVERY:
            self._reported = time.monotonic()
            self.report(tallies, details)

    def finish(self, tallies: Tallies, details: Details | None = None) -> NoReturn:
        """The last report; exits with 1 if anything failed."""
        figures = self.report(tallies, {**(details or {}), "finished": True})
        for name, figure in figures.items():
            print(f"{name}: {figure.reached}")
        sys.exit(1 if any(figure.failures for figure in figures.values()) else 0)


def write_record(path: Path | None, record: Mapping[str, Any]) -> None:
    """To a file, whole or not at all; without one, to the terminal."""
    text = json.dumps(record, indent=1, ensure_ascii=False) + "\n"
    if path is None:
        print(text)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def _words() -> list[str]:
    """The arguments, without the name of an output file."""
    words = sys.argv[1:]
    return words[: words.index("--out")] if "--out" in words else words


def _machine(device: str) -> dict[str, str | None]:
    return {"name": machine.machine_name(device), **machine.facts(device)}


def memory_folder() -> Path | None:
    """Files in memory are rewritten faster."""
    folder = Path("/dev/shm")
    return folder if folder.is_dir() else None
