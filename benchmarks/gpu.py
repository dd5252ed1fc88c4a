"""Whole layers on a GPU, beside other implementations, our own kernels for other GPUs, and kernels that only read.

A layer is timed from ids to the combined output as an engine calls it: the public layer with int64 ids, which with
expert parallelism include other ranks' ids. Peers get local int32 ids. All replay CUDA graphs for about 40 ms in turns,
for several rounds (`Windows`); batches rotate so that weights do not stay in the L2. The ceilings, dense GEMMs and
reads, are measured the same way. Every result is first compared with the reference. With `--device cpu` single calls
are timed instead, which checks the script.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor

from benchmarks import machine
from benchmarks.runner import Case, Run, subject
from lancebill.backends.base import Backend
from lancebill.backends.gpu import workspace
from lancebill.backends.gpu.backend import GpuBackend
from lancebill.backends.gpu.executor import GpuExecutor
from lancebill.backends.gpu.plan import GpuPlan, scratch
from lancebill.backends.gpu.shipped import pack_kernels
from lancebill.backends.oracle import select
from lancebill.backends.reference import BACKEND as REFERENCE
from lancebill.backends.registry import registry
from lancebill.bench.ceilings import Ceilings, measure_ceilings
from lancebill.bench.check import error_bound, expected_rows
from lancebill.bench.peer import Peer, SortingPeer
from lancebill.bench.peers import PEERS, expand_families
from lancebill.bench.peers_cuda import compile_humming
from lancebill.bench.results import BenchCase, expert_bytes
from lancebill.bench.sustained import GEMM_SIZE, WINDOW_US, Steady, Windows, dense_gemms, window_rates
from lancebill.bench.timing import Call, CpuClock, measure
from lancebill.bench.workload import Batch, Weights
from lancebill.jit.build import build_all
from lancebill.jit.compile import KernelSource
from lancebill.jit.driver import capability
from lancebill.jit.load import loadable
from lancebill.layer.parts import LayerParts
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.moe.device import Device, parse_device
from lancebill.moe.dispatch import Indexed, localize
from lancebill.moe.layout import Packed
from lancebill.moe.model_shapes import parse_shape
from lancebill.moe.problem import BATCH_INVARIANT, Problem
from lancebill.moe.simulation import Simulation
from lancebill.numbers.spec_names import parse_activation, parse_spec
from lancebill.testing.layers import SampleLayer, layer_problem, worst_row

HUMMING, TRITON, TORCH, MARLIN, HOPPER, READ = "humming", "triton_kernels", "torch", "marlin", "hopper", "read"
SORTED = ", sorted"  # of a peer's name: its routing sort is not timed
ROTATED_BYTES = 256 << 20  # distinct weights that successive calls read: several times the L2
FEWEST, MOST = 2, 32  # batches that take turns
CHECKED_ROWS = 16
COMPUTE_BOUND = 4096  # from this many tokens on the GEMMs decide a layer's time
READ_TOKENS = 4  # more tokens take more launches than two
Implementation = Callable[[Tensor, Tensor, Tensor], Tensor]  # x, local ids, weights

# Cases ---------------------------------------------------------------------------------------------------

TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384)
FEWER = (1, 16, 64, 256, 4096)
RACE = {  # shape, weights, activations, tokens, peers
    "deepseek-mxfp4-bf16": ("deepseek-v4-flash", "mxfp4", "bf16", TOKENS, (HUMMING, TRITON)),
    "deepseek-mxfp4-fp8": ("deepseek-v4-flash", "mxfp4", "fp8", TOKENS, (HUMMING,)),
    "deepseek-int4-bf16": ("deepseek-v4-flash", "int4-g128", "bf16", TOKENS, (HUMMING,)),
    "gpt-oss-mxfp4-bf16": ("gpt-oss-120b", "mxfp4", "bf16", FEWER, (HUMMING, TRITON)),
    "qwen3-mxfp4-bf16": ("qwen3-30b-a3b", "mxfp4", "bf16", FEWER, (HUMMING, TRITON)),
    "deepseek-fp8block-bf16": ("deepseek-v4-flash", "fp8-block", "bf16", TOKENS, (TORCH,)),
    "deepseek-int8-bf16": ("deepseek-v4-flash", "int8", "bf16", TOKENS, (TORCH,)),
    "qwen3-fp8block-bf16": ("qwen3-30b-a3b", "fp8-block", "bf16", TOKENS, (TORCH,)),
    "qwen3-int8-bf16": ("qwen3-30b-a3b", "int8", "bf16", TOKENS, (TORCH,)),
}
MXFP4 = (("mxfp4", "bf16"), ("mxfp4", "fp8"))
KIMI = (("int4-g32", "bf16"),)
SHAPES = {  # the most important first
    "deepseek-v3": MXFP4, "mixtral-8x7b": MXFP4, "kimi-k2": (*MXFP4, *KIMI), "deepseek-v4-flash": MXFP4,
    "llama-4-scout": MXFP4, "glm-4.5-air": MXFP4, "gpt-oss-120b:tp4": MXFP4, "qwen3-235b-a22b": MXFP4,
    "kimi-k2:ep8": KIMI, "kimi-k2:tp8": KIMI, "gpt-oss-120b": MXFP4, "gpt-oss-120b:tp2": MXFP4,
    "gpt-oss-120b:tp8": MXFP4, "qwen3-30b-a3b": MXFP4,
}  # fmt: skip
OLDER = (
    ("deepseek-v4-flash", "mxfp4"), ("deepseek-v4-flash", "int4-g128"), ("gpt-oss-120b", "mxfp4"),
    ("qwen3-30b-a3b", "mxfp4"), ("qwen3-30b-a3b", "int4-g128"), ("mixtral-8x7b", "mxfp4"),
    ("mixtral-8x7b", "int4-g128"), ("gpt-oss-120b", "int4-g64"),
)  # fmt: skip
OLDER_INT8 = ("deepseek-v4-flash", "qwen3-30b-a3b", "mixtral-8x7b")
ROUTINGS = ("uniform", "eight-busy", "half-empty", "zipf", "half-to-one")


def race_cases() -> Iterator[Case]:
    for part, (shape, weights, activations, tokens, _) in RACE.items():
        names = {"part": part, "shape": shape, "weights": weights, "activations": activations}
        yield from (Case.of(**names, tokens=count) for count in tokens)


def shape_cases() -> Iterator[Case]:
    """Uniform routing of all layers, the first numbers of tokens first."""
    layers = [(shape, *spec) for shape, specs in SHAPES.items() for spec in specs]
    for shape, weights, activations in layers:
        names = {"shape": shape, "weights": weights, "activations": activations, "routing": ROUTINGS[0]}
        yield from (Case.of(**names, tokens=count) for count in (1, 64, 1024, 8192, 16, 256, 4, 4096, 16384))


def older_cases() -> Iterator[Case]:
    for shape, weights in OLDER:
        names = {"shape": shape, "weights": weights, "activations": "bf16", "routing": ROUTINGS[0]}
        yield from (Case.of(**names, tokens=count) for count in TOKENS)
    for shape, activations in ((shape, activations) for shape in OLDER_INT8 for activations in ("bf16", "int8")):
        names = {"shape": shape, "weights": "int8", "activations": activations, "routing": ROUTINGS[0]}
        yield from (Case.of(**names, tokens=count) for count in (1, 64, 1024, 4096))


def shape_name(label: str) -> str:
    """A shape as the package writes it; `8x64x64x2` is one of 8 experts, hidden, intermediate, 2 of them used."""
    return re.sub(r"^(\d+)x(\d+)x(\d+)x(\d+)", r"\1,\2,\3,\4", label)


def problem_of(case: Case) -> Problem:
    """One rank's layer (`SHAPE:tpN`, `SHAPE:epN`) of a model. In the race peers compute plain layers of its sizes."""
    model, _, rank = shape_name(case["shape"]).partition(":")
    shape, weights, activations = parse_shape(model), case["weights"], case["activations"]
    if "part" in dict(case.labels):
        plain = {"hidden": shape.hidden, "intermediate": shape.intermediate, "experts": shape.experts}
        return layer_problem(weights, activations, top_k=shape.top_k, **plain)
    ranks = {rank[:2]: int(rank[2:])} if rank else {}
    return shape.problem(parse_spec(weights), parse_activation(activations), **ranks)


