"""What is measured (cases), what was found (rows, records), and the run that measures a subject.

A subject is a function that measures cases one after another and adds a row for each. The run chooses the cases, keeps
the time limit, notes what could not be measured and why, and rewrites the record after every row: a run that is killed
keeps what it has.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks import machine

RESULTS = machine.ROOT / "benchmarks" / "results"
MACHINES = {
    "aarch64": "an Arm CPU (aarch64)",
    "cascade-lake": "Intel Cascade Lake, 2 cores",
    "h200": "NVIDIA H200",
    "h200-as-sm-80": "NVIDIA H200 with the kernels of an sm_80",
    "neoverse-n1": "Arm Neoverse N1, 2 cores",
    "xeon-amx": "Intel Xeon with AMX, 2 of 16 cores",
    "xeon-avx512": "Intel Xeon, AMX switched off for us and for torch, 2 of 16 cores",
}


@dataclass(frozen=True)
class Case:
    """What is measured: labels by name, numbers or words."""

    labels: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, **labels: Any) -> Case:
        return cls(tuple(labels.items()))

    @classmethod
    def product(cls, **axes: Sequence[Any]) -> list[Case]:
        """Every combination of values; the last axis changes fastest."""
        return [cls(tuple(zip(axes, values))) for values in itertools.product(*axes.values())]

    def __getitem__(self, name: str) -> Any:
        return dict(self.labels)[name]

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.labels)

    def only(self, *names: str) -> Case:
        return Case(tuple((name, self[name]) for name in names))

    def replace(self, **labels: Any) -> Case:
        return Case(tuple((dict(self.labels) | labels).items()))


@dataclass(frozen=True)
class Row:
    """What was found of a case: our figures, units in their names, and the first figure of every other contestant."""

    case: Case
    figures: Mapping[str, Any]
    peers: Mapping[str, float] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        """A figure, or a label of the case."""
        return self.figures[name] if name in self.figures else self.case[name]

    def __contains__(self, name: str) -> bool:
        return name in self.figures or name in dict(self.case.labels)

    def ratio(self, peer: str, figure: str = "us") -> float:
        """A peer's time over ours."""
        return float(self.peers[peer] / self.figures[figure])

    def stored(self) -> dict[str, Any]:
        peers = {"peers": dict(self.peers)} if self.peers else {}
        return {"case": dict(self.case.labels), **self.figures, **peers}

    @classmethod
    def read(cls, stored: Mapping[str, Any]) -> Row:
        figures = {name: value for name, value in stored.items() if name not in ("case", "peers")}
        return cls(Case.of(**stored["case"]), figures, stored.get("peers", {}))


@dataclass(frozen=True)
class Record:
    """A run as it is kept: benchmarks/results/<subject>/<machine>/<date>t<time>-<commit>.json.

    `facts`: command, commit, date, hardware and versions, and what holds for all rows.
    """

    path: Path
    facts: Mapping[str, Any]
    rows: Sequence[Row]

    @property
    def name(self) -> str:
        """The path below benchmarks/results."""
        return self.path.relative_to(RESULTS).as_posix()

    @property
    def machine(self) -> str:
        return self.path.parent.name

    @property
    def machine_title(self) -> str:
        return MACHINES.get(self.machine, self.machine)

    def write(self) -> None:
        """A line for each fact and each row. Replaces the file at once: a run that is killed leaves a whole one."""
        facts = [f"{json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}" for name, value in self.facts.items()]
        rows = ",\n".join(json.dumps(row.stored(), ensure_ascii=False) for row in self.rows)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text("{\n" + ",\n".join([*facts, f'"rows": [\n{rows}\n]']) + "\n}\n", encoding="utf-8")
        part.replace(self.path)

    @classmethod
    @cache
    def read(cls, path: Path) -> Record:
        found = json.loads(path.read_text(encoding="utf-8"))
        return cls(path, found, [Row.read(row) for row in found.pop("rows")])


def records(subject: str, machine: str = "*") -> list[Record]:
    """Every run of a subject, by machine, the oldest first."""
    return [Record.read(path) for path in sorted((RESULTS / subject).glob(f"{machine}/*.json"))]


def newest(subject: str) -> list[Record]:
    """The newest run of each machine."""
    return list({record.machine: record for record in records(subject)}.values())


def result_path(subject: str, device: str = "cpu") -> Path:
    """Where a run is recorded that begins now, in UTC: names sort by time."""
    when = time.strftime("%Y-%m-%dt%H%M%S", time.gmtime())
    return RESULTS / subject / machine.machine_name(device) / f"{when}-{machine.commit()[:7]}.json"


