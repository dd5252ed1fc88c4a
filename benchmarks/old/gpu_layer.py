"""Whole layers of the Hopper backend and their peers on a GPU, in one process, into one JSON.

    python benchmarks/gpu_layer.py [--part deepseek-mxfp4-bf16,...] [--out FILE]      with the peers that are installed
    python benchmarks/gpu_layer.py --list               the names of parts
    python benchmarks/gpu_layer.py --smoke              two sizes of one shape, full tracebacks, no file

A layer is timed from `x, topk_ids, topk_weights` to the combined output, with our dispatch. Humming is timed with both
its GEMM types, with and without its routing sort; `against` has the ratio to the faster type. With few tokens, where
batch-invariant order launches other kernels, it is timed as well. Every contestant replays CUDA graphs of calls with
different routings back to back for about 40 ms, in turns, for several rounds. The ceilings, dense GEMMs and reads, are
measured the same way. With many tokens our GEMMs alone are also timed in turns with a dense GEMM. Every result is first
compared with the reference (worst of 16 rows). The file is rewritten after every cell.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import time
import traceback
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from gpu_cell import (
    AFTER_SORT,
    HUMMING,
    TRITON,
    against,
    compile_kernels,
    floors,
    reference_rows,
    relative_error,
    start_record,
)
from gpu_launches import gemms_against_dense, launch_times
from machine import clocks, result_path, without_local_paths
from result_files import write_record

from lancebill.backends.hopper.steps import kernels
from lancebill.backends.oracle import select
from lancebill.backends.registry import registry
from lancebill.bench import peers as others
from lancebill.bench.ceilings import Ceilings
from lancebill.bench.compare import summarize
from lancebill.bench.peer import Peer, SortingPeer
from lancebill.bench.peers import SlotsByExpert, TorchGrouped
from lancebill.bench.sustained import ROUNDS, WINDOW_US, Windows, dense_gemms, window_rates
from lancebill.bench.timing import Call, host_time
from lancebill.bench.workload import Batch, Weights
from lancebill.layer.parts import LayerParts
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.moe.device import parse_device
from lancebill.moe.dispatch import Indexed
from lancebill.moe.problem import BATCH_INVARIANT, Problem
from lancebill.testing.layers import SampleLayer, layer_problem, routing

SHAPES = {
    "deepseek-v4-flash": {"hidden": 4096, "intermediate": 2048, "experts": 256, "top_k": 6},
    "gpt-oss-120b": {"hidden": 2880, "intermediate": 2880, "experts": 128, "top_k": 4},
    "qwen3-30b-a3b": {"hidden": 2048, "intermediate": 768, "experts": 128, "top_k": 8},
}
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384)
TORCH, TORCH_GEMMS = "torch", "torch GEMMs"
COMPUTE_BOUND = 4096  # from this many tokens on the GEMMs decide a layer's time
DEVICE = torch.device("cuda", 0)


@dataclass(frozen=True)
class Part:
    shape: str
    spec: str
    activations: str = "bf16"
    tokens: tuple[int, ...] = TOKENS
    peers: tuple[str, ...] = (HUMMING,)


FEWER_TOKENS = (1, 16, 64, 256, 4096)
PARTS = {
    "deepseek-mxfp4-bf16": Part("deepseek-v4-flash", "mxfp4", peers=(HUMMING, TRITON)),
    "deepseek-mxfp4-fp8": Part("deepseek-v4-flash", "mxfp4", "fp8"),
    "deepseek-int4-bf16": Part("deepseek-v4-flash", "int4-g128"),
    "gpt-oss-mxfp4-bf16": Part("gpt-oss-120b", "mxfp4", tokens=FEWER_TOKENS, peers=(HUMMING, TRITON)),
    "qwen3-mxfp4-bf16": Part("qwen3-30b-a3b", "mxfp4", tokens=FEWER_TOKENS, peers=(HUMMING, TRITON)),
    "deepseek-fp8block-bf16": Part("deepseek-v4-flash", "fp8-block", peers=(TORCH,)),
    "deepseek-int8-bf16": Part("deepseek-v4-flash", "int8", peers=(TORCH,)),
    "qwen3-fp8block-bf16": Part("qwen3-30b-a3b", "fp8-block", peers=(TORCH,)),
    "qwen3-int8-bf16": Part("qwen3-30b-a3b", "int8", peers=(TORCH,)),
}
SMOKE = {
    name: replace(part, shape="qwen3-30b-a3b", tokens=(4, 64), peers=peers)
    for name, part, peers in (
        ("smoke-mxfp4-bf16", PARTS["deepseek-mxfp4-bf16"], (HUMMING, TRITON, TORCH)),
        ("smoke-mxfp4-fp8", PARTS["deepseek-mxfp4-fp8"], (HUMMING,)),
        ("smoke-int4-bf16", PARTS["deepseek-int4-bf16"], (HUMMING,)),
    )
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="default: a new file in benchmarks/results/gpu-layer")
    parser.add_argument("--part", default="all", help="names from --list, or all")
    parser.add_argument("--peers", default=f"{HUMMING},{TORCH}", help=f"{HUMMING}, {TORCH}, {TRITON}")
    parser.add_argument("--tokens", help="replaces each part's numbers of tokens")
    parser.add_argument(
        "--distinct", type=int, default=16, help="experts with different numbers; the others repeat them"
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="windows of each contestant")
    parser.add_argument("--window-us", type=float, default=WINDOW_US, help="length of a window")
    parser.add_argument("--pause-ms", type=float, default=0.0, help="pause before every window")
    parser.add_argument("--limit", type=float, default=560, help="seconds; no new cell is started after that")
    parser.add_argument("--launches", action="store_true", help="also time each of our launches alone")
    parser.add_argument("--smoke", action="store_true", help="two sizes of one shape, full tracebacks, no file")
    parser.add_argument("--list", action="store_true", help="print the names of parts")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(PARTS))
        return
    faulthandler.dump_traceback_later(arguments.limit + 30, exit=True)  # in case a peer hangs
    all_parts = SMOKE if arguments.smoke else PARTS
    names = list(all_parts) if arguments.part == "all" or arguments.smoke else arguments.part.split(",")
    parts = {name: all_parts[name] for name in names}
    if arguments.out is None and not arguments.smoke:
        arguments.out = result_path("gpu-layer", str(DEVICE))
    if arguments.tokens:
        sizes = tuple(int(t) for t in arguments.tokens.split(","))
        parts = {name: replace(part, tokens=sizes) for name, part in parts.items()}
    compile_all(parts.values())
    run = Run(arguments)
    for name, part in parts.items():
        run.measure_part(name, replace(part, peers=tuple(p for p in part.peers if p in arguments.peers.split(","))))
    run.finish()


def problem_of(part: Part) -> Problem:
    return layer_problem(part.spec, part.activations, **SHAPES[part.shape])


def batch_invariant(problem: Problem) -> Problem:
    """The same layer in batch-invariant order."""
    return replace(problem, order=BATCH_INVARIANT)


def compile_all(parts: Iterable[Part]) -> None:
    problems = [(problem_of(part), m) for part in parts for m in part.tokens]
    compile_kernels([(order, m) for problem, m in problems for order in (problem, batch_invariant(problem))])


class Run:
    """One run: ceilings, cells and the file."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.start = arguments, time.perf_counter()
        self.windows = Windows(DEVICE, arguments.window_us, arguments.rounds, arguments.pause_ms / 1e3)
        rates = window_rates(self.windows)
        torch.cuda.empty_cache()
        self.dense = dense_gemms(DEVICE)
        self.ceilings = Ceilings(rates["read_gbs"], {k: v for k, v in rates.items() if k != "read_gbs"}, {})
        self.record = start_record(Path(__file__).name, arguments, rates)

    def measure_part(self, name: str, part: Part) -> None:
        start = time.perf_counter()
        try:
            self._measure_part(name, part)
        except Exception:
            self._failed(name)
        gc.collect()
        torch.cuda.empty_cache()
        print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)

    def _measure_part(self, name: str, part: Part) -> None:
        if self.time_is_up():
            self.record["absent"][name] = "time limit reached"
            return
        problem = problem_of(part)
        weights = Weights(problem, DEVICE, distinct=self.arguments.distinct)
        backend = registry()["hopper"]
        ours = SampleLayer(problem, backend, weights.packed(backend.layout(problem)), DEVICE)
        peers = self._make_peers(name, part, problem, weights)
        for tokens in part.tokens:
            label = f"{name}: {tokens} tokens"
            if self.time_is_up():
                self.record["absent"][label] = "time limit reached"
                continue
            try:
                row = self.measure_cell(ours, weights, peers, tokens, label)
            except Exception:
                self._failed(label)
                continue
            row = {"part": name, "shape": part.shape, "spec": part.spec, "activations": part.activations} | row
            self.record["rows"].append(row)
            self.write()
            print(row_text(row), flush=True)

    def time_is_up(self) -> bool:
        return time.perf_counter() - self.start > self.arguments.limit

    def _make_peers(self, name_of_part: str, part: Part, problem: Problem, weights: Weights) -> dict[str, Peer]:
        """Make them one after another, then compile their kernels in parallel."""
        made: dict[str, Peer] = {}
        start = time.perf_counter()
        for name in [member for peer in part.peers for member in MEMBERS[peer]]:
            try:
                made[name] = PEERS[name](problem, weights)
            except Exception:
                self._failed(f"{name_of_part}: {name}")
        with ThreadPoolExecutor(max(1, len(made))) as pool:
            jobs = {name: pool.submit(peer.compile, part.tokens) for name, peer in made.items()}
        for name, job in jobs.items():
            try:
                job.result()
            except Exception:
                self._failed(f"{name_of_part}: {name}")
                del made[name]
        print(f"{name_of_part}: {', '.join(made)} made in {time.perf_counter() - start:.1f} s", flush=True)
        return made

    def measure_cell(
        self, ours: SampleLayer, weights: Weights, peers: dict[str, Peer], tokens: int, label: str
    ) -> dict:
        problem = ours.problem
        batches = [batch(problem, tokens, 31 * tokens + i) for i in range(8 if tokens <= 64 else 2)]
        reference = reference_rows(problem, weights, batches[0])
        out = torch.full_like(batches[0].x, float("nan"))
        contestants, worst = {"ours": [partial(our_call, ours, out, b) for b in batches]}, {}
        for name, peer in peers.items():
            try:
                of_peer = peer_calls(name, peer, batches)
                if name != TORCH_GEMMS:
                    worst |= {title: relative_error(calls[0](), reference) for title, calls in of_peer.items()}
                contestants |= of_peer
            except Exception:
                self._failed(f"{label}: {name}")
        if kernels(batch_invariant(problem), tokens) != kernels(problem, tokens):
            layer = replace(ours, problem=batch_invariant(problem))
            contestants[BATCH_INVARIANT] = [partial(our_call, layer, out, b) for b in batches]
            worst[BATCH_INVARIANT] = relative_error(contestants[BATCH_INVARIANT][0](), reference)
        first = contestants["ours"][0]().clone()
        second = contestants["ours"][0]()
        row = {
            "tokens": tokens,
            "repeatable": torch.equal(first, second),
            "worst_row": relative_error(first, reference),
        }
        times = {name: took.describe() for name, took in self.windows.measure(contestants).items()}
        if BATCH_INVARIANT in times:
            row["batch_invariant"] = times.pop(BATCH_INVARIANT) | {"worst_row": worst.pop(BATCH_INVARIANT)}
        row |= {"ours": times.pop("ours"), "peers": {n: t | {"worst_row": worst.get(n)} for n, t in times.items()}}
        row["against"] = against(row["ours"], row["peers"])
        row["host_us"] = round(host_time(eager_calls(ours, out, batches), DEVICE), 1) if tokens <= 256 else None
        row |= floors(self.ceilings, problem, batches, row["ours"]["us"]) | {"clocks": clocks()}
        if tokens >= COMPUTE_BOUND:
            row["products"] = gemms_against_dense(ours, batches[0], out, self.windows, self.dense)
        if self.arguments.launches:
            row["launches_us"] = launch_times(ours, batches[0], out, self.windows)
        return row

    def _failed(self, what: str) -> None:
        text = traceback.format_exc()
        print(f"FAILED {what}\n{text}", flush=True)
        self.record["absent"][what] = without_local_paths(text)
        self.write()

    def write(self) -> None:
        self.record["summary"] = summarize(self.record["rows"])
        if self.arguments.out:
            write_record(self.arguments.out, self.record)

    def finish(self) -> None:
        self.record["clocks_after"] = clocks()
        self.record["seconds"] = round(time.perf_counter() - self.start, 1)
        self.write()
        for part, of_part in self.record["summary"].items():
            for peer, ratios in of_part["against"].items():
                print(f"{part} against {peer}: geometric mean {ratios['geometric_mean']}, slower at {ratios['slower']}")


