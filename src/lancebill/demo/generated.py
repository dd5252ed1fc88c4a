"""The demo without a language model: convert, inspect and verify a small generated model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lancebill.checkpoint.read.files import Checkpoint
from lancebill.cli import console as ui
from lancebill.cli.convert import run_conversion, target_of
from lancebill.demo.narrate import heading, run_command
from lancebill.testing.checkpoints import Geometry
from lancebill.testing.models import write_model

SIZE = Geometry(experts=16, hidden=512, intermediate=256, layers=2, top_k=4)
TARGETS = (
    ("mxfp4", None),
    ("nvfp4", None),
    ("nvfp4", "modelopt"),
    ("int4-g128", None),
    ("int4-g128", "gptq"),
    ("int4-g32-zp", "awq"),
    ("nf4", "bitsandbytes"),
    ("fp8-block", "fp8"),
    ("int8", None),
    ("mxfp8", None),
)


def run_tour(folder: Path) -> None:
    model, small, gptq = folder / "model-bf16", folder / "model-mxfp4", folder / "model-gptq"
    heading("A small unquantised mixture-of-experts model with the tensor names of Qwen3-MoE.")
    if not model.exists():
        write_model(model, SIZE)
    run_command("inspect", model)
    heading("Convert its experts to MXFP4: 4-bit floats with one power-of-two scale per 32. The error is measured.")
    run_command("convert", model, small, "--to", "mxfp4", "--overwrite")
    run_command("inspect", small, "--memory", "--tp", "2")
    heading("Convert the same model to GPTQ, and GPTQ to compressed-tensors: same codes and scales, so no loss.")
    run_command("convert", model, gptq, "--to", "int4-g128", "--format", "gptq", "--overwrite")
    run_command("convert", gptq, folder / "model-int4", "--to", "int4-g128", "--overwrite")
    heading("Verify every stored value.")
    run_command("verify", folder / "model-int4", "--values")
    heading("Damage one scale: verify names it.")
    _damage(folder / "model-int4")
    run_command("verify", folder / "model-int4", "--values")
    heading("The error of each format.")
    _compare_formats(model, folder)


def _damage(folder: Path) -> None:
    """Overwrite one scale with NaN, as a failing disk might."""
    with Checkpoint.open(folder) as checkpoint:
        info = checkpoint.tensors["model.layers.1.mlp.experts.5.up_proj.weight_scale"]
    with info.file.open("r+b") as file:
        file.seek(info.start + 6)
        file.write(b"\xc0\x7f")


def _compare_formats(model: Path, folder: Path) -> None:
    table = ui.table("spec", "format", ">bits/weight", ">RMS error", ">max error", ">seconds")
    with ui.progress("formats", len(TARGETS)) as advance:
        for spec, name in TARGETS:
            summary = run_conversion(model, folder / "tour", target_of(spec, name), {"overwrite": True})
            table.add_row(summary["spec"], summary["format"], *_cells(summary, folder / "tour"))
            advance(1)
    ui.console().print()
    ui.console().print(table)


def _cells(summary: dict[str, Any], folder: Path) -> list[str]:
    with Checkpoint.open(folder) as checkpoint:
        experts = [info for name, info in checkpoint.tensors.items() if ".experts." in name]
    loss = summary["loss"]["total"]
    bits = 8 * sum(info.nbytes for info in experts) / loss["count"]
    return [f"{bits:.2f}", f"{loss['rms_error']:.2%}", f"{loss['max_error']:.2%}", f"{summary['seconds']:.2f}"]
