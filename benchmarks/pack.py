"""How fast experts are decoded and packed, from tensors in memory and from files, and how much memory that takes.

    python benchmarks/pack.py [--device cuda] [--threads 1,2] [--case mxfp4 --case awq] [--experts 16]

A rate is bytes of packed weights per second, over whole layers from stored tensors to the layout of the backend. On a
GPU it is also given as a share of the rate at which the device copies memory, on a CPU per second of processor time
("core"). "files": the same from a checkpoint that was just written, so that the system has it in memory. The best of
several rounds.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from load_memory import Peak
from machine import gpu_machine, origin, result_path

from lancebill.checkpoint.load.load_layer import load_layer
from lancebill.checkpoint.read.files import Checkpoint
from lancebill.checkpoint.read.slices import Index, Reader
from lancebill.checkpoint.resolve import manifest as manifests
from lancebill.checkpoint.resolve import naming as names
from lancebill.formats import registry
from lancebill.layer.recipe import LoadOptions, Recipe
from lancebill.testing.checkpoints import Generated, Geometry, generate, save

# Name: format, example, activations on a GPU.
CASES = {
    "mxfp4": ("deepseek_v4", "fp4-I8", None),
    "mxfp4-fp8": ("deepseek_v4", "fp4-I8", "fp8"),
    "gptq": ("gptq", "int4-g64:fp16-gptq_v2", None),
    "awq": ("awq", "int4-g64:fp16-zp", None),
    "compressed-tensors": ("compressed-tensors", "pack-quantized-int4-g64:fp16", None),
    "fp8-block": ("fp8", "block-F32", None),
    "nvfp4": ("modelopt", "W4A16_NVFP4", None),
    "gguf-q4_0": ("gguf", "Q4_0", None),
    "gguf-q8_0": ("gguf", "Q8_0", None),
}
ROUNDS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", default="1,2", help="on a CPU")
    parser.add_argument("--case", action="append", choices=CASES, help="default: all")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--hidden", type=int, help="default: 4096 on a GPU, 2048 on a CPU")
    parser.add_argument("--intermediate", type=int, help="default: 2048 on a GPU, 768 on a CPU")
    parser.add_argument("--out", type=Path, help="default: a new file in benchmarks/results/pack")
    chosen = parser.parse_args()
    on_gpu = chosen.device.startswith("cuda")
    hidden, intermediate = (4096, 2048) if on_gpu else (2048, 768)
    size = Geometry(chosen.experts, chosen.hidden or hidden, chosen.intermediate or intermediate)
    threads = [torch.get_num_threads()] if on_gpu else [int(count) for count in chosen.threads.split(",")]
    copy = copy_rate(chosen.device)
    rows: list[dict[str, Any]] = []
    for case in chosen.case or CASES:
        for row in measure(case, size, chosen.device, threads):
            row["copy_share"] = round(row["bytes_per_s"] / copy, 3)
            rows.append(row)
            print(json.dumps(row), flush=True)
    path = chosen.out or result_path("pack", chosen.device)
    path.write_text(json.dumps(document(size, chosen.device, copy, rows), indent=2) + "\n")
    print(f"wrote {path}")


def measure(case: str, size: Geometry, device: str, threads: list[int]) -> Iterator[dict[str, Any]]:
    """One row for each source and number of threads; one row with the reason if the case cannot be loaded."""
    generated, form_options = make_checkpoint(case, size, device)
    with tempfile.TemporaryDirectory(prefix="lancebill-bench-") as folder:
        checkpoint = Checkpoint.open(save(generated, Path(folder)))
        manifest = manifests.build(checkpoint.config, checkpoint.headers)
        manifest.check(where=case)
        recipe = Recipe.make(manifest, 0, LoadOptions(device=device, **form_options))
        held = {name: tensor.to(device) for name, tensor in generated.tensors.items()}
        sources: dict[str, Reader] = {"memory": reader_of(held), "files": checkpoint.read}
        for source, read in sources.items():
            for count in threads:
                yield {"case": case, "source": source, "threads": count, **best_load(recipe, read, device, count)}


def make_checkpoint(case: str, size: Geometry, device: str) -> tuple[Generated, dict[str, Any]]:
    kind, example_name, activations = CASES[case]
    example = next(e for e in registry()[kind].examples() if e.name == example_name)
    family = names.find_family({"model_type": example.config.model.get("model_type", "qwen3_moe")})
    options = {"activations": activations} if activations and device.startswith("cuda") else {}
    return generate(example, family, family.forms[0], size), options


def reader_of(tensors: dict[str, torch.Tensor]) -> Reader:
    def read(name: str, index: Index) -> torch.Tensor:
        return (tensors[name][index] if index else tensors[name]).contiguous()

    return read


def best_load(recipe: Recipe, read: Reader, device: str, threads: int) -> dict[str, Any]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    packed = recipe.allocate()
    size = sum(tensor.nbytes for tensors in packed.values() for tensor in tensors.values())

    def load() -> None:
        load_layer(read, recipe.plan, recipe.layout, out=packed)

    load()  # compiles the kernel, touches the pages
    gc.collect()
    rounds = [timed(load, device) for _ in range(ROUNDS)]
    seconds, busy = (min(column) for column in zip(*rounds))
    torch.set_num_threads(before)
    return {
        "spec": str(recipe.plan.w13.spec),
        "backend": recipe.choice.backend.name,
        "packed_bytes": size,
        "seconds": seconds,
        "processor_seconds": busy,
        "bytes_per_s": size / seconds,
        "bytes_per_s_core": size / busy,
        "peak_bytes": grown_by(load, device),
    }


def timed(load: Callable[[], None], device: str) -> tuple[float, float]:
    """Seconds, and seconds of processor time of all threads, which do not depend on what else the machine does."""
    busy, start = time.process_time(), time.perf_counter()
    load()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter() - start, time.process_time() - busy


def grown_by(load: Callable[[], None], device: str) -> int:
    """The growth of memory during a load."""
    if not device.startswith("cuda"):
        with Peak() as memory:
            load()
        return memory.growth()["anonymous"]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    load()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def copy_rate(device: str) -> float:
    """Bytes per second of a copy from memory to memory, of one thread on a CPU."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    source = torch.ones((1 << 30) if device.startswith("cuda") else (1 << 28), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = min(timed(lambda: _copy(source, target), device)[0] for _ in range(ROUNDS + 1))
    torch.set_num_threads(threads)
    return source.nbytes / seconds


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(source)


def document(size: Geometry, device: str, copy: float, rows: list[dict[str, Any]]) -> dict[str, Any]:
    from lancebill.cli.env import describe

    machine = describe()
    cpu = {"cpu": machine["cpu"], "python": machine["python"], "torch": machine["packages"]["torch"]}
    return {
        **origin(Path(__file__).name),
        "layer": {"experts": size.experts, "hidden": size.hidden, "intermediate": size.intermediate},
        "machine": gpu_machine() if device.startswith("cuda") else cpu,
        "copy_bytes_per_s": copy,
        "results": rows,
    }


if __name__ == "__main__":
    main()
