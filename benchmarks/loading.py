"""Reading, converting, verifying and packing checkpoints: rates and memory."""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import peak_memory
from benchmarks.runner import Case, Run, subject
from lancebill.checkpoint.load.load_layer import load_layer
from lancebill.checkpoint.load.staging import TensorSource
from lancebill.checkpoint.read.files import Checkpoint
from lancebill.checkpoint.read.slices import Index, Reader
from lancebill.checkpoint.resolve import manifest as manifests
from lancebill.checkpoint.resolve import naming as names
from lancebill.checkpoint.write.convert import ConvertOptions, convert, plan_conversion
from lancebill.checkpoint.write.target import choose_target
from lancebill.cli.convert import run_conversion, target_of
from lancebill.cli.verify import examine
from lancebill.formats import registry
from lancebill.formats.base import Example
from lancebill.formats.stored import TORCH_DTYPES, Config
from lancebill.layer.recipe import LoadOptions, Recipe
from lancebill.numbers.spec_names import parse_spec
from lancebill.testing.checkpoints import Generated, Geometry, generate, save
from lancebill.testing.models import config, write_model

FOLDER = (Path, "folder for the checkpoints")


@contextmanager
def scratch(run: Run) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="lancebill-bench-", dir=run.options.folder) as folder:
        yield Path(folder)


# Memory of a load ----------------------------------------------------------------------------------------

OURS, STOCK = "lancebill", "transformers"
BOUND = 1.08  # our peak over the checkpoint's bytes


@subject("memory", lambda: Case.product(weights=("int4-g128", "mxfp4", "mxfp4+int8"), loader=(OURS, STOCK)),
         layers=(2, "of the model"), experts=(128, "of each layer"), folder=FOLDER)  # fmt: skip
def memory(run: Run) -> None:
    """Peak memory while a quantised checkpoint is loaded, with lancebill and with stock transformers.

    The checkpoint has experts of Qwen3-30B-A3B's sizes as 4-bit compressed-tensors; `mxfp4+int8` has int8 outside the
    experts. It is loaded in fresh processes. Resident memory, which includes the pages of mapped files, is relative to
    the same process right before the load, when torch, transformers and the model's class are already imported.
    """
    with scratch(run) as folder:
        source = write_source(folder / "source", run.options.layers, run.options.experts)
        for weights, cases in run.groups("weights"):
            packed = convert_to(source, folder / weights["weights"], weights["weights"])
            for case in (case for case in cases if not run.late(case)):
                with run.attempt(case):
                    found = load_in_process(case["loader"], packed)
                    size = found["checkpoint_bytes"]
                    figures = {"peak_ratio": found["peak_resident_bytes"] / size, "held_gb": found["held_bytes"] / 1e9}
                    run.add(case, {**figures, "checkpoint_gb": size / 1e9, "seconds": found["seconds"]})


def write_source(folder: Path, layers: int, experts: int, hidden: int = 2048, intermediate: int = 768) -> Path:
    write_model(folder, Geometry(experts, hidden, intermediate, layers, top_k=8))
    return folder


def convert_to(source: Path, folder: Path, spec: str) -> Path:
    """The checkpoint with experts of a spec, and after a plus sign that of all other linear modules."""
    import lancebill

    experts, _, rest = spec.partition("+")
    if rest:
        lancebill.from_pretrained(source, weights={"experts": experts, "rest": rest}).save_pretrained(folder)
    else:
        run_conversion(source, folder, target_of(spec), {})
    return folder


def load_in_process(loader: str, folder: Path) -> dict[str, Any]:
    """`measure_load` in a fresh process."""
    code = f"from benchmarks.loading import measure_load; measure_load({loader!r}, {str(folder)!r})"
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"},
        cwd=Path(__file__).resolve().parents[1],
    )  # fmt: skip
    if process.returncode:
        raise RuntimeError(process.stderr.strip().splitlines()[-1])
    found: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return found


