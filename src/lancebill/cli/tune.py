"""`lancebill tune`: measure which tiles are fastest on a GPU and write the rules of the Hopper backend."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from lancebill.cli import console as ui
from lancebill.cli.bench import names, numbers
from lancebill.cli.explain import SHAPES
from lancebill.cli.names import check_shape, check_specs
from lancebill.errors import SpecError
from lancebill.moe.device import parse_device

if TYPE_CHECKING:
    from lancebill.bench.tuning import TuningLayer

ARCH = 90


def tune(
    shape: Annotated[list[str], typer.Option("--shape", help=f"{SHAPES}. Repeatable.")],
    weights: Annotated[str, typer.Option("--weights", help="Weight specs, comma-separated.")] = "mxfp4",
    activations: Annotated[
        str, typer.Option("--activations", help="Activation formats, comma-separated.")
    ] = "bf16,fp8",
    device: Annotated[str, typer.Option("--device", help="The GPU to measure on.")] = "cuda:0",
    tokens: Annotated[
        str, typer.Option("--tokens", help="Batch sizes in tokens, comma-separated.")
    ] = "1,4,16,64,256,1024,4096,16384",
    out: Annotated[
        Path, typer.Option("--out", help="File for the rules; new rules are merged into an existing file.")
    ] = Path("hopper.json"),
    install: Annotated[
        bool, typer.Option("--install", help="Also write the rules into the installed package.")
    ] = False,
) -> None:
    """Time candidate tiles for layers of these shapes and make rules from the fastest.

    Every candidate's result is checked before it is timed.

    Each measurement is saved at once in a .cells.json file: an interrupted search continues, a later one adds shapes.
    """
    with ui.reported(False):
        batches = numbers(tokens)
        if not out.resolve().parent.is_dir():
            raise SpecError("no such folder", where=str(out.parent))
        for text in shape:
            check_shape(text)
        check_specs(names(weights), names(activations))
        where = parse_device(device)
        import torch

        from lancebill.backends.hopper.tuning import policy as hopper
        from lancebill.backends.hopper.tuning import search
        from lancebill.bench.tuning import Journal, Search

        layers = _layers(shape, names(weights), names(activations))
        if where.arch != ARCH:
            raise SpecError("this device cannot be tuned", expected="an sm_90 GPU", got=where)
        journal = Journal(out.with_suffix(".cells.json"))
        tuning = Search(layers, batches, journal, where.torch)
        notes = ui.console(error=True)
        with ui.progress("tuning", len(tuning.cells)) as advance:
            tuning.run(lambda text: notes.print(f"[dim]{escape(text)}[/]"), advance)
        previous = json.loads(out.read_text()) if out.exists() else hopper.data()
        gpu = torch.cuda.get_device_name(where.index)
        rules = search.merge_into_data(previous, tuning.cells, journal.times, gpu, _origin(layers))
        text = json.dumps(rules, indent=1) + "\n"
        for file in (out, *[_installed_rules()] * install):
            file.write_text(text)
    ui.console().print(f"{len(tuning.cells)} cells measured; rules in {out}", soft_wrap=True)


def _layers(shapes: list[str], weights: tuple[str, ...], activations: tuple[str, ...]) -> list[TuningLayer]:
    from lancebill.bench.tuning import TuningLayer
    from lancebill.moe.model_shapes import parse_shape
    from lancebill.numbers.spec_names import parse_activation, parse_spec

    return [
        TuningLayer(
            f"{shape}: {spec} x {inputs}", parse_shape(shape).problem(parse_spec(spec), parse_activation(inputs))
        )
        for shape in shapes
        for spec in weights
        for inputs in activations
    ]


def _origin(layers: list[TuningLayer]) -> str:
    """When and for which layers the rules were measured."""
    names = ", ".join(layer.name for layer in layers)
    return f"{datetime.now(timezone.utc):%Y-%m-%d}, {names}; rows_up_to = routed rows per local expert"


def _installed_rules() -> Path:
    """The rules file of the installed package."""
    from lancebill.backends.hopper.tuning import policy as hopper

    return Path(hopper.__file__).parent / "hopper.json"
