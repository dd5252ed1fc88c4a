"""`lancebill explain`: which backend would compute a layer on a device, and why not the others."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lancebill.cli import console as ui
from lancebill.cli.console import Json
from lancebill.errors import SpecError

if TYPE_CHECKING:
    from lancebill.backends.oracle import Choice, Verdict
    from lancebill.checkpoint.resolve.manifest import Manifest
    from lancebill.moe.problem import Problem


@dataclass(frozen=True)
class ExplainRequest:
    """A problem and where it comes from; `unlike` lists layers of the same files that are quantised otherwise."""

    source: str
    problem: Problem
    layer: int | None = None
    unlike: tuple[int, ...] = ()


SHAPES = "deepseek-v4-flash, gpt-oss-120b, qwen3-30b-a3b, mixtral-8x7b, or E,H,I,K"


def explain(
    path: Annotated[
        Path | None, typer.Argument(metavar="PATH", help="A checkpoint; or none, with --shape and --weights.")
    ] = None,
    shape: Annotated[str | None, typer.Option("--shape", help=f"Without a checkpoint: {SHAPES}.")] = None,
    layer: Annotated[int | None, typer.Option("--layer", min=0, help="Of PATH; by default its first.")] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="cpu, sm_90, sm_80 (any machine), cuda:0; by default what is here.")
    ] = None,
    weights: Annotated[
        str | None, typer.Option("--weights", help="The spec of the weights; by default the checkpoint's own.")
    ] = None,
    activations: Annotated[
        str | None,
        typer.Option("--activations", help="bf16 (the default), fp8 ..., or 'checkpoint': as PATH declares."),
    ] = None,
    backend: Annotated[str, typer.Option("--backend", help="Ask for this one: it, or a refusal.")] = "auto",
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="The batch that estimates are for.")] = 64,
    tp: Annotated[int, typer.Option("--tp", min=1, help="Tensor-parallel ranks; the first one is explained.")] = 1,
    as_json: Json = False,
) -> None:
    """Show every backend's verdict with all its reasons, the choice, and why."""
    with ui.reported(as_json, ui.USAGE):
        _check_usage(path, shape, weights, layer)
        _check_backend(backend)
    with ui.reported(as_json):
        from lancebill.backends import oracle

        if path is not None:
            asked = _from_checkpoint(ui.existing(path, as_json), layer, weights, activations, tp)
        else:
            assert shape is not None and weights is not None
            asked = _from_shape(shape, weights, activations, tp)
        choice = oracle.explain(asked.problem, device or _here(), backend, tokens)
    if as_json:
        ui.print_json({"source": asked.source, "layer": asked.layer, "tokens": tokens, **choice.describe()})
    else:
        show(asked, choice, tokens, ui.console())
    raise typer.Exit(ui.PROBLEM if choice.chosen is None else ui.FINE)


def _check_usage(path: Path | None, shape: str | None, weights: str | None, layer: int | None) -> None:
    if (path is None) == (shape is None):
        raise SpecError("what is to be explained?", expected="either PATH or --shape", hint=f"shapes: {SHAPES}")
    if shape is not None and weights is None:
        raise SpecError("a shape alone does not say how weights are stored", hint="add --weights, for example mxfp4")
    if shape is not None and layer is not None:
        raise SpecError("--layer chooses a layer of a checkpoint; a shape is one layer")


def _check_backend(name: str) -> None:
    from lancebill.backends.oracle import AUTO
    from lancebill.backends.registry import registry

    if name != AUTO and name not in registry():
        raise SpecError(f"no backend is called '{name}'", expected=f"{AUTO} or one of {', '.join(registry())}")


def _here() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _from_shape(shape: str, weights: str, activations: str | None, tp: int) -> ExplainRequest:
    from lancebill.moe.model_shapes import parse_shape
    from lancebill.numbers.spec_names import parse_activation, parse_spec

    known = parse_shape(shape)
    return ExplainRequest(
        known.name, known.problem(parse_spec(weights), parse_activation(activations or "bf16"), tp=tp)
    )


