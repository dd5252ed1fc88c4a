"""The rates by which experts are divided between the CPU and copies, measured with both at work.

Rates of each alone mislead: the CPU's kernels and the copies read the same memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median

import torch

from lancebill.backends.cpu.executor import CpuExecutor
from lancebill.backends.cpu.host_call import HostCall, HostShape
from lancebill.moe.dispatch import Indexed
from lancebill.numbers.unusual import assuming
from lancebill.split.copy_lane import CudaLane
from lancebill.split.host_calls import host_threads
from lancebill.split.run_part import run_part
from lancebill.split.streamed import BUFFERS, Stage, copy_wave, pack_wave
from lancebill.split.ways import Rates

BATCHES = (256, 4096)  # tokens of the measured batches of waves
# Tokens of an expert: memory-bound; half a tile of 16; one and a half tiles; compute-bound; about the largest number
# for which the CPU can pay, because extrapolation misleads. The last tile is half full, as on average.
COUNTS = (1, 8, 24, 72, 136)
_EXPERTS = 16  # per call; the next call uses experts outside of the CPU's caches
_COPIED = 4 << 30  # bytes to copy while the CPU computes: enough time for some of the longest calls
_MOST_COPIES = 64  # waves
_BEST_OF = 3


def measure_rates(
    host: CpuExecutor, stage: Stage, lane: CudaLane, host_us: Callable[[Rates], tuple[float, float, float]]
) -> Rates:
    """Takes some tenths of a second, once for each problem. `host_us`: to begin a batch, divide it, ask the CPU."""
    each = sum(t[0].nbytes for tensors in host.tensors.packed().values() for t in tensors.values())
    wave = stage.experts * each
    flops = 2 * sum(shape.n * shape.k for shape in host.problem.matrices.values())
    points: list[tuple[float, float]] = []
    copies: list[float] = []
    for count in COUNTS:
        call, experts = _call(host, count)
        _seconds(call)
        copy_s, cpu_s = _both(host, stage, lane, wave, partial(_next_seconds, call, experts, host.problem.experts))
        copies.append(copy_s)
        least = points[-1][1] if points else 0.0  # more tokens never take less time
        points.append((float(count), max(least, cpu_s * 1e6 / experts)))
    pack_s = min(_pack_seconds(stage, lane.device) for _ in range(_BEST_OF))
    one_us, one_token_us = _wave_line(stage, 1, lane.device)
    all_us, all_token_us = _wave_line(stage, stage.experts, lane.device)
    others = max(1, stage.experts - 1)
    rates = Rates(
        copy_gbs=wave / min(copies) / 1e9,  # with few tokens the CPU reads more than it does in a large batch
        cpu_gbs=each / points[0][1] / 1e3,
        cpu_gflops=points[-1][0] * flops / points[-1][1] / 1e3,
        run_us=_run_us(host, stage, lane, wave),
        pack_gbs=wave / pack_s / 1e9,
        wave_us=one_us,
        token_us=one_token_us,
        expert_us=max(0.0, all_us - one_us) / others,
        expert_token_us=max(0.0, all_token_us - one_token_us) / others,
        wave_experts=stage.experts,
        cpu_points=tuple(points),
    )
    wait_us, divide_us, call_us = host_us(rates)
    return replace(rates, wait_us=wait_us, divide_us=divide_us, call_us=call_us)


def _both(
    host: CpuExecutor, stage: Stage, lane: CudaLane, wave: int, seconds: Callable[[], float]
) -> tuple[float, float]:
    """Seconds of the copy of a wave (of so many bytes) and of a call, while the CPU computes as long as copies run."""
    start, end, copies = _copies(host, stage, lane, wave)
    times = [seconds()]
    while not end.query():
        times.append(seconds())
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / copies, median(times[:-1] or times)  # the last one outlasted the copies


def _alone(host: CpuExecutor, stage: Stage, lane: CudaLane, wave: int, step: int) -> float:
    """Seconds of the copy of a wave while the CPU computes nothing."""
    start, end, copies = _copies(host, stage, lane, wave, step)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / copies


def _run_us(host: CpuExecutor, stage: Stage, lane: CudaLane, wave: int) -> float:
    """How much longer copies take for every expert that has no neighbour."""
    if stage.experts == 1 or host.problem.experts < 2 * stage.experts:
        return 0.0
    together, apart = (_alone(host, stage, lane, wave, step) for step in (1, 2))
    return max(0.0, apart - together) * 1e6 / (stage.experts - 1)


def _copies(
    host: CpuExecutor, stage: Stage, lane: CudaLane, wave: int, step: int = 1
) -> tuple[torch.cuda.Event, torch.cuda.Event, int]:
    """Queue copies of waves of so many bytes, and their packing, because a batch's copies are not alone either.

    Events before and after the copies, and the number of waves. Each has other experts than the one before, if there
    are enough: every expert from the first on, or every second.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    held, size = host.tensors.packed(), stage.experts * step
    starts = host.problem.experts - size + 1
    firsts = [i * size % starts for i in range(min(_MOST_COPIES, max(1, _COPIED // wave)))]
    waves = [range(first, first + size, step) for first in firsts]
    torch.cuda.synchronize(lane.device)  # the first copies wait for nothing
    start.record(lane.stream)
    for number in range(BUFFERS):
        copy_wave(stage, lane, held, waves, number)
    with assuming():
        for number in range(len(waves)):
            pack_wave(stage, lane, held, waves, number)
    end.record(lane.stream)
    return start, end, len(waves)


def _call(host: CpuExecutor, count: int) -> tuple[HostCall, int]:
    """A call in which each of some experts has this many tokens, and how many experts.

    Each row uses one expert, the usual case if the rest is on the GPU. Zeros would draw less power.
    """
    problem = host.problem
    experts = min(problem.experts, _EXPERTS)
    rows = count * experts
    shape = HostShape(rows, problem.input.storage, torch.int32, torch.float32, host_threads().count)
    places = torch.arange(problem.global_experts, dtype=torch.int32, device="cpu")
    places[places >= problem.experts] = -1
    call = host.host_call(shape, places, lambda size: torch.empty(size, dtype=torch.uint8, device="cpu"))
    call.x.copy_(torch.linspace(-1, 1, problem.hidden, dtype=torch.float32, device="cpu"))
    call.weights.fill_(1.0)
    call.ids.fill_(-1)
    call.ids[:, 0] = torch.arange(rows, device="cpu") % experts
    return call, experts


def _seconds(call: HostCall) -> float:
    start = time.perf_counter()
    call.run()
    taken = time.perf_counter() - start
    call.check()
    return taken


def _next_seconds(call: HostCall, experts: int, of: int) -> float:
    """With other experts than in the last call, if there are enough."""
    if of >= 2 * experts:
        call.ids[:, 0].add_(experts).remainder_(of)
    return _seconds(call)


def _pack_seconds(stage: Stage, device: torch.device) -> float:
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    with assuming():  # as in a batch
        stage.pack_wave(0, stage.experts)
    torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _wave_line(stage: Stage, experts: int, device: torch.device) -> tuple[float, float]:
    """Microseconds in which the GPU computes a wave of so many experts: of no tokens, and for each of the batch."""
    short, long = (_wave_seconds(stage, experts, tokens, device) * 1e6 for tokens in BATCHES)
    slope = max(0.0, (long - short) / (BATCHES[1] - BATCHES[0]))
    return max(0.0, short - slope * BATCHES[0]), slope


def _wave_seconds(stage: Stage, experts: int, tokens: int, device: torch.device) -> float:
    """Some experts of a wave, with their share of a batch, and their addition to the batch's total."""
    problem = stage.problem
    x = torch.zeros(tokens, problem.hidden, dtype=problem.input.storage, device=device)
    total = torch.zeros_like(x, dtype=torch.float32)
    slots = torch.arange(tokens * problem.top_k, dtype=torch.int32, device=device)
    ids = (slots % problem.global_experts).view(tokens, problem.top_k)
    places = torch.arange(problem.global_experts, dtype=torch.int32, device=device)
    places[places >= experts] = -1
    dispatch, best = Indexed(ids, torch.ones_like(ids, dtype=torch.float32)), float("inf")
    for _ in range(_BEST_OF):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        total.add_(run_part(stage.executor, x, dispatch, places, x.dtype))
        torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best
