"""Shared by the commands that run a model: options, loading, and a summary of the backends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from lancebill.cli import console as ui
from lancebill.cli.names import check_backends, check_specs
from lancebill.errors import CheckpointError, SpecError, UnsupportedProblem, ranges

Model = Annotated[
    Path,
    typer.Argument(
        metavar="PATH", help="A checkpoint folder with config.json and tokenizer, a .gguf file, or a model on the hub."
    ),
]
Weights = Annotated[str | None, typer.Option("--weights", help="Requantise the experts, for example to mxfp4.")]
Rest = Annotated[
    str | None,
    typer.Option("--rest", help="Quantise the other linear modules too, for example to int8.", show_default=False),
]
Activations = Annotated[
    str | None, typer.Option("--activations", help="Activation format: bf16, int8, fp8 ..., or 'checkpoint'.")
]
Backend = Annotated[str, typer.Option("--backend", help="Backend of the experts; auto chooses.")]
Order = Annotated[
    str | None, typer.Option("--order", help="Order of sums: fast, or batch-invariant (equal results in every batch).")
]
Device = Annotated[str, typer.Option("--device", help="cpu or cuda[:i].")]
GpuMemory = Annotated[
    str | None,
    typer.Option("--gpu-memory", help="Most memory of experts on the GPU, such as 20GiB; the CPU computes the others."),
]
GpuExperts = Annotated[
    int | None,
    typer.Option(
        "--gpu-experts", min=0, help="Likewise: so many experts of each layer on the GPU, or all of a smaller layer."
    ),
]
Moves = Annotated[
    str,
    typer.Option("--moves", help="With these: off, or recency: experts that were used last move to the GPU."),
]
CpuThreads = Annotated[
    int | None,
    typer.Option(
        "--cpu-threads", min=1, help="With these: threads of the CPU; by default the cores of a socket but two."
    ),
]
Dtype = Annotated[
    str, typer.Option("--dtype", help="Dtype of everything but the experts: auto, bfloat16, float16 or float32.")
]
DTYPES = ("auto", "bfloat16", "float16", "float32")


@dataclass(frozen=True)
class ModelOptions:
    """The options of a command that runs a model in this process."""

    revision: ui.Revision = None
    weights: Weights = None
    rest: Rest = None
    activations: Activations = None
    backend: Backend = "auto"
    device: Device = "cpu"
    gpu_memory: GpuMemory = None
    gpu_experts: GpuExperts = None
    moves: Moves = "off"
    cpu_threads: CpuThreads = None
    dtype: Dtype = "auto"


def open_model(path: Path, options: ModelOptions, as_json: bool) -> tuple[Path, Any, Any]:
    """The local path of a model, the model, and its tokenizer. Options are checked before a model is downloaded."""
    ui.check_path(path, as_json)
    chosen = asdict(options)
    revision, chosen["weights"] = chosen.pop("revision"), with_rest(options.weights, chosen.pop("rest"))
    check_options(**chosen)
    path = ui.located(path, revision, as_json)
    return path, *load(path, **chosen)


def with_rest(weights: str | None, rest: str | None) -> Any:
    """The rules that --weights and --rest give."""
    return weights if rest is None else {"experts": weights, "rest": rest}


def load(path: Path, **options: Any) -> tuple[Any, Any]:
    """The model and its tokenizer, with a progress bar of our own. The options were checked before."""
    from lancebill import from_pretrained
    from lancebill.checkpoint.read.files import model_path

    try:
        from transformers import logging
    except ModuleNotFoundError:
        raise UnsupportedProblem(
            "transformers is not installed", hint="pip install 'lancebill[transformers]'"
        ) from None
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    path = model_path(path)
    has_config = (path / "config.json").exists()
    beside = (path.parent / "tokenizer_config.json").exists()  # transformers reads those of few GGUF architectures
    if path.suffix == ".gguf" and not beside and find_spec("gguf") is None:
        hint = "pip install gguf, or 'lancebill[transformers]'"
        raise UnsupportedProblem("transformers reads a GGUF file's tokenizer with the package gguf", hint=hint)
    if has_config:  # before the tokenizer, for which transformers reads it too
        _check_config(path, options.get("dtype", "auto"))
    tokenizer = _tokenizer(path) if has_config else None  # first: its files are easily forgotten
    with ui.bytes_loaded("loading experts") as progress:
        model = from_pretrained(path, progress=progress, **options)
    return model, tokenizer or _tokenizer(path.parent, None if beside else path.name)


def check_options(
    *,
    device: str = "cpu",
    dtype: str = "auto",
    backend: str = "auto",
    weights: Any = None,
    activations: str | None = None,
    order: str = "fast",
    gpu_memory: str | None = None,
    gpu_experts: int | None = None,
    moves: str = "off",
    cpu_threads: int | None = None,
) -> None:
    """Raise for what is wrong, before a model is downloaded; what needs no torch comes before torch.

    Whoever asks in a command for a split expects a GPU to be used.
    """
    from lancebill.moe.device import parse_device
    from lancebill.split.split import check_has_gpu

    if parse_device(device).kind == "cpu":
        check_has_gpu(gpu_memory, gpu_experts, f"device '{device}'", "--device cuda")
    if dtype not in DTYPES:
        raise SpecError("this dtype is not supported", where="--dtype", expected=" or ".join(DTYPES), got=dtype)
    check_backends(backend)
    check_specs(weights.values() if isinstance(weights, Mapping) else [weights], [activations])
    from lancebill.backends import oracle
    from lancebill.layer.check_split import check_split
    from lancebill.moe.problem import ORDERS

    if order not in ORDERS:
        raise SpecError("no such order of sums", where="--order", expected=" or ".join(ORDERS), got=order)
    check_split(gpu_memory, gpu_experts, moves, cpu_threads, order=order)
    oracle.check_name(backend)


def _check_config(path: Path, dtype: str) -> None:
    from lancebill.integrations.transformers.pretrained import config_of, open_checkpoint

    with open_checkpoint(path) as checkpoint:
        config_of(checkpoint, dtype)


def _tokenizer(path: Path, gguf_file: str | None = None) -> Any:
    from lancebill.integrations.transformers.loaders import load_tokenizer

    hint = "copy the tokenizer's files (tokenizer_config.json, tokenizer.json ...) from the original model"
    try:
        tokenizer = load_tokenizer(path, gguf_file)
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        raise CheckpointError("transformers cannot load a tokenizer", where=str(path), got=why, hint=hint) from None
    if not tokenizer("a")["input_ids"]:  # some classes need no files, and know no words without them
        raise CheckpointError("the tokenizer has no words", where=str(path), hint=hint)
    return tokenizer


def small_steps(model: Any) -> Any:
    """The native decoder of a model on the CPU; None if it has none."""
    from lancebill.integrations.transformers.native_decoder import NativeDecoder, native_decoder

    found = native_decoder(model) if model.device.type == "cpu" else None
    return found if isinstance(found, NativeDecoder) else None


def announce(path: Path, model: Any, out: Console) -> None:
    """Print the size of the experts and the backend of each layer."""
    from lancebill.split.host_calls import host_threads

    kinds: dict[str, list[int]] = {}
    for report in model.lancebill_reports():
        kinds.setdefault(_layer_kind(report), []).append(report.layer)
    size = sum(report.bytes for report in model.lancebill_reports())
    host = sum(report.host_bytes for report in model.lancebill_reports())
    more = f", {ui.size(host)} more in host memory ({host_threads()})" if host else ""
    out.print(f"[bold]{escape(str(path))}[/]: {ui.size(size)} of experts{more}", soft_wrap=True)
    for kind, layers in kinds.items():
        out.print(f"  layers {ranges(layers)}: {escape(kind)}", soft_wrap=True)
    out.print(f"  what is not quantised: {model.lancebill_rest.not_quantised}", soft_wrap=True)


def describe(model: Any) -> dict[str, Any]:
    """The same as `announce`, ready for JSON."""
    reports = model.lancebill_reports()
    counted = Counter(_layer_kind(report) for report in reports)
    return {
        "layers": dict(counted),
        "not_quantised": model.lancebill_rest.not_quantised,
        "expert_bytes": sum(report.bytes for report in reports),
        "host_expert_bytes": sum(report.host_bytes for report in reports),
    }


def _layer_kind(report: Any) -> str:
    kept, inputs = report.kept, report.activations
    weights = kept["w13"] if kept["w13"] == kept["w2"] else f"{kept['w13']} / {kept['w2']}"
    activations = inputs["w13"] if inputs["w13"] == inputs["w2"] else f"{inputs['w13']} / {inputs['w2']}"
    return f"{weights} x {activations} on {report.choice.backend.name}"
