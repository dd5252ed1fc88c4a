"""`make demo`: a small model is made, converted, looked at, checked, broken and found out."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.rule import Rule

from lancebill.checkpoint.read.files import Checkpoint
from lancebill.cli import console as ui
from lancebill.cli.convert import run, target_of
from lancebill.cli.main import app
from lancebill.testing.checkpoints import Geometry
from lancebill.testing.models import write_model

SIZE = Geometry(experts=16, hidden=512, intermediate=256, layers=2, top_k=4)
TOUR = (
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


def main() -> None:
    parser = argparse.ArgumentParser(description="Convert a small generated model between formats.")
    parser.add_argument("--dir", type=Path, help="keep the files here (default: a temporary folder)")
    chosen = parser.parse_args().dir
    if chosen is not None:
        demo(chosen)
        return
    with tempfile.TemporaryDirectory(prefix="lancebill-demo-") as folder:
        demo(Path(folder))


def demo(folder: Path) -> None:
    model, small, gptq = folder / "model-bf16", folder / "model-mxfp4", folder / "model-gptq"
    _say("A small mixture-of-experts model, unquantised, with the tensor names of Qwen3-MoE.")
    if not model.exists():
        write_model(model, SIZE)
    _lancebill("inspect", model)
    _say("Its experts in MXFP4: 4-bit floats, a shared power of two for 32 of them. What it costs is measured.")
    _lancebill("convert", model, small, "--to", "mxfp4", "--overwrite")
    _lancebill("inspect", small, "--memory", "--tp", "2")
    _say("The same model as GPTQ, then from GPTQ to compressed-tensors: the same numbers, so nothing is lost.")
    _lancebill("convert", model, gptq, "--to", "int4-g128", "--format", "gptq", "--overwrite")
    _lancebill("convert", gptq, folder / "model-int4", "--to", "int4-g128", "--overwrite")
    _say("Every stored number of it is checked.")
    _lancebill("verify", folder / "model-int4", "--values")
    _say("One damaged scale among them is found, and named.")
    _damage(folder / "model-int4")
    _lancebill("verify", folder / "model-int4", "--values")
    _say("One model, many formats: what each costs.")
    _compare(model, folder)


def _say(text: str) -> None:
    out = ui.console()
    out.print()
    out.print(Rule(style="dim"))
    out.print(f"[bold]{escape(text)}[/]", soft_wrap=True)


def _lancebill(*words: object) -> None:
    out = ui.console()
    shown = " ".join(word.name if isinstance(word, Path) else str(word) for word in words)
    out.print(f"\n[green]$[/] [bold]lancebill {escape(shown)}[/]", soft_wrap=True)
    app([str(word) for word in words], standalone_mode=False)


def _damage(folder: Path) -> None:
    """Overwrite one scale with NaN, as a failing disk might."""
    with Checkpoint.open(folder) as checkpoint:
        info = checkpoint.tensors["model.layers.1.mlp.experts.5.up_proj.weight_scale"]
    with info.file.open("r+b") as file:
        file.seek(info.start + 6)
        file.write(b"\xc0\x7f")


def _compare(model: Path, folder: Path) -> None:
    rows = ui.table("spec", "format", ">bits/weight", ">RMS error", ">max error", ">seconds")
    with ui.progress("formats", len(TOUR)) as advance:
        for spec, name in TOUR:
            done = run(model, folder / "tour", target_of(spec, name), {"overwrite": True})
            rows.add_row(done["spec"], done["format"], *_figures(done, folder / "tour"))
            advance(1)
    ui.console().print()
    ui.console().print(rows)


def _figures(done: dict[str, Any], folder: Path) -> list[str]:
    with Checkpoint.open(folder) as checkpoint:
        experts = [info for name, info in checkpoint.tensors.items() if ".experts." in name]
    weights = done["loss"]["total"]["count"]
    bits = 8 * sum(info.nbytes for info in experts) / weights
    loss = done["loss"]["total"]
    return [f"{bits:.2f}", f"{loss['rms_error']:.2%}", f"{loss['max_error']:.2%}", f"{done['seconds']:.2f}"]


if __name__ == "__main__":
    main()