def measure_load(loader: str, folder: str) -> None:
    """Load the model in this process and print its memory."""
    import transformers

    import lancebill.integrations.transformers.pretrained as ours

    transformers.utils.logging.disable_progress_bar()
    loaded = transformers.AutoConfig.from_pretrained(folder)
    if loader == STOCK:
        import compressed_tensors  # noqa: F401  imported before the load, like the others
    ours.class_of(loaded)
    load = ours.from_pretrained if loader == OURS else transformers.AutoModelForCausalLM.from_pretrained
    start = time.perf_counter()
    with peak_memory() as peak:
        model = load(folder, dtype=loaded.dtype)
        seconds = time.perf_counter() - start
    with torch.no_grad():
        assert bool(model(torch.arange(8).unsqueeze(0)).logits.isfinite().all()), "the loaded model does not compute"
    found = {
        "checkpoint_bytes": sum(file.stat().st_size for file in Path(folder).glob("*.safetensors")),
        "held_bytes": sum(t.nbytes for t in (*model.parameters(), *model.buffers())),
        "peak_resident_bytes": peak.resident, "seconds": round(seconds, 2),
    }  # fmt: skip
    print(json.dumps(found))


# Conversion ----------------------------------------------------------------------------------------------

WIDE = Geometry(64, 2048, 1024, top_k=8)  # its layers


@subject("convert", lambda: Case.product(weights=("mxfp4", "nvfp4", "int4-g128"), search=("with", "without")),
         gigabytes=(2.0, "size of the source"), experts=(WIDE.experts, "of each layer"), folder=FOLDER)  # fmt: skip
def conversions(run: Run) -> None:
    """Speed and peak memory of `lancebill convert`, from bf16, with and without scale search.

    Rates are of processor time, so that other load does not count; memory is anonymous, above the idle process.
    """
    expert_bytes = 3 * WIDE.hidden * WIDE.intermediate * 2
    layers = max(1, round(run.options.gigabytes * 1e9 / (run.options.experts * expert_bytes) + 0.5))
    with scratch(run) as folder:
        size = replace(WIDE, experts=run.options.experts, layers=layers, top_k=min(8, run.options.experts))
        write_model(folder / "source", size)
        for case in (case for case in run.cases if not run.late(case)):
            target, options = (
                choose_target(parse_spec(case["weights"])),
                ConvertOptions(search=case["search"] == "with"),
            )
            with Checkpoint.open(folder / "source") as checkpoint:
                total = sum(info.nbytes for info in checkpoint.tensors.values())
                with peak_memory() as peak:
                    start = time.process_time()
                    plan = plan_conversion(checkpoint, target, options)
                    report = convert(checkpoint, folder / f"{case['weights']}-{case['search']}", plan, options)
                    used = time.process_time() - start
            figures = {"core_mb_per_s": total / used / 1e6, "peak_mib": peak.anonymous / 2**20, "cpu_seconds": used}
            run.add(case, {**figures, "rms_error": report.total.rms_error})


# Verification --------------------------------------------------------------------------------------------

LARGE_MODEL = Geometry(experts=128, hidden=4096, intermediate=1536, top_k=8)  # the experts of Qwen3-235B
STORED = {  # the example of a format that stores this spec
    ("dense", "bf16"): "bf16", ("fp8", "fp8-block"): "block-F32", ("modelopt", "nvfp4"): "NVFP4",
    ("compressed-tensors", "mxfp4"): "mxfp4-pack-quantized-mxfp4",
    ("compressed-tensors", "int4-g64:fp16"): "pack-quantized-int4-g64:fp16",
    ("gptq", "int4-g64:fp16"): "int4-g64:fp16-gptq", ("awq", "int4-g64:fp16-zp"): "int4-g64:fp16-zp",
}  # fmt: skip


def verify_cases() -> Iterator[Case]:
    yield Case.of(what="headers", format="modelopt", weights="nvfp4")
    yield from (Case.of(what="values", format=kind, weights=spec) for kind, spec in STORED)


@subject("verify", verify_cases, gigabytes=(100.0, "size of the checkpoint of holes"), repeats=(20, "the best counts"),
         folder=(Path, "folder for the checkpoints; it must support sparse files"))  # fmt: skip
