"""Runs one benchmark: backends and peers on the same layer, for each number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from lancebill.backends import oracle
from lancebill.bench import peers as peer_table
from lancebill.bench.ceilings import Ceilings, measure_ceilings
from lancebill.bench.check import check_output
from lancebill.bench.peer import Peer, SortingPeer
from lancebill.bench.results import BenchCase, BenchResult, BenchRow, BenchSetup
from lancebill.bench.split_layer import make_layer
from lancebill.bench.timing import Call, Times, host_time, make_clock, measure
from lancebill.bench.workload import Batch, Weights, batches
from lancebill.errors import LancebillError, SpecError
from lancebill.layer.check_split import check_layer
from lancebill.moe.device import Device, parse_device
from lancebill.moe.dispatch import Indexed, combine, to_contiguous
from lancebill.moe.problem import Problem
from lancebill.moe.simulation import Simulation
from lancebill.numbers.spec_names import ACTIVATIONS
from lancebill.split.host_calls import host_threads, use_host_threads
from lancebill.split.host_threads import HostThreads

LAYER, DISPATCH, COMBINE = "layer", "dispatch", "combine"
SORTED = ", sorted"  # suffix of a peer's name when its routing sort is not timed
SHARED = "torch"  # the "backend" of dispatch and combine, which all backends may share
ROUTINGS = 5  # batches with different routings, timed in turns

# What a peer's code raises if it cannot run here. Such a peer is left out; the benchmark goes on.
PEER_ERRORS = (
    ImportError, RuntimeError, AssertionError, ValueError, KeyError, TypeError, AttributeError, OSError, LancebillError,
)  # fmt: skip

Log = Callable[[str], None]
Layer = Callable[[Tensor, Tensor, Tensor], Tensor]


def check_setup(setup: BenchSetup) -> None:
    """Raise for names that do not exist, and if the layer cannot be split as asked."""
    device = parse_device(setup.device)
    peer_table.expand_families(setup.peers)
    Simulation(setup.routing)
    for name in setup.backends:
        oracle.check_name(name)
    check_layer(setup.problem(), device, setup.split, setup.moves, setup.cpu_threads, where="--split")
    if setup.cpu_threads is not None and device.kind == "cpu":
        what = "these threads compute experts in host memory beside a GPU"
        raise SpecError(what, where="--cpu-threads", got=f"device '{device}'", hint="--threads sets those of a CPU")


def run_benchmark(setup: BenchSetup, log: Log = lambda _: None) -> BenchResult:
    """Measure the machine, make the weights, then time every number of tokens."""
    device, problem = _local_device(setup.device), setup.problem()
    check_setup(setup)
    if setup.host and device.kind == "cpu":
        raise SpecError("host time is only measured for layers on a GPU", where="--host", got=device)
    choices = [oracle.select(problem, device, name) for name in setup.backends]
    with _threads(setup):
        return _measure(replace(setup, peers=peer_table.expand_families(setup.peers)), device, problem, choices, log)


@contextmanager
def _threads(setup: BenchSetup) -> Iterator[None]:
    """The numbers of threads that were asked for, until the end of the block."""
    threads_before, host_before = torch.get_num_threads(), host_threads()
    if setup.threads is not None:
        torch.set_num_threads(setup.threads)
    if setup.cpu_threads is not None:
        use_host_threads(HostThreads.choose(setup.cpu_threads))
    try:
        yield
    finally:
        torch.set_num_threads(threads_before)
        use_host_threads(host_before)


def _local_device(name: str) -> Device:
    """The device of this name. An architecture such as sm_90 can be planned for, but not timed."""
    device = parse_device(name)
    if device.kind == "cuda" and not name.startswith("cuda"):
        raise SpecError(f"{name} is an architecture, not a device of this machine", expected="cpu, cuda or cuda:0")
    return device


def _measure(
    setup: BenchSetup, device: Device, problem: Problem, choices: Sequence[oracle.Choice], log: Log
) -> BenchResult:
    log("measuring the machine")
    ceilings, clock = measure_ceilings(device, problem.activations), make_clock(device)
    evicted = clock.buffer.numel() * clock.buffer.element_size()
    threads = torch.get_num_threads() if device.kind == "cpu" else None
    rows: list[BenchRow] = []
    absent: dict[str, str] = {}
    weights = Weights(problem, device.torch, distinct=setup.distinct)
    layers: dict[str, _Ours] = {}
    for choice in choices:
        name = choice.backend.name
        log(f"packing {problem.experts} experts for {name}")
        layers[name] = _Ours(choice, weights, setup)
    peers = _make_peers(setup, problem, weights, absent, log)
    for tokens in setup.tokens:
        log(f"{tokens} token{'s' * (tokens != 1)}")
        work = batches(problem, tokens, setup.routing, ROUTINGS, device.torch)
        errors = {name: _call_and_check(name, layer, problem, weights, work[0]) for name, layer in layers.items()}
        _check_peers(peers, problem, weights, work[0], absent)
        timed: dict[str, list[Call]] = {name: _calls(layer, work) for name, layer in (layers | peers).items()}
        presorted = {f"{name}{SORTED}": _calls_after_sort(peer, work) for name, peer in peers.items()}
        timed |= {name: calls for name, calls in presorted.items() if calls} | _shared_parts(problem, work)
        eager = _eager_calls(layers, work) | {name: _calls(layer, work) for name, layer in peers.items()}
        host = {name: host_time(calls, device.torch) for name, calls in eager.items()} if setup.host else {}
        times = measure(clock, timed, setup.repeats)
        case = BenchCase.of(problem, work)
        peer_times = {name: times[name] for name in (*peers, *presorted) if name in times}
        for name in layers:
            rows.append(BenchRow(LAYER, name, tokens, times[name], case, ceilings, peer_times, errors[name], host))
        rows += _shared_rows(problem, tokens, times, ceilings)
    return BenchResult(setup, device, threads, ceilings, evicted, tuple(rows), absent)


class _Ours:
    """A `RoutedExperts` layer, called as users call it.

    The output is allocated once for each number of tokens and filled with NaN, so that checking the first result
    finds rows the kernel did not write.
    """

    def __init__(self, choice: oracle.Choice, weights: Weights, setup: BenchSetup) -> None:
        self.layer = make_layer(choice, weights, setup.split, setup.moves)
        self._out = torch.empty(0, dtype=torch.float32, device="cpu")

    def __call__(self, x: Tensor, ids: Tensor, routed: Tensor) -> Tensor:
        if self._out.shape != x.shape:
            self._out = torch.full_like(x, torch.nan)
        result: Tensor = self.layer(x, topk_ids=ids, topk_weights=routed, out=self._out)
        return result


def _eager_calls(layers: Mapping[str, _Ours], work: Sequence[Batch]) -> dict[str, list[Call]]:
    """The bare layer calls, without the `_Ours` wrapper: its Python overhead would show in the host time."""
    out = torch.empty_like(work[0].x)
    return {
        name: [partial(ours.layer, b.x, topk_ids=b.ids, topk_weights=b.weights, out=out) for b in work]
        for name, ours in layers.items()
    }


def _call_and_check(name: str, layer: Layer, problem: Problem, weights: Weights, batch: Batch) -> float:
    return check_output(name, problem, weights, batch, layer(batch.x, batch.ids, batch.weights))


def _make_peers(
    setup: BenchSetup, problem: Problem, weights: Weights, absent: dict[str, str], log: Log
) -> dict[str, Peer]:
    """The peers that can be constructed here; the reason for each other one is added to `absent`."""
    peers: dict[str, Peer] = {}
    for name in setup.peers:
        log(f"making {name}")
        try:
            peers[name] = peer_table.PEERS[name](problem, weights)
            peers[name].compile(setup.tokens)
        except PEER_ERRORS as error:
            peers.pop(name, None)
            absent[name] = _first_line(error)
    return peers


def _check_peers(
    peers: dict[str, Peer], problem: Problem, weights: Weights, batch: Batch, absent: dict[str, str]
) -> None:
    """Move peers that fail or compute a wrong result from `peers` to `absent`."""
    for name in list(peers):
        peer = peers[name]
        inputs = peer.activations or str(problem.input)
        computed = replace(problem, activations=ACTIVATIONS[inputs], activations_w2=None)
        try:
            _call_and_check(name, peer, computed, weights, batch)
        except PEER_ERRORS as error:
            absent[name] = f"{batch.x.shape[0]} tokens: {_first_line(error)}"
            del peers[name]


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _calls(layer: Layer, work: Sequence[Batch]) -> list[Call]:
    return [partial(layer, batch.x, batch.ids, batch.weights) for batch in work]


def _calls_after_sort(peer: Peer, work: Sequence[Batch]) -> list[Call]:
    """A peer's calls with the routing already sorted; empty if the peer has no separate sort."""
    if not isinstance(peer, SortingPeer):
        return []
    return [partial(peer.compute, b.x, b.ids, b.weights, peer.sort(b.ids)) for b in work]


def _shared_parts(problem: Problem, work: Sequence[Batch]) -> dict[str, list[Call]]:
    """Dispatch and combine in torch: what backends use that have no kernels for these steps."""
    calls: dict[str, list[Call]] = {DISPATCH: [], COMBINE: []}
    for batch in work:
        indexed = Indexed(batch.ids, batch.weights)
        rows, _, groups = to_contiguous(batch.x, indexed, problem.experts)
        out = torch.empty_like(batch.x)
        calls[DISPATCH].append(partial(to_contiguous, batch.x, indexed, problem.experts))
        calls[COMBINE].append(partial(combine, rows, groups, indexed, out))
    return calls


def _shared_rows(problem: Problem, tokens: int, times: Mapping[str, Times], ceilings: Ceilings) -> list[BenchRow]:
    """Dispatch and combine each move one row per slot and one row per token."""
    moved = tokens * (problem.top_k + 1) * problem.hidden * problem.input.storage.itemsize
    work = BenchCase(0.0, float(moved), 0.0, problem.activations)
    return [BenchRow(part, SHARED, tokens, times[part], work, ceilings) for part in (DISPATCH, COMBINE)]
