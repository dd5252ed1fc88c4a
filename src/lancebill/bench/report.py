"""Figures of a run as plain values: what was asked, where, at which rates, and one row for each part."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lancebill.bench.ceilings import Ceilings
from lancebill.bench.timing import Times
from lancebill.bench.workload import Batch
from lancebill.moe.problem import Problem
from lancebill.numbers.spec import ActivationSpec

if TYPE_CHECKING:
    from lancebill.bench.run import BenchResult

NOTES = {
    "min_us": "the fastest of the same calls",
    "us": "median of single calls, caches emptied before each; contestants take turns",
    "spread": "25th and 75th percentile, us",
    "tflops": "useful: 2 x rows x weights of the experts they go to",
    "gbs": "bytes that must move (activated experts as their spec stores them, tokens in and out) / time",
    "roofline": "floor / time; the floor is the larger of flops / fastest product and bytes / read rate",
    "host_us": "median host time of an eager call that is not waited for, of ours and of peers",
    "error": "worst of the rows compared with the reference, relative",
}


@dataclass(frozen=True)
class BenchCase:
    """What a call cannot avoid, averaged over the batches that take turns."""

    flops: float
    bytes: float
    experts: float  # activated
    activations: ActivationSpec

    @classmethod
    def of(cls, problem: Problem, batches: Sequence[Batch]) -> BenchCase:
        tokens = batches[0].x.shape[0]
        elements = sum(shape.n * shape.k for shape in problem.matrices.values())
        expert = sum(s.n * s.k * s.spec.bits_per_weight(s.n, s.k) / 8 for s in problem.matrices.values())
        activated = sum(batch.experts for batch in batches) / len(batches)
        rows = 2 * tokens * problem.hidden * problem.input.storage.itemsize
        return cls(2.0 * tokens * problem.top_k * elements, activated * expert + rows, activated, problem.activations)


@dataclass(frozen=True)
class BenchRow:
    """One part of the layer at one number of tokens."""

    part: str
    backend: str
    tokens: int
    times: Times
    work: BenchCase
    ceilings: Ceilings
    peers: Mapping[str, Times] = field(default_factory=dict)
    error: float | None = None
    host: Mapping[str, float] = field(default_factory=dict)

    @property
    def floor_us(self) -> float:
        return self.ceilings.floor_us(self.work.flops, self.work.bytes, self.work.activations)

    def describe(self) -> dict[str, Any]:
        us = self.times.median
        return {
            "tokens": self.tokens,
            "part": self.part,
            "backend": self.backend,
            "us": us,
            "min_us": min(self.times.us),
            "spread": list(self.times.quartiles),
            "timed_by": self.times.method,
            "tflops": self.work.flops / us / 1e6,
            "gbs": self.work.bytes / us / 1e3,
            "floor_us": self.floor_us,
            "roofline": self.floor_us / us,
            "experts": self.work.experts,
            "error": self.error,
            "peers": {name: times.median for name, times in self.peers.items()},
            "peers_min": {name: min(times.us) for name, times in self.peers.items()},
            "peers_spread": {name: list(times.quartiles) for name, times in self.peers.items()},
            "host_us": dict(self.host),
            "peers_timed_by": {name: times.method for name, times in self.peers.items()},
        }


def describe(result: BenchResult, machine: Mapping[str, Any], command: Sequence[str]) -> dict[str, Any]:
    """The whole report for `--json`."""
    setup = result.setup
    asked = {
        "shape": setup.shape.name,
        "weights": setup.weights,
        "activations": setup.activations,
        "routing": setup.routing,
    }
    meta = {
        "device": str(result.device),
        "versions": {"python": machine["python"], **machine["packages"]},
        "machine": {name: machine[name] for name in ("platform", "cpu", "cuda")},
        "gpu": _gpu() if result.device.kind == "cuda" else None,
        "commit": _commit(),
        "command": " ".join(command),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "threads": result.threads,
        "load": os.getloadavg()[0],
        "repeats": setup.repeats,
        "evicted_bytes": result.evicted,
        "distinct_experts": setup.distinct,
        "ceilings": result.ceilings.describe(),
        "problem": setup.problem().describe(),
        "absent_peers": dict(result.absent),
        "notes": NOTES,
    }
    return {"meta": meta, "rows": [{**asked, **row.describe()} for row in result.rows]}


def _commit() -> str | None:
    """The commit of the sources that run, with '+' where files differ from it; None where they are not in git."""
    here = str(Path(__file__).parents[1])
    if _output("git", "-C", here, "ls-files", "__init__.py") is None:
        return None
    head = _output("git", "-C", here, "rev-parse", "HEAD")
    return head and head + "+" * bool(_output("git", "-C", here, "status", "--porcelain", "--", here))


def _gpu() -> str | None:
    """Driver, clocks and power as they are right after the run."""
    facts = "name,driver_version,clocks.sm,clocks.mem,power.draw,temperature.gpu"
    return _output("nvidia-smi", f"--query-gpu={facts}", "--format=csv,noheader")


def _output(*command: str) -> str | None:
    """What a command prints; None where it prints nothing, fails, or is not there."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