# Subjects ------------------------------------------------------------------------------------------------

OPTIONS: dict[str, Any] = {
    "rounds": (4, "windows of each contestant"),
    "window_us": (WINDOW_US, "length of a window"),
    "pause_ms": (20.0, "pause before every window, against throttling"),
    "distinct": (16, "experts with different numbers; the others repeat them"),
}


@subject("gpu-layer", race_cases, device="cuda", beside=((HUMMING, TORCH), "peers, of those of each part"), **OPTIONS)
def gpu_layer(run: Run) -> None:
    """A plain layer and every peer, each part with the peers that compute it; the share of the floor.

    With few tokens, where batch-invariant order launches other kernels, it is timed as well. With many tokens our GEMMs
    alone are also timed in turns with a dense GEMM.
    """
    Race(run, extras=True).measure(
        lambda layer: [peer for peer in RACE[layer["part"]][4] if peer in run.options.beside]
    )


@subject("gpu-shapes", shape_cases, device="cuda",
         beside=((HUMMING,), f"{HUMMING}, {MARLIN}, {HOPPER}; {READ}: kernels that only read; empty: ours alone"),
         **OPTIONS)  # fmt: skip
def gpu_shapes(run: Run) -> None:
    """Layers of many models, also as one rank of tensor or expert parallelism and with skewed routings."""
    Race(run).measure(lambda layer: run.options.beside)


