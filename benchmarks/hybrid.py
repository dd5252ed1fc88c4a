"""A layer split between the GPU and host memory, against each part alone.

    python benchmarks/hybrid.py [--shapes qwen3-235b-a22b,deepseek-v4-flash] [--specs mxfp4,int4-g128]
                                [--shares 0,25,50,75] [--tokens 1,4,16] [--prefill 512,2048,8192] [--threads N]
                                [--peers kt-kernel] [--out FILE] [--note WORDS]

`split_us` is a replayed CUDA graph of calls with different routing; `gpu_us` the same graph with the GPU's part alone;
`cpu_us` the CPU's part alone, called from a loop without a GPU; `idle_us` the split layer when no token needs the CPU:
idle_us - gpu_us is what the way to the CPU and back costs. `function_us` is `split_us` with CUDA's host functions in
the place of mailboxes. The bar is max(cpu, gpu) / 0.9 + 20 us. `cpu_gbs` is the rate at which the CPU reads its
activated experts; `read_gbs` is the measured read rate of memory.

Prefill, with half of the experts on the GPU: `prefill_us` as planned, `cpu_us` with all missing experts on the CPU,
`copied_us` with all copied; `wire_us` is their bytes / the measured rate of copies, `together_us` the time of the CPU
and the wire together, `over_best` the planned time over the best of these three.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from machine import gpu_machine, origin, result_path
from torch import Tensor

from lancebill.backends.cpu import native
from lancebill.backends.cpu.executor import CpuExecutor
from lancebill.backends.cpu.host_call import HostShape
from lancebill.backends.oracle import select
from lancebill.bench.peer import Peer
from lancebill.bench.peers import PEERS
from lancebill.bench.run import PEER_ERRORS
from lancebill.bench.workload import Weights
from lancebill.cli.env import describe
from lancebill.layer.parts import LayerParts
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.moe.dispatch import Indexed
from lancebill.moe.model_shapes import Shape, parse_shape
from lancebill.numbers.spec_names import ACTIVATIONS, parse_spec
from lancebill.split import executor as executors
from lancebill.split import large_batches
from lancebill.split.executor import SplitExecutor
from lancebill.split.host_calls import use_host_threads
from lancebill.split.host_threads import HostThreads
from lancebill.split.split import Split, part_map

CALLS = 12  # in a graph, with different routing
ROUNDS = 15
PREFILLS = 5
PREFILL_SHARE = 50  # percent of experts on the GPU
DISTINCT = 8


class Experts:
    """The experts of a layer in host memory and on the GPU, in the layouts of both, to make split layers of."""

    def __init__(self, shape: Shape, spec: str) -> None:
        self.shape, self.problem = shape, shape.problem(parse_spec(spec), ACTIVATIONS["bf16"])
        self.choices = {device: select(self.problem, device) for device in ("cpu", "cuda")}
        self.packed = {
            device: Weights(self.problem, torch.device(device), distinct=DISTINCT).packed(
                choice.backend.layout(self.problem)
            )
            for device, choice in self.choices.items()
        }

    def layer(self, share: int) -> RoutedExperts:
        """A layer with `share` percent of its experts on the GPU."""
        split = Split.by_number(self.shape.experts, self.shape.experts * share // 100)
        return RoutedExperts(replace(self._parts(split.device, "cuda"), host=self._parts(split.host, "cpu")))

    def peers(self, names: str, threads: int) -> dict[str, Peer]:
        """Other libraries' layers of the same experts, all on the CPU."""
        torch.set_num_threads(threads)
        made, weights = {}, Weights(self.problem, torch.device("cpu"), distinct=DISTINCT)
        for name in filter(None, names.split(",")):
            try:
                made[name] = PEERS[name](self.problem, weights)
            except PEER_ERRORS as error:
                print(f"{name}: {error}", flush=True)
        return made

    def _parts(self, slots: tuple[int, ...], device: str) -> LayerParts:
        choice, rows = self.choices[device], slice(slots[0], slots[-1] + 1) if slots else slice(0)
        packed = {m: {name: t[rows] for name, t in held.items()} for m, held in self.packed[device].items()}
        places = torch.tensor(part_map(range(self.shape.experts), slots), dtype=torch.int32, device=device)
        choice = replace(choice, problem=replace(self.problem, experts=len(slots)))
        return LayerParts(choice, packed, expert_map=places)


