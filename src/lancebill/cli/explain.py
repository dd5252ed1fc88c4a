"""`lancebill explain`: which backend runs a layer on a device, and why the others do not."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lancebill.cli import console as ui
from lancebill.cli.console import Json
from lancebill.cli.names import check_backends, check_shape, check_specs
from lancebill.errors import SpecError, ranges
from lancebill.moe.device import parse_device

if TYPE_CHECKING:
    from lancebill.backends.oracle import Choice, Verdict
    from lancebill.checkpoint.resolve.manifest import Manifest
    from lancebill.moe.problem import Problem
    from lancebill.split.ways import Ways


@dataclass(frozen=True)
class ExplainRequest:
    """A problem and its source; `different` lists the layers of the checkpoint that have another quantisation."""

    source: str
    problem: Problem
    layer: int | None = None
    different: tuple[int, ...] = ()


SHAPES = (
    "deepseek-v4-flash, gpt-oss-120b, qwen3-30b-a3b, mixtral-8x7b, or E,H,I,K (experts, hidden, intermediate, top k)"
)


GpuExperts = Annotated[
    int | None,
    typer.Option("--gpu-experts", min=0, help="So many experts on the GPU: which way the others go, by estimate."),
]
Mixture = Annotated[
    str | None, typer.Option("--mixture", help="Where the layers of PATH have several: text or vision.")
]
MovesWay = Annotated[
    str, typer.Option("--moves", help="With --gpu-experts: off, or recency: when it pays that experts move.")
]


def explain(
    path: Annotated[
        Path | None,
        typer.Argument(metavar="PATH", help="A checkpoint or hub model; or use --shape and --weights instead."),
    ] = None,
    shape: Annotated[str | None, typer.Option("--shape", help=f"Without a checkpoint: {SHAPES}.")] = None,
    layer: Annotated[
        int | None, typer.Option("--layer", min=0, help="A layer of PATH; the default is its first MoE layer.")
    ] = None,
    mixture: Mixture = None,
    device: Annotated[
        str | None,
        typer.Option("--device", help="cpu, cuda:0, or sm_90, sm_80 (no GPU needed); the default is this machine."),
    ] = None,
    weights: Annotated[
        str | None, typer.Option("--weights", help="Weight spec; the default is the one of the checkpoint.")
    ] = None,
    activations: Annotated[
        str | None,
        typer.Option("--activations", help="bf16 (the default), fp8 ..., or 'checkpoint': what PATH declares."),
    ] = None,
    backend: Annotated[str, typer.Option("--backend", help="Require this backend; auto chooses.")] = "auto",
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Batch size for the estimates.")] = 64,
    gpu_experts: GpuExperts = None,
    moves: MovesWay = "off",
    tp: Annotated[int, typer.Option("--tp", min=1, help="Tensor-parallel ranks; explains rank 0.")] = 1,
    revision: ui.Revision = None,
    as_json: Json = False,
) -> None:
    """Show every backend's verdict with all its reasons, and which backend is chosen."""
    with ui.reported(as_json, ui.USAGE):
        _check_names(device, backend, weights, activations)
        _check_usage(path, shape, weights, {"--layer": layer, "--mixture": mixture, "--revision": revision})
    with ui.reported(as_json):
        if path is not None:
            path = ui.located(path, revision, as_json)
        from lancebill.backends import oracle

        if path is not None:
            request = _from_checkpoint(path, layer, mixture, weights, activations, tp)
        else:
            assert shape is not None and weights is not None
            request = _from_shape(shape, weights, activations, tp)
        choice = oracle.explain(request.problem, device or _default_device(), backend, tokens)
        ways, moving = _split(choice, gpu_experts, moves, tokens)
    if as_json:
        split: dict[str, object] = {} if ways is None else {"missing_experts": asdict(ways)}
        split |= {} if moving is None else {"moving_pays_from_hit_rate": moving}
        ui.print_json(
            {"source": request.source, "layer": request.layer, "tokens": tokens, **choice.describe(), **split}
        )
    else:
        show(request, choice, tokens, ui.console())
        if ways is not None:
            ui.console().print(f"experts in host memory: {ways}", soft_wrap=True)
        if moving is not None:
            text = f"experts move where more than {moving:.0%} of uses find an expert among the {gpu_experts} used last"
            ui.console().print(f"{text}; host memory has all experts", soft_wrap=True)
    raise typer.Exit(ui.PROBLEM if choice.chosen is None else ui.FINE)


def _split(choice: Choice, gpu_experts: int | None, moves: str, tokens: int) -> tuple[Ways | None, float | None]:
    """How experts in host memory are computed, and the hit rate from which moving them pays; None: not asked for.

    At assumed rates: a layer on a GPU measures those of its machine.
    """
    from lancebill.layer.check_split import check_layer
    from lancebill.split.moves import OFF
    from lancebill.split.reuse import break_even
    from lancebill.split.split import check_has_gpu
    from lancebill.split.ways import ASSUMED

    problem = choice.problem
    check_layer(problem, choice.device, gpu_experts, moves, where="--gpu-experts")
    if gpu_experts is None:
        return None, None
    if choice.device.kind == "cpu":
        check_has_gpu(None, gpu_experts, f"device '{choice.device}'", "--device sm_90")
    pays = None if moves == OFF else break_even(gpu_experts / problem.experts, ASSUMED)
    return _ways(problem, problem.experts - gpu_experts, tokens), pays