# Peers ---------------------------------------------------------------------------------------------------


class TorchGemms(TorchGrouped):
    """The two grouped GEMMs alone, on rows already in expert order: not a whole layer."""

    def sort(self, ids: torch.Tensor) -> tuple[SlotsByExpert, torch.Tensor]:
        hidden = torch.randn(ids.numel(), self.problem.intermediate, device=DEVICE).to(self.dtype)
        return super().sort(ids), hidden

    def compute(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, routed: tuple) -> torch.Tensor:
        order, hidden = routed
        torch._grouped_mm(x, self.w13.transpose(1, 2), offs=order.ends)
        return torch._grouped_mm(hidden, self.w2.transpose(1, 2), offs=order.ends)


PEERS = others.PEERS | {TORCH_GEMMS: TorchGemms}
MEMBERS = others.FAMILIES | {TORCH: (*others.FAMILIES[TORCH], TORCH_GEMMS)}


def peer_calls(name: str, peer: Peer, batches: list[Batch]) -> dict[str, list]:
    """A peer's calls: whole, and without its routing sort if it has one."""
    if name == TORCH_GEMMS:
        expanded = [replace(b, x=b.x.repeat_interleave(b.ids.shape[1], 0)) for b in batches]
        return {name: [partial(peer.compute, b.x, b.ids, b.weights, peer.sort(b.ids)) for b in expanded]}
    calls = {name: [partial(peer, b.x, b.ids, b.weights) for b in batches]}
    if isinstance(peer, SortingPeer):
        after = [partial(peer.compute, b.x, b.ids, b.weights, peer.sort(b.ids)) for b in batches]
        calls[f"{name}{AFTER_SORT}"] = after
    return calls


