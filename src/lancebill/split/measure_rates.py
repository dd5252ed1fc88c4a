"""The rates by which experts are divided between the CPU and copies, measured with both at work.

Rates of each alone mislead: the CPU's kernels and the copies read the same memory.
"""

from __future__ import annotations

import time

import torch

from lancebill.backends.cpu.executor import CpuExecutor
from lancebill.backends.cpu.host_call import HostCall, HostShape
from lancebill.moe.dispatch import Indexed
from lancebill.split.copy_lane import CudaLane
from lancebill.split.host_calls import host_threads
from lancebill.split.run_part import run_part
from lancebill.split.streamed import Stage
from lancebill.split.ways import Rates

BATCHES = (256, 4096)  # tokens of the batches that waves are computed for
MANY = 64  # tokens of an expert, where computing takes longer than reading
_COPIES = 4  # waves that are copied while the CPU computes
_BEST_OF = 3


def measure_rates(host: CpuExecutor, stage: Stage, lane: CudaLane) -> Rates:
    """Takes some ten milliseconds, once for each problem."""
    problem = host.problem
    each = sum(t[0].nbytes for tensors in host.tensors.packed().values() for t in tensors.values())
    flops = 2 * sum(shape.n * shape.k for shape in problem.matrices.values())
    few, many = (_call(host, tokens) for tokens in (1, MANY))
    active = min(problem.top_k, problem.experts)
    copy_s = few_s = many_s = pack_s = float("inf")
    for _ in range(_BEST_OF):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(lane.stream)
        for _ in range(_COPIES):
            _copy_wave(host, stage, lane)
        end.record(lane.stream)
        few_s = min(few_s, _seconds(few))
        many_s = min(many_s, _seconds(many))
        end.synchronize()
        copy_s = min(copy_s, start.elapsed_time(end) / 1e3 / _COPIES)
        pack_s = min(pack_s, _pack_seconds(stage))
    wave = stage.experts * each
    short, long = (_wave_seconds(stage, tokens, lane.device) for tokens in BATCHES)
    slope = max(0.0, (long - short) / (BATCHES[1] - BATCHES[0]))
    return Rates(
        copy_gbs=wave / copy_s / 1e9,
        cpu_gbs=active * each / few_s / 1e9,
        cpu_gflops=active * MANY * flops / many_s / 1e9,
        pack_gbs=wave / pack_s / 1e9,
        wave_us=max(0.0, short - slope * BATCHES[0]) * 1e6,
        token_us=slope * 1e6,
        wave_experts=stage.experts,
    )


def _call(host: CpuExecutor, tokens: int) -> HostCall:
    """A call in which each of the first experts has this many tokens."""
    problem, threads = host.problem, host_threads().count
    shape = HostShape(tokens, problem.input.storage, torch.int32, torch.float32, threads)
    places = torch.arange(problem.global_experts, dtype=torch.int32, device="cpu")
    places[places >= problem.experts] = -1
    call = host.host_call(shape, places, lambda size: torch.zeros(size, dtype=torch.uint8, device="cpu"))
    call.x.zero_()
    call.weights.fill_(1.0)
    call.ids.copy_(torch.arange(problem.top_k, device="cpu").expand_as(call.ids))
    return call


def _seconds(call: HostCall) -> float:
    start = time.perf_counter()
    call.run()
    taken = time.perf_counter() - start
    call.check()
    return taken


def _copy_wave(host: CpuExecutor, stage: Stage, lane: CudaLane) -> None:
    for matrix, tensors in host.tensors.packed().items():
        for name, tensor in tensors.items():
            lane.copy(stage.raw[0][matrix][name], tensor[: stage.experts])


def _pack_seconds(stage: Stage) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    stage.pack(0, stage.experts)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def _wave_seconds(stage: Stage, tokens: int, device: torch.device) -> float:
    """The GPU's experts of one wave, with its share of a batch, and its addition to the batch's total."""
    problem = stage.problem
    x = torch.zeros(tokens, problem.hidden, dtype=problem.input.storage, device=device)
    total = torch.zeros_like(x, dtype=torch.float32)
    slots = torch.arange(tokens * problem.top_k, dtype=torch.int32, device=device)
    ids = (slots % problem.global_experts).view(tokens, problem.top_k)
    places = torch.arange(problem.global_experts, dtype=torch.int32, device=device)
    places[places >= stage.experts] = -1
    dispatch, best = Indexed(ids, torch.ones_like(ids, dtype=torch.float32)), float("inf")
    for _ in range(_BEST_OF):
        torch.cuda.synchronize()
        start = time.perf_counter()
        total.add_(run_part(stage.executor, x, dispatch, places, x.dtype))
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best