def batches(shape: Shape, tokens: int, most: int | None = None) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Rows routed uniformly to all experts, or to the first `most`."""
    g = torch.Generator("cuda").manual_seed(tokens)
    made = []
    for _ in range(CALLS):
        x = torch.randn(tokens, shape.hidden, generator=g, device="cuda").bfloat16()
        ids = torch.rand(tokens, most or shape.experts, generator=g, device="cuda").topk(shape.top_k).indices.int()
        made.append((x, ids, torch.rand(tokens, shape.top_k, generator=g, device="cuda")))
    return made


def replayed_us(
    run: Callable[[tuple[Tensor, Tensor, Tensor]], Any], given: list[tuple[Tensor, Tensor, Tensor]]
) -> float:
    """The median time of a call in a replayed graph."""
    run(given[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for each in given:
            run(each)
    graph.replay()
    times = []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(given))
    return sorted(times)[ROUNDS // 2]


def cpu_us(layer: RoutedExperts, given: list[tuple[Tensor, Tensor, Tensor]], threads: HostThreads) -> float:
    """The median time of the CPU's part, called back to back from this thread."""
    host = layer.host_experts
    assert host is not None and isinstance(host.executor, CpuExecutor) and host.expert_map is not None
    x, ids, weights = given[0]
    shape = HostShape(len(x), x.dtype, ids.dtype, weights.dtype, threads.count)
    calls = []
    for each in given:
        call = host.executor.host_call(shape, host.expert_map, lambda size: torch.empty(size, dtype=torch.uint8))
        for target, source in zip((call.x, call.ids, call.weights), each):
            target.copy_(source)
        calls.append(call)
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for call in calls:
            call.run()
        times.append((time.perf_counter() - start) * 1e6 / len(calls))
    return sorted(times)[ROUNDS // 2]


def measure(layer: RoutedExperts, shape: Shape, tokens: int, threads: HostThreads) -> dict[str, Any]:
    given, executor = batches(shape, tokens), layer.executor
    assert isinstance(executor, SplitExecutor) and layer.host_experts is not None

    def own(each: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        x, ids, weights = each
        return executor.own.run(x, Indexed(ids, weights, layer.expert_map), torch.empty_like(x))

    gpu = replayed_us(own, given) if layer.problem.experts else 0.0

    def whole(each: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        out: Tensor = layer(each[0], topk_ids=each[1], topk_weights=each[2])
        return out

    held = layer.problem.experts
    idle = replayed_us(whole, batches(shape, tokens, held)) if held >= shape.top_k else None
    both = replayed_us(whole, given)
    executors.MAILBOX_ROWS = 0
    function = replayed_us(whole, given)
    executors.MAILBOX_ROWS = executors.MOST_ROWS
    cpu = cpu_us(layer, given, threads)
    places = layer.host_experts.expert_map
    assert places is not None
    active = [len({int(e) for e in ids.flatten().tolist() if places[int(e)] >= 0}) for _, ids, _ in given]
    each_bytes = sum(t[0].nbytes for held in layer.host_experts.packed.values() for t in held.values())
    bar = max(cpu, gpu) / 0.9 + 20
    layer.host_experts.calls.check()
    return {
        "tokens": tokens, "split_us": round(both, 1), "cpu_us": round(cpu, 1), "gpu_us": round(gpu, 1),
        "function_us": round(function, 1), "idle_us": None if idle is None else round(idle, 1),
        "bar_us": round(bar, 1), "within": both <= bar,
        "cpu_gbs": round(sum(active) / len(active) * each_bytes / cpu / 1e3, 1),
    }  # fmt: skip


def peer_us(peer: Peer, given: list[tuple[Tensor, Tensor, Tensor]]) -> float:
    """The median time of a peer that computes all experts on the CPU."""
    rows, times = [tuple(tensor.cpu() for tensor in each) for each in given], []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for x, ids, weights in rows:
            peer(x, ids, weights)
        times.append((time.perf_counter() - start) * 1e6 / len(rows))
    return sorted(times)[ROUNDS // 2]


def eager_us(run: Callable[[], Any]) -> float:
    """The median time of a call, from its start until the GPU has ended."""
    times = []
    for _ in range(PREFILLS + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e6)
    return sorted(times[1:])[PREFILLS // 2]


def prefill(layer: RoutedExperts, shape: Shape, tokens: int) -> dict[str, Any]:
    """A large batch: as planned, with all missing experts on the CPU, and with all of them copied."""
    x, ids, weights = batches(shape, tokens)[0]
    executor = layer.executor
    assert isinstance(executor, SplitExecutor)
    large = executor.large_batches
    assert layer.host_experts is not None and layer.host_experts.expert_map is not None
    chosen = large.choose(Indexed(ids, weights, layer.expert_map), layer.host_experts.expert_map)
    rates, size = large._measured(x.device), large_batches.expert_size(large.host.executor)
    key, taken = large._key(x.device), {}
    forced = {
        "planned": rates,
        "cpu": replace(rates, copy_gbs=1e-6),
        "copied": replace(rates, cpu_gbs=1e-6, cpu_gflops=1e-6),
    }
    for name, used in forced.items():
        large_batches._RATES[key] = used
        large._expected.clear()
        taken[name] = eager_us(lambda: layer(x, topk_ids=ids, topk_weights=weights))
    large_batches._RATES[key] = rates
    large._expected.clear()
    missing = len(chosen.cpu) + len(chosen.streamed)
    wire = missing * size.bytes / rates.copy_gbs / 1e3
    together = 1 / (1 / wire + 1 / taken["cpu"])
    best = min(wire, taken["cpu"], together)
    return {
        "tokens": tokens, "prefill_us": round(taken["planned"], 1), "cpu_us": round(taken["cpu"], 1),
        "copied_us": round(taken["copied"], 1), "wire_us": round(wire, 1), "together_us": round(together, 1),
        "over_best": round(taken["planned"] / best, 3), "on_cpu": len(chosen.cpu), "copied": len(chosen.streamed),
        "estimate_us": round(chosen.estimate_us, 1), "rates": asdict(rates),
    }  # fmt: skip


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


def main() -> None:
    arguments = parse()
    threads = HostThreads.choose(arguments.threads)
    use_host_threads(threads)
    library = native.library()
    assert library is not None, native.state().why
    library.place_threads(threads.cpus, threads.spin_us)
    machine = {"threads": threads.count, "cpus": threads.cpus, "read_gbs": round(read_rate(threads.count), 1)}
    print(json.dumps(machine), library.best, flush=True)
    path = arguments.out or result_path("hybrid", "cuda")
    found = gpu_machine() | machine | {"cpu": describe()["cpu"]}
    record = {**origin("hybrid.py"), "machine": found, "note": arguments.note, "rows": list[dict[str, Any]]()}
    for row in measured(arguments, threads):
        print(json.dumps(row), flush=True)
        record["rows"].append(row)
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")  # a run that is cut off keeps its rows


def measured(arguments: argparse.Namespace, threads: HostThreads) -> Iterator[dict[str, Any]]:
    large = [int(tokens) for tokens in arguments.prefill.split(",") if tokens]
    for name, spec in product(arguments.shapes.split(","), arguments.specs.split(",")):
        shape = parse_shape(name)
        experts = Experts(shape, spec)
        for share in map(int, arguments.shares.split(",")):
            layer, where = experts.layer(share), {"shape": name, "spec": spec, "share": share}
            for tokens in large if share == PREFILL_SHARE else ():
                yield where | prefill(layer, shape, tokens)
            peers = experts.peers(arguments.peers, threads.count) if share == 0 else {}
            for tokens in map(int, arguments.tokens.split(",")):
                given = batches(shape, tokens)
                beside = {f"{peer}_us": round(peer_us(made, given), 1) for peer, made in peers.items()}
                yield where | measure(layer, shape, tokens, threads) | beside


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="qwen3-235b-a22b,deepseek-v4-flash")
    parser.add_argument("--specs", default="mxfp4,int4-g128")
    parser.add_argument("--shares", default="0,25,50,75")
    parser.add_argument("--tokens", default="1,4,16")
    parser.add_argument("--prefill", default="512,2048,8192")
    parser.add_argument("--peers", default="", help="such as kt-kernel: with no expert on the GPU")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--note", default="")
    return parser.parse_args()


if __name__ == "__main__":
    main()
