"""What `hybrid.py` measures of a split layer: decode, decode while experts move, prefill, and other libraries."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import torch
from hybrid_batches import RECENCY, UNIFORM, Batch, batches, steps
from hybrid_experts import Experts
from torch import Tensor

from lancebill.backends.cpu.executor import CpuExecutor
from lancebill.backends.cpu.host_call import HostCall, HostShape
from lancebill.bench.peer import Peer
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.moe.dispatch import Indexed
from lancebill.split import divide_batch, large_batches
from lancebill.split import executor as executors
from lancebill.split import moves as moving
from lancebill.split.chosen_experts import ChosenExperts
from lancebill.split.executor import SplitExecutor
from lancebill.split.host_calls import host_threads, use_host_threads
from lancebill.split.host_threads import HostThreads
from lancebill.split.large_batches import LargeBatches
from lancebill.split.streamed import BUFFERS, copy_wave
from lancebill.split.ways import BOTH_WORTH, MOST_ROWS, Rates, Ways
from lancebill.testing.layers import worst_row

TURNS = 12  # what is compared is measured in turns: the rate of memory changes from second to second
ENOUGH_S = 0.006  # of one measurement
ROUNDS = 1, 25  # at least, at most
PREFILLS = 5
STEPS = 200, 400  # of a layer whose experts move: first, and timed
CALLS = {1: 16, 4: 8}  # different calls in a round, by tokens: experts must not stay in the CPU's caches
FEWEST_CALLS = 4
SPINS_US = 200, 2000
Measured = dict[str, Any]


def us_of_calls(once: Callable[[], object], calls: int) -> float:
    """The median time of a call, where `once` makes `calls` of them."""
    times: list[float] = []
    while len(times) < ROUNDS[0] or (sum(times) < ENOUGH_S and len(times) < ROUNDS[1]):
        start = time.perf_counter()
        once()
        times.append(time.perf_counter() - start)
    return median(times) * 1e6 / calls


def in_turns(measures: dict[str, Callable[[], float]], turns: int = TURNS) -> dict[str, float]:
    """The median of each. Every second turn goes backwards: after a pause the CPU is faster than after work."""
    found: dict[str, list[float]] = {name: [] for name in measures}
    for turn in range(turns):
        for name in list(measures)[:: -1 if turn % 2 else 1]:
            found[name].append(measures[name]())
    return {name: median(times) for name, times in found.items()}


def replayed(run: Callable[[Batch], object], given: Sequence[Batch]) -> Callable[[], float]:
    """Measures the median time of a call in a replayed graph of all calls. On a CPU there are no graphs."""

    def all_calls() -> None:
        for each in given:
            run(each)

    all_calls()
    if given[0].x.device.type == "cpu":
        return lambda: us_of_calls(all_calls, len(given))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        all_calls()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times: list[float] = []

    def replay() -> None:
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(given))

    def measure() -> float:
        replay()
        times.clear()
        us_of_calls(replay, len(given))
        return median(times)

    return measure


def whole(layer: RoutedExperts) -> Callable[[Batch], Tensor]:
    """A call of the layer."""

    def run(given: Batch) -> Tensor:
        out: Tensor = layer(given.x, topk_ids=given.ids, topk_weights=given.weights)
        return out

    return run


def own(layer: RoutedExperts) -> Callable[[Batch], Tensor]:
    """A call of the GPU's part alone."""
    executor = layer.executor.own if isinstance(layer.executor, SplitExecutor) else layer.executor

    def run(given: Batch) -> Tensor:
        dispatch = Indexed(given.ids, given.weights, layer.expert_map)
        return executor.run(given.x, dispatch, torch.empty_like(given.x))

    return run


def host_calls(layer: RoutedExperts, given: Sequence[Batch]) -> list[HostCall]:
    """The calls of the CPU's part, as the GPU would ask for them."""
    host = layer.host_experts
    assert host is not None and isinstance(host.executor, CpuExecutor) and host.expert_map is not None
    x, ids, weights = given[0].x, given[0].ids, given[0].weights
    shape = HostShape(len(x), x.dtype, ids.dtype, weights.dtype, host_threads().count)
    made = []
    for each in given:
        call = host.executor.host_call(shape, host.expert_map, lambda size: torch.empty(size, dtype=torch.uint8))
        call.x.copy_(each.x)
        call.ids.copy_(each.ids)
        call.weights.copy_(each.weights)
        made.append(call)
    return made


