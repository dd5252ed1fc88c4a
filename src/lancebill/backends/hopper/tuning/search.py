"""The search behind `lancebill tune`: candidates, winners, and rules made of winners. `bench.tuning` measures.

A cell is one layer with one number of tokens; candidates compete in it. A journal keeps the measured times, so that a
search can be resumed, and a search on another shape adds to them. A rule depends only on the number of rows per expert:
winners are chosen by the geometric mean over the measured layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from lancebill.backends.gpu.kernels.limits import MOST_SLOTS
from lancebill.backends.gpu.kernels.weight_form import E4M3
from lancebill.backends.gpu.tiles import Rule

SIXTEEN_BIT, EIGHT_BIT = "16-bit", "8-bit"
# Tile sizes by launch, as in `Rule.tiles`.
TILES = (
    "8", "16/8", "16+8", "64/32/16+8", "64/32+16+8", "16+8+64/32", "80/64/48/32+16+8", "80/64/48/32+24+16",
    "80/64/48+32+24+16", "80/64/48/32", "128+80/64/48/32", "128+80/64+48/32", "128+80/64/48+32+24+16",
    "128+112+96+80/64/48/32", "128+96+80/64/48/32+160j", "128+96+80/64/48/32+144j",
)  # fmt: skip
_LOWEST, _HIGHEST = 0.4, 6.0  # range of the first tile's size over the rows per expert
_ROOM = 16  # rows by which the first tile may exceed that range


def flags(rule: Rule) -> dict[str, Any]:
    """The boolean fields of a rule, by name."""
    return {name: bool(value) for name, value in asdict(rule).items() if name not in ("launches", "full")}


@dataclass(frozen=True)
class Candidate:
    """A rule to try; None means decoding, with one tile per slot."""

    rule: Rule | None = None

    @property
    def name(self) -> str:
        if self.rule is None:
            return "decode"
        return " ".join([self.rule.tiles, *(flag for flag, on in flags(self.rule).items() if on)])


@dataclass(frozen=True)
class Cell:
    """A layer and a batch in which candidates compete."""

    layer: str  # shape and specs
    kind: str  # 16-bit or 8-bit inputs
    tokens: int
    slots: int
    experts: int

    @property
    def rows(self) -> float:
        """Average rows per expert."""
        return self.slots / self.experts

    @property
    def name(self) -> str:
        return f"{self.layer}, {self.kind}, {self.tokens} tokens, {self.slots} slots, {self.experts} experts"


def kind_of(activations: str) -> str:
    return EIGHT_BIT if activations == E4M3 else SIXTEEN_BIT


def first_round(cell: Cell, in_use: Rule) -> list[Candidate]:
    """Every tile list of plausible size, with the flags in use; decoding too where its kernels hold the slots."""
    candidates = [
        Candidate(replace(in_use, launches=rule.launches, full=rule.full))
        for rule in map(Rule.parse, TILES)
        if rule.full_tile <= _HIGHEST * cell.rows + _ROOM and rule.full_tile >= min(_LOWEST * cell.rows, 128)
    ]
    return candidates + [Candidate()] * (cell.slots <= MOST_SLOTS)


def second_round(best: Rule) -> list[Candidate]:
    """The best tiles with all other combinations of flags."""
    names = list(flags(best))
    choices: list[dict[str, Any]] = [dict(zip(names, on)) for on in product((True, False), repeat=len(names))]
    variants = [replace(best, **choice) for choice in choices]
    return [Candidate(rule) for rule in variants if rule != best]


def parse_candidate(name: str) -> Candidate:
    """The candidate with this name; the inverse of `Candidate.name`."""
    if name == Candidate().name:
        return Candidate()
    sizes, *words = name.split()
    rule = Rule.parse(sizes)
    choice: dict[str, Any] = {flag: flag in words for flag in flags(rule)}
    return Candidate(replace(rule, **choice))


def is_valid_name(name: str) -> bool:
    """Whether a name is valid. Old journals may contain flags that no longer exist."""
    return parse_candidate(name).name == name


Times = Mapping[str, Mapping[str, float]]  # cell name -> candidate name -> microseconds


def best_of(times: Mapping[str, float], *, decode: bool = False) -> str | None:
    """The fastest candidate. Ignores decoding unless `decode` is set."""
    eligible = {name: us for name, us in times.items() if decode or parse_candidate(name).rule is not None}
    return min(eligible, key=eligible.__getitem__) if eligible else None


def winners(cells: Iterable[Cell], times: Times) -> dict[str, dict[float, Rule]]:
    """By kind and rows: the rule with the smallest geometric mean of its slowdown over each layer's best."""
    grouped: dict[tuple[str, float], list[Mapping[str, float]]] = {}
    for cell in cells:
        if times.get(cell.name):
            grouped.setdefault((cell.kind, cell.rows), []).append(times[cell.name])
    chosen: dict[str, dict[float, Rule]] = {}
    for (kind, rows), tables in sorted(grouped.items()):
        name = _least_loss(tables)
        rule = None if name is None else parse_candidate(name).rule
        if rule is not None:
            chosen.setdefault(kind, {})[rows] = rule
    return chosen


def _least_loss(tables: list[Mapping[str, float]]) -> str | None:
    losses: dict[str, list[float]] = {}
    for table in tables:
        best = best_of(table)
        for name, us in table.items():
            if best is not None and parse_candidate(name).rule is not None:
                losses.setdefault(name, []).append(math.log(us / table[best]))
    everywhere = {name: sum(each) for name, each in losses.items() if len(each) == len(tables)}
    return min(everywhere, key=everywhere.__getitem__) if everywhere else None


def rules_from_winners(chosen: Mapping[float, Rule]) -> list[dict[str, Any]]:
    """Rules for all numbers of rows from some winners. Limits are geometric means; equal neighbours are merged."""
    points = sorted(chosen.items())
    entries: list[dict[str, Any]] = []
    for (rows, rule), after in zip(points, [*points[1:], None]):
        edge = None if after is None else round(math.sqrt(rows * after[0]), 2)
        entry = {"rows_up_to": edge, "tiles": rule.tiles, **flags(rule)}
        if entries and {**entries[-1], "rows_up_to": edge} == entry:
            entries[-1] = entry
        else:
            entries.append(entry)
    return entries


def decode_slots(cells: Iterable[Cell], times: Times, kind: str) -> int | None:
    """The most slots up to which decoding always won; None if it was not measured."""
    most = None
    for cell in sorted((cell for cell in cells if cell.kind == kind), key=lambda cell: cell.slots):
        table = times.get(cell.name, {})
        if Candidate().name in table:
            if best_of(table, decode=True) != Candidate().name:
                return 0 if most is None else most
            most = cell.slots
    return most


def merge_into_data(
    data: Mapping[str, Any], cells: Iterable[Cell], times: Times, gpu: str, measured: str
) -> dict[str, Any]:
    """The tuning data, updated with what was measured. Kinds that were not measured stay."""
    cells = list(cells)
    updated = dict(data) | {"gpu": gpu, "measured": measured}
    for kind, chosen in winners(cells, times).items():
        updated[kind] = rules_from_winners(chosen)
    decoded = dict(updated.get("decode_slots", {}))
    for kind in (SIXTEEN_BIT, EIGHT_BIT):
        slots = decode_slots(cells, times, kind)
        if slots is not None:
            decoded[kind] = slots
    return updated | {"decode_slots": decoded}
