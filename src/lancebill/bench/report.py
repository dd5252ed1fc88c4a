"""The JSON report of a benchmark: the machine, the setup, the ceilings, and one row for each part."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from lancebill.bench.results import BenchResult

NOTES = {
    "min_us": "the fastest of the same calls",
    "us": "median of single calls with cold caches; all implementations are timed in turns",
    "spread": "25th and 75th percentile, us",
    "tflops": "useful flops / time: 2 x rows x weights of the experts the rows are routed to",
    "gbs": "bytes that must move (activated experts at their spec's size, tokens in and out) / time",
    "roofline": "floor / time; the floor is the larger of flops / fastest GEMM rate and bytes / read rate",
    "host_us": "median host time of an eager call without synchronisation, of ours and of peers",
    "error": "largest relative error among the rows compared with the reference",
}


def describe(result: BenchResult, machine: Mapping[str, Any], command: Sequence[str]) -> dict[str, Any]:
    """The whole report for `--json`."""
    setup = result.setup
    configuration = {
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
        "experts_on_device": setup.split,
        "moves": setup.moves,
        "cpu_threads": setup.cpu_threads,
        "ceilings": result.ceilings.describe(),
        "problem": setup.problem().describe(),
        "absent_peers": dict(result.absent),
        "notes": NOTES,
    }
    return {"meta": meta, "rows": [{**configuration, **row.describe()} for row in result.rows]}


def _commit() -> str | None:
    """The commit of these sources, followed by '+' if files differ from it; None if they are not in git."""
    package = str(Path(__file__).parents[1])
    if _output("git", "-C", package, "ls-files", "__init__.py") is None:
        return None
    head = _output("git", "-C", package, "rev-parse", "HEAD")
    return head and head + "+" * bool(_output("git", "-C", package, "status", "--porcelain", "--", package))


def _gpu() -> str | None:
    """Driver version, clocks, power and temperature right after the run."""
    facts = "name,driver_version,clocks.sm,clocks.mem,power.draw,temperature.gpu"
    return _output("nvidia-smi", f"--query-gpu={facts}", "--format=csv,noheader")


def _output(*command: str) -> str | None:
    """The output of a command; None if it prints nothing, fails or is not installed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
