"""One benchmark: backends and peers on a layer, for each number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from lancebill.backends import oracle
from lancebill.bench import peers as others
from lancebill.bench.ceilings import Ceilings, measure_ceilings
from lancebill.bench.check import check
from lancebill.bench.peer import Peer, SortingPeer
from lancebill.bench.report import BenchCase, BenchRow
from lancebill.bench.timing import Call, Times, host_time, make_clock, measure
from lancebill.bench.workload import Batch, Weights, batches
from lancebill.errors import LancebillError, SpecError
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.moe.dispatch import Indexed, combine, to_contiguous
from lancebill.moe.model_shapes import Shape
from lancebill.moe.problem import FAST, Device, Problem, parse_device
from lancebill.moe.simulation import Simulation
from lancebill.numbers.spec_names import ACTIVATIONS, parse_activation, parse_spec

LAYER, DISPATCH, COMBINE = "layer", "dispatch", "combine"
SORTED = ", sorted"  # a peer without its routing sort: done before the clock starts
SHARED = "torch"  # who computes the parts that any backend may use
ROUTINGS = 5  # batches that take turns

# What other people's code raises where it cannot: each is a reason, not our failure.
THEIRS = (
    ImportError, RuntimeError, AssertionError, ValueError, KeyError, TypeError, AttributeError, OSError, LancebillError,
)  # fmt: skip

Say = Callable[[str], None]
Layer = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Setup:
    """What is asked for."""

    shape: Shape
    weights: str
    activations: str = "bf16"
    device: str = "cpu"
    tokens: tuple[int, ...] = (1, 16, 64)
    routing: str = "uniform"
    backends: tuple[str, ...] = (oracle.AUTO,)
    peers: tuple[str, ...] = ()
    threads: int | None = None
    repeats: int = 20
    host: bool = False  # time the host's part of eager calls too
    distinct: int | None = None  # different experts; the rest repeat their numbers
    order: str = FAST

    def problem(self) -> Problem:
        posed = self.shape.problem(parse_spec(self.weights), parse_activation(self.activations))
        return replace(posed, order=self.order)


@dataclass(frozen=True)
class BenchResult:
    """What came out; `absent` says why a peer is not in the figures."""

    setup: Setup
    device: Device
    threads: int | None
    ceilings: Ceilings
    evicted: int  # bytes read before every timed call
    rows: tuple[BenchRow, ...]
    absent: Mapping[str, str]


def run(setup: Setup, say: Say = lambda _: None) -> BenchResult:
    """Measure the machine, make the weights, then every number of tokens in turn."""
    device, problem = _present(setup.device), setup.problem()
    names = others.expand(setup.peers)
    Simulation(setup.routing)  # refuses a name that is none
    if setup.host and device.kind == "cpu":
        raise SpecError("the host's part of a call is timed beside a GPU", where="--host", got=device)
    choices = [oracle.select(problem, device, name) for name in setup.backends]
    before = torch.get_num_threads()
    if setup.threads is not None:
        torch.set_num_threads(setup.threads)
    try:
        return _run(replace(setup, peers=names), device, problem, choices, say)
    finally:
        torch.set_num_threads(before)


def _present(name: str) -> Device:
    """The device of this name; one that can only be asked about cannot be timed."""
    device = parse_device(name)
    if device.kind == "cuda" and not name.startswith("cuda"):
        raise SpecError(f"{name} is a kind of device, not one that is here", expected="cpu, cuda or cuda:0")
    return device


def _run(setup: Setup, device: Device, problem: Problem, choices: Sequence[oracle.Choice], say: Say) -> BenchResult:
    say("measuring the machine")
    ceilings, clock = measure_ceilings(device, problem.activations), make_clock(device)
    evicted = clock.buffer.numel() * clock.buffer.element_size()
    threads = torch.get_num_threads() if device.kind == "cpu" else None
    rows: list[BenchRow] = []
    absent: dict[str, str] = {}
    weights = Weights(problem, device.torch, distinct=setup.distinct)
    layers: dict[str, _Ours] = {}
    for choice in choices:
        name = choice.backend.name
        say(f"packing {problem.experts} experts for {name}")
        layers[name] = _Ours(choice, weights)
    rivals = _peers(setup, problem, weights, absent, say)
    for tokens in setup.tokens:
        say(f"{tokens} token{'s' * (tokens != 1)}")
        work = batches(problem, tokens, setup.routing, ROUTINGS, device.torch)
        errors = {name: _checked(name, layer, problem, weights, work[0]) for name, layer in layers.items()}
        _check_peers(rivals, problem, weights, work[0], absent)
        contestants: dict[str, list[Call]] = {name: _calls(layer, work) for name, layer in (layers | rivals).items()}
        sorted_ = {f"{name}{SORTED}": _sorted(rival, work) for name, rival in rivals.items()}
        contestants |= {name: calls for name, calls in sorted_.items() if calls} | _shared_parts(problem, work)
        eager = _eager(layers, work) | {name: _calls(layer, work) for name, layer in rivals.items()}
        host = {name: host_time(calls, device.torch) for name, calls in eager.items()} if setup.host else {}
        times = measure(clock, contestants, setup.repeats)
        done = BenchCase.of(problem, work)
        beside = {name: times[name] for name in (*rivals, *sorted_) if name in times}
        for name in layers:
            rows.append(BenchRow(LAYER, name, tokens, times[name], done, ceilings, beside, errors[name], host))
        rows += _shared_rows(problem, tokens, times, ceilings)
    return BenchResult(setup, device, threads, ceilings, evicted, tuple(rows), absent)


class _Ours:
    """What users call, with the weights packed as the backend wants them.

    The output is allocated once for a number of tokens, as NaN: the first result, which is checked,
    shows what was not written.
    """

    def __init__(self, choice: oracle.Choice, weights: Weights) -> None:
        self.layer = RoutedExperts()
        self.layer.adopt(choice, weights.packed(choice.backend.layout(choice.problem)))
        self._out = torch.empty(0)

    def __call__(self, x: Tensor, ids: Tensor, routed: Tensor) -> Tensor:
        if self._out.shape != x.shape:
            self._out = torch.full_like(x, torch.nan)
        result: Tensor = self.layer(x, topk_ids=ids, topk_weights=routed, out=self._out)
        return result


def _eager(layers: Mapping[str, _Ours], work: Sequence[Batch]) -> dict[str, list[Call]]:
    """What users write, and nothing of ours around it: every microsecond of the host counts."""
    out = torch.empty_like(work[0].x)
    return {
        name: [partial(ours.layer, b.x, topk_ids=b.ids, topk_weights=b.weights, out=out) for b in work]
        for name, ours in layers.items()
    }


def _checked(name: str, layer: Layer, problem: Problem, weights: Weights, batch: Batch) -> float:
    return check(name, problem, weights, batch, layer(batch.x, batch.ids, batch.weights))


def _peers(setup: Setup, problem: Problem, weights: Weights, absent: dict[str, str], say: Say) -> dict[str, Peer]:
    made: dict[str, Peer] = {}
    for name in setup.peers:
        say(f"making {name}")
        try:
            made[name] = others.PEERS[name](problem, weights)
            made[name].ready(setup.tokens)
        except THEIRS as error:
            made.pop(name, None)
            absent[name] = _first_line(error)
    return made


def _check_peers(
    rivals: dict[str, Peer], problem: Problem, weights: Weights, batch: Batch, absent: dict[str, str]
) -> None:
    """A peer that fails, or computes something else, leaves the race; it is no reason to stop ours."""
    for name in list(rivals):
        rival = rivals[name]
        inputs = rival.activations or str(problem.input)
        computed = replace(problem, activations=ACTIVATIONS[inputs], activations_w2=None)
        try:
            _checked(name, rival, computed, weights, batch)
        except THEIRS as error:
            absent[name] = f"{batch.x.shape[0]} tokens: {_first_line(error)}"
            del rivals[name]


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _calls(layer: Layer, work: Sequence[Batch]) -> list[Call]:
    return [partial(layer, batch.x, batch.ids, batch.weights) for batch in work]


def _sorted(rival: Peer, work: Sequence[Batch]) -> list[Call]:
    """What is left of a peer's calls once its routing is sorted; nothing where it has no such step."""
    if not isinstance(rival, SortingPeer):
        return []
    return [partial(rival.compute, b.x, b.ids, b.weights, rival.sort(b.ids)) for b in work]


def _shared_parts(problem: Problem, work: Sequence[Batch]) -> dict[str, list[Call]]:
    """The pieces around the products that are the same for every backend that has none of its own."""
    calls: dict[str, list[Call]] = {DISPATCH: [], COMBINE: []}
    for batch in work:
        indexed = Indexed(batch.ids, batch.weights)
        rows, _, groups = to_contiguous(batch.x, indexed, problem.experts)
        out = torch.empty_like(batch.x)
        calls[DISPATCH].append(partial(to_contiguous, batch.x, indexed, problem.experts))
        calls[COMBINE].append(partial(combine, rows, groups, indexed, out))
    return calls


def _shared_rows(problem: Problem, tokens: int, times: Mapping[str, Times], ceilings: Ceilings) -> list[BenchRow]:
    """Both move one row for each slot and one for each token, once each way."""
    moved = tokens * (problem.top_k + 1) * problem.hidden * problem.input.storage.itemsize
    work = BenchCase(0.0, float(moved), 0.0, problem.activations)
    return [BenchRow(part, SHARED, tokens, times[part], work, ceilings) for part in (DISPATCH, COMBINE)]
