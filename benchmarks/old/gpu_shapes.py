"""Layers of many models on a GPU, ours and Humming's, with their share of the floor, into one JSON.

    python benchmarks/gpu_shapes.py --minutes 9                                     all layers below, with Humming
    python benchmarks/gpu_shapes.py --no-peers --shapes deepseek-v3,gpt-oss-120b:tp4 --tokens 1,64     ours alone
    python benchmarks/gpu_shapes.py --routings eight-busy,half-empty,zipf,half-to-one --tokens 64,1024
    python benchmarks/gpu_shapes.py --list                                          the layers, in order
    LANCEBILL_GPU=sm_80 python benchmarks/gpu_shapes.py --no-peers --beside hopper,marlin      an older GPU's kernels

Layers are chosen by `--shapes` and `--specs`, or one by one: `--layers "qwen3-30b-a3b int4-g128:bf16;..."`.
A shape is a name or E,H,I,K (separate those by semicolons), as one rank of `:tpN` or `:epN`. Ours is the public layer
with int64 ids, which with expert parallelism include other ranks'. Humming gets local int32 ids already sorted by
expert, and its faster GEMM type counts. All replay CUDA graphs for about 40 ms in turns, for several rounds; batches
rotate so that weights do not stay in the L2. `--beside` adds contestants: `hopper` and `marlin` (from vLLM), and up to
4 tokens `read`: two launches that only read as many bytes (`gpu_read.py`). Every result is first compared with the
reference. Each layer may use its part of the time that is left, and measures the
first numbers of tokens first. The file is rewritten after every cell.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import math
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache, partial
from multiprocessing import get_context
from multiprocessing.pool import AsyncResult
from pathlib import Path
from typing import Any

import torch
from gpu_cell import AFTER_SORT, against, compile_kernels, floors, reference_rows, relative_error, start_record
from gpu_read import MOST_READ_TOKENS, READ, LayerReader, take_read
from machine import clocks, result_path, without_local_paths
from result_files import geometric_mean, write_record

from lancebill.backends.oracle import select
from lancebill.backends.registry import registry
from lancebill.bench.ceilings import Ceilings
from lancebill.bench.check import error_bound
from lancebill.bench.peers_cuda import PEERS, HummingIndexed, compile_humming
from lancebill.bench.results import expert_bytes
from lancebill.bench.sustained import WINDOW_US, Windows, window_rates
from lancebill.bench.workload import Batch, Weights
from lancebill.errors import WrongResult
from lancebill.layer.parts import LayerParts
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.moe.device import parse_device
from lancebill.moe.dispatch import Indexed, localize
from lancebill.moe.model_shapes import parse_shape
from lancebill.moe.problem import Problem
from lancebill.moe.simulation import KINDS, Simulation
from lancebill.numbers.spec_names import parse_activation, parse_spec
from lancebill.testing.layers import SampleLayer

MXFP4, KIMI_INT4 = ("mxfp4:bf16", "mxfp4:fp8"), ("int4-g32:bf16",)
LAYERS: dict[str, tuple[str, ...]] = {
    "deepseek-v3": MXFP4,
    "mixtral-8x7b": MXFP4,
    "kimi-k2": (*MXFP4, *KIMI_INT4),
    "deepseek-v4-flash": MXFP4,
    "llama-4-scout": MXFP4,
    "glm-4.5-air": MXFP4,
    "gpt-oss-120b:tp4": MXFP4,
    "qwen3-235b-a22b": MXFP4,
    "kimi-k2:ep8": KIMI_INT4,
    "kimi-k2:tp8": KIMI_INT4,
    "gpt-oss-120b": MXFP4,
    "gpt-oss-120b:tp2": MXFP4,
    "gpt-oss-120b:tp8": MXFP4,
    "qwen3-30b-a3b": MXFP4,
}
TOKENS = "1,64,1024,8192,16,256,4,4096,16384"
ROTATED_BYTES = 256 << 20  # distinct weights that successive calls read: several times the L2
FEWEST, MOST = 2, 32  # batches that take turns
HOPPER = "hopper"
Contestant = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # x, local ids, weights
HUMMING_PEERS = ("humming-indexed", "humming-grouped")
CLEARLY_FASTER = 1.05
COMPILERS = 2  # processes; each compiles many of Humming's kernels at once


@dataclass(frozen=True)
class Layer:
    """One rank's layer of a model under a spec."""

    shape: str
    weights: str
    activations: str

    @property
    def name(self) -> str:
        return f"{self.shape} {self.weights}:{self.activations}"

    @property
    def problem(self) -> Problem:
        model, _, rank = self.shape.partition(":")
        ranks = {rank[:2]: int(rank[2:])} if rank else {}
        return parse_shape(model).problem(parse_spec(self.weights), parse_activation(self.activations), **ranks)