def on_cpu(layer: RoutedExperts, given: Sequence[Batch]) -> Callable[[], float]:
    """Measures the median time of the CPU's part, called back to back from this thread."""
    calls = host_calls(layer, given)

    def all_calls() -> None:
        for call in calls:
            call.run()

    def measure() -> float:
        all_calls()
        taken = us_of_calls(all_calls, len(calls))
        for call in calls:
            call.check()
        return taken

    return measure


def bytes_read(layer: RoutedExperts, given: Sequence[Batch]) -> float:
    """Of the experts in host memory that a call uses, on average."""
    assert layer.host_experts is not None and layer.host_experts.expert_map is not None
    places = layer.host_experts.expert_map.tolist()
    active = [len({expert for expert in each.ids.flatten().tolist() if places[expert] >= 0}) for each in given]
    each_bytes = sum(t[0].nbytes for held in layer.host_experts.packed.values() for t in held.values())
    return sum(active) / len(active) * each_bytes


def decode(experts: Experts, share: int, routing: str, tokens: int, ways: bool = False) -> Measured:
    """A split layer against each part alone; `ways`: also what the way to the CPU costs."""
    layer, shape = experts.layer(share), experts.shape
    given = batches(shape, routing, tokens, CALLS.get(tokens, FEWEST_CALLS), experts.device)
    measures = {"split_us": replayed(whole(layer), given)}
    if layer.problem.experts:
        measures["gpu_us"] = replayed(own(layer), given)
    if layer.host_experts is not None:
        measures["cpu_us"] = on_cpu(layer, given)
    row: Measured = {"gpu_us": 0.0, "cpu_us": 0.0} | in_turns(measures)
    row["bar_us"] = max(row["cpu_us"], row["gpu_us"]) / 0.9 + 20
    row["within"] = row["split_us"] <= row["bar_us"]
    if layer.host_experts is not None:
        made = [mapped.call.call for mapped in layer.host_experts.calls.captured[-len(given) :]]
        if made:
            row["asked_us"] = sum(each.nanoseconds for each in made) / sum(each.count for each in made) / 1e3
        row["cpu_gbs"] = bytes_read(layer, given) / row["cpu_us"] / 1e3
        if ways:
            row |= _ways(layer, experts, tokens, given)
        layer.host_experts.calls.check()
    return row


def _ways(layer: RoutedExperts, experts: Experts, tokens: int, given: Sequence[Batch]) -> Measured:
    """Without a token for the CPU, and with CUDA's host functions in the place of mailboxes."""
    idle = batches(experts.shape, UNIFORM, tokens, len(given), experts.device, most=layer.problem.experts)
    row = in_turns({"idle_us": replayed(whole(layer), idle), "idle_gpu_us": replayed(own(layer), idle)})
    before, executors.MAILBOX_ROWS = executors.MAILBOX_ROWS, 0
    try:
        return row | {"function_us": replayed(whole(layer), given)()}
    finally:
        executors.MAILBOX_ROWS = before


def threads(experts: Experts, share: int, tokens: int, usual: HostThreads) -> Measured:
    """Decode with other threads on the CPU."""
    layer = experts.layer(share)
    assert layer.host_experts is not None and isinstance(layer.host_experts.executor, CpuExecutor)
    given = batches(experts.shape, UNIFORM, tokens, CALLS.get(tokens, FEWEST_CALLS), experts.device)
    row: Measured = {}
    for count, spin_us in product((usual.count, max(1, usual.count - 1)), SPINS_US):
        chosen = replace(usual, count=count, spin_us=spin_us)
        use_host_threads(chosen)
        layer.host_experts.executor.native.place_threads(chosen.cpus, chosen.spin_us)
        row[f"split_{count}_{spin_us}_us"] = replayed(whole(layer), given)()
        row[f"cpu_{count}_{spin_us}_us"] = on_cpu(layer, given)()
    use_host_threads(usual)
    return row


class _Steps:
    """A layer that is called step by step, on a GPU as a replayed graph, with the experts of a trace."""

    def __init__(self, layer: RoutedExperts, experts: Experts, tokens: int) -> None:
        used = steps(experts.shape, RECENCY, tokens, sum(STEPS))
        self.ids = torch.tensor(used, dtype=torch.int32, device=experts.device)
        self.given = batches(experts.shape, UNIFORM, tokens, 1, experts.device)[0]
        self.run, self.graph = whole(layer), None
        if experts.device == "cuda":
            self.run(self.given)
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.run(self.given)

    def us(self) -> float:
        """The time of a step, after the first ones."""
        self._go(range(STEPS[0]))
        start = time.perf_counter()
        self._go(range(STEPS[0], sum(STEPS)))
        return (time.perf_counter() - start) * 1e6 / STEPS[1]

    def _go(self, which: range) -> None:
        for step in which:
            self.given.ids.copy_(self.ids[step])
            if self.graph is None:
                self.run(self.given)
            else:
                self.graph.replay()
                torch.cuda.current_stream().synchronize()  # as a model does at the end of every step