def _from_checkpoint(
    path: Path, layer: int | None, weights: str | None, activations: str | None, tp: int
) -> ExplainRequest:
    """The problem that loading this layer would pose, from headers alone."""
    from lancebill.checkpoint.read.files import Checkpoint
    from lancebill.checkpoint.resolve import manifest as manifests
    from lancebill.layer.recipe import LoadOptions, pose
    from lancebill.moe.placement import Placement

    with Checkpoint.open(path) as checkpoint:
        manifest = manifests.build(checkpoint.config, checkpoint.headers)
        manifest.check(where=str(path))
    index = min(manifest.layers, default=0) if layer is None else layer
    options = LoadOptions(
        placement=Placement(tp_size=tp), weights=weights, activations=activations, dtype=_input_dtype(activations)
    )
    return ExplainRequest(str(path), pose(manifest, index, options)[2], index, _unlike(manifest, index))


def _input_dtype(activations: str | None) -> Any:
    """Activations of 16 or 32 bits are the inputs as they come; quantised ones are made from bf16."""
    import torch

    from lancebill.layer.rules import CHECKPOINT
    from lancebill.numbers.spec_names import parse_activation

    if activations is None or activations == CHECKPOINT:
        return torch.bfloat16
    spec = parse_activation(activations).spec
    return torch.bfloat16 if spec.quantized else spec.dtype.storage


def _unlike(manifest: Manifest, index: int) -> tuple[int, ...]:
    """Layers that are quantised another way: their verdicts may differ."""
    from lancebill.checkpoint.resolve.naming import DOWN, GATE

    def specs(layer: int) -> tuple[object, ...]:
        return tuple(manifest.layers[layer].spec(name) for name in (GATE, DOWN))

    return tuple(other for other in manifest.layers if specs(other) != specs(index))


# For people ------------------------------------------------------------------------------------------


def show(asked: ExplainRequest, choice: Choice, tokens: int, out: Console) -> None:
    problem = choice.problem
    title = asked.source if asked.layer is None else f"{asked.source}, layer {asked.layer}"
    out.print(f"[bold]{escape(title)}[/]", soft_wrap=True)
    if asked.unlike:
        out.print(f"[dim]quantised otherwise, ask with --layer: {ui.ranges(list(asked.unlike))}[/]")
    facts = ui.table("", "")
    facts.show_header = False
    facts.add_row("experts", f"{problem.experts}, top {problem.top_k}, {problem.activation}")
    facts.add_row("sizes", f"hidden {problem.hidden}, intermediate {problem.intermediate}")
    facts.add_row("weights", _pair(*(f"{m.spec}{' bias' * m.bias}" for m in problem.matrices.values())))
    facts.add_row("activations", _pair(str(problem.activations), str(problem.second_activations)))
    facts.add_row("on", f"{choice.device}, {tokens} token{'s' * (tokens != 1)}")
    out.print(facts)
    out.print()
    out.print(_verdicts(choice))
    out.print()
    out.print(_conclusion(choice), soft_wrap=True)


def _pair(first: str, second: str) -> str:
    return first if first == second else f"w13 {first}, w2 {second}"


def _verdicts(choice: Choice) -> Table:
    rows = ui.table("backend", "verdict", ">estimate", "why")
    for verdict in choice.verdicts:
        name = f"[bold]{escape(verdict.backend.name)}[/]"
        if verdict.supported:
            rows.add_row(name, _word(choice, verdict), *_plan_cells(verdict))
        for number, reason in enumerate(verdict.reasons):
            hint = f"\n[dim]{escape(reason.hint)}[/]" if reason.hint else ""
            why = f"[yellow]{escape(reason.code)}[/]: {escape(reason.text)}{hint}"
            rows.add_row("" if number else name, "" if number else "[red]no[/]", "", why)
    return rows


def _word(choice: Choice, verdict: Verdict) -> str:
    if choice.chosen is not None and verdict.backend is choice.chosen.backend:
        return "[bold green]chosen[/]"
    return "on request" if verdict.backend.on_request else "possible"


def _plan_cells(verdict: Verdict) -> tuple[str, str]:
    plan = verdict.plan
    assert plan is not None
    return f"{plan.estimate_us:,.0f} us", escape("; ".join(plan.notes))


def _conclusion(choice: Choice) -> str:
    asked = choice.requested != "auto"
    if choice.chosen is None:
        what = f"'{choice.requested}' was asked for and cannot compute this" if asked else "no backend computes this"
        return f"[bold red]refused[/]: {escape(what)} on {choice.device}"
    name = f"[bold green]{escape(choice.chosen.backend.name)}[/]"
    if asked:
        return f"{name}, as asked"
    rivals = sum(v.supported and not v.backend.on_request for v in choice.verdicts)
    return f"{name}: the lowest estimate of {rivals}" if rivals > 1 else f"{name}: the only one that can"