# Subjects and runs ---------------------------------------------------------------------------------------

Option = tuple[Any, str]  # its default, or the type of a value that has none; what it is


@dataclass(frozen=True)
class Subject:
    """One kind of measurement."""

    name: str  # also of its folder of records
    measure: Callable[[Run], None]
    cases: Callable[[], Iterable[Case]]
    options: Mapping[str, Option]
    device: str

    @property
    def title(self) -> str:
        return (self.measure.__doc__ or "").strip()


SUBJECTS: dict[str, Subject] = {}


def subject(
    name: str, cases: Callable[[], Iterable[Case]], *, device: str = "cpu", **options: Option
) -> Callable[[Callable[[Run], None]], Callable[[Run], None]]:
    """Makes a function a subject. `cases` lists what is measured by default, the most important first."""

    def register(measure: Callable[[Run], None]) -> Callable[[Run], None]:
        SUBJECTS[name] = Subject(name, measure, cases, options, device)
        return measure

    return register


def chosen_cases(cases: Sequence[Case], given: Mapping[str, Sequence[str]]) -> list[Case]:
    """The cases with the given labels.

    Labels that the default cases have select among them, in the order in which they are given. Others replace the
    label in all cases, so that it is combined with everything that is left of the other labels.
    """
    for name, words in given.items():
        known = {str(case[name]): case[name] for case in cases}
        if known.keys() >= set(words):
            cases = [case for word in words for case in cases if str(case[name]) == word]
        else:
            kind = type(next(iter(known.values())))
            cases = [case.replace(**{name: kind(word)}) for word in words for case in cases]
    return list(dict.fromkeys(cases))


class Run:
    """One run of a subject: its cases, its options, and the record that it writes."""

    def __init__(self, subject: Subject, cases: Sequence[Case], options: argparse.Namespace) -> None:
        self.subject, self.cases, self.options = subject, list(cases), options
        self.device: str = options.device
        self.started = time.monotonic()
        self.path: Path = options.out or result_path(subject.name, self.device)
        self.facts: dict[str, Any] = {**machine.origin(), "machine": machine.facts(self.device)}
        self.facts |= {"note": options.note} if options.note else {}
        self.absent: dict[str, str] = {}  # what was not measured, and why
        self.rows: list[Row] = []

    def add(self, case: Case, figures: Mapping[str, Any], peers: Mapping[str, float] | None = None) -> Row:
        """A row, which is printed and written."""
        row = Row(case, {name: short(value) for name, value in figures.items()},
                  {name: short(value) for name, value in (peers or {}).items()})  # fmt: skip
        self.rows.append(row)
        print(json.dumps(row.stored(), ensure_ascii=False), flush=True)
        self.write()
        return row

    def write(self) -> None:
        absent = {"absent": self.absent} if self.absent else {}
        Record(self.path, self.facts | absent, self.rows).write()

    def groups(self, *names: str) -> Iterator[tuple[Case, list[Case]]]:
        """The cases with equal labels of these names together, in the order of the first of each group."""
        groups: dict[Case, list[Case]] = {}
        for case in self.cases:
            groups.setdefault(case.only(*names), []).append(case)
        yield from groups.items()

    @property
    def seconds_left(self) -> float:
        return float(self.options.seconds) - (time.monotonic() - self.started)

    def late(self, what: object) -> bool:
        """Whether the time is over; then `what` is noted as not measured."""
        if self.seconds_left > 0:
            return False
        self.skip(what, "the time limit was reached")
        return True

    def skip(self, what: object, why: object) -> None:
        self.absent[str(what)] = machine.without_local_paths(str(why))
        print(f"absent: {what}: {why}", flush=True)

    @contextmanager
    def attempt(self, what: object) -> Iterator[None]:
        """What fails here is noted, and the run goes on."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.skip(what, (str(error).splitlines() or [type(error).__name__])[0])

    def finish(self) -> None:
        self.facts["seconds"] = round(time.monotonic() - self.started, 1)
        self.write()
        print(f"{len(self.rows)} rows, {len(self.absent)} absent; wrote {self.path}", flush=True)


def short(value: Any) -> Any:
    """A float as it is recorded, with six digits and two decimals at least: more says nothing."""
    if not isinstance(value, float) or not math.isfinite(value) or value == 0:
        return value
    return round(value, max(2, 5 - math.floor(math.log10(abs(value)))))
