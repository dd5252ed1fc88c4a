"""A layer split between the GPU and host memory, against each part alone and against other libraries.

    python benchmarks/hybrid.py [--shapes qwen3-235b-a22b deepseek-v4-flash] [--specs mxfp4 int4-g128]
                                [--shares 0 25 50 75 100] [--tokens 1 4 16] [--prefill 512 2048 8192]
                                [--peers llama.cpp kt-kernel] [--threads N] [--seconds 230] [--device cuda]
                                [--kinds decode prefill peers moves threads] [--out FILE] [--note WORDS]

The most important rows come first, and every row is written when it is measured: a run that has no time left
(`--seconds`, without compiling) drops the last rows and says which. Experts are made once for each shape and spec.

`decode`: `split_us` is a call in a replayed CUDA graph of calls with different routing; `gpu_us` the same graph with
the GPU's part alone; `cpu_us` the CPU's part alone, called from a loop without a GPU; `cpu_gbs` the rate at which the
CPU reads the experts of its part that are used. The three are measured in turns. The bar is max(cpu, gpu) / 0.9 +
20 us. `asked_us` is the mean time of the CPU's part inside the split calls, by the library's own clock. Routing is
uniform, or has the reuse of real models (`recency`). In some rows: `idle_us` is the split layer when no token needs the
CPU and `idle_gpu_us` its GPU part alone, so the difference is what the way to the CPU and back costs; `function_us` is
`split_us` with CUDA's host functions in the place of mailboxes.

`prefill`, with half of the experts on the GPU: `prefill_us` as planned, `cpu_us` with all missing experts on the CPU,
`copied_us` with all copied, `both_us` with the best division of both ways however little it saves by estimate; each
is measured after a call of its own kind. `asked_us` is the time of the CPU's part inside the planned call, by the
library's own clock, and `share_us` the estimate of that part from the start of the call to its sums on the GPU.
`lane_gbs` is the rate of the layer's own copies alone, `alone_us` the time of the CPU's part without a GPU; `beside_us`
and `beside_gbs` are those of both at work (batches of one call of the CPU); `wire_us` is the bytes of missing experts /
the rate of pinned copies in the same run (`wire_gbs`, of 2 GiB; `small_wire_gbs` is that of 256 MiB), `together_us` the
time of the CPU and the wire together, `over_best` the planned time over the best of these three.

`peers`: the CPU's part with all experts, and other libraries with the same ones on as many threads; `difference` is the
relative difference of their results to ours. `ended_with`: the process that measures them did not end well.
`read_gbs` is the measured read rate of memory, first and last.

`moves`: steps with the reuse of real models, each with its own experts, while experts stay (`still_us`), move where it
pays by estimate (`recency_us`), or in any case (`always_us`).

`threads`, only if asked for: `decode` with one thread less, and with threads that spin longer before they sleep; a name
such as `split_14_2000_us` has the number of threads and the microseconds that they spin.

With `--device cpu` the CPU stands in for the GPU, without graphs and without prefill: a check of this script.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import hybrid_cells as cells
import hybrid_peers
import torch
from gpu_kernels import compile_first
from hybrid_batches import RECENCY, UNIFORM
from hybrid_experts import Experts
from machine import gpu_machine, origin, package_version, result_path
from result_files import write_record

from lancebill.backends.cpu import native
from lancebill.cli.env import describe
from lancebill.moe.model_shapes import parse_shape
from lancebill.moe.problem import Problem
from lancebill.numbers.spec_names import ACTIVATIONS, parse_spec
from lancebill.split.host_calls import use_host_threads
from lancebill.split.host_threads import HostThreads
from lancebill.split.measure_rates import BATCHES
from lancebill.split.streamed import WAVE_BYTES
from lancebill.split.ways import size_of

DECODE, PREFILL, PEERS, MOVES, THREADS = "decode", "prefill", "peers", "moves", "threads"
HALF = 50  # percent of experts on the GPU
WIRE = 2 << 30, 256 << 20  # bytes: as many as the experts of a layer, and as few as caches of the CPU may hold


@dataclass(frozen=True)
class Cell:
    """One row of the table."""

    kind: str
    shape: str
    spec: str
    share: int
    routing: str
    tokens: int


def planned(arguments: argparse.Namespace) -> Iterator[Cell]:
    """All rows, the most important ones first."""
    layers, shares, tokens = list(product(arguments.shapes, arguments.specs)), arguments.shares, arguments.tokens
    large = arguments.prefill if arguments.device == "cuda" else []

    def decode(routing: str, count: int) -> Iterator[Cell]:
        yield from (Cell(DECODE, *layer, share, routing, count) for layer in layers for share in shares)

    yield from decode(UNIFORM, tokens[0])
    yield from (Cell(PREFILL, *layer, HALF, UNIFORM, count) for count in large for layer in layers)
    for count in tokens[1:]:
        yield from decode(UNIFORM, count)
    for count in tokens:
        yield from decode(RECENCY, count)
    if arguments.peers:
        yield from (Cell(PEERS, *layer, 0, UNIFORM, tokens[0]) for layer in layers)  # and all other numbers of tokens
    yield from (Cell(MOVES, *layer, HALF, RECENCY, count) for count in tokens for layer in layers)
    yield from (Cell(THREADS, *layer, HALF, UNIFORM, count) for count in tokens for layer in layers)


class Run:
    """Experts that rows share, and what was measured of the machine."""

    def __init__(self, arguments: argparse.Namespace, threads: HostThreads) -> None:
        self.arguments, self.threads = arguments, threads
        self.wire_gbs, self.small_wire_gbs = map(wire_rate, WIRE) if arguments.device == "cuda" else (0.0, 0.0)
        self._experts: dict[tuple[str, str], Experts] = {}

    def measure(self, cell: Cell) -> Iterator[dict[str, Any]]:
        """The row of a cell; of peers, one for each number of tokens."""
        arguments = self.arguments
        if cell.kind == PEERS:
            layer = cell.shape, cell.spec, arguments.device
            yield from hybrid_peers.measure(layer, arguments.tokens, arguments.peers, self.threads)
            return
        experts = self._experts_of(cell)
        if cell.kind == PREFILL:
            yield cells.prefill(experts, cell.share, cell.tokens, self.wire_gbs)
        elif cell.kind == MOVES:
            yield cells.moves(experts, cell.share, cell.tokens)
        elif cell.kind == THREADS:
            yield cells.threads(experts, cell.share, cell.tokens, self.threads)
        else:
            ways = cell.share == HALF and cell.routing == UNIFORM and arguments.device == "cuda"
            yield cells.decode(experts, cell.share, cell.routing, cell.tokens, ways=ways)

    def _experts_of(self, cell: Cell) -> Experts:
        key = cell.shape, cell.spec
        if key not in self._experts:
            self._experts[key] = Experts(*key, self.arguments.device)
        return self._experts[key]


def launched(wanted: list[Cell]) -> Iterator[tuple[Problem, int]]:
    """The GPU's parts of layers and the numbers of tokens that they compute in these rows."""
    for cell in wanted:
        problem = parse_shape(cell.shape).problem(parse_spec(cell.spec), ACTIVATIONS["bf16"])
        yield replace(problem, experts=problem.experts * cell.share // 100), cell.tokens
        if cell.kind in (PREFILL, MOVES):  # copied experts, and the rates that are measured first
            wave = replace(problem, experts=min(problem.experts, max(1, WAVE_BYTES // size_of(problem).bytes)))
            yield from ((wave, tokens) for tokens in (*BATCHES, cell.tokens))


def wire_rate(size: int) -> float:
    """GB/s of copies from so many bytes of pinned memory to the GPU, the best of five."""
    source, best = torch.zeros(size, dtype=torch.uint8, pin_memory=True), 0.0
    target = torch.empty_like(source, device="cuda")
    for _ in range(6):
        torch.cuda.synchronize()
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        best = max(best, source.numel() / (time.perf_counter() - start) / 1e9)
    return best


def read_rate(threads: int) -> float:
    """GB/s at which all threads together read memory, the best of five."""
    library, memory = native.library(), torch.zeros(1 << 30, dtype=torch.uint8)
    assert library is not None
    best = 0.0
    for _ in range(5):
        start = time.perf_counter()
        library.read(memory, threads)
        best = max(best, memory.numel() / (time.perf_counter() - start) / 1e9)
    return best


def rounded(value: Any) -> Any:
    return round(value, 3 if abs(value) < 10 else 1) if isinstance(value, float) else value


def say(text: str) -> None:
    print(text, flush=True)


def main() -> None:
    arguments = parse()
    threads = HostThreads.choose(arguments.threads)
    use_host_threads(threads)
    library = native.library()
    assert library is not None, native.state().why
    library.place_threads(threads.cpus, threads.spin_us)
    wanted = [cell for cell in planned(arguments) if cell.kind in arguments.kinds]
    start = time.monotonic()
    failed = compile_first(launched(wanted)) if arguments.device == "cuda" else {}
    compiled_s, start = time.monotonic() - start, time.monotonic()
    run = Run(arguments, threads)
    machine: dict[str, Any] = gpu_machine() if arguments.device == "cuda" else {}
    machine |= {"cpu": describe()["cpu"], "threads": threads.count, "cpus": threads.cpus, "level": library.best}
    machine |= {"read_gbs": [rounded(read_rate(threads.count))], "wire_gbs": rounded(run.wire_gbs)}
    machine["small_wire_gbs"] = rounded(run.small_wire_gbs)
    record = {
        **origin("hybrid.py"), "machine": machine, "kt-kernel": package_version("kt-kernel"), "note": arguments.note,
        "compiled_s": rounded(compiled_s), "not_compiled": failed,
        "rows": list[dict[str, Any]](), "dropped": [asdict(cell) for cell in wanted],
    }  # fmt: skip
    say(json.dumps({name: value for name, value in record.items() if name != "dropped"}))
    path = arguments.out or result_path("hybrid", arguments.device)
    for done, cell in enumerate(wanted, 1):
        begun = time.monotonic()
        if begun - start > arguments.seconds:
            break
        for found in run.measure(cell):
            row = asdict(cell) | {name: rounded(value) for name, value in found.items()}
            row["took_s"] = rounded(time.monotonic() - begun)
            say(json.dumps(row))
            record["rows"].append(row)
        record["dropped"] = [asdict(left) for left in wanted[done:]]
        write_record(path, record)
    machine["read_gbs"].append(rounded(read_rate(threads.count)))
    write_record(path, record)
    say(f"{len(record['rows'])} rows in {time.monotonic() - start:.0f} s, {len(record['dropped'])} dropped")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["qwen3-235b-a22b", "deepseek-v4-flash"])
    parser.add_argument("--specs", nargs="+", default=["mxfp4", "int4-g128"])
    parser.add_argument("--shares", nargs="+", type=int, default=[0, 25, 50, 75, 100])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--prefill", nargs="*", type=int, default=[512, 2048, 8192])
    parser.add_argument("--peers", nargs="*", default=["llama.cpp", "kt-kernel"], help="on the CPU, with all experts")
    kinds = [DECODE, PREFILL, PEERS, MOVES]
    parser.add_argument("--kinds", nargs="+", choices=[*kinds, THREADS], default=kinds, help="rows of these kinds only")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seconds", type=float, default=230.0, help="rows that would begin later are dropped")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--note", default="")
    return parser.parse_args()


if __name__ == "__main__":
    main()
