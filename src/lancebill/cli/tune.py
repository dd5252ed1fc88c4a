"""`lancebill tune`: measure which tiles are fastest on a GPU, and write what the Hopper backend goes by."""

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
from lancebill.errors import SpecError

if TYPE_CHECKING:
    from lancebill.bench.tuning import TuningLayer

ARCH = 90


def tune(
    shape: Annotated[list[str], typer.Option("--shape", help=f"One or more times: {SHAPES}.")],
    weights: Annotated[str, typer.Option("--weights", help="Specs of the weights.")] = "mxfp4",
    activations: Annotated[str, typer.Option("--activations", help="bf16, fp8.")] = "bf16,fp8",
    device: Annotated[str, typer.Option("--device", help="The GPU to measure on.")] = "cuda:0",
    tokens: Annotated[str, typer.Option("--tokens", help="Sizes of the batch.")] = "1,4,16,64,256,1024,4096,16384",
    out: Annotated[Path, typer.Option("--out", help="Where the rules go; an existing file is merged into.")] = Path(
        "hopper.json"
    ),
    install: Annotated[bool, typer.Option("--install", help="Then put them into the installed package.")] = False,
) -> None:
    """Measure candidate tiles for layers of these shapes; rules are made of the winners.

    Every candidate's result is compared before it is timed. Cells are kept beside the rules (.cells.json) as they
    are measured: a search that was stopped goes on, and another shape adds to it.
    """
    with ui.reported(False):
        import torch

        from lancebill.backends.hopper.tuning import policy as hopper
        from lancebill.backends.hopper.tuning import search
        from lancebill.bench.tuning import Journal, Search
        from lancebill.moe.problem import parse_device

        if not out.resolve().parent.is_dir():
            raise SpecError("no such folder", where=str(out.parent))
        layers = _layers(shape, names(weights), names(activations))
        where = parse_device(device)
        if where.arch != ARCH:
            raise SpecError("there is nothing to tune on this device", expected="an sm_90 GPU", got=where)
        journal = Journal(out.with_suffix(".cells.json"))
        hunt = Search(layers, numbers(tokens), journal, where.torch)
        notes = ui.console(error=True)
        with ui.progress("tuning", len(hunt.cells)) as advance:
            hunt.run(lambda text: notes.print(f"[dim]{escape(text)}[/]"), advance)
        known = json.loads(out.read_text()) if out.exists() else hopper.data()
        found = search.merge(known, hunt.cells, journal.times, torch.cuda.get_device_name(where.index), _said(layers))
        text = json.dumps(found, indent=1) + "\n"
        for file in (out, *[_data()] * install):
            file.write_text(text)
    ui.console().print(f"{len(hunt.cells)} cells measured; rules in {out}", soft_wrap=True)


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


def _said(layers: list[TuningLayer]) -> str:
    names = ", ".join(layer.name for layer in layers)
    return f"{datetime.now(timezone.utc):%Y-%m-%d}, {names}; rows_up_to = routed rows per local expert"


def _data() -> Path:
    """What the installed package goes by."""
    from lancebill.backends.hopper.tuning import policy as hopper

    return Path(hopper.__file__).parent / "hopper.json"