@dataclass(frozen=True)
class Budget:
    """The time left, shared by a layer and those after it."""

    end: float
    layers: int

    @property
    def left(self) -> float:
        return max(0.0, self.end - time.perf_counter())

    def deadline(self) -> float:
        """When the present layer has used its part of the time left from now on."""
        return time.perf_counter() + self.left / self.layers


@dataclass(frozen=True)
class EngineBatch:
    """A batch as an engine passes it: global int64 ids. `local` has this rank's ids, for peers and the reference."""

    ids: torch.Tensor
    local: Batch


def main() -> None:
    arguments = parser().parse_args()
    layers = named_layers(arguments.layers) if arguments.layers else chosen_layers(arguments.shapes, arguments.specs)
    if arguments.list:
        print("\n".join(layer.name for layer in layers))
        return
    faulthandler.dump_traceback_later(60 * arguments.minutes + 60, exit=True)  # in case a peer hangs
    if arguments.out is None:
        arguments.out = result_path("gpu-shapes", arguments.device)
    end = time.perf_counter() + 60 * arguments.minutes
    with ExitStack() as stack:
        ahead = {}
        if not arguments.no_peers:
            pool = stack.enter_context(get_context("spawn").Pool(COMPILERS))
            jobs = [(layer, arguments.tokens, arguments.device) for layer in layers]
            ahead = {job[0]: pool.apply_async(compile_peers, job) for job in jobs}
        sizes = [(layer.problem, tokens) for layer in layers for tokens in arguments.tokens]
        compile_kernels(sizes, arguments.device, [HOPPER] if HOPPER in arguments.beside else [])
        device = torch.device(arguments.device)
        windows = Windows(device, arguments.window_us, arguments.rounds, arguments.pause_ms / 1e3)
        run = Run(arguments, device, windows, window_rates(windows))
        for i, layer in enumerate(layers):
            run.measure_layer(layer, ahead.get(layer), Budget(end, layers=len(layers) - i))
        run.finish()


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--minutes", type=float, default=9.0, help="no new cell is started after that")
    made.add_argument("--layers", help="as --list prints them, separated by semicolons")
    made.add_argument("--shapes", help="default: all of --list, in that order")
    made.add_argument("--specs", help="weights:activations, such as mxfp4:fp8; default: those of --list")
    made.add_argument("--tokens", type=numbers, default=numbers(TOKENS), help=f"in this order; default: {TOKENS}")
    made.add_argument("--routings", type=words, default=("uniform",), help=f"{', '.join(KINDS)}; default: uniform")
    made.add_argument("--no-peers", action="store_true", help="ours alone")
    made.add_argument("--beside", type=words, default=(), help="further contestants: hopper, marlin, read")
    made.add_argument("--rounds", type=int, default=4, help="windows of each contestant")
    made.add_argument("--window-us", type=float, default=WINDOW_US, help="length of a window")
    made.add_argument("--pause-ms", type=float, default=20.0, help="pause before every window, against throttling")
    made.add_argument("--distinct", type=int, default=16, help="experts with different numbers; the others repeat them")
    made.add_argument("--device", default="cuda:0")
    made.add_argument("--out", type=Path, help="default: a new file in benchmarks/results/gpu-shapes")
    made.add_argument("--list", action="store_true", help="print the layers, in order")
    return made


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


def chosen_layers(shapes: str | None, specs: str | None) -> list[Layer]:
    """Layers of these shapes and specs, in this order; each shape's usual specs by default."""
    names = list(LAYERS) if shapes is None else shapes.split(";" if ";" in shapes else ",")
    if shapes is not None and shapes.replace(",", "").isdigit():  # one shape of sizes
        names = [shapes]
    pairs = [(name, spec) for name in names for spec in (words(specs) if specs else LAYERS.get(name, MXFP4))]
    return [Layer(name, *spec.split(":")) for name, spec in pairs]


def named_layers(text: str) -> list[Layer]:
    """Layers as `--list` prints them: "shape weights:activations", separated by semicolons."""
    pairs = (name.strip().split(" ") for name in text.split(";"))
    return [Layer(shape, *spec.split(":")) for shape, spec in pairs]


def compile_peers(layer: Layer, tokens: Sequence[int], device: str) -> None:
    """Runs in another process: compile Humming's kernels into its cache on disk."""
    compile_humming(layer.problem, tokens, torch.device(device))