def verify(run: Run) -> None:
    """Speed of `lancebill verify`: the headers of a large checkpoint of holes, and values of several formats.

    Values are on small checkpoints, from the page cache, in bytes for each second of one core.
    """
    torch.set_num_threads(1)
    family = names.find_family({"model_type": "qwen3_moe"})
    with scratch(run) as folder:
        for case in (case for case in run.cases if not run.late(case)):
            example = example_of(case["format"], STORED[case["format"], case["weights"]])
            if case["what"] == "headers":
                stored = write_holes(folder / "large", example, run.options.gigabytes * 1e9)
                used, tensors = verified(folder / "large")
                run.add(case, {"gb": stored / 1e9, "tensors": tensors, "cpu_seconds": used})
                continue
            small = replace(LARGE_MODEL, experts=4, top_k=2)
            where = folder / str(case).replace(":", "-").replace(" ", "-")
            where = save(generate(example, family, family.forms[0], small), where)
            stored = sum(file.stat().st_size for file in where.glob("*.safetensors"))
            best = min(verified(where, values=True)[0] for _ in range(run.options.repeats))
            run.add(case, {"core_gb_per_s": stored / best / 1e9, "gb": stored / 1e9})


def verified(folder: Path, values: bool = False) -> tuple[float, int]:
    """Seconds of processor time, and tensors."""
    start = time.process_time()
    report = examine(folder, values=values)
    used = time.process_time() - start
    assert report.ok, [problem.render() for problem in report.problems[:3]]
    return used, report.tensors


def example_of(kind: str, name: str) -> Example:
    """One of a format's examples, or a checkpoint of any spec that the format writes."""
    found = next((example for example in registry()[kind].examples() if example.name == name), None)
    if found is not None:
        return found
    quant, scheme = registry()[kind].config_for(parse_spec(name), ())
    return Example(name, Config(quant=quant, method=quant["quant_method"]), scheme)


