"""Loading a layer: memory on the device and on the host, bytes read, and the rate.

    python tests/campaign/loading.py --record

A small layer has the sizes of Qwen3-30B-A3B (128 experts of 2048 x 768) and is stored as int4 in groups of 128; with a
GPU a large one has those of DeepSeek-V4-Flash (256 of 4096 x 2048) as MXFP4. With a GPU they are loaded to it. Files
are not in the page cache for the timed load; `disk` reads the same file with eight threads and does nothing else,
`PCIe` copies pinned memory. Every load is in a process of its own, the second there, so that the rate is that of a
layer in the middle of a model; the first layer is kept, so that its memory is not used again. Host memory includes all
pinned memory of the process. A rank that holds half of the columns of a matrix needs short pieces of its rows, and
reads what is between them too, because a disk reads whole pages. That load is listed apart; L3 also says what reading
each piece by itself would give.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from bookkeeping import ROOT, Details, Figure, Part, Tallies, Tally

from benchmarks.loading import LARGE as LARGE_LAYER
from benchmarks.loading import make_checkpoint, pinned_copy_rate
from benchmarks.machine import peak_memory
from lancebill.checkpoint.read import slices
from lancebill.checkpoint.read.files import Checkpoint
from lancebill.layer.routed_experts import RoutedExperts
from lancebill.moe.placement import Placement
from lancebill.testing.checkpoints import Geometry, save

SMALL_CASE, SMALL_LAYER = "compressed-tensors-g128", Geometry(128, 2048, 768)
WHOLE, LARGE, COLUMNS, PIECES = "whole", "large", "half of the columns", "piece by piece"
LOADS = {
    WHOLE: Placement(),
    COLUMNS: Placement(tp_rank=1, tp_size=2),
    PIECES: Placement(tp_rank=1, tp_size=2),
    "half of the experts": Placement(ep_size=2),
    LARGE: Placement(),
}
CHUNK, THREADS = 8 << 20, 8
MIB = 1 << 20


def main() -> None:
    if sys.argv[1:2] == ["--load"]:
        print(json.dumps(measured(Path(sys.argv[2]), sys.argv[3])))
        return
    part = Part("loading", __doc__, figures, device=DEVICE, loads=3)
    with tempfile.TemporaryDirectory(dir=ROOT) as folder:  # on a disk, not in memory
        small = save(make_checkpoint(SMALL_CASE, SMALL_LAYER, DEVICE)[0], Path(folder) / "small")
        size, largest = _stored_bytes(small)
        details = {"expert_bytes": size, "largest_slice": largest, "device": DEVICE}
        folders = {name: small for name in LOADS if name != LARGE}
        if DEVICE == "cuda":
            folders[LARGE] = save(make_checkpoint("mxfp4", LARGE_LAYER, DEVICE)[0], Path(folder) / LARGE)
            details["large_bytes"] = _stored_bytes(folders[LARGE])[0]
        loads: dict[str, dict[str, Any]] = {}
        for name, stored in folders.items():
            timed = LARGE if LARGE in folders else WHOLE
            runs = [_in_process(stored, name) for _ in range(part.arguments.loads if name == timed else 1)]
            loads[name] = min(runs, key=lambda run: run["seconds"])
        rates = {"disk": _rate(stored, _read_all)} | ({"PCIe": pinned_copy_rate()} if DEVICE == "cuda" else {})
    details |= {"loads": loads, "rates": rates}
    part.finish(_tallies(details), details)


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def measured(folder: Path, name: str) -> dict[str, Any]:
    """The second load in this process; the first imports modules and compiles kernels."""
    placement = LOADS[name]
    first = RoutedExperts.from_checkpoint(folder, layer=0, device=DEVICE, placement=placement)
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    if name == PIECES:
        slices.PAGE = 1  # the smallest gap that is not read
    _forget(folder)
    ctypes.CDLL(None).malloc_trim(0)  # what the first load has freed would not be counted
    device_before, before = torch.cuda.memory_allocated() if DEVICE == "cuda" else 0, _bytes_read()
    start, busy = time.perf_counter(), time.process_time()
    with peak_memory() as memory:
        layer = RoutedExperts.from_checkpoint(folder, layer=0, device=DEVICE, placement=placement)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        seconds, processor = time.perf_counter() - start, time.process_time() - busy
        measuring, _ = _bytes_read(f"self/task/{memory.sampler}")
    held = sum(tensor.nbytes for tensor in layer.state_dict().values())
    assert held == sum(tensor.nbytes for tensor in first.state_dict().values())
    read, from_disk = (after - start for start, after in zip(before, _bytes_read()))
    out = {"seconds": seconds, "processor_seconds": processor, "read": read - measuring, "from_disk": from_disk}
    out |= {"held": held, "host": memory.anonymous, "pinned": _pinned_bytes()}
    if DEVICE == "cuda":
        out["device_peak"] = torch.cuda.max_memory_allocated() - device_before
        out["device_final"] = torch.cuda.memory_allocated() - device_before
    return out


def _in_process(folder: Path, name: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--load", str(folder), name]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    run: dict[str, Any] = json.loads(out.splitlines()[-1])
    return run


def _stored_bytes(folder: Path) -> tuple[int, int]:
    """Of all expert tensors, and of the largest."""
    with Checkpoint.open(folder) as checkpoint:
        sizes = [info.end - info.start for name, info in checkpoint.tensors.items() if ".experts." in name]
    return sum(sizes), max(sizes)


def _bytes_read(who: str = "self") -> tuple[int, int]:
    """By read calls of this process or a thread, from files of any kind; and those that came from a disk, not from the
    cache."""
    lines = dict(line.split(": ") for line in Path(f"/proc/{who}/io").read_text().splitlines())
    return int(lines["rchar"]), int(lines["read_bytes"])


def _pinned_bytes() -> int:
    """What torch has pinned, used or not: the most that was needed at a time, as it gives nothing back.

    Releases call it `reserved_bytes` or, later, `allocated_bytes`. Before that, the latter counts every reuse.
    """
    if DEVICE == "cpu":
        return 0
    stats = torch.cuda.host_memory_stats()
    return int(stats.get("reserved_bytes.current", stats.get("allocated_bytes.current")))


def _forget(folder: Path) -> None:
    """Drop the files from the page cache."""
    for file in folder.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read_all(file: Path) -> None:
    size = file.stat().st_size
    with file.open("rb") as opened, ThreadPoolExecutor(THREADS) as pool:
        buffers = [bytearray(CHUNK) for _ in range(THREADS)]

        def read(number: int) -> None:
            for start in range(number * CHUNK, size, THREADS * CHUNK):
                os.preadv(opened.fileno(), [buffers[number]], start)

        list(pool.map(read, range(THREADS)))


def _rate(folder: Path, read: Callable[[Path], None]) -> float:
    """Bytes a second, the best of three."""
    best, files = 0.0, sorted(folder.glob("*.safetensors"))
    for _ in range(3):
        _forget(folder)
        start = time.perf_counter()
        for file in files:
            read(file)
        best = max(best, sum(file.stat().st_size for file in files) / (time.perf_counter() - start))
    return best


def _tallies(details: Details) -> dict[str, Tally]:
    reached = _reached(details)
    wrong = {
        "L1": "L1" in reached and reached["L1"] > 1.05,
        "L2": reached["L2"] > 2 * details["largest_slice"] + 256 * MIB,
        "L3": reached["L3"] > 1.01,
        "L5": "L5" in reached and reached["L5"] < 0.8,
    }
    return {name: Tally(1, int(wrong[name])) for name in reached}


def _reached(details: Details) -> dict[str, float]:
    loads = [load for name, load in details["loads"].items() if name in (WHOLE, LARGE)]
    on_host = details["device"] == "cpu"
    out = {
        "L2": max(load["host"] + load.get("pinned", 0) - (load["held"] if on_host else 0) for load in loads),
        "L3": max(_overread(details).values()),
    }
    if on_host:
        return out
    size = details.get("large_bytes", details["expert_bytes"])  # of the last
    rate = size / loads[-1]["seconds"] / min(details["rates"].values())
    return {"L1": max(load["device_peak"] / load["device_final"] for load in loads), **out, "L5": rate}


def _overread(details: Details) -> dict[str, float]:
    size = details["expert_bytes"]
    sizes = {WHOLE: size, LARGE: details.get("large_bytes", size)}
    loads = {name: load for name, load in details["loads"].items() if name != PIECES}
    return {name: load["read"] / sizes.get(name, size / 2) for name, load in loads.items()}


def _piece_by_piece(details: Details) -> str:
    """Half of the columns again, without reading what is between the pieces of rows."""
    loads, size = details["loads"], details["expert_bytes"] / 2
    if PIECES not in loads:
        return ""
    columns, pieces = loads[COLUMNS], loads[PIECES]
    times = pieces["processor_seconds"] / columns["processor_seconds"]
    return (
        f"; {COLUMNS} {PIECES}: {pieces['read'] / size:.3f}, in {times:.0f} times the processor time;"
        f" the disk, which reads whole pages: {columns['from_disk'] / size:.3f} and {pieces['from_disk'] / size:.3f}"
    )


def figures(tallies: Tallies, details: Sequence[Details]) -> dict[str, Figure]:
    run = details[0]
    reached, loads = _reached(run), run["loads"]
    rates = ", ".join(f"{name} {rate / 1e9:.1f} GB/s" for name, rate in run["rates"].items())
    size, last = (run["large_bytes"], LARGE) if LARGE in loads else (run["expert_bytes"], WHOLE)
    loaded = size / loads[last]["seconds"] / 1e9
    peaks = [load for name, load in loads.items() if name in (WHOLE, LARGE) and "device_peak" in load]
    words = {
        "L1": ", ".join(
            f"{load['device_peak'] / load['device_final']:.3f} of {load['device_final'] / MIB:.0f} MiB"
            for load in peaks
        ),
        "L2": f"{reached['L2'] / MIB:.0f} MiB beside the layer's {loads[last]['held'] / MIB:.0f} MiB"
        f" (largest slice {run['largest_slice'] / MIB:.1f} MiB)",
        "L3": ", ".join(f"{ratio:.3f} {name}" for name, ratio in _overread(run).items()) + _piece_by_piece(run),
        "L5": f"{100 * reached.get('L5', 0):.0f} %: {loaded:.2f} GB/s to {run['device']}; {rates}",
    }
    return {name: tally.figure(words[name]) for name, tally in tallies.items()}


if __name__ == "__main__":
    main()