class Run:
    """One run: ceilings, cells and the file."""

    def __init__(
        self, arguments: argparse.Namespace, device: torch.device, windows: Windows, rates: dict[str, float]
    ) -> None:
        self.arguments, self.device, self.windows, self.start = arguments, device, windows, time.perf_counter()
        self.ceilings = Ceilings(rates["read_gbs"], {k: v for k, v in rates.items() if k != "read_gbs"}, {})
        self.record = start_record(Path(__file__).name, arguments, rates)

    def measure_layer(self, layer: Layer, compiled: AsyncResult[None] | None, budget: Budget) -> None:
        """All cells of a layer that fit into its time; what is missing is recorded with the reason."""
        start = time.perf_counter()
        try:
            self._measure_layer(layer, compiled, budget)
        except Exception:
            self._failed(layer.name)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        print(f"{layer.name}: {time.perf_counter() - start:.1f} s", flush=True)

    def _measure_layer(self, layer: Layer, compiled: AsyncResult[None] | None, budget: Budget) -> None:
        start, problem = time.perf_counter(), layer.problem
        weights = Weights(problem, self.device, distinct=self.arguments.distinct)
        ours = make_ours(problem, weights, self.device)
        made = time.perf_counter()
        peers = {} if compiled is None else self._make_peers(layer, weights, compiled, budget)
        beside = self._make_beside(layer, weights)
        reader = LayerReader(ours.packed, self.device) if READ in self.arguments.beside else None
        print(f"{layer.name}: ours packed in {made - start:.1f} s, peers in {time.perf_counter() - made:.1f} s")
        deadline = budget.deadline()
        for tokens in self.arguments.tokens:
            for routing in self.arguments.routings:
                label = f"{layer.name}, {tokens} tokens, {routing}"
                if time.perf_counter() > deadline:
                    self.record["absent"][label] = "out of time"
                    continue
                try:
                    cell = self.measure_cell(ours, weights, peers, tokens, routing, label, beside, reader)
                except Exception:
                    self._failed(label)
                    continue
                names = {"shape": layer.shape, "weights": layer.weights, "activations": layer.activations}
                self.record["rows"].append(names | {"routing": routing, "tokens": tokens} | cell)
                self.write()
                print(row_text(self.record["rows"][-1]), flush=True)

    def _make_peers(
        self, layer: Layer, weights: Weights, compiled: AsyncResult[None], budget: Budget
    ) -> dict[str, HummingIndexed]:
        peers: dict[str, HummingIndexed] = {}
        try:
            compiled.get(timeout=budget.left)
            for name in HUMMING_PEERS:
                peer = PEERS[name](weights.problem, weights)
                assert isinstance(peer, HummingIndexed)
                peer.compile(self.arguments.tokens)
                peers[name] = peer
        except Exception:
            self._failed(f"{layer.name}: peers")
        return peers

    def _make_beside(self, layer: Layer, weights: Weights) -> dict[str, Contestant]:
        """The contestants of `--beside` that run here."""
        made: dict[str, Contestant] = {}
        for name in filter(lambda name: name != READ, self.arguments.beside):
            try:
                made[name] = (
                    hopper_layer(weights, self.device) if name == HOPPER else PEERS[name](weights.problem, weights)
                )
            except Exception:
                self._failed(f"{layer.name}: {name}")
        return made

    def measure_cell(
        self,
        ours: RoutedExperts,
        weights: Weights,
        peers: dict[str, HummingIndexed],
        tokens: int,
        routing: str,
        label: str,
        beside: dict[str, Contestant] | None = None,
        reader: LayerReader | None = None,
    ) -> dict[str, Any]:
        problem = weights.problem
        batches = rotating_batches(problem, tokens, routing, self.device)
        local = [batch.local for batch in batches]
        reference = reference_rows(problem, weights, local[0])
        out = torch.full_like(local[0].x, torch.nan)
        calls = [partial(ours, b.local.x, topk_ids=b.ids, topk_weights=b.local.weights, out=out) for b in batches]
        contestants, worst = {"ours": calls}, {}
        for name, peer in peers.items():
            after_sort = [partial(peer.compute, b.x, b.ids, b.weights, peer.sort(b.ids)) for b in local]
            error = relative_error(after_sort[0](), reference)
            if error > 2 * error_bound(problem):
                self.record["absent"][f"{label}: {name}"] = f"differs from the reference by {error}"
                continue
            contestants[name + AFTER_SORT], worst[name + AFTER_SORT] = after_sort, error
        for name, contestant in (beside or {}).items():
            own = [partial(contestant, b.x, b.ids, b.weights) for b in local]
            error = relative_error(own[0](), reference)
            if error > 2 * error_bound(problem):
                self.record["absent"][f"{label}: {name}"] = f"differs from the reference by {error}"
                continue
            contestants[name], worst[name] = own, error
        first = calls[0]().clone()
        checked = {"worst_row": relative_error(first, reference), "repeatable": torch.equal(first, calls[0]())}
        if checked["worst_row"] > error_bound(problem):
            raise WrongResult("the result differs from the reference", where=label, got=checked["worst_row"])
        if reader is not None and tokens <= MOST_READ_TOKENS:
            contestants |= reader.contestants(local)
        times = {name: took.describe() for name, took in self.windows.measure(contestants).items()}
        mine = times.pop("ours")
        read = take_read(times, mine["us"])
        theirs = {name: took | {"worst_row": worst[name]} for name, took in times.items()}
        floor = floors(self.ceilings, problem, local, mine["us"])
        return {
            "backend": ours.choice.backend.name, "ours": mine | checked, "peers": theirs,
            "against": against(mine, theirs), **floor, **read, "batches": len(batches), "clocks": clocks(),
        }  # fmt: skip

    def _failed(self, what: str) -> None:
        text = traceback.format_exc()
        print(f"FAILED {what}\n{text}", flush=True)
        self.record["absent"][what] = without_local_paths(text)
        self.write()

    def write(self) -> None:
        write_record(self.arguments.out, self.record)

    def finish(self) -> None:
        self.record["clocks_after"] = clocks()
        self.record["seconds"] = round(time.perf_counter() - self.start, 1)
        self.write()
        print(table_text(self.record["rows"]))


