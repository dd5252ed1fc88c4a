"""Speed and peak memory of `lancebill convert`.

    python benchmarks/convert.py [--dir FOLDER] [--gigabytes 2]

Writes a bf16 checkpoint with 64 experts in each layer to a temporary folder in FOLDER, converts it with and without
scale search, and records speed and memory in benchmarks/results/convert. The bound is on CPU time, so that other load
does not count.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from machine import origin, result_path
from result_files import write_record

from lancebill.checkpoint.read.files import Checkpoint
from lancebill.checkpoint.write.convert import ConvertOptions, Report, convert, plan_conversion
from lancebill.checkpoint.write.target import choose_target
from lancebill.cli.env import describe
from lancebill.numbers.spec_names import parse_spec
from lancebill.testing.checkpoints import Geometry
from lancebill.testing.models import write_model

SPECS = ("mxfp4", "nvfp4", "int4-g128")
HIDDEN, INTERMEDIATE, EXPERTS = 2048, 1024, 64
EXPERT_BYTES = 3 * HIDDEN * INTERMEDIATE * 2
SLACK = 256 << 20
MIN_RATE = 75e6  # bytes of source for each second of one core


class Peak(threading.Thread):
    """Samples the peak anonymous memory of this process."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak, self._done = 0, threading.Event()

    def run(self) -> None:
        while not self._done.wait(0.005):
            self.peak = max(self.peak, anonymous_bytes())

    def __enter__(self) -> Peak:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self.join()


def anonymous_bytes() -> int:
    """Memory that is not backed by files."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("this kernel does not report RssAnon")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, help="folder for the checkpoints")
    parser.add_argument("--gigabytes", type=float, default=2.0, help="size of the source")
    parser.add_argument("--spec", action="append", help=f"target specs (default: {' '.join(SPECS)})")
    parser.add_argument("--out", type=Path, help="default: a new file in benchmarks/results/convert")
    options = parser.parse_args()
    layers = max(1, round(options.gigabytes * 1e9 / (EXPERTS * EXPERT_BYTES) + 0.5))
    size = Geometry(EXPERTS, HIDDEN, INTERMEDIATE, layers, top_k=8)
    with tempfile.TemporaryDirectory(prefix="lancebill-bench-", dir=options.dir) as folder:
        source = Path(folder) / "source"
        print(f"writing {layers} layers x {EXPERTS} experts of {EXPERT_BYTES / 1e6:.1f} MB", flush=True)
        write_model(source, size)
        ways = [(spec, search) for spec in options.spec or SPECS for search in (True, False)]
        results = [measure(source, Path(folder) / f"{spec}-{search}", spec, search) for spec, search in ways]
    save(options.out or result_path("convert"), results, size)


def measure(source: Path, destination: Path, spec: str, search: bool) -> dict[str, Any]:
    target, options = choose_target(parse_spec(spec)), ConvertOptions(search=search)
    with Checkpoint.open(source) as checkpoint:
        total = sum(info.nbytes for info in checkpoint.tensors.values())
        baseline = anonymous_bytes()
        with Peak() as memory:
            start, used = time.perf_counter(), time.process_time()
            report: Report = convert(checkpoint, destination, plan_conversion(checkpoint, target, options), options)
            seconds, used = time.perf_counter() - start, time.process_time() - used
    bound = 2 * EXPERT_BYTES + SLACK
    result: dict[str, Any] = {
        "spec": spec,
        "search": search,
        "format": report.target.format.name,
        "source_bytes": total,
        "written_bytes": report.written_bytes,
        "seconds": round(seconds, 3),
        "cpu_seconds": round(used, 3),
        "megabytes_per_second": round(total / seconds / 1e6, 1),
        "peak_anonymous_bytes": max(0, memory.peak - baseline),
        "bound_anonymous_bytes": bound,
        "rms_error": report.total.rms_error,
        "within_bounds": total / used >= MIN_RATE and memory.peak - baseline <= bound,
    }
    print(
        f"{spec}{' with search' if search else ''}: {total / used / 1e6:.0f} MB/s of source a core, "
        f"{result['peak_anonymous_bytes'] / 2**20:.0f} MiB above the idle process "
        f"(bound {bound / 2**20:.0f}), {'within' if result['within_bounds'] else 'OUT OF'} bounds",
        flush=True,
    )
    return result


def save(path: Path, results: list[dict[str, Any]], size: Geometry) -> None:
    machine = describe()
    document = {
        **origin(Path(__file__).name),
        "model": {"layers": size.layers, "experts": size.experts, "hidden": size.hidden, "inter": size.intermediate},
        "machine": {
            "cpu": machine["cpu"],
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "python": machine["python"],
            "torch": machine["packages"]["torch"],
        },
        "results": results,
    }
    write_record(path, document)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
