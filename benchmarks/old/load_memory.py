"""Peak memory while a quantised checkpoint is loaded, with lancebill and with stock transformers.

    python benchmarks/load_memory.py [--dir FOLDER] [--layers 2] [--spec int4-g128 --spec mxfp4]

Writes a checkpoint with the experts of Qwen3-30B-A3B (128 of 2048 x 768 in each layer) as 4-bit compressed-tensors, and
loads it in fresh processes; `mxfp4+int8` has int8 outside the experts. The figures are relative to the same process
right before the load, when torch, transformers and the model's class are already imported: anonymous memory, and
resident memory, which includes the pages of mapped files.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from machine import origin, result_path
from result_files import write_record

SPECS = ("int4-g128", "mxfp4", "mxfp4+int8")
OURS, STOCK = "lancebill", "transformers"
BOUND = 1.08  # our peak over the checkpoint's bytes
COUNTED = {"anonymous": "RssAnon", "resident": "VmRSS"}


class Peak(threading.Thread):
    """Samples the peak memory of this process."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.before = self.peak = memory_bytes()
        self._done = threading.Event()

    def run(self) -> None:
        while not self._done.wait(0.002):
            self.sample()

    def sample(self) -> None:
        now = memory_bytes()
        self.peak = {name: max(value, now[name]) for name, value in self.peak.items()}

    def __enter__(self) -> Peak:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.sample()
        self._done.set()
        self.join()

    def growth(self) -> dict[str, int]:
        return {name: self.peak[name] - self.before[name] for name in COUNTED}


def memory_bytes() -> dict[str, int]:
    """Memory of this process by kind."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {name: int(lines[key].split()[0]) * 1024 for name, key in COUNTED.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, help="folder for the checkpoints")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--spec", action="append", help=f"default: {' '.join(SPECS)}")
    parser.add_argument("--out", type=Path, help="default: a new file in benchmarks/results/memory")
    parser.add_argument(
        "--load", nargs=2, metavar=("WHO", "FOLDER"), help="only load FOLDER in this process and print the figures"
    )
    chosen = parser.parse_args()
    if chosen.load:
        print(json.dumps(measure_load(chosen.load[0], Path(chosen.load[1]))))
        return
    rows = []
    with tempfile.TemporaryDirectory(prefix="lancebill-bench-", dir=chosen.dir) as folder:
        source = write_source(Path(folder) / "source", chosen.layers, chosen.experts)
        for spec in chosen.spec or SPECS:
            packed = convert_to(source, Path(folder) / spec, spec)
            rows += [{"spec": spec, **measure_in_process(who, packed)} for who in (OURS, STOCK)]
            print(json.dumps(rows[-2:], indent=1), flush=True)
    save(chosen.out or result_path("memory"), rows, chosen.layers, chosen.experts)


def measure_load(who: str, folder: Path) -> dict[str, Any]:
    """Load the model in this process and measure its memory."""
    import torch
    import transformers

    import lancebill.integrations.transformers.pretrained as ours

    transformers.utils.logging.disable_progress_bar()
    config = transformers.AutoConfig.from_pretrained(folder)
    if who == STOCK:
        import compressed_tensors  # noqa: F401  imported before the load, like the others
    ours.class_of(config)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    load = ours.from_pretrained if who == OURS else transformers.AutoModelForCausalLM.from_pretrained
    start = time.perf_counter()
    with Peak() as memory:
        model = load(folder, dtype=config.dtype)
        seconds = time.perf_counter() - start
    with torch.no_grad():  # check that the loaded model computes
        finite = bool(model(torch.arange(8).unsqueeze(0)).logits.isfinite().all())
    growth = memory.growth()
    return {
        "who": who,
        "checkpoint_bytes": size,
        "held_bytes": sum(t.nbytes for t in (*model.parameters(), *model.buffers())),
        **{f"peak_{name}_bytes": value for name, value in growth.items()},
        **{f"peak_{name}_ratio": round(value / size, 3) for name, value in growth.items()},
        "seconds": round(seconds, 2),
        "computes": finite,
    }


def measure_in_process(who: str, folder: Path) -> dict[str, Any]:
    """`measure_load` in a fresh process; its last line of error output if it cannot load."""
    command = [sys.executable, __file__, "--load", who, str(folder)]
    process = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    if process.returncode:
        return {"who": who, "error": process.stderr.strip().splitlines()[-1]}
    figures: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    if who == OURS:
        figures["within_bound"] = figures["peak_resident_ratio"] <= BOUND
    return figures


def write_source(folder: Path, layers: int, experts: int, hidden: int = 2048, intermediate: int = 768) -> Path:
    from lancebill.testing.checkpoints import Geometry
    from lancebill.testing.models import write_model

    write_model(folder, Geometry(experts, hidden, intermediate, layers, top_k=8))
    return folder


def convert_to(source: Path, folder: Path, spec: str) -> Path:
    """The checkpoint with experts of a spec, and after a plus sign that of all other linear modules."""
    import lancebill
    from lancebill.cli.convert import run_conversion, target_of

    experts, _, rest = spec.partition("+")
    if rest:
        lancebill.from_pretrained(source, weights={"experts": experts, "rest": rest}).save_pretrained(folder)
    else:
        run_conversion(source, folder, target_of(spec), {})
    return folder


def save(path: Path, rows: list[dict[str, Any]], layers: int, experts: int) -> None:
    from lancebill.cli.env import describe

    machine = describe()
    document = {
        **origin(Path(__file__).name),
        "model": {"layers": layers, "experts": experts, "hidden": 2048, "inter": 768},
        "machine": {
            "cpu": machine["cpu"],
            "python": machine["python"],
            **{name: machine["packages"][name] for name in ("torch", "transformers")},
        },
        "bound_ratio": BOUND,
        "results": rows,
    }
    write_record(path, document)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