@subject("gpu-older", older_cases, device="cuda", beside=((MARLIN, HOPPER), f"{MARLIN}, {HOPPER}"), **OPTIONS)
def gpu_older(run: Run) -> None:
    """Kernels for older GPUs on this one: run it with LANCEBILL_GPU=sm_80. Beside vLLM's Marlin and our own kernels."""
    Race(run).measure(lambda layer: run.options.beside if layer["activations"] != "int8" else ())


@dataclass(frozen=True)
class Sample:
    """A layer to time, and the weights of which other implementations are made."""

    problem: Problem
    weights: Weights
    packed: dict[str, Packed]
    layer: RoutedExperts

    @classmethod
    def make(cls, problem: Problem, device: torch.device, distinct: int) -> Sample:
        """With expert parallelism the layer maps global ids itself."""
        choice, weights = select(problem, parse_device(str(device))), Weights(problem, device, distinct=distinct)
        packed = weights.packed(choice.backend.layout(choice.problem))
        places = None if problem.experts == problem.global_experts else rank_map(problem, device)
        return cls(problem, weights, packed, RoutedExperts(LayerParts(choice, packed, expert_map=places)))

    def invariant(self) -> RoutedExperts | None:
        """The same layer in batch-invariant order, if the backend computes that otherwise."""
        choice = select(replace(self.problem, order=BATCH_INVARIANT), self.layer.choice.device)
        return RoutedExperts(LayerParts(choice, self.packed)) if isinstance(choice.backend, GpuBackend) else None

    def hopper(self) -> Implementation:
        """The Hopper backend, also where the GPU counts as an older one."""
        backend = registry()[HOPPER]
        layer = SampleLayer(
            self.problem, backend, self.weights.packed(backend.layout(self.problem)), self.weights.device
        )
        return lambda x, ids, weights: layer(x, Indexed(ids, weights), torch.empty_like(x))