# One cell ------------------------------------------------------------------------------------------------


def batch(problem: Problem, tokens: int, seed: int) -> Batch:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    x = torch.randn(tokens, problem.hidden, generator=generator, device=DEVICE).to(problem.input.storage)
    routed = routing(problem, tokens, seed)
    return Batch(x, routed.ids, routed.weights)


def our_call(layer: SampleLayer, out: torch.Tensor, b: Batch) -> torch.Tensor:
    return layer(b.x, Indexed(b.ids, b.weights), out)


def eager_calls(ours: SampleLayer, out: torch.Tensor, batches: list[Batch]) -> list[Call]:
    """Calls of the public layer, with the same weights."""
    choice = select(ours.problem, parse_device(str(DEVICE)), ours.backend.name)
    layer = RoutedExperts(LayerParts(choice, ours.weights))
    return [partial(layer, b.x, topk_ids=b.ids, topk_weights=b.weights, out=out) for b in batches]


def row_text(row: dict) -> str:
    ratios = ", ".join(f"{name} {v['us']:.1f} ({v['ratio']:.2f}x)" for name, v in row["against"].items())
    errors = {name: peer["worst_row"] for name, peer in row["peers"].items()}
    return (
        f"{row['part']} M={row['tokens']}: ours {row['ours']['us']:.1f} us +-{row['ours']['noise']:.1%}, "
        f"{row['of_floor']:.0%} of floor, worst row {row['worst_row']}, repeatable {row['repeatable']}; {ratios}; "
        f"peers' worst rows {errors}; clocks {row['clocks']}"
        + (f"; batch-invariant {row['batch_invariant']['us']:.1f}" if "batch_invariant" in row else "")
        + (f"; GEMMs {row['products']['of_dense']:.1%} of dense" if "products" in row else "")
    )


if __name__ == "__main__":
    main()
