"""Measures what `tune.search` proposes: each candidate's plan, compiled ahead, checked, timed in windows."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lancebill.backends.hopper.layout import HopperLayout
from lancebill.backends.hopper.plan import HopperPlan, make_plan
from lancebill.backends.hopper.steps import steps
from lancebill.backends.hopper.tuning import search
from lancebill.backends.hopper.tuning.search import Candidate, Cell
from lancebill.backends.registry import registry
from lancebill.bench.sustained import Windows
from lancebill.bench.timing import Call
from lancebill.bench.workload import Batch, Weights, batches
from lancebill.errors import LancebillError
from lancebill.jit.build import build_all
from lancebill.moe.dispatch import Indexed
from lancebill.moe.layout import Packed
from lancebill.moe.problem import Problem

ROUTINGS, DISTINCT = 4, 8
AGREE = 4e-2  # of the largest number: another order of sums, not another result

Say = Callable[[str], None]


@dataclass(frozen=True)
class TuningLayer:
    """One of the layers that are tuned for."""

    name: str
    problem: Problem

    def cell(self, tokens: int) -> Cell:
        plan = make_plan(self.problem, tokens)
        kind = search.kind_of(plan.first.form.activations)
        return Cell(self.name, kind, tokens, tokens * self.problem.top_k, self.problem.experts)


def plan_of(problem: Problem, tokens: int, candidate: Candidate) -> HopperPlan:
    """The backend's plan with the candidate's tiles in place of its own."""
    return make_plan(problem, tokens, candidate.rule, decode=candidate.rule is None)


def _of_known(cells: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Without candidates that a rule cannot say any more."""
    return {cell: {name: of for name, of in told.items() if search.known(name)} for cell, told in cells.items()}


class Journal:
    """Cells measured so far, in a file that is written after each: a search may be stopped and goes on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        held: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self.times: dict[str, dict[str, float]] = _of_known(held.get("times", {}))
        self.failed: dict[str, dict[str, str]] = _of_known(held.get("failed", {}))

    def knows(self, cell: Cell, candidate: Candidate) -> bool:
        return any(candidate.name in held.get(cell.name, {}) for held in (self.times, self.failed))

    def note(self, cell: Cell, found: Mapping[str, float], failed: Mapping[str, str]) -> None:
        self.times.setdefault(cell.name, {}).update(found)
        self.failed.setdefault(cell.name, {}).update(failed)
        whole = json.dumps({"times": self.times, "failed": self.failed}, indent=1) + "\n"
        fresh = self.path.with_suffix(".new")
        fresh.write_text(whole)
        fresh.replace(self.path)


class Search:
    """All layers and sizes, one after another; each in two rounds: tiles, then flags of the best."""

    def __init__(
        self, layers: Sequence[TuningLayer], tokens: Sequence[int], journal: Journal, device: torch.device
    ) -> None:
        self.layers, self.tokens, self.journal, self.device = layers, tokens, journal, device
        self.windows = Windows(device)

    @property
    def cells(self) -> list[Cell]:
        return [layer.cell(tokens) for layer in self.layers for tokens in self.tokens]

    def run(self, say: Say, advance: Callable[[int], None] = lambda _: None) -> None:
        for layer in self.layers:
            wanted = [(layer.cell(tokens), c) for tokens in self.tokens for c in self._first(layer, tokens)]
            unknown = sum(not self.journal.knows(cell, candidate) for cell, candidate in wanted)
            say(f"{layer.name}: {unknown} of {len(wanted)} candidates are not measured yet")
            weights = Weights(layer.problem, self.device, distinct=DISTINCT)
            packed = weights.packed(HopperLayout(layer.problem))
            for tokens in self.tokens:
                self._cell(layer, tokens, packed, say)
                advance(1)

    def _first(self, layer: TuningLayer, tokens: int) -> list[Candidate]:
        cell = layer.cell(tokens)
        in_use = make_plan(layer.problem, tokens).rule
        assert in_use is not None
        return list(dict.fromkeys([Candidate(in_use), *search.first_round(cell, in_use)]))

    def _cell(self, layer: TuningLayer, tokens: int, packed: Mapping[str, Packed], say: Say) -> None:
        cell = layer.cell(tokens)
        self._measure(layer, cell, self._first(layer, tokens), packed)
        leader = search.best_of(self.journal.times.get(cell.name, {}))
        rule = None if leader is None else search.parse(leader).rule
        if rule is None:
            say(f"{cell.name}: no candidate runs")
            return
        self._measure(layer, cell, search.second_round(rule), packed)
        times = self.journal.times[cell.name]
        best = search.best_of(times, decode=True)
        say(f"{cell.name}: {best}, {times[best or '']:.1f} us of {len(times)} candidates")

    def _measure(
        self, layer: TuningLayer, cell: Cell, candidates: Sequence[Candidate], packed: Mapping[str, Packed]
    ) -> None:
        wanted = [candidate for candidate in candidates if not self.journal.knows(cell, candidate)]
        if not wanted:
            return
        plans, failed = self._plans(layer, cell, wanted)
        work = batches(layer.problem, cell.tokens, "uniform", ROUTINGS, self.device)
        expected: Tensor | None = None
        able: dict[str, list[Call]] = {}
        for name, plan in plans.items():
            out = torch.full_like(work[0].x, torch.nan)
            calls: list[Call] = [partial(_run, plan, packed, batch, out) for batch in work]
            try:
                got = _run(plan, packed, work[0], out).float()
            except (RuntimeError, LancebillError) as error:
                failed[name] = str(error).splitlines()[0]
                continue
            expected = got if expected is None else expected
            if float((got - expected).abs().max()) <= AGREE * float(expected.abs().max()):
                able[name] = calls
            else:
                failed[name] = "another result"
        took = self.windows.measure(able)
        self.journal.note(cell, {name: round(steady.median, 3) for name, steady in took.items()}, failed)

    def _plans(
        self, layer: TuningLayer, cell: Cell, wanted: Sequence[Candidate]
    ) -> tuple[dict[str, HopperPlan], dict[str, str]]:
        """Plans whose kernels compile, built on all cores; and why the others do not."""
        plans: dict[str, HopperPlan] = {}
        failed: dict[str, str] = {}
        for candidate in wanted:
            try:
                plans[candidate.name] = plan_of(layer.problem, cell.tokens, candidate)
            except (AssertionError, KeyError) as error:  # a tile that does not fit this form
                failed[candidate.name] = f"no such tile: {error}"
        broken = build_all(step.source for plan in plans.values() for step in steps(plan))
        for name, plan in list(plans.items()):
            why = [broken[step.source] for step in steps(plan) if step.source in broken]
            if why:
                failed[name] = why[0].splitlines()[-1]
                del plans[name]
        return plans, failed


def _run(plan: HopperPlan, packed: Mapping[str, Packed], batch: Batch, out: Tensor) -> Tensor:
    return registry()["hopper"].run(plan, batch.x, Indexed(batch.ids, batch.weights), packed, out)