@dataclass(frozen=True)
class EngineBatch:
    """A batch as an engine passes it: global int64 ids. `local` has this rank's ids, for peers and the reference."""

    ids: Tensor
    local: Batch


class Race:
    """One run: the clock, the ceilings, and the cells of layer after layer."""

    def __init__(self, run: Run, extras: bool = False) -> None:
        self.run, self.extras, self.device = run, extras, torch.device(run.device)
        given = run.options
        self.clock = clock(self.device, given.window_us, given.rounds, given.pause_ms / 1e3)
        self.ceilings = ceilings(self.clock)
        rates = {"read_gbs": self.ceilings.read_gbs, **self.ceilings.tflops}
        run.facts |= {"ceilings": {name: round(rate, 1) for name, rate in rates.items()}}
        run.facts |= {"window_us": given.window_us, "rounds": given.rounds, "clocks": clocks(self.device)}
        self.dense = dense_gemms(self.device) if extras and self.device.type == "cuda" else {}

    def measure(self, beside: Callable[[Case], Iterable[str]]) -> None:
        """Each layer may use its part of the time that is left, so that the last ones have some."""
        labels = [name for name, _ in self.run.cases[0].labels if name not in ("routing", "tokens")]
        layers = list(self.run.groups(*labels))
        compile_kernels(((problem_of(case), case["tokens"]) for case in self.run.cases), self.run.device)
        ahead = {layer: HUMMING in beside(layer) for layer, _ in layers}
        with compiled_ahead([cases for layer, cases in layers if ahead[layer]], self.device) as compiled:
            for i, (layer, cases) in enumerate(layers):
                with self.run.attempt(layer):
                    peers = list(beside(layer))
                    if ahead[layer]:
                        compiled[layer_key(layer)].get(timeout=min(1e6, self.run.seconds_left))
                    until = time.monotonic() + self.run.seconds_left / (len(layers) - i)
                    self.measure_layer(cases, peers, until)
                if self.device.type == "cuda":
                    torch.cuda.empty_cache()

    def measure_layer(self, cases: list[Case], names: Sequence[str], until: float = math.inf) -> None:
        problem = problem_of(cases[0])
        sample = Sample.make(problem, self.device, self.run.options.distinct)
        peers: dict[str, Peer | Implementation] = {}
        for name in expand_families(tuple(name for name in names if name not in (HOPPER, READ))):
            with self.run.attempt(f"{cases[0].only('shape', 'weights', 'activations')}: {name}"):
                peer = PEERS[name](problem, sample.weights)
                peer.compile([case["tokens"] for case in cases])
                peers[name] = peer
        if HOPPER in names:
            peers[HOPPER] = sample.hopper()
        for case in cases:
            if time.monotonic() > until:
                self.run.skip(case, "the layer's part of the time was over")
                continue
            with self.run.attempt(case):
                self.measure_cell(case, sample, peers, read=READ in names and case["tokens"] <= READ_TOKENS)

    def measure_cell(self, case: Case, sample: Sample, peers: Mapping[str, Any], read: bool = False) -> None:
        problem, tokens = sample.problem, case["tokens"]
        batches = rotating_batches(problem, tokens, dict(case.labels).get("routing", ROUTINGS[0]), self.device)
        local, want = [batch.local for batch in batches], Wanted.of(problem, sample.weights, batches[0].local)
        out = torch.full_like(local[0].x, torch.nan)
        ours = layer_calls(sample.layer, batches, out)
        error, bound = want.error(ours[0]()), error_bound(problem)
        if error > bound:
            raise ValueError(f"the result differs from the reference by {error}")
        contestants: dict[str, list[Call]] = {"ours": ours}
        for name, calls in peer_calls(peers, local, with_sort=self.extras).items():
            with self.run.attempt(f"{case}: {name}"):
                differs = want.error(calls[0]())
                if differs > 2 * bound:
                    raise ValueError(f"differs from the reference by {differs}")
                contestants[name] = calls
        invariant = sample.invariant() if self.extras else None
        if invariant is not None and launched(invariant, tokens) != launched(sample.layer, tokens):
            contestants["invariant"] = layer_calls(invariant, batches, out)
        readers = layer_readers(sample.packed, local) if read else {}
        times = self.clock.measure(contestants | readers)
        us = {name: taken.median for name, taken in times.items()}
        mine = us.pop("ours")
        figures = {"us": mine, "noise": times["ours"].noise, "error": error}
        figures |= floors(self.ceilings, problem, local, mine)
        if "invariant" in us:
            figures["invariant_us"] = us.pop("invariant")
        if readers:
            fastest = min(us.pop(name) for name in readers)
            figures |= {"read_us": fastest, "of_read": fastest / mine}
        if self.dense and tokens >= COMPUTE_BOUND:
            figures["of_dense"] = of_dense(self.clock, sample.layer, local[0], out, self.dense)
        self.run.add(case, figures, fastest_variants(us))


