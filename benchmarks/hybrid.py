"""Layers split between a GPU and host memory, against each part alone and against other libraries.

With `--device cpu` the CPU stands in for the GPU, without graphs and without prefill: a check of this script.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cached_property, partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import compile_kernels
from benchmarks.loading import pinned_copy_rate
from benchmarks.runner import Case, Run, subject
from lancebill.backends.cpu import native
from lancebill.backends.cpu.executor import CpuExecutor
from lancebill.backends.cpu.host_call import HostCall, HostShape
from lancebill.backends.oracle import select
from lancebill.bench import peers_kt
from lancebill.bench.peers import PEERS
from lancebill.bench.workload import Batch, Weights
from lancebill.layer.parts import LayerParts
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.moe.activation import Activation
from lancebill.moe.dispatch import Indexed
from lancebill.moe.layout import Packed
from lancebill.moe.model_shapes import Shape, parse_shape
from lancebill.moe.problem import Problem
from lancebill.numbers.spec_names import ACTIVATIONS, parse_spec
from lancebill.split import divide_batch, large_batches
from lancebill.split import moves as moving
from lancebill.split.chosen_experts import ChosenExperts
from lancebill.split.copy_lane import pin_in_place
from lancebill.split.executor import SplitExecutor
from lancebill.split.host_calls import host_threads, use_host_threads
from lancebill.split.host_threads import HostThreads
from lancebill.split.large_batches import LargeBatches
from lancebill.split.measure_rates import BATCHES
from lancebill.split.split import Split, part_map
from lancebill.split.streamed import WAVE_BYTES
from lancebill.split.traces import REUSE, Reuse, make_trace
from lancebill.split.ways import Rates, size_of
from lancebill.testing.layers import worst_row

DECODE, PREFILL, PEER, MOVES = "decode", "prefill", "peers", "moves"
UNIFORM, RECENCY = "uniform", "recency"
HALF = 50  # percent of experts on the GPU
TURNS = 12  # what is compared is measured in turns: the rate of memory changes from second to second
ENOUGH_S, MOST_ROUNDS = 0.006, 25  # of one measurement
PREFILLS = 5
STEPS = 200, 400  # of a layer whose experts move: first, and timed
CALLS = {1: 16, 4: 8}  # different calls in a round, by tokens: experts must not stay in the CPU's caches
FEWEST_CALLS = 4
APART = 25  # steps between two batches of a trace: in a model, other layers have evicted an expert by its next use
DISTINCT = 8  # experts with different numbers; each has memory of its own
CPU = torch.device("cpu")


def split_cases() -> Iterator[Case]:
    """The most important first."""
    layers = {"shape": ("qwen3-235b-a22b", "deepseek-v4-flash"), "weights": ("mxfp4", "int4-g128")}
    few = (1, 4, 16)

    def cases(kind: str, routing: str, tokens: int, *shares: int) -> list[Case]:
        return Case.product(kind=(kind,), **layers, share=shares, routing=(routing,), tokens=(tokens,))

    yield from cases(DECODE, UNIFORM, 1, 0, 25, 50, 75, 100)
    yield from (case for tokens in (512, 2048, 8192) for case in cases(PREFILL, UNIFORM, tokens, HALF))
    yield from (case for tokens in few[1:] for case in cases(DECODE, UNIFORM, tokens, 0, 25, 50, 75, 100))
    yield from (case for tokens in few for case in cases(DECODE, RECENCY, tokens, 0, 25, 50, 75, 100))
    yield from (case for tokens in few for case in cases(PEER, UNIFORM, tokens, 0))
    yield from (case for tokens in few for case in cases(MOVES, RECENCY, tokens, HALF))


@subject(
    "hybrid", split_cases, device="cuda", beside=(("llama.cpp", "kt-kernel"), "on the CPU, with all experts"),
    threads=(int, "of the CPU's part; default: as the library chooses"),
)  # fmt: skip
def hybrid(run: Run) -> None:
    """A layer split between the GPU and host memory, against each part alone and against other libraries.

    decode: a call in a replayed CUDA graph of calls with different routing (`split_us`), the same with the GPU's part
    alone, and the CPU's part called from a loop without a GPU, in turns. The bar is max(cpu, gpu) / 0.9 + 20 us.
    Routing is uniform, or has the reuse of real models (`recency`). prefill: half of the experts on the GPU; as
    planned, with all missing experts on the CPU, with all copied, each after a call of its own kind. `wire_ms` is the
    bytes of missing experts / the rate of pinned copies; `best_ms` the least of wire, CPU, and both together. peers:
    the CPU's part with all experts, and other libraries with the same ones on as many threads. moves: steps with the
    reuse of real models while experts stay (`still_us`), move where it pays by estimate (`recency_us`), or in any case
    (`always_us`).
    """
    threads = use_threads(HostThreads.choose(run.options.threads))
    compile_kernels(launched(run.cases), run.device)
    on_gpu = run.device.startswith("cuda")
    run.facts |= {"threads": threads.count, "read_gbs": [round(read_rate(threads.count), 1)]}
    run.facts |= {"wire_gbs": round(pinned_copy_rate(2 << 30) / 1e9, 1) if on_gpu else 0.0}
    experts: dict[Case, Experts] = {}
    for case in (case for case in run.cases if not run.late(case)):
        layer = case.only("shape", "weights")
        with run.attempt(case):
            if case["kind"] == PEER:
                figures, peers = beside_peers(run, case, threads)
                run.add(case, figures, peers)
                continue
            if layer not in experts:
                experts[layer] = Experts(case["shape"], case["weights"], run.device)
            measure = {DECODE: decode, PREFILL: partial(prefill, wire_gbs=run.facts["wire_gbs"]), MOVES: moves}
            run.add(case, measure[case["kind"]](experts[layer], case))
    run.facts["read_gbs"].append(round(read_rate(threads.count), 1))


def use_threads(threads: HostThreads) -> HostThreads:
    """Let the CPU's part use these."""
    use_host_threads(threads)
    library = native.library()
    assert library is not None, native.state().why
    library.place_threads(threads.cpus, threads.spin_us)
    return threads


