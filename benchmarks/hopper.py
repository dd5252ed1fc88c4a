"""Check and time whole layers of the Hopper backend: one run, one JSON.

    python benchmarks/hopper.py --out results.json [--shapes deepseek-v4-flash] [--specs mxfp4:bf16] [--tokens 1,16]
    python benchmarks/hopper.py --first-forward       fresh process to first result, compiling forbidden

A layer is timed from `x, topk_ids, topk_weights` to the combined output, dispatch included, as CUDA-graph
replays of several calls with different routings, so that weights do not stay in the L2. Two windows are
given: `short` (median of single replays with pauses) and `steady` (about 40 ms back to back).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from functools import lru_cache
from pathlib import Path

import torch

from colibri.backends.hopper.plan import make_plan
from colibri.backends.hopper.steps import steps
from colibri.dispatch import Indexed
from colibri.jit.build import build_all
from colibri.problem import Problem
from colibri.testing.layers import Layer, layer_problem, make_layer, routing, worst_row

SHAPES = {
    "deepseek-v4-flash": {"hidden": 4096, "intermediate": 2048, "experts": 256, "top_k": 6},
    "gpt-oss-120b": {"hidden": 2880, "intermediate": 2880, "experts": 128, "top_k": 4},
    "qwen3-30b-a3b": {"hidden": 2048, "intermediate": 768, "experts": 128, "top_k": 8},
}
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384)
STEADY_US = 40_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--shapes", default="deepseek-v4-flash")
    parser.add_argument("--specs", default="mxfp4:bf16,mxfp4:fp8,int4-g128:bf16")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--distinct", type=int, default=16, help="different experts; the rest repeat them")
    parser.add_argument("--parts", action="store_true", help="time each launch alone too")
    parser.add_argument("--first-forward", action="store_true", help="seconds from `import torch` to a first result")
    arguments = parser.parse_args()
    if arguments.first_forward:
        first_forward()
        return
    tokens = [int(t) for t in arguments.tokens.split(",")]
    record = {"machine": machine(), "command": command(), "commit": commit(), "ceilings": ceilings(), "rows": []}
    for shape in arguments.shapes.split(","):
        for name in arguments.specs.split(","):
            spec, _, activations = name.rpartition(":")
            problem = layer_problem(spec, activations, **SHAPES[shape])
            failed = build_all(step.source for m in tokens for step in steps(make_plan(problem, m)))
            for source, why in failed.items():
                print("does not compile:", source.label, why[-300:])
            layer = make_layer(problem, "hopper", distinct=arguments.distinct)
            reference = make_layer(problem, "reference", distinct=arguments.distinct)
            for m in tokens:
                row = {"shape": shape, "spec": spec, "activations": activations, "tokens": m}
                row |= measure(layer, reference, m, arguments.parts)
                record["rows"].append(row)
                print(json.dumps(row), flush=True)
            del layer, reference
            torch.cuda.empty_cache()
    if arguments.out:
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


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


def measure(layer: Layer, reference: Layer, tokens: int, parts: bool) -> dict[str, object]:
    problem = layer.problem
    sets = [inputs(problem, tokens, 31 * tokens + i) for i in range(8 if tokens <= 64 else 2)]
    out = torch.full_like(sets[0][0], float("nan"))
    layer(*sets[0], out)
    first = out.clone()
    layer(*sets[0], out)
    result: dict[str, object] = {"repeatable": torch.equal(first, out)}
    few = min(tokens, 64)
    x, routed = sets[0]
    head = Indexed(routed.ids[:few].contiguous(), routed.weights[:few].contiguous())
    want = reference(x[:few].contiguous(), head, torch.empty(few, x.shape[1], device="cuda"))
    result["worst_row"] = round(worst_row(first[:few], want), 6)
    calls = [lambda s=s: layer(*s, out) for s in sets]
    result["short_us"] = round(timed(calls, repeats=9 if tokens <= 64 else 5, pause=0.02), 2)
    count = max(2, int(STEADY_US / float(result["short_us"])) // len(calls)) * len(calls)  # type: ignore[arg-type]
    result["steady_us"] = round(timed(calls, repeats=1, calls_in_graph=min(count, 400)), 2)
    if tokens <= 256:
        result["host_us"] = round(host_time(calls[0]), 1)
    if parts:
        result["parts_us"] = launch_times(layer, sets, out)
    plan = layer.backend.plan(problem, tokens, None)  # type: ignore[arg-type]
    result["floor_us"] = round(plan.estimate_us, 1)
    return result


def inputs(problem: Problem, tokens: int, seed: int) -> tuple[torch.Tensor, Indexed]:
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(tokens, problem.hidden, generator=generator, device="cuda").to(problem.input.storage)
    return x, routing(problem, tokens, seed)


def timed(calls: list, repeats: int, calls_in_graph: int | None = None, pause: float = 0.0) -> float:
    """Microseconds a call, median of graph replays."""
    count = calls_in_graph or len(calls) * 2
    stream, graph = capture_stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(count):
                calls[i % len(calls)]()
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        time.sleep(pause)
        torch.cuda._sleep(1_000_000)  # the GPU stays busy while the host enqueues the replay
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / count)
    return sorted(times)[len(times) // 2]


@lru_cache(maxsize=1)
def capture_stream() -> torch.cuda.Stream:
    """One stream for all graphs: its scratch memory is grown once."""
    return torch.cuda.Stream()


def launch_times(layer: Layer, sets: list, out: torch.Tensor) -> list[tuple[str, float]]:
    """Each launch of the program alone, repeated in a graph on the first set's data."""
    (x, routed), found = sets[0], []
    stream = capture_stream()
    with torch.cuda.stream(stream):
        layer(x, routed, out)
        torch.cuda.synchronize()
        program = next(
            p for key, p in layer.backend._programs.items()
            if key[3] == stream.cuda_stream and p.plan.problem is layer.problem and p.tokens == x.shape[0]
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


def host_time(call) -> float:
    """Host microseconds of an eager call, best of three batches."""
    best = float("inf")
    for _ in range(3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(50):
            call()
        best = min(best, (time.perf_counter() - start) / 50 * 1e6)
    torch.cuda.synchronize()
    return best


def ceilings() -> dict[str, float]:
    """Dense bf16 rate and copy rate (bytes read and written) of this card, in this run."""
    a = torch.randn(8192, 8192, device="cuda").bfloat16()
    dense = timed([lambda: a @ a], repeats=5)
    source = torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(source)
    copy = timed([lambda: target.copy_(source)], repeats=5)
    return {"bf16_tflops": round(2 * 8192**3 / dense / 1e6, 1), "copy_tb_s": round(source.numel() * 8 / copy / 1e6, 3)}


def machine() -> dict[str, str]:
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,driver_version,clocks.sm", "--format=csv,noheader"],
        capture_output=True,
        text=True,
    ).stdout.strip()
    import triton

    return {
        "gpu": driver,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }


def command() -> str:
    """What was run, with file names but no folders of this machine."""
    return " ".join(["python", "benchmarks/hopper.py", *(Path(word).name for word in sys.argv[1:])])


def commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--verify", "HEAD"], capture_output=True, text=True)
    return found.stdout.strip() if found.returncode == 0 else "unknown"


if __name__ == "__main__":
    main()