# Contestants ---------------------------------------------------------------------------------------------


def layer_calls(layer: RoutedExperts, batches: Sequence[EngineBatch], out: Tensor) -> list[Call]:
    return [partial(layer, b.local.x, topk_ids=b.ids, topk_weights=b.local.weights, out=out) for b in batches]


def peer_calls(peers: Mapping[str, Any], batches: Sequence[Batch], with_sort: bool) -> dict[str, list[Call]]:
    """Peers without their routing sort, if they have one, and whole."""
    found: dict[str, list[Call]] = {}
    for name, peer in peers.items():
        if isinstance(peer, SortingPeer):
            after = [partial(peer.compute, b.x, b.ids, b.weights, peer.sort(b.ids)) for b in batches]
            found[f"{name}{SORTED}"] = list(after)
        if with_sort or not isinstance(peer, SortingPeer):
            found[name] = [partial(peer, b.x, b.ids, b.weights) for b in batches]
    return found


def layer_readers(packed: Mapping[str, Packed], batches: Sequence[Batch]) -> dict[str, list[Call]]:
    """Ways only to read the bytes of the activated experts: w13's in a launch, w2's in one that waits for it."""
    from lancebill.bench.read_kernel import CHAINED_READERS, make_sink, read_in_turn  # needs Triton

    device, matrices = batches[0].x.device, []
    for tensors in packed.values():
        experts = next(iter(tensors.values())).shape[0]
        words = sum(tensor.nbytes for tensor in tensors.values()) // experts // 4
        matrices.append(torch.empty(experts, words, dtype=torch.int32, device=device).random_())
    rows = [batch.ids[batch.ids >= 0].unique().to(torch.int32) for batch in batches]
    sinks = {reader: make_sink(device, reader) for reader in CHAINED_READERS}
    return {
        reader.name: [partial(read_in_turn, matrices, row, sink, reader) for row in rows]
        for reader, sink in sinks.items()
    }


def fastest_variants(us: Mapping[str, float]) -> dict[str, float]:
    """The fastest of a family's variants without their routing sort, then the others."""
    found: dict[str, float] = {}
    for name, taken in us.items():
        family = next((family for family in (HUMMING, TRITON) if name.startswith(family)), None)
        title = name if family is None else family if name.endswith(SORTED) else f"{family} with sort"
        found[title] = min(taken, found.get(title, math.inf))
    families = [title for title in found if title in (HUMMING, TRITON)]
    plain = [title for title in found if title not in families and not title.endswith((SORTED, "with sort"))]
    return {title: found[title] for title in dict.fromkeys([*families, *plain, *found])}


