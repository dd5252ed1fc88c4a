"""`lancebill convert`: requantise a checkpoint to another spec, in a format that other engines load."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from lancebill.cli import console as ui
from lancebill.cli.console import Json
from lancebill.cli.names import FORMATS, check_format

if TYPE_CHECKING:
    from lancebill.checkpoint.write.convert import Report
    from lancebill.checkpoint.write.output import Output
    from lancebill.checkpoint.write.target import Target
    from lancebill.numbers.loss import Loss


class DeviceChoice(str, Enum):
    cpu = "cpu"
    cuda = "cuda"


class MxRule(str, Enum):
    floor = "floor"
    ceil = "ceil"


def convert(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="The checkpoint to read, or a model on the hub.")],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="The folder to write.")],
    to: Annotated[str, typer.Option("--to", help="The target spec: mxfp4, nvfp4, int4-g128, fp8-block, bf16 ...")],
    format_name: Annotated[
        str | None,
        typer.Option("--format", help="compressed-tensors (the default), gptq, awq, modelopt, fp8, gpt-oss ..."),
    ] = None,
    device: Annotated[DeviceChoice, typer.Option("--device", help="The device to quantise on.")] = DeviceChoice.cpu,
    search: Annotated[
        bool | None,
        typer.Option(
            "--search/--no-search",
            help="Search for the scales of least weighted squared error: nearer to the source, in less than twice the "
            "time. The default, except for codebooks (nf4) and scales of whole matrices.",
        ),
    ] = None,
    mx_rule: Annotated[
        MxRule | None, typer.Option("--mx-rule", help="How power-of-two scales are rounded; implies --no-search.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a checkpoint at DST.")] = False,
    experts_only: Annotated[bool, typer.Option("--experts-only", help="Write only the experts.")] = False,
    revision: ui.Revision = None,
    as_json: Json = False,
) -> None:
    """Requantise the experts, copy or re-encode the other tensors, and report the error of each layer.

    The output is weight-only: activation scales are dropped.
    """
    options = {
        "device": device.value,
        "mx_rule": (mx_rule or MxRule.floor).value,
        "search": False if search is None and mx_rule is not None else search,
        "overwrite": overwrite,
        "experts_only": experts_only,
    }
    with ui.reported(as_json, ui.USAGE):
        ui.check_path(source, as_json)
        target = target_of(to, format_name)
        _check_device(device.value)
    with ui.reported(as_json), ui.cleans_up_when_stopped():
        source = ui.located(source, revision, as_json)
        summary = run_conversion(source, destination, target, options)
    if as_json:
        ui.print_json(summary)
    else:
        show(summary, ui.console())


def target_of(to: str, format_name: str | None = None) -> Target:
    """The format and spec that the options name."""
    from lancebill.errors import SpecError
    from lancebill.numbers.spec_names import EXAMPLES, parse_spec

    try:
        spec = parse_spec(to)
    except SpecError:
        if to not in FORMATS:
            raise
        expected = f"a spec such as {EXAMPLES}"
        raise SpecError(
            f"{to} is a format", where="--to", expected=expected, hint=f"--format {to} selects it"
        ) from None
    check_format(format_name)
    from lancebill.checkpoint.write.target import choose_target

    return choose_target(spec, format_name)


def run_conversion(source: Path, destination: Path, target: Target, options: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a checkpoint; returns a summary, ready for JSON."""
    from lancebill.checkpoint.read.files import Checkpoint
    from lancebill.checkpoint.write.convert import ConvertOptions, plan_conversion, work_bytes
    from lancebill.checkpoint.write.convert import convert as convert_checkpoint

    chosen = ConvertOptions(**options)
    start = time.perf_counter()
    with Checkpoint.open(source) as checkpoint:
        output = plan_conversion(checkpoint, target, chosen)
        with ui.progress(f"to {target.spec}", work_bytes(checkpoint, output), in_bytes=True) as advance:
            report = convert_checkpoint(checkpoint, destination, output, chosen, advance)
        before = sum(info.nbytes for info in checkpoint.tensors.values())
    summary = _describe(source, destination, report, output, before, time.perf_counter() - start)
    return {**summary, "search": chosen.searches(target.spec)}


def _check_device(device: str) -> None:
    import torch

    from lancebill.errors import SpecError

    if device == "cuda" and not torch.cuda.is_available():
        raise SpecError("no CUDA device is available", where="--device", hint="`lancebill env` shows what torch sees")


def _describe(
    source: Path, destination: Path, report: Report, output: Output, before: int, seconds: float
) -> dict[str, Any]:
    return {
        "source": str(source),
        "destination": str(destination),
        "format": report.target.format.name,
        "spec": str(report.target.spec),
        "seconds": round(seconds, 3),
        "bytes": {"before": before, "after": report.written_bytes, "experts_read": report.source_bytes},
        "tensors": len(output.tensors),
        "copied": report.copied,
        "recast": list(report.recast),
        "dequantized": list(report.dequantized),
        "inputs_left_behind": report.dropped,
        "unread_by_transformers": report.unread,
        "loss": {
            "layers": [{"layer": index, **asdict(loss)} for index, loss in sorted(report.layers.items())],
            "total": asdict(report.total),
        },
    }


def show(summary: Mapping[str, Any], out: Console) -> None:
    from lancebill.numbers.loss import Loss

    rows = ui.table("layer", ">weights", ">max error", ">RMS error", ">saturated", ">flushed")
    losses = {str(row.pop("layer")): Loss(**row) for row in map(dict, summary["loss"]["layers"])}
    for name, loss in losses.items():
        rows.add_row(name, *_loss_cells(loss))
    if len(losses) > 1:
        rows.add_row("[bold]all[/]", *(f"[bold]{cell}[/]" for cell in _loss_cells(Loss(**summary["loss"]["total"]))))
    out.print(rows)
    sizes = summary["bytes"]
    rate = sizes["before"] / max(summary["seconds"], 1e-9)
    out.print(
        f"[bold green]wrote[/] [bold]{escape(summary['destination'])}[/]: [bold cyan]{summary['spec']}[/] "
        f"as {summary['format']}{', scales searched' if summary['search'] else ''}, "
        f"{ui.size(sizes['before'])} to {ui.size(sizes['after'])} "
        f"in {summary['seconds']:.1f} s ({ui.size(int(rate))}/s)",
        soft_wrap=True,
    )
    for text, names in (
        ("modules outside the experts re-encoded exactly", summary["recast"]),
        ("modules outside the experts dequantised", summary["dequantized"]),
    ):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            out.print(f"{len(names)} {text}: {escape(', '.join(names[:3]))}{more}", soft_wrap=True)
    for role, count in summary["inputs_left_behind"].items():
        word = "folded into the weights" if role == "pre_quant_scale" else "dropped: the output is weight-only"
        out.print(f"{count} {role} tensors {word}")
    if summary["unread_by_transformers"]:
        why = escape(summary["unread_by_transformers"])
        out.print(f"[yellow]note[/]: transformers alone cannot load this: {why}; lancebill does", soft_wrap=True)


def _loss_cells(loss: Loss) -> list[str]:
    def percent(value: float) -> str:
        return "exact" if value == 0 else f"{value:.3%}"

    return [
        f"{loss.count:,}",
        percent(loss.max_error),
        percent(loss.rms_error),
        f"{loss.saturated:,}",
        f"{loss.flushed:,}",
    ]