def write_holes(folder: Path, example: Example, size: float) -> int:
    """One sparse safetensors file for each layer; returns the bytes that the tensors would have."""
    folder.mkdir()
    family = names.find_family({"model_type": "qwen3_moe"})
    one = Geometry(1, LARGE_MODEL.hidden, LARGE_MODEL.intermediate)
    tensors = generate(example, family, family.forms[0], one).headers
    sizes = {name: TORCH_DTYPES[held.dtype].itemsize * math.prod(held.shape) for name, held in tensors.items()}
    layers = int(-(-size // (LARGE_MODEL.experts * sum(sizes.values()))))
    for layer in range(layers):
        header, end = {}, 0
        for expert in range(LARGE_MODEL.experts):
            for name, stored in tensors.items():
                renamed = name.replace("layers.0.", f"layers.{layer}.").replace("experts.0.", f"experts.{expert}.")
                place = [end, end + sizes[name]]
                header[renamed] = {"dtype": stored.dtype, "shape": list(stored.shape), "data_offsets": place}
                end = place[1]
        text = json.dumps(header).encode()
        with (folder / f"model-{layer:05}.safetensors").open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + end)
    quant = {"quant_method": example.config.method, **example.config.quant}
    model = config(replace(LARGE_MODEL, layers=layers)) | {"quantization_config": quant}
    (folder / "config.json").write_text(json.dumps(model))
    return layers * LARGE_MODEL.experts * sum(sizes.values())


# Packing -------------------------------------------------------------------------------------------------

PACKED = {  # checkpoint: format, example or spec, activations on a GPU
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
LARGE, SMALL = Geometry(256, 4096, 2048), Geometry(8, 2048, 768)
DIFFERENT = 2  # experts of different numbers; the others are copies of them
ROUNDS = 5


@subject("pack", lambda: Case.product(checkpoint=tuple(PACKED), source=(MEMORY, FILES), threads=(1, 2)),
         experts=(SMALL.experts, f"of the layer; {LARGE.experts}: of DeepSeek-V4-Flash's sizes"))  # fmt: skip
def pack(run: Run) -> None:
    """How fast experts are decoded and packed, from stored tensors to the backend's layout, and the memory it takes.

    Sources: `memory`, tensors on the device; `pinned`, in pinned host memory; `files`, a checkpoint that was just
    written, so that the system has it in memory. The best of several rounds. `of_copy`: the share of the rate at which
    the device copies memory, or copies it from pinned memory. The published figures of a GPU: `python -m benchmarks
    pack --device cuda --experts 256 checkpoint=gptq-g128,mxfp4,gpt-oss,compressed-tensors-g128 source=memory,pinned
    threads=16`.
    """
    size = LARGE if run.options.experts == LARGE.experts else replace(SMALL, experts=run.options.experts)
    copies = {MEMORY: copy_rate(run.device)} | ({PINNED: pinned_copy_rate()} if run.device.startswith("cuda") else {})
    run.facts |= {"copy_gbs": copies[MEMORY] / 1e9}
    run.facts |= {"pinned_copy_gbs": copies[PINNED] / 1e9} if PINNED in copies else {}
    for labels, cases in run.groups("checkpoint", "source"):
        if run.late(labels):
            continue
        generated, options = make_checkpoint(labels["checkpoint"], size, run.device)
        manifest = manifests.build(generated.config, generated.headers)
        manifest.check(where=labels["checkpoint"])
        recipe = Recipe.make(manifest, 0, LoadOptions(device=run.device, **options))
        with reader_from(labels["source"], generated, run.device) as read:
            for case in cases:
                found = best_load(recipe, read, run.device, case["threads"], PLACES[labels["source"]])
                of_copy = found["gb_per_s"] * 1e9 / copies.get(labels["source"], copies[MEMORY])
                run.add(case, {**found, "of_copy": of_copy})


@contextmanager
def reader_from(source: str, generated: Generated, device: str) -> Iterator[Reader]:
    if source == FILES:
        with tempfile.TemporaryDirectory(prefix="lancebill-bench-") as folder:
            yield Checkpoint.open(save(generated, Path(folder))).read
        return
    held = {
        name: t.pin_memory() if source == PINNED else t.to(device, copy=True) for name, t in generated.tensors.items()
    }

    def read(name: str, index: Index) -> torch.Tensor:
        return held[name][index] if index else held[name]

    yield read


def make_checkpoint(name: str, size: Geometry, device: str) -> tuple[Generated, dict[str, Any]]:
    """A layer of few different experts, and the options of loading it."""
    kind, spec, activations = PACKED[name]
    example = example_of(kind, spec)
    family = names.find_family(
        {"model_type": FAMILIES.get(kind) or example.config.model.get("model_type", "qwen3_moe")}
    )
    options = {"activations": activations} if activations and device.startswith("cuda") else {}
    form = next((form for form in family.forms if form.stacked == registry()[kind].stacked), family.forms[0])
    few = generate(example, family, form, replace(size, experts=min(DIFFERENT, size.experts)))
    return repeated(few, form, size.experts), options


def repeated(few: Generated, form: names.NameForm, experts: int) -> Generated:
    """The checkpoint with so many experts; the tensors of the further ones are those of the first."""
    many = Generated(replace(few.config, model={**few.config.model, "num_experts": experts}))
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


def best_load(recipe: Recipe, read: Reader, device: str, threads: int, source: TensorSource) -> dict[str, float]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    packed = recipe.allocate()
    size = sum(tensor.nbytes for tensors in packed.values() for tensor in tensors.values())

    def load() -> None:
        load_layer(read, recipe.plan, recipe.layout, out=packed, source=source)

    load()  # compiles the kernel, touches the pages
    seconds, busy = (min(column) for column in zip(*(timed(load, device) for _ in range(ROUNDS))))
    torch.set_num_threads(before)
    rates = {"gb_per_s": size / seconds / 1e9, "core_gb_per_s": size / busy / 1e9, "ms": 1e3 * seconds}
    return {**rates, "packed_gb": size / 1e9, "peak_mib": grown_by(load, device) / 2**20}


def timed(call: Callable[[], object], device: str) -> tuple[float, float]:
    """Seconds, and seconds of processor time of all threads, which do not depend on what else the machine does."""
    busy, start = time.process_time(), time.perf_counter()
    call()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter() - start, time.process_time() - busy


def grown_by(call: Callable[[], object], device: str) -> int:
    """The growth of memory during a call."""
    if not device.startswith("cuda"):
        with peak_memory() as peak:
            call()
        return peak.anonymous
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def copy_rate(device: str) -> float:
    """Bytes per second of a copy from memory to memory, of one thread on a CPU."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    source = torch.ones((1 << 30) if device.startswith("cuda") else (1 << 28), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = min(timed(lambda: target.copy_(source), device)[0] for _ in range(ROUNDS + 1))
    torch.set_num_threads(threads)
    return source.nbytes / seconds


def pinned_copy_rate(size: int = 1 << 28) -> float:
    """Bytes per second of a copy from pinned memory to a GPU."""
    source = torch.ones(size, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device="cuda")
    return source.nbytes / min(
        timed(lambda: target.copy_(source, non_blocking=True), "cuda")[0] for _ in range(ROUNDS + 1)
    )