def of_dense(clock: Any, layer: RoutedExperts, b: Batch, out: Tensor, dense: Mapping[str, Call]) -> float:
    """The share of a dense GEMM's rate that our GEMMs reach, launched as the layer launches them, timed in turns."""
    executor = layer.executor
    assert isinstance(executor, GpuExecutor)
    with torch.cuda.stream(clock.stream):
        layer(b.x, topk_ids=b.ids, topk_weights=b.weights, out=out)
        torch.cuda.synchronize()
        plan = executor.plan(b.x, Indexed(b.ids, b.weights))
        assert isinstance(plan, GpuPlan)
        bindings = executor.program(plan, b.x.device, executor.workspace(plan, b.x.device)).bindings
    gemms = [launch for step, launch in zip(bindings.steps, bindings.launches) if "KIND" in dict(step.source.constants)]
    assert bindings.workspace is not None, "only a captured call's workspace is not kept"
    # In a layer the dispatch resets the tile counters; GEMMs alone would find no tile left.
    counters = workspace.views(bindings.workspace.memory, scratch(bindings.plan))["counts"].view(-1, 4)[:, 1:]

    def ours() -> None:
        counters.zero_()
        for launch in gemms:
            launch(torch.cuda.current_stream().cuda_stream)

    inputs = "fp8" if layer.problem.activations.spec.quantized else "bf16"
    times = clock.measure({"ours": [ours], "dense": [dense[inputs]]})
    rate = BenchCase.of(layer.problem, [b]).flops / times["ours"].median
    return float(rate / (2.0 * GEMM_SIZE**3 / times["dense"].median))


# Batches and results -------------------------------------------------------------------------------------


def rank_map(problem: Problem, device: torch.device) -> Tensor:
    """The slot of every global expert on the first rank, which has the first experts."""
    experts = torch.arange(problem.global_experts, device=device)
    return torch.where(experts < problem.experts, experts, -1).to(torch.int32)


def rotating_batches(problem: Problem, tokens: int, routing: str, device: torch.device) -> list[EngineBatch]:
    """Different tokens and routings, so many that the weights they need do not fit in the L2."""
    first = engine_batch(problem, tokens, routing, 0, device)
    count = math.ceil(ROTATED_BYTES / (max(1, first.local.experts) * expert_bytes(problem)))
    seeds = range(1, min(max(count, FEWEST), MOST))
    return [first, *(engine_batch(problem, tokens, routing, seed, device) for seed in seeds)]


def engine_batch(problem: Problem, tokens: int, routing: str, seed: int, device: torch.device) -> EngineBatch:
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(tokens, problem.hidden, generator=generator, device=device).to(problem.input.storage)
    weights = torch.rand(tokens, problem.top_k, generator=generator, device=device) + 0.1
    ids = drawn_ids(routing, seed, tokens, problem.global_experts, problem.top_k).to(device)
    local = localize(ids, rank_map(problem, device), problem.global_experts)
    return EngineBatch(ids, Batch(x, local, weights / weights.sum(1, keepdim=True)))


@cache
def drawn_ids(routing: str, seed: int, tokens: int, experts: int, top_k: int) -> Tensor:
    """Many layers have the same sizes, and drawing for many tokens takes a second."""
    return Simulation(routing, seed).draw(tokens, experts, top_k, torch.device("cpu"))[0].to(torch.int64)


@dataclass(frozen=True)
class Wanted:
    """Some rows of a batch, and the reference's results for them."""

    rows: Tensor
    want: Tensor

    @classmethod
    def of(cls, problem: Problem, weights: Weights, batch: Batch) -> Wanted:
        tokens, layout = len(batch.x), REFERENCE.layout(problem)
        rows = torch.linspace(0, tokens - 1, min(CHECKED_ROWS, tokens)).round().long().to(batch.x.device)
        packed = weights.cached("reference", lambda: weights.packed(layout, range(weights.distinct)))
        return cls(rows, expected_rows(problem, weights, batch, rows, packed))

    def error(self, got: Any) -> float:
        """Of the worst of the compared rows; infinite if any row of the result is not finite."""
        return worst_row(got[self.rows], self.want) if bool(torch.isfinite(got).all()) else math.inf


# The GPU -------------------------------------------------------------------------------------------------


