"""Whole layers of the Hopper backend beside peers: one process, one window, one JSON.

    PYTHONPATH=src:.peers/site python benchmarks/hopper.py --out results.json [--part deepseek-mxfp4-bf16,...]
    python benchmarks/hopper.py --list                names of parts
    python benchmarks/hopper.py --smoke               two sizes of one shape, tracebacks in full: does everything run?
    python benchmarks/hopper.py --first-forward       fresh process to first result, compiling forbidden

A layer is timed from `x, topk_ids, topk_weights` to the combined output, our dispatch included. Humming is timed in
both its GEMM types, after its routing sort and with it; the ratios in `against` are to the faster type. Everyone
replays CUDA graphs of calls with different routings for about 40 ms, back to back, three times in turn; so are the
ceilings measured: dense products and reads. Results are compared with the reference first (worst of 16 rows).
The file is written again after every cell.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import os
import platform
import subprocess
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from colibri.backends.hopper.plan import make_plan
from colibri.backends.hopper.steps import steps
from colibri.bench.beside import best, compare, summarize
from colibri.bench.ceilings import Ceilings
from colibri.bench.report import Work
from colibri.bench.steady import ROUNDS, WINDOW_US, Windows, window_rates
from colibri.bench.workload import Batch
from colibri.codec import dequantize
from colibri.dispatch import Indexed
from colibri.jit.build import build_all
from colibri.layout import PlainLayout
from colibri.problem import Problem
from colibri.testing.layers import Layer, layer_problem, make_layer, routing, worst_row

SHAPES = {
    "deepseek-v4-flash": {"hidden": 4096, "intermediate": 2048, "experts": 256, "top_k": 6},
    "gpt-oss-120b": {"hidden": 2880, "intermediate": 2880, "experts": 128, "top_k": 4},
    "qwen3-30b-a3b": {"hidden": 2048, "intermediate": 768, "experts": 128, "top_k": 8},
}
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384)
CHECKED_ROWS = 16
HUMMING, TORCH = "humming", "torch"
DEVICE = torch.device("cuda", 0)


@dataclass(frozen=True)
class Part:
    shape: str
    spec: str
    activations: str = "bf16"
    tokens: tuple[int, ...] = TOKENS
    peers: tuple[str, ...] = (HUMMING,)


SHORT = (1, 16, 64, 256, 4096)
PARTS = {
    "deepseek-mxfp4-bf16": Part("deepseek-v4-flash", "mxfp4"),
    "deepseek-mxfp4-fp8": Part("deepseek-v4-flash", "mxfp4", "fp8"),
    "deepseek-int4-bf16": Part("deepseek-v4-flash", "int4-g128"),
    "gpt-oss-mxfp4-bf16": Part("gpt-oss-120b", "mxfp4", tokens=SHORT),
    "qwen3-mxfp4-bf16": Part("qwen3-30b-a3b", "mxfp4", tokens=SHORT),
    "deepseek-fp8block-bf16": Part("deepseek-v4-flash", "fp8-block", peers=(TORCH,)),
    "deepseek-int8-bf16": Part("deepseek-v4-flash", "int8", peers=(TORCH,)),
    "qwen3-fp8block-bf16": Part("qwen3-30b-a3b", "fp8-block", peers=(TORCH,)),
    "qwen3-int8-bf16": Part("qwen3-30b-a3b", "int8", peers=(TORCH,)),
}
SMOKE = {
    name: replace(part, shape="qwen3-30b-a3b", tokens=(4, 64), peers=peers)
    for name, part, peers in (
        ("smoke-mxfp4-bf16", PARTS["deepseek-mxfp4-bf16"], (HUMMING, TORCH)),
        ("smoke-mxfp4-fp8", PARTS["deepseek-mxfp4-fp8"], (HUMMING,)),
        ("smoke-int4-bf16", PARTS["deepseek-int4-bf16"], (HUMMING,)),
    )
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--part", default="all", help="one or more of --list, or all")
    parser.add_argument("--peers", default=f"{HUMMING},{TORCH}")
    parser.add_argument("--tokens", help="instead of a part's own sizes")
    parser.add_argument("--distinct", type=int, default=16, help="different experts; the rest repeat them")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--window-us", type=float, default=WINDOW_US)
    parser.add_argument("--limit", type=float, default=560, help="seconds: no new cell is begun after this")
    parser.add_argument("--launches", action="store_true", help="time each of our launches alone too")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--first-forward", action="store_true", help="seconds from `import torch` to a first result")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(PARTS))
        return
    if arguments.first_forward:
        first_forward()
        return
    faulthandler.dump_traceback_later(arguments.limit + 30, exit=True)  # a peer that hangs takes nothing with it
    known = SMOKE if arguments.smoke else PARTS
    chosen = list(known) if arguments.part == "all" or arguments.smoke else arguments.part.split(",")
    run = Run(arguments)
    for name in chosen:
        part = known[name]
        if arguments.tokens:
            part = replace(part, tokens=tuple(int(t) for t in arguments.tokens.split(",")))
        run.part(name, replace(part, peers=tuple(p for p in part.peers if p in arguments.peers.split(","))))
    run.finish()


class Run:
    """One run: its ceilings, its cells, its file."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.start = arguments, time.perf_counter()
        self.windows = Windows(DEVICE, arguments.window_us, arguments.rounds)
        rates = window_rates(self.windows, {})
        torch.cuda.empty_cache()
        self.ceilings = Ceilings(rates["read_gbs"], {k: v for k, v in rates.items() if k != "read_gbs"}, {})
        self.record: dict = {
            "machine": machine(), "command": command(), "commit": commit(),
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "window_us": arguments.window_us, "rounds": arguments.rounds, "distinct_experts": arguments.distinct,
            "ceilings": {name: round(rate, 1) for name, rate in rates.items()},
            "clocks_before": clocks(), "absent": {}, "rows": [],
        }  # fmt: skip
        print("ceilings", self.record["ceilings"], "clocks", self.record["clocks_before"], flush=True)

    def part(self, name: str, part: Part) -> None:
        began = time.perf_counter()
        try:
            self._part(name, part)
        except Exception:
            self._failed(name)
        gc.collect()
        torch.cuda.empty_cache()
        print(f"{name}: {time.perf_counter() - began:.1f} s", flush=True)

    def _part(self, name: str, part: Part) -> None:
        problem = layer_problem(part.spec, part.activations, **SHAPES[part.shape])
        failed = build_all(step.source for m in part.tokens for step in steps(make_plan(problem, m)))
        for source, why in failed.items():
            print("does not compile:", source.label, why[-300:])
        ours = make_layer(problem, "hopper", distinct=self.arguments.distinct)
        reference = make_layer(problem, "reference", distinct=self.arguments.distinct)
        peers: dict[str, object] = {}
        for peer in part.peers:
            began = time.perf_counter()
            try:
                peers |= PEERS[peer](problem, reference, part.tokens, self.arguments.distinct)
                print(f"{name}: {peer} made in {time.perf_counter() - began:.1f} s", flush=True)
            except Exception:
                self._failed(f"{name}: {peer}")
        for tokens in part.tokens:
            if time.perf_counter() - self.start > self.arguments.limit:
                self.record["absent"][f"{name}: {tokens} tokens"] = "the time was up"
                continue
            try:
                row = self.cell(ours, reference, peers, tokens, f"{name}: {tokens} tokens")
            except Exception:
                self._failed(f"{name}: {tokens} tokens")
                continue
            row = {"part": name, "shape": part.shape, "spec": part.spec, "activations": part.activations} | row
            self.record["rows"].append(row)
            self.write()
            print(line(row), flush=True)

    def cell(self, ours: Layer, reference: Layer, peers: dict, tokens: int, label: str) -> dict:
        problem = ours.problem
        batches = [batch(problem, tokens, 31 * tokens + i) for i in range(8 if tokens <= 64 else 2)]
        wanted = expected(reference, batches[0])
        out = torch.full_like(batches[0].x, float("nan"))
        contestants, worst = {"ours": calls(partial(our_call, ours, out), batches)}, {}
        for name, peer in peers.items():
            try:
                found, comparable = peer.contestants(name, batches)
                worst |= {title: check(call[0](), wanted) for title, call in found.items() if comparable}
                contestants |= found
            except Exception:
                self._failed(f"{label}: {name}")
                torch.cuda.synchronize()
        first = contestants["ours"][0]().clone()
        again = contestants["ours"][0]()
        row = {"tokens": tokens, "repeatable": torch.equal(first, again), "worst_row": check(first, wanted)}
        times = {name: took.describe() for name, took in self.windows.measure(contestants).items()}
        row |= {"ours": times.pop("ours"), "peers": {n: t | {"worst_row": worst.get(n)} for n, t in times.items()}}
        row["against"] = against(row["ours"], row["peers"])
        row["host_us"] = round(host_time(contestants["ours"][0]), 1) if tokens <= 256 else None
        row |= floors(self.ceilings, problem, batches, row["ours"]["us"]) | {"clocks": clocks()}
        if self.arguments.launches:
            row["launches_us"] = launch_times(ours, batches, out, self.windows.stream)
        return row

    def _failed(self, what: str) -> None:
        text = traceback.format_exc()
        print(f"FAILED {what}\n{text}", flush=True)
        self.record["absent"][what] = scrub(text)
        self.write()

    def write(self) -> None:
        self.record["summary"] = summarize(self.record["rows"])
        if self.arguments.out:
            self.arguments.out.write_text(json.dumps(self.record, indent=1) + "\n")

    def finish(self) -> None:
        self.record["clocks_after"] = clocks()
        self.record["seconds"] = round(time.perf_counter() - self.start, 1)
        self.write()
        for part, found in self.record["summary"].items():
            for peer, beside in found["against"].items():
                print(f"{part} against {peer}: geometric mean {beside['geometric_mean']}, slower at {beside['slower']}")