def read_rate(threads: int) -> float:
    """GB/s at which all threads together read memory, the best of five."""
    library, memory, best = native.library(), torch.zeros(1 << 30, dtype=torch.uint8), 0.0
    assert library is not None
    for _ in range(5):
        start = time.perf_counter()
        library.read(memory, threads)
        best = max(best, memory.numel() / (time.perf_counter() - start) / 1e9)
    return best


def launched(cases: Sequence[Case]) -> Iterator[tuple[Problem, int]]:
    """The GPU's parts of layers and the numbers of tokens that they compute."""
    for case in cases:
        problem = parse_shape(case["shape"]).problem(parse_spec(case["weights"]), ACTIVATIONS["bf16"])
        yield replace(problem, experts=problem.experts * case["share"] // 100), case["tokens"]
        if case["kind"] in (PREFILL, MOVES):  # copied experts, and the rates that are measured first
            wave = replace(problem, experts=min(problem.experts, max(1, WAVE_BYTES // size_of(problem).bytes)))
            yield from ((wave, tokens) for tokens in (*BATCHES, case["tokens"]))


# Layers and batches --------------------------------------------------------------------------------------


class Experts:
    """The experts of one shape and spec, made once in the layouts of both parts, and the split layers made of them."""

    def __init__(self, shape: str, weights: str, device: str) -> None:
        self.shape, self.device = parse_shape(shape), device
        self.problem = self.shape.problem(parse_spec(weights), ACTIVATIONS["bf16"])
        self.weights = Weights(self.problem, torch.device(device), distinct=DISTINCT)
        self.choices = {where: select(self.problem, where) for where in dict.fromkeys((device, "cpu"))}
        self._layers: dict[int, RoutedExperts] = {}

    @cached_property
    def on_device(self) -> dict[str, Packed]:
        return self.weights.packed(self.choices[self.device].backend.layout(self.problem))

    @cached_property
    def in_host(self) -> dict[str, Packed]:
        """The pages are locked: a layer of some of them could not lock its own."""
        weights = self.weights if self.device == "cpu" else Weights(self.problem, CPU, distinct=DISTINCT)
        made = weights.packed(self.choices["cpu"].backend.layout(self.problem))
        if self.device == "cuda":
            for tensor in (tensor for held in made.values() for tensor in held.values()):
                pin_in_place(tensor)
        return made

    def layer(self, share: int) -> RoutedExperts:
        """A layer with `share` percent of its experts on the GPU. Layers share their memory."""
        if share not in self._layers:
            split = Split.by_number(self.shape.experts, self.shape.experts * share // 100)
            own = self._part(self.device, self.on_device, split.device)
            host = self._part("cpu", self.in_host, split.host) if split.host else None
            self._layers[share] = RoutedExperts(replace(own, host=host))
        return self._layers[share]

    def moving(self, share: int, moves: str) -> RoutedExperts:
        """A layer whose experts move, so that its part on the GPU has memory of its own."""
        split = Split.by_number(self.shape.experts, self.shape.experts * share // 100)
        own = self._part(self.device, self.on_device, split.device)
        copied = {m: {name: tensor.clone() for name, tensor in held.items()} for m, held in own.packed.items()}
        in_host = split.host if moves == moving.OFF else tuple(range(self.shape.experts))
        return RoutedExperts(replace(own, packed=copied, host=self._part("cpu", self.in_host, in_host), moves=moves))

    def _part(self, where: str, held: dict[str, Packed], slots: tuple[int, ...]) -> LayerParts:
        rows = slice(slots[0], slots[-1] + 1) if slots else slice(0)
        packed = {matrix: {name: tensor[rows] for name, tensor in each.items()} for matrix, each in held.items()}
        places = torch.tensor(part_map(range(self.shape.experts), slots), dtype=torch.int32, device=where)
        choice = replace(self.choices[where], problem=replace(self.problem, experts=len(slots)))
        return LayerParts(choice, packed, expert_map=places)

    def batches(self, routing: str, tokens: int, count: int | None = None) -> list[Batch]:
        """Calls with different rows."""
        count, apart = count or CALLS.get(tokens, FEWEST_CALLS), 1 if routing == UNIFORM else APART
        used = routed_steps(self.shape, routing, tokens, count * apart, seed=tokens)[::apart]
        g, made = torch.Generator(self.device).manual_seed(tokens), []
        for each in used:
            x = torch.randn(tokens, self.shape.hidden, generator=g, device=self.device).bfloat16()
            weights = torch.rand(tokens, self.shape.top_k, generator=g, device=self.device)
            made.append(Batch(x, torch.tensor(each, dtype=torch.int32, device=self.device), weights))
        return made


def routed_steps(shape: Shape, routing: str, tokens: int, count: int, seed: int = 0) -> list[list[tuple[int, ...]]]:
    """The experts of `tokens` sequences in each of `count` steps: uniform, or with the reuse that real models show."""
    if routing == UNIFORM:
        chosen = random.Random(seed)
        return [[tuple(chosen.sample(range(shape.experts), shape.top_k)) for _ in range(tokens)] for _ in range(count)]
    nearest = min(REUSE.values(), key=lambda known: abs(known.experts - shape.experts))
    hits = tuple((places * shape.experts // nearest.experts, rate) for places, rate in nearest.hits)
    reuse = Reuse(shape.experts, shape.top_k, hits)
    traces = [make_trace(reuse, count, seed * 1000 + sequence) for sequence in range(tokens)]
    return [list(step) for step in zip(*traces)]


def whole(layer: RoutedExperts, given: Batch) -> Tensor:
    out: Tensor = layer(given.x, topk_ids=given.ids, topk_weights=given.weights)
    return out


def own(layer: RoutedExperts, given: Batch) -> Tensor:
    """A call of the GPU's part alone."""
    executor = layer.executor.own if isinstance(layer.executor, SplitExecutor) else layer.executor
    return executor.run(given.x, Indexed(given.ids, given.weights, layer.expert_map), torch.empty_like(given.x))


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


# Times ---------------------------------------------------------------------------------------------------


def us_of_calls(once: Callable[[], object], calls: int) -> float:
    """The median time of a call, where `once` makes `calls` of them."""
    times: list[float] = []
    while not times or (sum(times) < ENOUGH_S and len(times) < MOST_ROUNDS):
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


def replayed(call: Callable[[Batch], object], given: Sequence[Batch]) -> Callable[[], float]:
    """Measures the median time of a call in a replayed graph of all calls. On a CPU there are no graphs."""

    def all_calls() -> None:
        for each in given:
            call(each)

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


def once_us(call: Callable[[], object]) -> float:
    """From its start until the GPU has ended."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e6


def bytes_read(layer: RoutedExperts, given: Sequence[Batch]) -> float:
    """Of the experts in host memory that a call uses, on average."""
    assert layer.host_experts is not None and layer.host_experts.expert_map is not None
    places = layer.host_experts.expert_map.tolist()
    active = [len({expert for expert in each.ids.flatten().tolist() if places[expert] >= 0}) for each in given]
    return (
        sum(active)
        / len(active)
        * sum(t[0].nbytes for held in layer.host_experts.packed.values() for t in held.values())
    )


# Cells ---------------------------------------------------------------------------------------------------


def decode(experts: Experts, case: Case) -> dict[str, Any]:
    layer, given = experts.layer(case["share"]), experts.batches(case["routing"], case["tokens"])
    measures = {"split_us": replayed(partial(whole, layer), given)}
    if layer.problem.experts:
        measures["gpu_us"] = replayed(partial(own, layer), given)
    if layer.host_experts is not None:
        measures["cpu_us"] = on_cpu(layer, given)
    row = {"split_us": 0.0, "cpu_us": 0.0, "gpu_us": 0.0} | in_turns(measures)
    row["bar_us"] = max(row["cpu_us"], row["gpu_us"]) / 0.9 + 20
    if layer.host_experts is not None:
        row["cpu_gbs"] = bytes_read(layer, given) / row["cpu_us"] / 1e3
        layer.host_experts.calls.check()
    return row


def prefill(experts: Experts, case: Case, wire_gbs: float) -> dict[str, Any]:
    layer, given = experts.layer(case["share"]), experts.batches(UNIFORM, case["tokens"], 1)[0]
    assert isinstance(layer.executor, SplitExecutor) and layer.host_experts is not None
    large, host_map = layer.executor.large_batches, layer.host_experts.expert_map
    assert host_map is not None
    rates, size = large._measured(given.x.device), large_batches.expert_size(large.host.executor)
    chosen = ChosenExperts(large._cpu.native, given.ids.cpu().int(), given.weights.cpu().float())
    counts = chosen.counts(host_map, large._cpu.problem.experts)
    ways = divide_batch.choose_ways(counts, case["tokens"], size, rates)
    forced = {
        "prefill": rates,
        "cpu": replace(rates, copy_gbs=1e-6),
        "copied": replace(rates, cpu_gbs=1e-6, cpu_gflops=1e-6, cpu_points=()),
    }

    def us(used: Rates) -> float:
        with forced_rates(large, given.x.device, used):
            whole(layer, given)  # as layers of a model follow one another; after other work the CPU is faster or slower
            return once_us(lambda: whole(layer, given))

    taken = in_turns({name: partial(us, used) for name, used in forced.items()}, PREFILLS)
    wire = (len(ways.cpu) + len(ways.streamed)) * size.bytes / wire_gbs / 1e3
    best = min(wire, taken["cpu"], 1 / (1 / wire + 1 / taken["cpu"]))
    times = {f"{name}_ms": each / 1e3 for name, each in {**taken, "wire": wire, "best": best}.items()}
    divided = {"on_cpu": len(ways.cpu), "copied": len(ways.streamed), "rates": asdict(rates)}
    return {**times, "over_best": taken["prefill"] / best, **divided}


@contextmanager
def forced_rates(large: LargeBatches, device: torch.device, rates: Rates) -> Iterator[None]:
    key = large._key(device)
    before, large_batches._RATES[key] = large_batches._RATES[key], rates
    large._expected.clear()
    try:
        yield
    finally:
        large_batches._RATES[key] = before
        large._expected.clear()


class Steps:
    """A layer that is called step by step, on a GPU as a replayed graph, with the experts of a trace."""

    def __init__(self, layer: RoutedExperts, experts: Experts, tokens: int) -> None:
        used = routed_steps(experts.shape, RECENCY, tokens, sum(STEPS))
        self.ids = torch.tensor(used, dtype=torch.int32, device=experts.device)
        self.given, self.layer, self.graph = experts.batches(UNIFORM, tokens, 1)[0], layer, None
        if experts.device == "cuda":
            whole(layer, self.given)
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                whole(layer, self.given)

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
                whole(self.layer, self.given)
            else:
                self.graph.replay()
                torch.cuda.current_stream().synchronize()  # as a model does at the end of every step


def moves(experts: Experts, case: Case) -> dict[str, Any]:
    share, tokens, estimate = case["share"], case["tokens"], moving.break_even
    row: dict[str, Any] = {"still_us": Steps(experts.moving(share, moving.OFF), experts, tokens).us()}
    for name, rule in {"recency": estimate, "always": lambda share, rates: 0.0}.items():
        moving.break_even = rule
        try:
            layer = experts.moving(share, moving.RECENCY)
            assert layer.moves is not None and isinstance(layer.executor, SplitExecutor)
            if experts.device == "cuda":  # the rates by which moving pays
                layer.executor.large_batches.expected(4096, torch.device("cuda", 0))
            row[f"{name}_us"] = Steps(layer, experts, tokens).us()
            row[f"{name}_moved"] = layer.moves.moved
            layer.moves.halt()
            layer.moves.check()
        finally:
            moving.break_even = estimate
    return row


def beside_peers(run: Run, case: Case, threads: HostThreads) -> tuple[dict[str, Any], dict[str, float]]:
    """The CPU's part and other libraries, in a process of its own: their threads may spin or never answer."""
    context, figures, peers = get_context("spawn"), dict[str, Any](), dict[str, float]()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=peers_process, args=(theirs, case, run.options.beside, run.device, threads))
    process.start()
    theirs.close()
    try:
        while ours.poll(90.0):
            name, found = ours.recv()
            if name == "ours":
                figures |= found
            elif isinstance(found, str):
                run.skip(f"{case}: {name}", found)
            elif found["difference"] < 1:
                peers[name] = found["us"]
            else:
                figures["wrong"] = [*figures.get("wrong", ()), name]
    except EOFError:  # it has ended
        pass
    process.kill()
    process.join()
    return figures, peers


def peers_process(results: Connection, case: Case, names: Sequence[str], device: str, threads: HostThreads) -> None:
    """Sends (name, what was measured) as soon as it is known."""
    torch.set_num_threads(use_threads(threads).count)
    peers_kt.MOST_TOKENS = case["tokens"]
    experts = Experts(case["shape"], case["weights"], device)
    given = experts.batches(UNIFORM, case["tokens"])
    taken = median(on_cpu(experts.layer(0), given)() for _ in range(TURNS))
    results.send(("ours", {"cpu_us": taken, "cpu_gbs": bytes_read(experts.layer(0), given) / taken / 1e3}))
    want = host_calls(experts.layer(0), given[:1])[0]
    want.run()
    rows = [(each.x.cpu(), each.ids.cpu(), each.weights.cpu()) for each in given]
    for name in names:
        try:  # none of them clamps
            peer = PEERS[name](replace(experts.problem, activation=Activation()), experts.weights)
            difference = worst_row(peer(*rows[0]), want.out)
            us = us_of_calls(lambda: [peer(*each) for each in rows], len(rows))  # noqa: B023
            results.send((name, {"us": us, "difference": difference}))
        except Exception as error:
            results.send((name, str(error) or type(error).__name__))
