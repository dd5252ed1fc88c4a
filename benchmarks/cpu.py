"""A layer and a matrix on a CPU: single calls with cold caches, beside other implementations and beside reading."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from multiprocessing import get_context
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from benchmarks import machine
from benchmarks.runner import Case, Run, subject
from lancebill.backends.base import TensorTable
from lancebill.backends.cpu import Cpu, native
from lancebill.backends.cpu.native.abi import IsaLevel
from lancebill.bench.ceilings import read_rate
from lancebill.bench.check import ROWS, error_bound, expected_rows
from lancebill.bench.peer import Peer
from lancebill.bench.peers import PEERS
from lancebill.bench.peers_ggml import Ggml
from lancebill.bench.timing import Call, CpuClock, Times, measure
from lancebill.bench.workload import Batch, Weights, batches
from lancebill.formats.gguf import TYPES
from lancebill.layer.quantized_linear import QuantizedLinear
from lancebill.moe.device import Device
from lancebill.moe.dispatch import Indexed
from lancebill.moe.layout import Packed
from lancebill.moe.problem import Problem
from lancebill.numbers.random_weight import random_weight
from lancebill.numbers.spec import QuantSpec
from lancebill.numbers.spec_names import ACTIVATIONS, parse_spec
from lancebill.testing.layers import layer_problem, worst_row

HIDDEN, INTERMEDIATE, TOP_K = 2048, 768, 8
W4A8, INT4 = "vllm-w4a8", "int4-g32"  # the peer of 4-bit specs that are not integers, and its weights
BESIDE = (W4A8, "vllm-cpu", "torch-grouped", "aten-int4", "llama.cpp")
PREFILL_TOKENS = 128  # from this many on a call counts as prefill
MAX_CALL_SECONDS = 2.5  # a slower contestant is left out
PEER_TOLERANCE = 5e-2  # a peer may round inputs and sums, but must compute the same layer
SLOW_LEVELS = {IsaLevel.PORTABLE, IsaLevel.AVX2, IsaLevel.AVXVNNI}  # no prefill, unless there is no other level
DISTINCT = 8  # experts with different numbers; the others repeat them in their own memory
READ = ("codes", "scales", "zeros")  # what the kernels read of a packed matrix
Layer = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Contestant:
    """A layer, the problem and weights that define its correct result, and the instruction set level if it is ours."""

    problem: Problem
    weights: Weights
    layer: Layer
    level: IsaLevel | None = None


def spec_of(name: str) -> QuantSpec:
    """A spec, or that of a type of GGUF."""
    return TYPES[name].spec if name in TYPES else parse_spec(name)


def random_layer(weights: str, experts: int) -> tuple[Problem, Weights]:
    sizes = {"hidden": HIDDEN, "intermediate": INTERMEDIATE, "experts": experts, "top_k": TOP_K}
    problem = layer_problem(str(spec_of(weights)), "bf16", **sizes)
    return problem, Weights(problem, torch.device("cpu"), distinct=DISTINCT)


def ours(problem: Problem, level: IsaLevel, packed: dict[str, Packed]) -> Layer:
    """Our kernels at one instruction set level, on packed weights."""
    executor = Cpu(level).executor(problem, Device("cpu"), TensorTable.of(packed))

    def layer(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.empty_like(x)
        fast_call = executor.fast_calls.get(x.numel())
        if fast_call is not None and fast_call(x, ids, weights, out):
            return out
        executor.run(x, Indexed(ids, weights), out)
        executor.prepare_fast_call(x)
        return out

    return layer


def peer(name: str, problem: Problem, weights: Weights) -> Contestant:
    """Another library's layer, which may round its inputs."""
    made: Peer = PEERS[name](problem, weights)
    return Contestant(rounded(problem) if made.activations == "int8" else problem, weights, made)


@lru_cache(maxsize=1)
def w4a8(experts: int) -> Contestant:
    return peer("vllm-cpu", *random_layer(INT4, experts))


def rounded(problem: Problem) -> Problem:
    return replace(problem, activations=ACTIVATIONS["int8"])


