"""Runs cells, many at once, each in a process of its own: a crash is one failed cell.

    python tests/gpu/run_cells.py --part 1 --out FOLDER      half of the cells, on the GPU
    python tests/gpu/run_cells.py --device cpu --only mxfp4  the cells with this word, on the CPU

A process is a fork of this one, which has imported the libraries and never touches the GPU. Writes `part-N.json`, and
the output of failed cells to `part-N.log`; `gpu_record.py` joins the parts.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import SkipTest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
QUIET = 25  # of more cells only every so many of those that passed are shown
ALONE = 110.0  # seconds that are left for cells that run alone
PACKAGES = ("torch", "triton", "transformers", "numpy", "safetensors", "gguf")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=int, choices=(1, 2), help="one half of the cells")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "gpu-suite")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", action="append", default=[], help="cells with this text in their name")
    parser.add_argument("--seconds", type=float, default=330.0, help="after this, cells that are left fail")
    parser.add_argument("--timeout", type=float, default=150.0, help="seconds of one cell")
    parser.add_argument("--commit", default=os.environ.get("COMMIT"))
    parser.add_argument("--site", type=Path, help="a folder of packages that this interpreter may lack")
    parser.add_argument("--cell", nargs=2, metavar=("NAME", "FOLDER"), help="run one cell in this process")
    parser.add_argument("--list", action="store_true", help="print the names of the cells")
    return parser.parse_args()


def set_paths(site: Path | None) -> None:
    """The library, what cells share with other tests, and last the packages that travel along."""
    sys.path[:0] = [str(ROOT / "src"), *(str(ROOT / "tests" / name) for name in ("gpu", "helpers", "e2e", "families"))]
    if site is not None:
        sys.path.append(str(site.resolve()))


@dataclass
class Running:
    cell: Any
    folder: Path
    started: float = field(default_factory=time.monotonic)

    @property
    def log(self) -> Path:
        return self.folder / "log"


class Runner:
    """Starts cells and collects what became of them."""

    def __init__(self, chosen: argparse.Namespace, work: Path) -> None:
        self.chosen, self.work = chosen, work
        self.forks = can_fork(chosen.device)
        self.running: dict[int, Running] = {}
        self.results: dict[str, dict[str, Any]] = {}
        self.logs: dict[str, str] = {}
        self.end = time.monotonic() + chosen.seconds

    def run(self, cells: Sequence[Any]) -> None:
        waiting, total = list(reversed(cells)), len(cells) + len(self.results)
        while waiting or self.running:
            while waiting and len(self.running) < self.chosen.jobs and time.monotonic() < self.end:
                self._start(waiting.pop())
            for cell in waiting if time.monotonic() >= self.end else []:
                self._note(cell, total, outcome=FAILED, reason="not started: the time of this part was over", seconds=0)
            waiting = waiting if time.monotonic() < self.end else []
            self._collect(total)
            time.sleep(0.02)

    def _start(self, cell: Any) -> None:
        folder = Path(tempfile.mkdtemp(dir=self.work))
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            _child(cell, self.chosen, folder, self.forks)
        self.running[pid] = Running(cell, folder)

    def _collect(self, total: int) -> None:
        for pid, running in list(self.running.items()):
            seconds = time.monotonic() - running.started
            ended, status = os.waitpid(pid, os.WNOHANG)
            late = seconds > self.chosen.timeout or time.monotonic() > self.end + 20
            if not ended and not late:
                continue
            if not ended:
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            del self.running[pid]
            result = running.folder / "result.json"
            if result.exists():
                found = json.loads(result.read_text())
            else:
                code = os.waitstatus_to_exitcode(status)
                found = {"outcome": FAILED, "reason": "took too long" if not ended else f"the process died: {code}"}
            if found["outcome"] == FAILED:
                self.logs[str(running.cell)] = running.log.read_text(errors="replace")[-6000:]
            self._note(running.cell, total, seconds=round(seconds, 1), **found)
            shutil.rmtree(running.folder, ignore_errors=True)

    def _note(self, cell: Any, total: int, **found: Any) -> None:
        self.results[str(cell)] = found
        if found["outcome"] != PASSED or total < QUIET or len(self.results) % QUIET == 0:
            print(f"[{len(self.results)}/{total}] {line(str(cell), found)}", flush=True)


def can_fork(device: str) -> bool:
    """Whether a fork of this process can use the device: not if a library that it imported has touched the driver."""
    import torch

    pid = os.fork()
    if pid == 0:
        try:
            torch.zeros(1, device=device).cpu()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(pid, 0)[1] == 0


def line(name: str, found: Mapping[str, Any]) -> str:
    reason = f": {' '.join(found['reason'].split())[:200]}" if found.get("reason") else ""
    return f"{found['outcome']} {found['seconds']:.1f} s  {name}{reason}"


def _child(cell: Any, chosen: argparse.Namespace, folder: Path, forks: bool) -> None:
    """In the new process: run the cell and leave what became of it in a file."""
    os.setsid()
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if not forks:
        site = [] if chosen.site is None else ["--site", str(chosen.site)]
        words = [__file__, "--device", chosen.device, *site, "--cell", str(cell), str(folder)]
        os.execv(sys.executable, [sys.executable, "-W", "ignore", *words])
    done = False
    try:
        done = run_here(cell, chosen.device, folder)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0 if done else 1)


def run_here(cell: Any, device: str, folder: Path) -> bool:
    faulthandler.enable()
    found = outcome(cell, device, folder / "files")
    (folder / "result.part").write_text(json.dumps(found))
    (folder / "result.part").rename(folder / "result.json")
    return True


def outcome(cell: Any, device: str, folder: Path) -> dict[str, Any]:
    """Run one cell in this process."""
    import torch
    from cells import Failed, Place

    folder.mkdir()
    torch.manual_seed(0)
    torch.backends.cudnn.allow_tf32 = False
    try:
        notes = cell.run(Place(device, folder))
        if device != "cpu":
            torch.cuda.synchronize()
        return {"outcome": PASSED, "notes": notes}
    except SkipTest as skipped:
        return {"outcome": SKIPPED, "reason": str(skipped)}
    except BaseException as error:
        traceback.print_exc()
        found = {"outcome": FAILED, "reason": f"{type(error).__name__}: {error}"}
        return {**found, "notes": error.notes} if isinstance(error, Failed) else found


def environment(chosen: argparse.Namespace) -> dict[str, Any]:
    """Commit, versions and GPU, asked of other processes: this one must not touch the GPU."""
    commit = chosen.commit or _said("git", "-C", str(ROOT), "rev-parse", "HEAD")
    gpu = _said("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader") or chosen.device
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "none"
    return {"commit": commit, "gpu": gpu, "versions": {"python": sys.version.split()[0], **versions}}


def _said(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def main() -> None:
    chosen = arguments()
    os.environ["OMP_NUM_THREADS"] = "1"  # cells run side by side; and a fork has no threads of its parent
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # so that asking for GPUs does not start the driver
    set_paths(chosen.site)
    started = time.monotonic()
    from all_cells import all_cells

    if chosen.cell is not None:
        name, folder = chosen.cell
        run_here(next(cell for cell in all_cells() if str(cell) == name), chosen.device, Path(folder))
        return
    cells = [cell for cell in all_cells() if chosen.part in (None, cell.part)]
    cells = [cell for cell in cells if all(word in str(cell) for word in chosen.only)]
    if chosen.list:
        print("\n".join(map(str, cells)))
        return
    chosen.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        runner, alone = Runner(chosen, Path(work)), [cell for cell in cells if cell.alone]
        end, runner.end = runner.end, runner.end - (ALONE if alone else 0.0)
        runner.run([cell for cell in cells if not cell.alone])
        runner.chosen.jobs, runner.end = 1, end
        runner.run(alone)
    name = f"part-{chosen.part or 'all'}"
    seconds = round(time.monotonic() - started)
    record = {**environment(chosen), "seconds": seconds, "cells": runner.results}
    (chosen.out / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    (chosen.out / f"{name}.log").write_text("\n\n".join(f"== {cell}\n{log}" for cell, log in runner.logs.items()))
    counts = {kind: sum(r["outcome"] == kind for r in runner.results.values()) for kind in (PASSED, FAILED, SKIPPED)}
    failures = [line(name, found) for name, found in runner.results.items() if found["outcome"] == FAILED]
    print("\n".join(failures))
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()), f"in {seconds} s")
    sys.exit(1 if counts[FAILED] else 0)


if __name__ == "__main__":
    main()