class SingleCalls:
    """The clock where there is no GPU."""

    def __init__(self, repeats: int) -> None:
        self.repeats, self.device = repeats, torch.device("cpu")

    def measure(self, contestants: Mapping[str, Sequence[Call]]) -> dict[str, Steady]:
        return {name: Steady(taken.us) for name, taken in measure(CpuClock(), contestants, self.repeats).items()}


def clock(device: torch.device, window_us: float = WINDOW_US, rounds: int = 3, pause: float = 0.0) -> Any:
    return Windows(device, window_us, rounds, pause) if device.type == "cuda" else SingleCalls(rounds)


def ceilings(clock: Any) -> Ceilings:
    if clock.device.type == "cpu":
        return measure_ceilings(parse_device("cpu"), parse_activation("bf16"))
    rates = window_rates(clock)
    return Ceilings(rates.pop("read_gbs"), rates, {})


def clocks(device: torch.device) -> str:
    """Current SM and memory clocks, power and temperature."""
    return machine.nvidia_smi("clocks.sm,clocks.mem,power.draw,temperature.gpu") if device.type == "cuda" else ""


def floors(ceilings: Ceilings, problem: Problem, batches: Sequence[Batch], us: float) -> dict[str, float]:
    """The floor (the larger of flops at the dense rate and bytes of activated experts at the read rate), our share, and
    the time of the flops at the rate of bf16."""
    work = BenchCase.of(problem, batches)
    floor = ceilings.floor_us(work.flops, work.experts * expert_bytes(problem), problem.activations)
    return {"floor_us": floor, "of_floor": floor / us, "gemm_us": work.flops / ceilings.tflops["bf16"] / 1e6}


def sources_of(backend: Backend, problem: Problem, tokens: int, device: Device) -> list[KernelSource]:
    """The kernels that pack a layer's weights and compute it for a number of tokens."""
    plan = backend.plan(problem, tokens, device)
    if not isinstance(backend, GpuBackend) or not isinstance(plan, GpuPlan):
        return []
    return [*pack_kernels(problem, plan.arch), *(step.source for step in backend.steps(plan))]


def launched(layer: RoutedExperts, tokens: int) -> list[KernelSource]:
    return sources_of(layer.choice.backend, layer.problem, tokens, layer.choice.device)


def compile_kernels(sizes: Iterable[tuple[Problem, int]], where: str) -> dict[str, str]:
    """Compile all kernels together, so that all cores have work; returns those that failed, with their errors.

    Also those of the Hopper backend and of batch-invariant order.
    """
    if not where.startswith("cuda"):
        return {}
    device, sources = parse_device(where), dict[KernelSource, None]()
    itself, hopper = replace(device, arch=capability(device.index)), registry()[HOPPER]
    for problem, tokens in dict.fromkeys(sizes):
        if not problem.experts:
            continue
        for wanted in (problem, replace(problem, order=BATCH_INVARIANT)):
            sources |= dict.fromkeys(sources_of(select(wanted, device).backend, wanted, tokens, device))
        if not list(hopper.check(problem, itself)):
            sources |= dict.fromkeys(sources_of(hopper, problem, tokens, itself))
    start = time.perf_counter()
    failed = build_all([loadable(source, device.index) for source in sources])
    print(f"{len(sources)} kernels in {time.perf_counter() - start:.1f} s, {len(failed)} failed", flush=True)
    return {source.label: why for source, why in failed.items()}


def layer_key(layer: Case) -> Case:
    return layer.only("shape", "weights", "activations")


@contextmanager
def compiled_ahead(layers: Sequence[Sequence[Case]], device: torch.device) -> Iterator[dict[Case, Any]]:
    """Humming's kernels, which two other processes compile into its cache meanwhile: layer after layer."""
    with get_context("spawn").Pool(2) if layers else nullcontext() as pool:
        yield {
            layer_key(cases[0]): pool.apply_async(
                compile_humming, (problem_of(cases[0]), [case["tokens"] for case in cases], device)
            )
            for cases in layers
        }