def moves(experts: Experts, share: int, tokens: int) -> Measured:
    """Steps of a trace with experts that stay, that move where it pays by estimate, and that move in any case."""
    row: Measured = {"steps": STEPS[1], "still_us": _Steps(experts.moving(share, moving.OFF), experts, tokens).us()}
    estimate = moving.break_even
    for name, rule in {"recency": estimate, "always": lambda share, rates: 0.0}.items():
        moving.break_even = rule
        try:
            layer = experts.moving(share, moving.RECENCY)
            assert layer.moves is not None and isinstance(layer.executor, SplitExecutor)
            if experts.device == "cuda":  # the rates by which moving pays
                layer.executor.large_batches.expected(4096, torch.device("cuda", 0))
            row[f"{name}_us"] = _Steps(layer, experts, tokens).us()
            row[f"{name}_moved"] = layer.moves.moved
            layer.moves.halt()
            layer.moves.check()
        finally:
            moving.break_even = estimate
    return row


def eager_us(run: Callable[[], object]) -> float:
    """The median time of a call, after a first one."""
    once_us(run)
    return median(once_us(run) for _ in range(PREFILLS))


def once_us(run: Callable[[], object]) -> float:
    """From its start until the GPU has ended."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e6


def prefill(experts: Experts, share: int, tokens: int, wire_gbs: float) -> Measured:
    """A large batch: as planned, with all missing experts on the CPU, with all of them copied, and with both ways."""
    layer, given = experts.layer(share), batches(experts.shape, UNIFORM, tokens, 1, experts.device)[0]
    assert isinstance(layer.executor, SplitExecutor) and layer.host_experts is not None
    large, host_map = layer.executor.large_batches, layer.host_experts.expert_map
    assert host_map is not None
    rates, size = large._measured(given.x.device), large_batches.expert_size(large.host.executor)
    chosen_experts = ChosenExperts(large._cpu.native, given.ids.cpu().int(), given.weights.cpu().float())
    counts = chosen_experts.counts(host_map, large._cpu.problem.experts)
    chosen = divided(lambda: whole(layer)(given)) or divide_batch.choose_ways(counts, tokens, size, rates)
    forced = {
        "prefill": (rates, BOTH_WORTH),
        "cpu": (replace(rates, copy_gbs=1e-6), BOTH_WORTH),
        "copied": (replace(rates, cpu_gbs=1e-6, cpu_gflops=1e-6, cpu_points=()), BOTH_WORTH),
        "both": (rates, 1.0),
    }

    def us(used: Rates, worth: float) -> float:
        with _forced(large, given.x.device, used, worth):
            whole(layer)(given)  # as layers of a model follow one another; after other work the CPU is faster or slower
            return once_us(lambda: whole(layer)(given))

    measures = {name: partial(us, *how) for name, how in forced.items()}
    taken = in_turns(measures, PREFILLS)
    missing = len(chosen.cpu) + len(chosen.streamed)
    wire = missing * size.bytes / wire_gbs / 1e3
    together = 1 / (1 / wire + 1 / taken["cpu"])
    best = min(wire, taken["cpu"], together)
    return {
        **{f"{name}_us": us for name, us in taken.items()},
        "gpu_us": eager_us(lambda: own(layer)(given)), "wire_us": wire, "together_us": together,
        "over_best": taken["prefill"] / best, "within": taken["prefill"] <= 1.15 * best,
        "never_slower": taken["prefill"] <= min(taken["cpu"], taken["copied"]),
        "on_cpu": len(chosen.cpu), "copied": len(chosen.streamed), "estimate_us": chosen.estimate_us,
        "cpu_estimate_us": chosen.cpu_alone_us, "copied_estimate_us": chosen.copied_us, "share_us": chosen.cpu_us,
        "asked_us": asked_us(layer, lambda: whole(layer)(given)),
        **(beside_copies(layer, large, given) if tokens <= MOST_ROWS else {}), "rates": asdict(rates),
    }  # fmt: skip


def divided(run: Callable[[], object]) -> Ways | None:
    """How a call divides its experts, which depends on those whose copies have begun. None: it does not ask."""
    found, choose = list[Ways](), divide_batch.choose_ways

    def chosen(*given: Any, **how: Any) -> Ways:
        found.append(choose(*given, **how))
        return found[-1]

    divide_batch.choose_ways = chosen
    try:
        run()
    finally:
        divide_batch.choose_ways = choose
    return found[-1] if found else None


def asked_us(layer: RoutedExperts, run: Callable[[], object]) -> float:
    """The mean time of the CPU's part inside large batches, by the library's own clock."""

    def nanoseconds() -> int:
        assert layer.host_experts is not None
        return sum(mapped.call.call.nanoseconds for _, mapped in layer.host_experts.calls.eager.values())

    once_us(run)
    before = nanoseconds()
    for _ in range(PREFILLS):
        once_us(run)
    return (nanoseconds() - before) / PREFILLS / 1e3


@contextmanager
def _forced(large: LargeBatches, device: torch.device, rates: Rates, worth: float) -> Iterator[None]:
    """Other rates, and how much both ways must save."""
    key = large._key(device)
    before, choose = large_batches._RATES[key], divide_batch.choose_ways
    large_batches._RATES[key] = rates
    divide_batch.choose_ways = partial(choose, worth=worth)
    large._expected.clear()
    try:
        yield
    finally:
        large_batches._RATES[key], divide_batch.choose_ways = before, choose
        large._expected.clear()


def lane_copies(large: LargeBatches, device: torch.device) -> tuple[Callable[[], None], int]:
    """Queues the copies of all experts in host memory, wave by wave; and their bytes."""
    stage, lane = large._stage(device), large_batches.lane_of(device.index or 0)
    held = large.host.executor.tensors.packed()
    slots = range(large.host.executor.problem.experts)
    waves = [slots[first : first + stage.experts] for first in range(0, len(slots), stage.experts)]
    size = large_batches.expert_size(large.host.executor).bytes * len(slots)

    def copy() -> None:
        for first in range(0, len(waves), BUFFERS):
            for number in range(first, min(first + BUFFERS, len(waves))):
                copy_wave(stage, lane, held, waves, number)

    return copy, size


def beside_copies(layer: RoutedExperts, large: LargeBatches, given: Batch) -> Measured:
    """The CPU's part with all its experts, alone and while experts are copied; the rate of copies alone and beside."""
    device, call = given.x.device, host_calls(layer, [given])[0]
    (copy, size), lane = lane_copies(large, device), large_batches.lane_of(device.index or 0)
    alone_us, copy_us = eager_us(call.run), eager_us(copy)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times, rates, repeats = [], [], max(1, round(alone_us / copy_us))
    for _ in range(PREFILLS):
        torch.cuda.synchronize()
        start.record(lane.stream)
        for _ in range(repeats):
            copy()
        end.record(lane.stream)
        begun = time.perf_counter()
        call.run()
        times.append((time.perf_counter() - begun) * 1e6)
        torch.cuda.synchronize()
        rates.append(size * repeats / start.elapsed_time(end) / 1e6)
    beside = {"beside_us": median(times), "beside_gbs": median(rates)}
    return {"alone_us": alone_us, "lane_gbs": size / copy_us / 1e3, **beside}


def cpu_part(experts: Experts, tokens: int) -> Measured:
    """The CPU's part with all experts."""
    given = batches(experts.shape, UNIFORM, tokens, CALLS.get(tokens, FEWEST_CALLS), experts.device)
    taken = median(on_cpu(experts.layer(0), given)() for _ in range(TURNS))
    return {"cpu_us": taken, "cpu_gbs": bytes_read(experts.layer(0), given) / taken / 1e3}


def beside_peer(experts: Experts, peer: Peer, tokens: int) -> Measured:
    """Another library with the same experts and rows, and how its result differs from ours."""
    given = batches(experts.shape, UNIFORM, tokens, CALLS.get(tokens, FEWEST_CALLS), experts.device)
    rows = [Batch(each.x.cpu(), each.ids.cpu(), each.weights.cpu()) for each in given]
    ours = host_calls(experts.layer(0), given[:1])[0]
    ours.run()

    def all_calls() -> None:
        for each in rows:
            peer(each.x, each.ids, each.weights)

    all_calls()
    theirs = peer(rows[0].x, rows[0].ids, rows[0].weights)
    return {"us": us_of_calls(all_calls, len(rows)), "difference": worst_row(theirs, ours.out)}
