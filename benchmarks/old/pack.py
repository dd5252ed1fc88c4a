"""How fast experts are decoded and packed, from tensors in memory and from files, and how much memory that takes.

    python benchmarks/pack.py [--device cuda] [--threads 1,2] [--case mxfp4 --case awq] [--experts 16]
    python benchmarks/pack.py --device cuda --large             a layer of DeepSeek-V4-Flash's shape, 256 experts

A rate is bytes of packed weights per second, over whole layers from stored tensors to the layout of the backend. On a
GPU it is also given as a share of the rate at which the device copies memory, or copies it from pinned memory if that
is the source; on a CPU per second of processor time ("core"). Sources: "memory", tensors on the device; "pinned",
tensors in pinned host memory; "files", a checkpoint that was just written, so that the system has it in memory. The
best of several rounds. `--profile` adds the kernels of a load and their time on the device.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from load_memory import Peak
from machine import gpu_machine, origin, result_path
from result_files import write_record

from lancebill.checkpoint.load.load_layer import load_layer
from lancebill.checkpoint.load.staging import TensorSource
from lancebill.checkpoint.read.files import Checkpoint
from lancebill.checkpoint.read.slices import Index, Reader
from lancebill.checkpoint.resolve import manifest as manifests
from lancebill.checkpoint.resolve import naming as names
from lancebill.formats import registry
from lancebill.formats.base import Example
from lancebill.formats.stored import Config
from lancebill.layer.recipe import LoadOptions, Recipe
from lancebill.numbers.spec_names import parse_spec
from lancebill.testing.checkpoints import Generated, Geometry, generate, save

# Name: format, example or spec, activations on a GPU.
CASES = {
    "mxfp4": ("deepseek_v4", "fp4-I8", None),
    "mxfp4-fp8": ("deepseek_v4", "fp4-I8", "fp8"),
    "gpt-oss": ("mxfp4", "gpt-oss", None),  # all experts in one tensor, rows of gate and up alternate
    "gptq": ("gptq", "int4-g64:fp16-gptq_v2", None),
    "gptq-g128": ("gptq", "int4-g128:fp16", None),
    "awq": ("awq", "int4-g64:fp16-zp", None),
    "compressed-tensors": ("compressed-tensors", "pack-quantized-int4-g64:fp16", None),
    "compressed-tensors-g128": ("compressed-tensors", "int4-g128", None),
    "fp8-block": ("fp8", "block-F32", None),
    "nvfp4": ("modelopt", "W4A16_NVFP4", None),
    "gguf-q4_0": ("gguf", "Q4_0", None),
    "gguf-q8_0": ("gguf", "Q8_0", None),
}
FAMILIES = {"mxfp4": "gpt_oss"}  # by format, where the example names none
MEMORY, PINNED, FILES = "memory", "pinned", "files"
PLACES = {MEMORY: TensorSource.DEVICE, PINNED: TensorSource.PINNED, FILES: TensorSource.FILES}
LARGE = Geometry(256, 4096, 2048)
LARGE_CASES = ("mxfp4", "gpt-oss", "gptq-g128", "compressed-tensors-g128")
DIFFERENT = 2  # experts of different numbers; the others are copies of them
ROUNDS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", default="1,2", help="on a CPU")
    parser.add_argument("--case", action="append", choices=CASES, help="default: all")
    parser.add_argument("--source", action="append", choices=(MEMORY, PINNED, FILES), help="default: memory and files")
    parser.add_argument(
        "--large", action="store_true", help="a layer of DeepSeek-V4-Flash, from memory and pinned memory"
    )
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--hidden", type=int, help="default: 4096 on a GPU, 2048 on a CPU")
    parser.add_argument("--intermediate", type=int, help="default: 2048 on a GPU, 768 on a CPU")
    parser.add_argument("--profile", action="store_true", help="also list the kernels of a load; on a GPU")
    parser.add_argument("--out", type=Path, help="default: a new file in benchmarks/results/pack")
    chosen = parser.parse_args()
    on_gpu = chosen.device.startswith("cuda")
    hidden, intermediate = (4096, 2048) if on_gpu else (2048, 768)
    size = Geometry(chosen.experts, chosen.hidden or hidden, chosen.intermediate or intermediate)
    size = LARGE if chosen.large else size
    cases = chosen.case or (LARGE_CASES if chosen.large else CASES)
    sources = chosen.source or ((MEMORY, PINNED) if chosen.large else (MEMORY, FILES))
    threads = [torch.get_num_threads()] if on_gpu else [int(count) for count in chosen.threads.split(",")]
    copies = {MEMORY: copy_rate(chosen.device)} | ({PINNED: pinned_copy_rate()} if on_gpu else {})
    rows: list[dict[str, Any]] = []
    for case in cases:
        for row in measure(case, size, chosen.device, threads, sources, profile=chosen.profile and on_gpu):
            row["copy_share"] = round(row["bytes_per_s"] / copies.get(row["source"], copies[MEMORY]), 3)
            rows.append(row)
            print(json.dumps(row), flush=True)
    path = chosen.out or result_path("pack", chosen.device)
    write_record(path, document(size, chosen.device, copies, rows))
    print(f"wrote {path}")


def measure(
    case: str, size: Geometry, device: str, threads: list[int], sources: Sequence[str], *, profile: bool
) -> Iterator[dict[str, Any]]:
    """One row for each source and number of threads."""
    generated, form_options = make_checkpoint(case, size, device)
    manifest = manifests.build(generated.config, generated.headers)
    manifest.check(where=case)
    recipe = Recipe.make(manifest, 0, LoadOptions(device=device, **form_options))
    for source in sources:
        with reader_from(source, generated, device) as read:
            for count in threads:
                row = {"case": case, "source": source, "threads": count}
                yield row | best_load(recipe, read, device, count, PLACES[source], profile=profile)


@contextmanager
def reader_from(source: str, generated: Generated, device: str) -> Iterator[Reader]:
    """Reads the tensors of a checkpoint from memory of the device, from pinned memory or from files."""
    if source == FILES:
        with tempfile.TemporaryDirectory(prefix="lancebill-bench-") as folder:
            yield Checkpoint.open(save(generated, Path(folder))).read
    elif source == PINNED:
        yield reader_of({name: tensor.pin_memory() for name, tensor in generated.tensors.items()})
    else:
        yield reader_of({name: tensor.to(device, copy=True) for name, tensor in generated.tensors.items()})


def make_checkpoint(case: str, size: Geometry, device: str) -> tuple[Generated, dict[str, Any]]:
    kind, name, activations = CASES[case]
    example = next((e for e in registry()[kind].examples() if e.name == name), None) or example_of(kind, name)
    model_type = FAMILIES.get(kind) or example.config.model.get("model_type", "qwen3_moe")
    family = names.find_family({"model_type": model_type})
    options = {"activations": activations} if activations and device.startswith("cuda") else {}
    form = next((form for form in family.forms if form.stacked == registry()[kind].stacked), family.forms[0])
    few = replace(size, experts=min(DIFFERENT, size.experts))
    return repeated(generate(example, family, form, few), form, size.experts), options


def example_of(kind: str, spec: str) -> Example:
    """A checkpoint of any spec that the format writes."""
    quant, scheme = registry()[kind].config_for(parse_spec(spec), ())
    return Example(spec, Config(quant=quant, method=quant["quant_method"]), scheme)


def repeated(few: Generated, form: names.NameForm, experts: int) -> Generated:
    """The checkpoint with so many experts; the tensors of the further ones are those of the first."""
    config = replace(few.config, model={**few.config.model, "num_experts": experts})
    many = Generated(config)
    for name, tensor in few.tensors.items():
        parsed = names.parse_name(form, name)
        assert parsed is not None
        if parsed.expert is None:
            many.tensors[name] = tensor.repeat(-(-experts // DIFFERENT), *[1] * (tensor.dim() - 1))[:experts]
            continue
        for expert in range(parsed.expert, experts, DIFFERENT):
            module = form.module(parsed.prefix, parsed.layer, expert, parsed.projection)
            many.tensors[module + parsed.suffix] = tensor
    return many


def reader_of(tensors: dict[str, torch.Tensor]) -> Reader:
    def read(name: str, index: Index) -> torch.Tensor:
        return tensors[name][index] if index else tensors[name]

    return read


def kernels_of(load: Callable[[], object]) -> list[dict[str, Any]]:
    """The kernels and copies of a load by their time on the device, longest first."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        load()
        torch.cuda.synchronize()
    timed = sorted(found.key_averages(), key=lambda event: -event.self_device_time_total)
    return [
        {"name": event.key[:80], "count": event.count, "microseconds": round(event.self_device_time_total)}
        for event in timed[:8]
    ]


