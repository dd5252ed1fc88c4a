"""What `lancebill tune` looks for: candidates, winners, and rules made of winners. Pure; measuring is `bench.tuning`'s.

A cell is one candidate at one number of tokens of one layer. Cells are kept as they are measured, so that a search
that was stopped goes on where it was, and one on another shape adds to what is known. A rule holds for a number of
rows per expert, whatever the layer: winners are chosen by the geometric mean over the layers that were measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from lancebill.backends.hopper.kernels.weight_form import E4M3
from lancebill.backends.hopper.tuning.policy import Rule

WIDE, NARROW = "16-bit", "8-bit"
# Full tiles first, then what takes the remainder of an expert; a last one above the first joins both.
TILES = (
    (8,), (16,), (16, 8), (24, 16, 8), (32, 16), (32, 16, 8), (32, 24, 16, 8), (40, 32, 24, 16), (48, 32, 16),
    (48, 32, 24, 16), (64, 32, 16), (64, 48, 32, 16), (80, 64, 48, 32), (80, 64, 48, 40), (96, 64, 32),
    (96, 64, 48, 32), (128, 64, 32), (128, 96, 64), (128, 112, 96, 80), (128, 96, 64, 160), (128, 112, 64, 160),
    (128, 64, 32, 160), (128, 96, 64, 144), (128, 64, 32, 144),
)  # fmt: skip
_LOWEST, _HIGHEST = 0.4, 6.0  # a first tile holds so many times the rows an expert has
_ROOM = 16  # or so many rows
MOST_DECODED = 96  # slots up to which a tile for each is tried


def flags(rule: Rule) -> dict[str, Any]:
    """What a rule says beside its sizes, by name: all of it is yes or no."""
    return {name: bool(value) for name, value in asdict(rule).items() if name != "sizes"}


@dataclass(frozen=True)
class Candidate:
    """A rule to try, or a tile for each slot."""

    rule: Rule | None = None

    @property
    def name(self) -> str:
        if self.rule is None:
            return "decode"
        return " ".join(["+".join(map(str, self.rule.sizes)), *(flag for flag, on in flags(self.rule).items() if on)])


@dataclass(frozen=True)
class Cell:
    """Where candidates compete."""

    layer: str  # shape and specs
    kind: str  # 16-bit or 8-bit inputs
    tokens: int
    slots: int
    experts: int

    @property
    def rows(self) -> float:
        """An expert's, on average."""
        return self.slots / self.experts

    @property
    def name(self) -> str:
        return f"{self.layer}, {self.kind}, {self.tokens} tokens, {self.slots} slots, {self.experts} experts"


def kind_of(activations: str) -> str:
    return NARROW if activations == E4M3 else WIDE


def first_round(cell: Cell, in_use: Rule) -> list[Candidate]:
    """Every list of tiles that is not plainly too high or too low, with the flags in use; decoding where it may pay."""
    found = [
        Candidate(replace(in_use, sizes=sizes))
        for sizes in TILES
        if sizes[0] <= _HIGHEST * cell.rows + _ROOM and sizes[0] >= min(_LOWEST * cell.rows, 128)
    ]
    return found + [Candidate()] * (cell.slots <= MOST_DECODED)


def second_round(best: Rule) -> list[Candidate]:
    """The other flags for the best tiles."""
    names = list(flags(best))
    choices: list[dict[str, Any]] = [dict(zip(names, on)) for on in product((True, False), repeat=len(names))]
    found = [replace(best, **choice) for choice in choices]
    return [Candidate(rule) for rule in found if rule != best]


def parse(name: str) -> Candidate:
    """The candidate of a name."""
    if name == Candidate().name:
        return Candidate()
    sizes, *words = name.split()
    rule = Rule(tuple(map(int, sizes.split("+"))), False)
    choice: dict[str, Any] = {flag: flag in words for flag in flags(rule)}
    return Candidate(replace(rule, **choice))


def known(name: str) -> bool:
    """Whether it says all of a candidate: journals may be older than this."""
    return parse(name).name == name


Times = Mapping[str, Mapping[str, float]]  # cell name -> candidate name -> microseconds


def best_of(times: Mapping[str, float], *, decode: bool = False) -> str | None:
    """The fastest, without decoding unless asked."""
    able = {name: us for name, us in times.items() if decode or parse(name).rule is not None}
    return min(able, key=able.__getitem__) if able else None


def winners(cells: Iterable[Cell], times: Times) -> dict[str, dict[float, Rule]]:
    """By kind and rows: the rule with the smallest geometric mean of its losses to each layer's best."""
    grouped: dict[tuple[str, float], list[Mapping[str, float]]] = {}
    for cell in cells:
        if times.get(cell.name):
            grouped.setdefault((cell.kind, cell.rows), []).append(times[cell.name])
    found: dict[str, dict[float, Rule]] = {}
    for (kind, rows), tables in sorted(grouped.items()):
        name = _least_loss(tables)
        rule = None if name is None else parse(name).rule
        if rule is not None:
            found.setdefault(kind, {})[rows] = rule
    return found


def _least_loss(tables: list[Mapping[str, float]]) -> str | None:
    losses: dict[str, list[float]] = {}
    for table in tables:
        best = best_of(table)
        for name, us in table.items():
            if best is not None and parse(name).rule is not None:
                losses.setdefault(name, []).append(math.log(us / table[best]))
    everywhere = {name: sum(found) for name, found in losses.items() if len(found) == len(tables)}
    return min(everywhere, key=everywhere.__getitem__) if everywhere else None


def rules(chosen: Mapping[float, Rule]) -> list[dict[str, Any]]:
    """Winners at some numbers of rows to rules for all: edges lie midway, neighbours that agree are one."""
    points = sorted(chosen.items())
    found: list[dict[str, Any]] = []
    for (rows, rule), after in zip(points, [*points[1:], None]):
        edge = None if after is None else round(math.sqrt(rows * after[0]), 2)
        entry = {"rows_up_to": edge, "tiles": list(rule.sizes), **flags(rule)}
        if found and {**found[-1], "rows_up_to": edge} == entry:
            found[-1] = entry
        else:
            found.append(entry)
    return found


def decode_slots(cells: Iterable[Cell], times: Times, kind: str) -> int | None:
    """Up to how many slots a tile for each wins wherever it was tried; None where it was not."""
    most = None
    for cell in sorted((cell for cell in cells if cell.kind == kind), key=lambda cell: cell.slots):
        table = times.get(cell.name, {})
        if Candidate().name in table:
            if best_of(table, decode=True) != Candidate().name:
                return 0 if most is None else most
            most = cell.slots
    return most


def merge(data: Mapping[str, Any], cells: Iterable[Cell], times: Times, gpu: str, measured: str) -> dict[str, Any]:
    """The data with what was measured in place of what was there; kinds that were not measured stay."""
    cells = list(cells)
    found = dict(data) | {"gpu": gpu, "measured": measured}
    for kind, chosen in winners(cells, times).items():
        found[kind] = rules(chosen)
    known = dict(found.get("decode_slots", {}))
    for kind in (WIDE, NARROW):
        slots = decode_slots(cells, times, kind)
        if slots is not None:
            known[kind] = slots
    return found | {"decode_slots": known}
