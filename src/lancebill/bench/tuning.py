"""Measures the candidates of `tuning.search`: compiles their plans, checks the results, times them in windows."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lancebill.backends.gpu.layout import FragmentLayout
from lancebill.backends.gpu.plan import GpuPlan
from lancebill.backends.hopper.plan import make_plan
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
AGREE = 4e-2  # largest difference between candidates, relative to the largest output: only the order of sums differs

Log = Callable[[str], None]


@dataclass(frozen=True)
class TuningLayer:
    """One of the layers to tune."""

    name: str
    problem: Problem

    def cell(self, tokens: int) -> Cell:
        plan = make_plan(self.problem, tokens)
        kind = search.kind_of(plan.first_gemm.form.activations)
        return Cell(self.name, kind, tokens, tokens * self.problem.top_k, self.problem.experts)


def plan_of(problem: Problem, tokens: int, candidate: Candidate) -> GpuPlan:
    """The backend's plan with the candidate's tiles instead of the policy's."""
    return make_plan(problem, tokens, candidate.rule, decode=candidate.rule is None)


def _without_obsolete(cells: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Drop candidates whose names the current rules can no longer express."""
    return {
        cell: {name: value for name, value in by_name.items() if search.is_valid_name(name)}
        for cell, by_name in cells.items()
    }


class Journal:
    """The measurements so far. The file is rewritten after each cell, so a stopped search can resume."""

    def __init__(self, path: Path) -> None:
        self.path = path
        stored: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        self.times: dict[str, dict[str, float]] = _without_obsolete(stored.get("times", {}))
        self.failed: dict[str, dict[str, str]] = _without_obsolete(stored.get("failed", {}))

    def is_measured(self, cell: Cell, candidate: Candidate) -> bool:
        """Whether the candidate was already measured, or failed, for this cell."""
        return any(candidate.name in cells.get(cell.name, {}) for cells in (self.times, self.failed))

    def note(self, cell: Cell, times: Mapping[str, float], failed: Mapping[str, str]) -> None:
        """Add results and write the file; it is replaced in one step, so it is never half written."""
        self.times.setdefault(cell.name, {}).update(times)
        self.failed.setdefault(cell.name, {}).update(failed)
        text = json.dumps({"times": self.times, "failed": self.failed}, indent=1) + "\n"
        new_file = self.path.with_suffix(".new")
        new_file.write_text(text)
        new_file.replace(self.path)


class Search:
    """Tunes all layers and batch sizes. Each cell takes two rounds: tiles, then flags of the best tile."""

    def __init__(
        self, layers: Sequence[TuningLayer], tokens: Sequence[int], journal: Journal, device: torch.device
    ) -> None:
        self.layers, self.tokens, self.journal, self.device = layers, tokens, journal, device
        self.windows = Windows(device)

    @property
    def cells(self) -> list[Cell]:
        return [layer.cell(tokens) for layer in self.layers for tokens in self.tokens]

    def run(self, log: Log, advance: Callable[[int], None] = lambda _: None) -> None:
        for layer in self.layers:
            candidates = [(layer.cell(tokens), c) for tokens in self.tokens for c in self._first_round(layer, tokens)]
            remaining = sum(not self.journal.is_measured(cell, candidate) for cell, candidate in candidates)
            log(f"{layer.name}: {remaining} of {len(candidates)} candidates are not measured yet")
            weights = Weights(layer.problem, self.device, distinct=DISTINCT)
            packed = weights.packed(FragmentLayout(layer.problem))
            for tokens in self.tokens:
                self._tune_cell(layer, tokens, packed, log)
                advance(1)

    def _first_round(self, layer: TuningLayer, tokens: int) -> list[Candidate]:
        """The rule in use, then all tiles to try."""
        cell = layer.cell(tokens)
        in_use = make_plan(layer.problem, tokens).rule
        assert in_use is not None
        return list(dict.fromkeys([Candidate(in_use), *search.first_round(cell, in_use)]))

    def _tune_cell(self, layer: TuningLayer, tokens: int, packed: Mapping[str, Packed], log: Log) -> None:
        cell = layer.cell(tokens)
        self._measure(layer, cell, self._first_round(layer, tokens), packed)
        best_tile = search.best_of(self.journal.times.get(cell.name, {}))
        rule = None if best_tile is None else search.parse_candidate(best_tile).rule
        if rule is None:
            log(f"{cell.name}: no candidate runs")
            return
        self._measure(layer, cell, search.second_round(rule), packed)
        times = self.journal.times[cell.name]
        best = search.best_of(times, decode=True)
        log(f"{cell.name}: {best}, {times[best or '']:.1f} us of {len(times)} candidates")

    def _measure(
        self, layer: TuningLayer, cell: Cell, candidates: Sequence[Candidate], packed: Mapping[str, Packed]
    ) -> None:
        """Measure those candidates that are not in the journal; all must agree with the first that runs."""
        remaining = [candidate for candidate in candidates if not self.journal.is_measured(cell, candidate)]
        if not remaining:
            return
        plans, failed = self._plans(layer, cell, remaining)
        work = batches(layer.problem, cell.tokens, "uniform", ROUTINGS, self.device)
        expected: Tensor | None = None
        correct: dict[str, list[Call]] = {}
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
                correct[name] = calls
            else:
                failed[name] = "wrong result"
        times = self.windows.measure(correct)
        self.journal.note(cell, {name: round(steady.median, 3) for name, steady in times.items()}, failed)

    def _plans(
        self, layer: TuningLayer, cell: Cell, candidates: Sequence[Candidate]
    ) -> tuple[dict[str, GpuPlan], dict[str, str]]:
        """Plans of the candidates that compile, and the compile error of each other one. Compiles on all cores."""
        plans: dict[str, GpuPlan] = {}
        failed: dict[str, str] = {}
        for candidate in candidates:
            try:
                plans[candidate.name] = plan_of(layer.problem, cell.tokens, candidate)
            except (AssertionError, KeyError) as error:  # this kernel form does not support the tile
                failed[candidate.name] = f"tile not supported: {error}"
        broken = build_all(step.source for plan in plans.values() for step in steps(plan))
        for name, plan in list(plans.items()):
            errors = [broken[step.source] for step in steps(plan) if step.source in broken]
            if errors:
                failed[name] = errors[0].splitlines()[-1]
                del plans[name]
        return plans, failed


def _run(plan: GpuPlan, packed: Mapping[str, Packed], batch: Batch, out: Tensor) -> Tensor:
    return registry()["hopper"].run(plan, batch.x, Indexed(batch.ids, batch.weights), packed, out)