def _ways(problem: Problem, missing: int, tokens: int) -> Ways:
    from lancebill.split.large_batches import FEWEST
    from lancebill.split.ways import ASSUMED, expected_ways, size_of

    ways = expected_ways(missing, tokens, problem.top_k, problem.global_experts, size_of(problem), ASSUMED)
    if tokens >= FEWEST:
        return ways
    both = tuple(range(len(ways.cpu) + len(ways.streamed)))  # a small batch copies nothing
    return replace(ways, cpu=both, streamed=(), cpu_us=ways.cpu_alone_us, stream_us=0.0)


def _check_names(device: str | None, backend: str, weights: str | None, activations: str | None) -> None:
    """Raise before anything slow is imported."""
    if device is not None:
        parse_device(device)
    check_backends(backend)
    check_specs([weights], [activations])


def _check_usage(path: Path | None, shape: str | None, weights: str | None, of_path: dict[str, object]) -> None:
    if (path is None) == (shape is None):
        raise SpecError("give either PATH or --shape", hint=f"shapes: {SHAPES}")
    if shape is not None and weights is None:
        raise SpecError("--shape needs --weights", hint="for example --weights mxfp4")
    if shape is not None:
        check_shape(shape)
    for name, value in of_path.items():
        if shape is not None and value is not None:
            raise SpecError(f"{name} needs a checkpoint: a shape is a single layer", got=value)


def _default_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _from_shape(shape: str, weights: str, activations: str | None, tp: int) -> ExplainRequest:
    from lancebill.moe.model_shapes import parse_shape
    from lancebill.numbers.spec_names import parse_activation, parse_spec

    sizes = parse_shape(shape)
    return ExplainRequest(
        sizes.name, sizes.problem(parse_spec(weights), parse_activation(activations or "bf16"), tp=tp)
    )


def _from_checkpoint(
    path: Path, layer: int | None, mixture: str | None, weights: str | None, activations: str | None, tp: int
) -> ExplainRequest:
    """The problem of this layer, as loading it would create it; reads only headers."""
    from lancebill.checkpoint.read.files import Checkpoint
    from lancebill.checkpoint.resolve import manifest as manifests
    from lancebill.checkpoint.resolve.naming import find_family
    from lancebill.layer.recipe import LoadOptions, plan_problem
    from lancebill.moe.placement import Placement

    with Checkpoint.open(path) as checkpoint:
        naming = find_family(checkpoint.config.model, mixture=mixture)
        manifest = manifests.build(checkpoint.config, checkpoint.headers, naming)
        manifest.check(where=str(path))
    index = min(manifest.layers, default=0) if layer is None else layer
    options = LoadOptions(
        placement=Placement(tp_size=tp), weights=weights, activations=activations, dtype=_input_dtype(activations)
    )
    return ExplainRequest(
        str(path), plan_problem(manifest, index, options)[2], index, _different_layers(manifest, index)
    )


def _input_dtype(activations: str | None) -> Any:
    """Unquantised activations have the dtype of the inputs; quantised ones are made from bf16 inputs."""
    import torch

    from lancebill.layer.rules import CHECKPOINT
    from lancebill.numbers.spec_names import parse_activation

    if activations is None or activations == CHECKPOINT:
        return torch.bfloat16
    spec = parse_activation(activations).spec
    return torch.bfloat16 if spec.quantized else spec.dtype.storage


def _different_layers(manifest: Manifest, index: int) -> tuple[int, ...]:
    """Layers with other specs than layer `index`: their verdicts may differ."""
    from lancebill.checkpoint.resolve.naming import DOWN, GATE

    def specs(layer: int) -> tuple[object, ...]:
        return tuple(manifest.layers[layer].spec(name) for name in (GATE, DOWN))

    return tuple(other for other in manifest.layers if specs(other) != specs(index))


# Text output -----------------------------------------------------------------------------------------


def show(request: ExplainRequest, choice: Choice, tokens: int, out: Console) -> None:
    problem = choice.problem
    title = request.source if request.layer is None else f"{request.source}, layer {request.layer}"
    out.print(f"[bold]{escape(title)}[/]", soft_wrap=True)
    if request.different:
        out.print(f"[dim]quantised differently, see --layer: {ranges(list(request.different))}[/]")
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
    by_name = choice.requested != "auto"
    if choice.chosen is None:
        what = f"'{choice.requested}' cannot run this" if by_name else "no backend can run this"
        return f"[bold red]refused[/]: {escape(what)} on {choice.device}"
    name = f"[bold green]{escape(choice.chosen.backend.name)}[/]"
    if by_name:
        return f"{name}, as requested"
    rivals = sum(v.supported and not v.backend.on_request for v in choice.verdicts)
    return f"{name}: the lowest of {rivals} estimates" if rivals > 1 else f"{name}: the only candidate"