@subject(
    "cpu-layer",
    lambda: Case.product(weights=("int4-g32", "int4-g128", "mxfp4", "nvfp4"), threads=(2,), tokens=(1, 16, 512)),
    levels=(("",), "instruction sets; default: all that this CPU supports but the portable one"),
    beside=(BESIDE, "other implementations"),
    experts=(128, "experts of the layer"),
    repeats=(30, "timed calls of each contestant"),
)
def cpu_layer(run: Run) -> None:
    """A layer of Qwen3-30B-A3B's shape on a few cores, at every instruction set level, beside peers.

    Each timed thread has its own physical core, one of those that were fastest right before. Before every timed call
    the last-level cache is emptied by reading past its size, on cores that are not timed if there are any. That also
    evicts the interpreter and puts threads to sleep, which the layers of a model do not do to each other; so the
    contestant then computes a token with experts that the timed call does not use, if there are enough. Contestants
    take turns, call by call; llama.cpp's threads sleep in the turns of others (those of OpenMP, if it is built with
    them, after a while). Every result is compared with the reference before it is timed. GB/s counts the bytes of the
    activated experts as the spec stores them; `of_stream` is its share of the rate at which the same threads read
    memory right before. A spec may be the name of a GGUF type, such as Q4_K. `vllm-w4a8` is vLLM's W4A8 on int4 weights
    in groups of 32, the peer of 4-bit specs that are not integers. vLLM is used if it can be imported or
    `LANCEBILL_VLLM_OPS` names its library.
    """
    levels, experts = chosen_levels(run.options.levels), run.options.experts
    most, cpus = max(case["threads"] for case in run.cases), sorted(os.sched_getaffinity(0))
    cores, helpers = timed_cores(machine.physical_cores(), most)
    run.facts |= {"layer": {"hidden": HIDDEN, "intermediate": INTERMEDIATE, "experts": experts, "top_k": TOP_K}}
    run.facts |= {"load": os.getloadavg()[0], "threads": most}
    clock = Sweeper(helpers, most)
    for layer, cases in run.groups("weights"):
        if run.late(layer):
            continue
        machine.pin(machine.threads_of(), cpus)
        torch.set_num_threads(len(cpus))
        problem, weights = random_layer(layer["weights"], experts)
        contestants = dict(contestants_of(run, layer["weights"], problem, weights, levels))
        for case in (case for case in cases if not run.late(case)):
            with run.attempt(case):
                work = batches(problem, case["tokens"], "uniform", 5, torch.device("cpu"))
                torch.set_num_threads(case["threads"])
                machine.pin(machine.threads_of(), cores)
                errors = dict(correct(run, case, contestants, work[0]))
                running = {name: contestants[name] for name in errors}
                timed = machine.quietest_cores(cores, case["threads"])
                for each in running.values():  # start the pool's threads before they are pinned
                    each.layer(work[0].x, work[0].ids, work[0].weights)
                clock.place(timed, cores)
                stream = read_rate(Device("cpu"))
                clock.sleepers = [each.layer for each in running.values() if isinstance(each.layer, Ggml)]
                repeats = max(1, run.options.repeats // (5 if case["tokens"] >= PREFILL_TOKENS else 1))
                turns = {name: turns_of(each.layer, work, problem) for name, each in running.items()}
                times = measure(clock, turns, repeats)
                add_rows(run, case, running, times, errors, work, stream)
    clock.end()


def chosen_levels(names: tuple[str, ...]) -> list[IsaLevel]:
    library = native.library()
    if library is None:
        sys.exit(f"nothing to measure: {native.state().why} ({native.state().hint})")
    if any(names):
        return [level for level in library.levels if str(level) in names]
    return [level for level in library.levels if level != IsaLevel.PORTABLE] or list(library.levels)


def timed_cores(cores: list[int], threads: int) -> tuple[list[int], int]:
    """The cores that may be timed, and how many cores of their last-level cache remain for the sweepers."""
    if threads > len(cores):
        sys.exit(f"nothing to measure: {threads} threads, and this process may use {len(cores)} physical cores")
    sharing = [cores[0], *machine.cache_neighbours(cores[:1], cores)]
    helpers = len(sharing) - threads
    return (sharing, helpers) if helpers > 0 else (cores, 0)


def contestants_of(
    run: Run, name: str, problem: Problem, weights: Weights, levels: list[IsaLevel]
) -> Iterator[tuple[str, Contestant]]:
    """Ours at every level with both kinds of input, and the peers."""
    packed = weights.packed(Cpu().layout(problem))  # shared by all levels and both kinds of input
    for level in levels:
        for activations, taken in (("bf16", problem), ("int8", rounded(problem))):
            yield f"{activations} {level}", Contestant(taken, weights, ours(taken, level, packed), level)
    for other in run.options.beside:
        if other == W4A8 and name.startswith("int4"):  # the same as vllm-cpu
            continue
        with run.attempt(f"{name}, {other}"):
            as_int4 = other == W4A8 or (other, name) == ("vllm-cpu", INT4)
            yield other, w4a8(problem.experts) if as_int4 else peer(other, problem, weights)


def correct(run: Run, case: Case, contestants: dict[str, Contestant], batch: Batch) -> Iterator[tuple[str, float]]:
    """The contestants whose results are correct and which are fast enough, with their errors."""
    rows = torch.linspace(0, len(batch.x) - 1, min(ROWS, len(batch.x))).round().long()
    references: dict[Problem, Tensor] = {}
    slow_alone = all(each.level in SLOW_LEVELS for each in contestants.values() if each.level is not None)
    for name, each in contestants.items():
        if case["tokens"] >= PREFILL_TOKENS and each.level in SLOW_LEVELS and not slow_alone:
            continue
        if each.problem not in references:
            references[each.problem] = expected_rows(each.problem, each.weights, batch, rows)
        with run.attempt(f"{case}, {name}"):
            start = time.perf_counter()
            got = each.layer(batch.x, batch.ids, batch.weights)
            seconds = time.perf_counter() - start
            error = worst_row(got[rows], references[each.problem])
            if not error <= (PEER_TOLERANCE if each.level is None else error_bound(each.problem)):
                run.skip(f"{case}, {name}", f"wrong: relative error {error:.1e} in the worst row")
            elif seconds > MAX_CALL_SECONDS:
                run.skip(f"{case}, {name}", f"{seconds:.1f} s a call")
            else:
                yield name, error


def add_rows(
    run: Run, case: Case, running: dict[str, Contestant], times: dict[str, Times], errors: dict[str, float],
    work: list[Batch], stream: float,
) -> None:  # fmt: skip
    """A row for each of our contestants, with the times of the peers: the fastest calls, and the medians."""
    others = {name: times[name] for name, each in running.items() if each.level is None}
    peers = {name: min(taken.us) for name, taken in others.items()}
    peers |= {f"{name}, median": taken.median for name, taken in others.items()}
    experts = sum(batch.experts for batch in work) / len(work)
    for name, each in running.items():
        if each.level is None:
            continue
        stored = sum(s.n * s.k * s.spec.bits_per_weight(s.n, s.k) / 8 for s in each.problem.matrices.values())
        least = min(times[name].us)
        labels = {"activations": name.split()[0], "level": str(each.level)}
        ours = Case.of(weights=case["weights"], **labels, threads=case["threads"], tokens=case["tokens"])
        gbs = experts * stored / least / 1e3
        rates = {"gbs": gbs, "of_stream": gbs / stream, "error": errors[name]}
        order = [each for peer in others for each in (peer, f"{peer}, median")]
        run.add(ours, {"us": least, "median_us": times[name].median, **rates}, {each: peers[each] for each in order})


@subject(
    "cpu-linear",
    lambda: Case.product(size=("4096x4096", "14336x4096"), weights=("mxfp4", "int4-g128", "int8", "Q4_K", "Q6_K"),
                         rows=(1, 2, 4, 8, 16)),
    threads=(len(os.sched_getaffinity(0)), "threads"),
    repeats=(15, "timed calls"),
)  # fmt: skip
def cpu_linear(run: Run) -> None:
    """`QuantizedLinear` for few rows of bf16, against reading as many bytes with the same threads.

    Times are of single calls with cold caches. The library's own reader reads the packed weights themselves, in turns
    with the layer: `of_read` is the reader's fastest time over ours. A spec may be the name of a GGUF type.
    """
    library, threads = native.library(), run.options.threads
    assert library is not None, native.state().why
    torch.set_num_threads(threads)
    clock = CpuClock()
    run.facts |= {"threads": threads, "load": os.getloadavg()[0]}
    for matrix, cases in run.groups("size", "weights"):
        n, k = map(int, matrix["size"].split("x"))
        weight = random_weight(spec_of(matrix["weights"]), n, k, torch.Generator().manual_seed(0))
        layer = QuantizedLinear.from_weight(weight)
        packed = [layer.packed["w13"][name] for name in READ if name in layer.packed["w13"]]
        largest, size = max(packed, key=torch.Tensor.numel), sum(tensor.nbytes for tensor in packed)
        for case in (case for case in cases if not run.late(case)):
            x = torch.randn(case["rows"], k).bfloat16()
            calls = {"layer": [partial(layer, x)], "read": [partial(library.read, largest, threads)]}
            taken = measure(clock, calls, run.options.repeats)
            us, read_us = min(taken["layer"].us), min(taken["read"].us) * size / largest.nbytes
            run.add(case, {"ms": us / 1e3, "of_read": read_us / us, "gbs": size / us / 1e3})


# Single calls with cold caches ---------------------------------------------------------------------------

PRIVATE_CACHE_BYTES = 16 << 20  # fills the caches of a single core
SETTLE_SECONDS = 1e-3  # our own threads, which have emptied the caches, no longer spin after that
SWEEPS = 2  # reads of the buffer: one alone may not evict everything, whatever the replacement policy


@dataclass(frozen=True)
class Turn:
    """A timed call, and the one right before it."""

    layer: Layer
    batch: Batch
    before: Batch | None

    def __call__(self) -> Tensor:
        return self.layer(self.batch.x, self.batch.ids, self.batch.weights)

    def warm_up(self) -> None:
        if self.before is not None:
            self.layer(self.before.x, self.before.ids, self.before.weights)


def turns_of(layer: Layer, work: list[Batch], problem: Problem) -> list[Turn]:
    return [Turn(layer, batch, with_other_experts(batch, problem)) for batch in work]


def with_other_experts(batch: Batch, problem: Problem) -> Batch | None:
    """One token with experts that `batch` does not use."""
    others = torch.tensor(sorted(set(range(problem.experts)) - set(batch.ids.flatten().tolist())), dtype=torch.int32)
    if len(others) < problem.top_k:
        return None
    return Batch(batch.x[:1], others[None, : problem.top_k].contiguous(), batch.weights[:1])


class Sweeper(CpuClock):
    """Empties the shared cache from neighbouring cores: the timed cores alone would take long to read past it.

    Make it before anything is computed: the process that sweeps is a fork.
    """

    def __init__(self, helpers: int, threads: int) -> None:
        super().__init__()
        self.private = torch.ones(threads * PRIVATE_CACHE_BYTES // 4)
        self.helper = Helper(self.buffer, helpers) if helpers > 0 else None
        self.sleepers: list[Ggml] = []  # contestants whose threads spin after a call

    def place(self, timed: list[int], cores: list[int]) -> None:
        """Pin timed threads to one core each, and sweepers to the neighbouring cores."""
        machine.pin_apart(machine.threads_of(), timed)
        if self.helper is not None:
            machine.pin(machine.threads_of(self.helper.process.pid), machine.cache_neighbours(timed, cores))

    def empty_private_caches(self) -> None:
        threads = torch.get_num_threads()
        read(self.private[: threads * PRIVATE_CACHE_BYTES // 4], threads)

    def evict(self) -> Tensor:
        """Also empties the timed cores' private caches, before and after: what they evict goes to the shared cache.

        Nothing here runs in OpenMP's threads: they would spin on timed cores for milliseconds.
        """
        for contestant in self.sleepers:
            contestant.sleep()
        self.empty_private_caches()
        for _ in range(SWEEPS):
            if self.helper is not None:
                self.helper.sweep()
            else:
                read(self.buffer, torch.get_num_threads())
        self.empty_private_caches()
        time.sleep(SETTLE_SECONDS)
        return self.private

    def time(self, call: Call) -> float:
        self.evict()
        assert isinstance(call, Turn)
        call.warm_up()
        start = time.perf_counter_ns()
        call()
        return (time.perf_counter_ns() - start) / 1e3

    def end(self) -> None:
        if self.helper is not None:
            self.helper.end()


class Helper:
    """A process that reads a buffer when asked. In our own process, callers share teams of threads: those that sweep
    might be those that are timed."""

    def __init__(self, buffer: Tensor, threads: int) -> None:
        processes = get_context("fork")
        self.connection, other_end = processes.Pipe()
        arguments = other_end, self.connection, buffer, threads
        self.process = processes.Process(target=sweep_when_asked, args=arguments, daemon=True)
        self.process.start()
        other_end.close()
        self.sweep()  # starts its threads, which can then be pinned

    def sweep(self) -> None:
        self.connection.send_bytes(b"sweep")
        self.connection.recv_bytes()

    def end(self) -> None:
        self.connection.close()
        self.process.join()


def sweep_when_asked(connection: Connection, other_end: Connection, buffer: Tensor, threads: int) -> None:
    other_end.close()  # or this process would not see that the other one has ended
    with suppress(EOFError, KeyboardInterrupt):
        while connection.recv_bytes():
            read(buffer, threads)
            connection.send_bytes(b"done")


def read(buffer: Tensor, threads: int) -> None:
    kernels = native.library()
    assert kernels is not None  # whoever measures has checked it
    kernels.read(buffer, threads)
