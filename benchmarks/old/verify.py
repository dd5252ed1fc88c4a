"""Speed of `lancebill verify`.

    python benchmarks/verify.py [--gigabytes 100]

Two parts: the headers of a large NVFP4 checkpoint, whose tensors are holes of sparse files; and `--values` on small
checkpoints of several formats, in bytes for each second of one core (CPU time, so that other load does not count).
Records both in benchmarks/results/verify.
"""

from __future__ import annotations

import argparse
import json
import struct
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from machine import origin, result_path
from result_files import write_record

from lancebill.checkpoint.resolve import naming as names
from lancebill.cli.env import describe
from lancebill.cli.verify import examine
from lancebill.formats import registry
from lancebill.formats.base import Example
from lancebill.formats.stored import TORCH_DTYPES
from lancebill.testing.checkpoints import Geometry, generate, save
from lancebill.testing.models import config

LARGE = Geometry(experts=128, hidden=4096, intermediate=1536, top_k=8)  # the experts of Qwen3-235B
SMALL = replace(LARGE, experts=4, top_k=2)
FORMATS = (
    ("dense", "bf16"),
    ("fp8", "block-F32"),
    ("modelopt", "NVFP4"),
    ("compressed-tensors", "mxfp4-pack-quantized-mxfp4"),
    ("compressed-tensors", "pack-quantized-int4-g64:fp16"),
    ("gptq", "int4-g64:fp16-gptq"),
    ("awq", "int4-g64:fp16-zp"),
)
REPEATS, MAX_SECONDS, MIN_RATE = 20, 10.0, 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=100.0, help="size of the checkpoint of holes")
    parser.add_argument("--dir", type=Path, help="folder for the checkpoints; it must support sparse files")
    parser.add_argument("--out", type=Path, help="default: a new file in benchmarks/results/verify")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="lancebill-bench-", dir=options.dir) as folder:
        metadata = of_metadata(Path(folder) / "large", options.gigabytes * 1e9)
        values = [of_values(find(*which), which[0], Path(folder)) for which in FORMATS]
    machine = describe()
    document = {
        **origin(Path(__file__).name),
        "machine": {"cpu": machine["cpu"], "python": machine["python"], "torch": machine["packages"]["torch"]},
        "metadata": metadata,
        "values": values,
    }
    path = options.out or result_path("verify")
    write_record(path, document)
    print(f"wrote {path}")


def find(fmt: str, name: str) -> Example:
    return next(example for example in registry()[fmt].examples() if example.name == name)


def of_metadata(folder: Path, size: float) -> dict[str, Any]:
    """Verify a checkpoint of holes from its headers."""
    example = find("modelopt", "NVFP4")
    stored = write_holes(folder, example, size)
    start, used = time.perf_counter(), time.process_time()
    report = examine(folder)
    wall, used = time.perf_counter() - start, time.process_time() - used
    assert report.ok, [problem.render() for problem in report.problems[:3]]
    print(f"headers: {stored / 1e9:.0f} GB, {report.tensors} tensors in {wall:.1f} s ({used:.1f} s of CPU time)")
    return {
        "bytes": stored,
        "tensors": report.tensors,
        "layers": report.layers,
        "seconds": round(wall, 2),
        "cpu_seconds": round(used, 2),
        "within_bounds": used <= MAX_SECONDS,
    }


def write_holes(folder: Path, example: Example, size: float) -> int:
    """One sparse safetensors file for each layer; returns the bytes that the tensors would have."""
    folder.mkdir()
    row = names.find_family({"model_type": "qwen3_moe"})
    one = Geometry(1, LARGE.hidden, LARGE.intermediate)
    tensors = generate(example, row, row.forms[0], one).headers
    per_layer = LARGE.experts * sum(nbytes(header.dtype, header.shape) for header in tensors.values())
    layers = int(-(-size // per_layer))
    for layer in range(layers):
        header, end = {}, 0
        for expert in range(LARGE.experts):
            for name, stored in tensors.items():
                name = name.replace("layers.0.", f"layers.{layer}.").replace("experts.0.", f"experts.{expert}.")
                stop = end + nbytes(stored.dtype, stored.shape)
                header[name] = {"dtype": stored.dtype, "shape": list(stored.shape), "data_offsets": [end, stop]}
                end = stop
        text = json.dumps(header).encode()
        with (folder / f"model-{layer:05}.safetensors").open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + end)
    model = config(Geometry(LARGE.experts, LARGE.hidden, LARGE.intermediate, layers, LARGE.top_k))
    quant = {"quant_method": example.config.method, **example.config.quant}
    (folder / "config.json").write_text(json.dumps({**model, "quantization_config": quant}))
    return layers * per_layer


def nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    count = TORCH_DTYPES[dtype].itemsize
    for side in shape:
        count *= side
    return count


def of_values(example: Example, fmt: str, parent: Path) -> dict[str, Any]:
    """`--values` on a small checkpoint, from the page cache."""
    row = names.find_family({"model_type": "qwen3_moe"})
    folder = save(generate(example, row, row.forms[0], SMALL), parent / f"{fmt}-{example.name}".replace(":", "-"))
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    best = min(cpu_seconds(folder) for _ in range(REPEATS))
    print(f"{fmt} {example.name}: {stored / 1e6:.0f} MB, {stored / best / 1e9:.2f} GB/s a core", flush=True)
    return {
        "format": fmt,
        "spec": str(example.scheme.spec),
        "bytes": stored,
        "cpu_seconds": round(best, 3),
        "gigabytes_per_second": round(stored / best / 1e9, 3),
        "within_bounds": stored / best >= MIN_RATE,
    }


def cpu_seconds(folder: Path) -> float:
    start = time.process_time()
    report = examine(folder, values=True)
    used = time.process_time() - start
    assert report.ok, [problem.render() for problem in report.problems[:3]]
    return used


if __name__ == "__main__":
    main()
