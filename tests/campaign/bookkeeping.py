"""How a part of the campaign reports: one JSON object with its figures, printed, and with --record also kept.

A record is benchmarks/results/reliability/<part>/<machine>/<date>-<commit>.json. docs/reliability.md is made from the
records by page.py, which shows the newest run of each figure.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests" / "helpers"), str(ROOT / "tests" / "unit" / "checkpoint")]

import machine  # noqa: E402  (a module of benchmarks/)

MOST_EXAMPLES = 20  # failures that a record keeps in full


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


class Part:
    """One script of the campaign: its arguments, its time, its record."""

    def __init__(self, name: str, description: str | None, **numbers: float) -> None:
        """`numbers`: options with their defaults, such as minutes=120."""
        self.name, self.started = name, time.time()
        parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        for option, default in numbers.items():
            parser.add_argument(f"--{option}", type=type(default), default=default)
        parser.add_argument("--record", action="store_true", help="keep the record below benchmarks/results")
        self.arguments = parser.parse_args()
        self._commit = machine.commit()  # now: a long run's sources are those it started with
        self._path = machine.result_path(f"reliability/{name}") if self.arguments.record else None

    @property
    def seconds(self) -> float:
        return time.time() - self.started

    def report(self, figures: Mapping[str, Figure], details: Mapping[str, Any], tallies: Mapping[str, Tally]) -> None:
        """Print the record, and write it; may be called again and again during a long run."""
        record = {
            "part": self.name,
            "command": " ".join(["python", f"tests/campaign/{self.name}.py", *sys.argv[1:]]),
            "commit": self._commit,
            "date": time.strftime("%Y-%m-%d"),
            "machine": {"cpu": platform.machine(), "python": platform.python_version()},
            "seconds": round(self.seconds),
            "cpu_seconds": round(time.process_time()),
            "figures": {name: vars(figure) for name, figure in figures.items()},
            "details": dict(details),
            "failed": {name: tally.examples for name, tally in tallies.items() if tally.examples},
        }
        text = json.dumps(record, indent=1, ensure_ascii=False) + "\n"
        if self._path is not None:
            self._path.write_text(text, encoding="utf-8")
        else:
            print(text)

    def finish(self, figures: Mapping[str, Figure], details: Mapping[str, Any], tallies: Mapping[str, Tally]) -> None:
        """The last report; exits with 1 if anything failed."""
        self.report(figures, details, tallies)
        for name, figure in figures.items():
            print(f"{name}: {figure.reached}")
        sys.exit(1 if any(figure.failures for figure in figures.values()) else 0)