def make_ours(problem: Problem, weights: Weights, device: torch.device) -> RoutedExperts:
    """The public layer; with expert parallelism it maps global ids itself."""
    choice = select(problem, parse_device(str(device)))
    packed = weights.packed(choice.backend.layout(choice.problem))
    expert_map = None if problem.experts == problem.global_experts else rank_map(problem, device)
    return RoutedExperts(LayerParts(choice, packed, expert_map=expert_map))


def hopper_layer(weights: Weights, device: torch.device) -> Contestant:
    """The Hopper backend, also where the GPU counts as an older one."""
    backend = registry()[HOPPER]
    layer = SampleLayer(weights.problem, backend, weights.packed(backend.layout(weights.problem)), device)
    return lambda x, ids, routing_weights: layer(x, Indexed(ids, routing_weights), torch.empty_like(x))


def rank_map(problem: Problem, device: torch.device) -> torch.Tensor:
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


@lru_cache(maxsize=256)
def drawn_ids(routing: str, seed: int, tokens: int, experts: int, top_k: int) -> torch.Tensor:
    """Many layers have the same sizes, and drawing for many tokens takes a second."""
    return Simulation(routing, seed).draw(tokens, experts, top_k, torch.device("cpu"))[0].to(torch.int64)


def row_text(row: dict[str, Any]) -> str:
    ratios = read_text(row) + ", ".join(
        f"{p['variant']} {p['us']:.1f} ({p['ratio']:.2f}x)" for p in row["against"].values()
    )
    ours = row["ours"]
    return (
        f"{row['shape']} {row['weights']}:{row['activations']} {row['routing']} M={row['tokens']}: "
        f"{ours['us']:.1f} us +-{ours['noise']:.1%}, {row['of_floor']:.0%} of floor, {ratios or 'alone'}; "
        f"worst row {ours['worst_row']}, repeatable {ours['repeatable']}, {ours['timed_by']}, {row['clocks']}"
    )


def read_text(row: dict[str, Any]) -> str:
    return f"{row[READ]['of_read']:.0%} of {row[READ]['reader']} ({row[READ]['us']:.1f} us), " if READ in row else ""


def table_text(rows: list[dict[str, Any]]) -> str:
    """A line for each layer and routing, us (ratio, share of the floor) for each number of tokens; then summaries."""
    lines: dict[str, dict[int, str]] = {}
    ratios: dict[str, list[float]] = {}
    short = []
    for row in rows:
        found = [peer["ratio"] for peer in row["against"].values()]
        name = f"{row['shape']} {row['weights']}:{row['activations']} {row['routing']}"
        text = "".join(f"{ratio:.2f}x " for ratio in found) + f"{row['of_floor']:.0%}"
        lines.setdefault(name, {})[row["tokens"]] = f"{row['ours']['us']:.0f} ({text})"
        ratios.setdefault(f"{row['weights']}:{row['activations']} {row['routing']}", []).extend(found)
        if any(ratio < CLEARLY_FASTER for ratio in found):
            short.append(f"not clearly faster: {name} M={row['tokens']} ({text} of floor)")
    counts = sorted({row["tokens"] for row in rows})
    head = f"{'':<46}" + "".join(f"{count:>20}" for count in counts)
    body = [f"{name:<46}" + "".join(f"{of.get(count, ''):>20}" for count in counts) for name, of in lines.items()]
    means = [
        f"{name}: geometric mean {geometric_mean(found):.3f}x, lowest {min(found):.3f}x"
        for name, found in ratios.items()
        if found
    ]
    return "\n".join([head, *body, *short, *means])


if __name__ == "__main__":
    main()
