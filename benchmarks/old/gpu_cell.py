"""One measurement of a layer on a GPU: what both GPU benchmarks check, compare and record."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any

import torch
from machine import clocks, command, commit, gpu_machine

from lancebill.backends.base import Backend
from lancebill.backends.gpu.backend import GpuBackend
from lancebill.backends.gpu.plan import GpuPlan
from lancebill.backends.oracle import select
from lancebill.backends.reference import BACKEND as REFERENCE
from lancebill.backends.registry import registry
from lancebill.bench.ceilings import Ceilings
from lancebill.bench.check import expected_rows
from lancebill.bench.compare import best, compare
from lancebill.bench.results import BenchCase, expert_bytes
from lancebill.bench.workload import Batch, Weights
from lancebill.jit.build import build_all
from lancebill.jit.compile import KernelSource
from lancebill.jit.driver import capability
from lancebill.jit.load import loadable
from lancebill.moe.device import Device, parse_device
from lancebill.moe.problem import Problem
from lancebill.testing.layers import worst_row

CHECKED_ROWS = 16
HUMMING, TRITON = "humming", "triton_kernels"
AFTER_SORT = ", sorted"


@dataclass(frozen=True)
class ReferenceRows:
    """Some rows of a batch, and the reference's results for them."""

    rows: torch.Tensor
    want: torch.Tensor


def compile_kernels(sizes: Sequence[tuple[Problem, int]], device: str = "cuda", backends: Sequence[str] = ()) -> None:
    """Compile our kernels for these layers and numbers of tokens together, so that all cores have work.

    Those of the chosen backend and of `backends`, as far as these support a layer on the GPU's own architecture.
    """
    start, where = time.perf_counter(), parse_device(device)
    sources = [source for problem, tokens in sizes for source in kernels_of(problem, tokens, where)]
    for name in backends:
        backend, itself = registry()[name], replace(where, arch=capability(where.index))
        served = [(problem, tokens) for problem, tokens in sizes if not list(backend.check(problem, itself))]
        sources += [source for problem, tokens in served for source in launched(backend, problem, tokens, itself)]
    for source, why in build_all(sources).items():
        print("does not compile:", source.label, why[-300:])
    print(f"{len(set(sources))} kernels in {time.perf_counter() - start:.1f} s", flush=True)


def kernels_of(problem: Problem, tokens: int, device: Device) -> list[KernelSource]:
    """What the backend that is chosen on a GPU launches, as the GPU loads it."""
    return launched(select(problem, device).backend, problem, tokens, device)


def launched(backend: Backend, problem: Problem, tokens: int, device: Device) -> list[KernelSource]:
    """What one of our GPU backends launches, as the GPU loads it."""
    plan = backend.plan(problem, tokens, device)
    if not isinstance(backend, GpuBackend) or not isinstance(plan, GpuPlan):
        return []
    return [loadable(step.source, device.index) for step in backend.steps(plan)]


def reference_rows(problem: Problem, weights: Weights, batch: Batch) -> ReferenceRows:
    tokens = batch.x.shape[0]
    rows = torch.linspace(0, tokens - 1, min(CHECKED_ROWS, tokens)).round().long().to(batch.x.device)
    layout = REFERENCE.layout(problem)
    packed = weights.cached("reference", lambda: weights.packed(layout, range(weights.distinct)))
    return ReferenceRows(rows, expected_rows(problem, weights, batch, rows, packed))


def relative_error(got: torch.Tensor, reference: ReferenceRows) -> float:
    """Of the worst of the compared rows; infinite if any row of the result is not finite."""
    rows, want = reference.rows, reference.want
    return round(worst_row(got[rows], want), 6) if bool(torch.isfinite(got).all()) else float("inf")


def against(ours: dict, peers: dict) -> dict[str, dict]:
    """The ratio to each peer's fastest variant."""
    groups: dict[str, list[str]] = {}
    for family in (HUMMING, TRITON):
        variants = [name for name in peers if name.startswith(family)]
        groups[family] = [name for name in variants if name.endswith(AFTER_SORT)]
        groups[f"{family} with sort"] = [name for name in variants if not name.endswith(AFTER_SORT)]
    groups |= {name: [name] for name in peers if not name.startswith((HUMMING, TRITON))}
    ratios = {}
    for title, names in groups.items():
        chosen = best(peers, names)
        if chosen is not None:
            ratios[title] = {"variant": chosen[0], "us": chosen[1]["us"]} | compare(ours, chosen[1])
    return ratios


def floors(ceilings: Ceilings, problem: Problem, batches: Sequence[Batch], us: float) -> dict[str, float]:
    """The floor (the larger of flops at the dense rate and bytes of activated experts at the read rate), our share."""
    work = BenchCase.of(problem, batches)
    floor = ceilings.floor_us(work.flops, work.experts * expert_bytes(problem), problem.activations)
    return {
        "floor_us": round(floor, 2), "of_floor": round(floor / us, 4), "tflops": round(work.flops / us / 1e6, 1),
        "gbs": round(work.bytes / us / 1e3, 1), "experts": work.experts,
    }  # fmt: skip


def start_record(script: str, arguments: argparse.Namespace, rates: Mapping[str, float]) -> dict[str, Any]:
    """The beginning of a run's JSON: where it runs, how it measures and the GPU's ceilings."""
    record: dict[str, Any] = {
        "machine": gpu_machine(), "command": command(script), "commit": commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "window_us": arguments.window_us, "rounds": arguments.rounds, "pause_ms": arguments.pause_ms,
        "distinct_experts": arguments.distinct,
        "ceilings": {name: round(rate, 1) for name, rate in rates.items()},
        "clocks_before": clocks(), "absent": {}, "rows": [],
    }  # fmt: skip
    print("ceilings", record["ceilings"], "clocks", record["clocks_before"], flush=True)
    return record