def best_load(
    recipe: Recipe, read: Reader, device: str, threads: int, source: TensorSource, *, profile: bool
) -> dict[str, Any]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    packed = recipe.allocate()
    size = sum(tensor.nbytes for tensors in packed.values() for tensor in tensors.values())

    def load() -> None:
        load_layer(read, recipe.plan, recipe.layout, out=packed, source=source)

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
        **({"kernels": kernels_of(load)} if profile else {}),
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


def pinned_copy_rate() -> float:
    """Bytes per second of a copy from pinned memory to a GPU."""
    source = torch.ones(1 << 28, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device="cuda")
    return source.nbytes / min(timed(lambda: _copy(source, target), "cuda")[0] for _ in range(ROUNDS + 1))


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)


def document(size: Geometry, device: str, copies: dict[str, float], rows: list[dict[str, Any]]) -> dict[str, Any]:
    from lancebill.cli.env import describe

    machine = describe()
    cpu = {"cpu": machine["cpu"], "python": machine["python"], "torch": machine["packages"]["torch"]}
    return {
        **origin(Path(__file__).name),
        "layer": {"experts": size.experts, "hidden": size.hidden, "intermediate": size.intermediate},
        "machine": gpu_machine() if device.startswith("cuda") else cpu,
        "copy_bytes_per_s": copies[MEMORY],
        **({"pinned_copy_bytes_per_s": copies[PINNED]} if PINNED in copies else {}),
        "results": rows,
    }


if __name__ == "__main__":
    main()