# Peers ---------------------------------------------------------------------------------------------------


class HummingPeer:
    """One of its GEMM types, after its sort and with it."""

    def __init__(self, experts) -> None:
        self.experts = experts

    def contestants(self, name: str, batches: list[Batch]) -> tuple[dict, bool]:
        out = torch.full_like(batches[0].x, float("nan"))

        def compute(b: Batch, routed) -> torch.Tensor:
            return self.experts.compute(b.x, routed, b.ids, b.weights, out)

        def whole(b: Batch) -> torch.Tensor:
            return compute(b, self.experts.sort(b.ids))

        after = [partial(compute, b, self.experts.sort(b.ids)) for b in batches]
        return {f"{name}, sorted": after, f"{name}, with sort": calls(whole, batches)}, True


def humming_peers(problem: Problem, reference: Layer, tokens: tuple[int, ...], distinct: int) -> dict[str, object]:
    from colibri.backends.humming.package import WAYS, Experts, make_matrix

    matrices = {
        name: make_matrix(shape, problem.experts, reference.weights[name], problem.activations, problem.input.storage)
        for name, shape in problem.matrices.items()
    }
    made = {f"{HUMMING} {way}": Experts(problem, matrices, way) for way in WAYS}
    with ThreadPoolExecutor(len(made)) as pool:
        list(pool.map(lambda experts: experts.compile(tokens), made.values()))
    return {name: HummingPeer(experts) for name, experts in made.items()}


class TorchPeer:
    """torch._grouped_mm on bf16 weights: a layer in torch's own operations, and its two products alone."""

    def __init__(self, problem: Problem, weights: dict[str, torch.Tensor]) -> None:
        self.problem, self.weights = problem, weights

    def contestants(self, name: str, batches: list[Batch]) -> tuple[dict, bool]:
        every = torch.arange(self.problem.experts, dtype=torch.int32, device=DEVICE)
        w13, w2 = (self.weights[m].transpose(1, 2) for m in ("w13", "w2"))

        def layer(b: Batch) -> torch.Tensor:
            expert, order = torch.sort(b.ids.reshape(-1), stable=True)
            ends = torch.searchsorted(expert, every, right=True).to(torch.int32)
            hidden = torch._grouped_mm(b.x[order // self.problem.top_k], w13, offs=ends)
            rows = torch._grouped_mm(self.problem.activation(hidden), w2, offs=ends)
            back = torch.empty_like(rows)
            back[order] = rows
            spread = back.view(*b.ids.shape, -1) * b.weights.unsqueeze(-1)
            return spread.sum(dim=1).to(b.x.dtype)

        return {name: calls(layer, batches)}, True


class TorchProducts(TorchPeer):
    """The two products on rows already in expert order: nothing around them."""

    def contestants(self, name: str, batches: list[Batch]) -> tuple[dict, bool]:
        w13, w2 = (self.weights[m].transpose(1, 2) for m in ("w13", "w2"))
        found = []
        for b in batches:
            expert, order = torch.sort(b.ids.reshape(-1), stable=True)
            every = torch.arange(self.problem.experts, dtype=torch.int32, device=DEVICE)
            ends = torch.searchsorted(expert, every, right=True).to(torch.int32)
            rows = b.x[order // self.problem.top_k]
            h = torch.randn(rows.shape[0], self.problem.intermediate, device=DEVICE).to(rows.dtype)
            found.append(partial(self._products, (rows, w13), (h, w2), ends))
        return {name: found}, False

    def _products(self, first: tuple, second: tuple, ends: torch.Tensor) -> None:
        torch._grouped_mm(*first, offs=ends)
        torch._grouped_mm(*second, offs=ends)


def torch_peers(problem: Problem, reference: Layer, tokens: tuple[int, ...], distinct: int) -> dict[str, object]:
    layout, weights = PlainLayout(), {}
    for name, shape in problem.matrices.items():
        dense = torch.empty(problem.experts, shape.n, shape.k, dtype=torch.bfloat16, device=DEVICE)
        for expert in range(problem.experts):
            if expert < distinct:
                held = {role: t[expert] for role, t in reference.weights[name].items()}
                dense[expert] = dequantize(layout.unpack(shape, held))
            else:
                dense[expert] = dense[expert % distinct]
        weights[name] = dense
    return {f"{TORCH} layer": TorchPeer(problem, weights), f"{TORCH} products": TorchProducts(problem, weights)}


PEERS = {HUMMING: humming_peers, TORCH: torch_peers}


# One cell ------------------------------------------------------------------------------------------------


def batch(problem: Problem, tokens: int, seed: int) -> Batch:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    x = torch.randn(tokens, problem.hidden, generator=generator, device=DEVICE).to(problem.input.storage)
    routed = routing(problem, tokens, seed)
    return Batch(x, routed.ids, routed.weights)


def calls(call, batches: list[Batch]) -> list:
    return [partial(call, b) for b in batches]


def our_call(layer: Layer, out: torch.Tensor, b: Batch) -> torch.Tensor:
    return layer(b.x, Indexed(b.ids, b.weights), out)


def expected(reference: Layer, b: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Some rows, evenly spread, and what the reference makes of them in fp32."""
    rows = torch.linspace(0, b.x.shape[0] - 1, min(CHECKED_ROWS, b.x.shape[0])).round().long().to(DEVICE)
    routed = Indexed(b.ids[rows].contiguous(), b.weights[rows].contiguous())
    return rows, reference(b.x[rows].contiguous(), routed, torch.empty(len(rows), b.x.shape[1], device=DEVICE))


def check(got: torch.Tensor, wanted: tuple[torch.Tensor, torch.Tensor]) -> float:
    """The worst row's relative error; infinite where anything is not finite, in any row."""
    rows, want = wanted
    return round(worst_row(got[rows], want), 6) if bool(torch.isfinite(got).all()) else float("inf")


def against(ours: dict, peers: dict) -> dict[str, dict]:
    """Ratios to each peer's best variant."""
    groups = {
        HUMMING: [name for name in peers if name.endswith(", sorted")],
        f"{HUMMING} with sort": [name for name in peers if name.endswith(", with sort")],
        **{name: [name] for name in peers if name.startswith(TORCH)},
    }
    found = {}
    for title, names in groups.items():
        chosen = best(peers, names)
        if chosen is not None:
            found[title] = {"variant": chosen[0], "us": chosen[1]["us"]} | compare(ours, chosen[1])
    return found


def floors(ceilings: Ceilings, problem: Problem, batches: list[Batch], us: float) -> dict[str, float]:
    work = Work.of(problem, batches)
    floor = ceilings.floor_us(work.flops, work.bytes, problem.activations)
    return {
        "floor_us": round(floor, 2), "of_floor": round(floor / us, 4), "tflops": round(work.flops / us / 1e6, 1),
        "gbs": round(work.bytes / us / 1e3, 1), "experts": work.experts,
    }  # fmt: skip


def line(row: dict) -> str:
    beside = ", ".join(f"{name} {v['us']:.1f} ({v['ratio']:.2f}x)" for name, v in row["against"].items())
    errors = {name: peer["worst_row"] for name, peer in row["peers"].items()}
    return (
        f"{row['part']} M={row['tokens']}: ours {row['ours']['us']:.1f} us +-{row['ours']['noise']:.1%}, "
        f"{row['of_floor']:.0%} of floor, worst row {row['worst_row']}, repeatable {row['repeatable']}; {beside}; "
        f"peers' worst rows {errors}; clocks {row['clocks']}"
    )


def host_time(call) -> float:
    """Host microseconds of an eager call, best of three batches."""
    best_of = float("inf")
    for _ in range(3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(50):
            call()
        best_of = min(best_of, (time.perf_counter() - start) / 50 * 1e6)
    torch.cuda.synchronize()
    return best_of


def launch_times(layer: Layer, batches: list[Batch], out: torch.Tensor, stream) -> list[tuple[str, float]]:
    """Each launch of the program alone, repeated in a graph on the first batch's data."""
    b, found = batches[0], []
    with torch.cuda.stream(stream):
        our_call(layer, out, b)
        torch.cuda.synchronize()
        program = next(
            p for key, p in layer.backend._programs.items()
            if key[3] == stream.cuda_stream and p.plan.problem is layer.problem and p.tokens == b.x.shape[0]
        )  # fmt: skip
        for step, launch in zip(steps(program.plan), program.launches):
            launch._config.count = 0
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                for _ in range(5):
                    launch(torch.cuda.current_stream().cuda_stream)
            graph.replay()
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(500_000)
            start.record()
            graph.replay()
            stop.record()
            torch.cuda.synchronize()
            constants = dict(step.source.constants)
            size = constants.get("T", 0) + constants.get("U", 0)
            label = f"{step.source.kernel}{size or ''} {constants.get('KIND', '')}".strip()
            found.append((label, round(start.elapsed_time(stop) * 200, 1)))
            launch._config.count = int(program.overlap and launch is not program.launches[0])
    return found


# Where and when --------------------------------------------------------------------------------------------


def first_forward() -> None:
    """Time a child that may not compile: imports, context, allocation, kernel loading, one layer."""
    script = (
        "import time, torch; start = time.perf_counter()\n"
        "from colibri.testing.layers import Layer, layer_problem, routing\n"
        "from colibri.backends import registry\n"
        f"problem = layer_problem('mxfp4', 'bf16', **{SHAPES['deepseek-v4-flash']})\n"
        "backend = registry()['hopper']; layout = backend.layout(problem)\n"
        "weights = {n: layout.allocate(s, problem.experts, 'cuda') for n, s in problem.matrices.items()}\n"
        "layer = Layer(problem, backend, weights, torch.device('cuda', 0))\n"
        "x = torch.randn(16, problem.hidden, device='cuda').bfloat16()\n"
        "layer(x, routing(problem, 16, 0)); torch.cuda.synchronize()\n"
        "print(round(time.perf_counter() - start, 3))\n"
    )
    for _ in range(2):
        child = subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            env={**os.environ, "COLIBRI_NO_COMPILE": "1"},
        )
        print("first forward, s:", child.stdout.strip() or child.stderr[-600:])


def machine() -> dict[str, str | None]:
    return {
        "gpu": smi("name,driver_version"),
        "python": platform.python_version(),
        **{name: installed(name) for name in ("torch", "triton", "humming-kernels", "cuda-core")},
    }


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def clocks() -> str:
    """SM and memory clocks, power and temperature right now."""
    return smi("clocks.sm,clocks.mem,power.draw,temperature.gpu")


def smi(what: str) -> str:
    done = subprocess.run(
        ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader"], capture_output=True, text=True
    )
    return done.stdout.strip()


def command() -> str:
    """What was run, with file names but no folders of this machine."""
    return " ".join(["python", "benchmarks/hopper.py", *(Path(word).name for word in sys.argv[1:])])


def scrub(text: str) -> str:
    """A traceback without this machine's folders."""
    here = str(Path(__file__).resolve().parent.parent)
    return text.replace(here + "/", "").replace(str(Path(sys.prefix)), "<python>").replace(str(Path.home()), "~")


def commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--verify", "HEAD"], capture_output=True, text=True)
    return found.stdout.strip() if found.returncode == 0 else "unknown"


if __name__ == "__main__":
    main()
