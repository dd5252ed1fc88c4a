"""`lancebill inspect`: describe a checkpoint from its headers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from lancebill.cli import console as ui
from lancebill.cli.console import Json, Revision, Source
from lancebill.errors import ranges

if TYPE_CHECKING:
    from lancebill.checkpoint.read.files import Checkpoint
    from lancebill.checkpoint.resolve.manifest import Manifest
    from lancebill.checkpoint.resolve.stored_layer import Projection, StoredLayer


def inspect(
    path: Source,
    memory: Annotated[bool, typer.Option("--memory", help="Show the memory each rank needs.")] = False,
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", help="A GPU's memory, such as 24GiB: show which experts it holds.", show_default=False),
    ] = None,
    tp: Annotated[int, typer.Option("--tp", min=1, help="Tensor-parallel ranks.")] = 1,
    ep: Annotated[int, typer.Option("--ep", min=1, help="Expert-parallel ranks.")] = 1,
    layer: Annotated[int | None, typer.Option("--layer", min=0, help="List the tensors of this layer.")] = None,
    revision: Revision = None,
    as_json: Json = False,
) -> None:
    """Show format, family, layers x experts, specs, bits per weight and bytes."""
    with ui.reported(as_json):
        path = ui.located(path, revision, as_json)
        from lancebill.checkpoint.read.files import Checkpoint
        from lancebill.checkpoint.resolve import manifest as manifests

        with Checkpoint.open(path) as checkpoint:
            manifest = manifests.build(checkpoint.config, checkpoint.headers)
            summary = describe(checkpoint, manifest)
            if memory or tp > 1 or ep > 1:
                summary["memory"] = describe_memory(manifest, tp, ep)
            if gpu is not None:
                summary["split"] = describe_split(checkpoint, manifest, gpu, tp, ep)
            if layer is not None:
                summary["layer"] = _describe_layer(manifest, layer)
    if as_json:
        ui.print_json(summary)
    else:
        show(summary, ui.console())
    fits = "split" not in summary or summary["split"]["fits"]
    raise typer.Exit(ui.PROBLEM if summary["problems"] or not fits else ui.FINE)


def describe(checkpoint: Checkpoint, manifest: Manifest) -> dict[str, Any]:
    """What the headers and the config contain, ready for JSON."""
    from lancebill.checkpoint.resolve.missing_layers import missing_layers

    layers = manifest.stored_layers
    found = [problem for one in manifest.mixtures for problem in one.problems]
    problems = [*found, *checkpoint.problems, *missing_layers(manifest)]
    first = layers[0] if layers else None
    expert_bytes = sum(checkpoint.tensors[name].nbytes for name in manifest.expert_tensors)
    weights = sum(_weight_count(layer) for layer in layers)
    complete = layers and not found
    return {
        "path": str(checkpoint.path),
        "format": manifest.format.name,
        "family": manifest.naming.family,
        "files": len(checkpoint.files),
        "tensors": len(checkpoint.tensors),
        "layers": len(manifest.layers),
        **_sizes(manifest),
        "mixtures": {one.naming.mixture: _sizes(one) for one in manifest.mixtures} if manifest.beside else None,
        "gated": first.gated if first else None,
        "names": _name_form(first) if first else None,
        "groups": [group for one in manifest.mixtures for group in _groups(one)],
        "bytes": {"experts": expert_bytes, "all": sum(info.nbytes for info in checkpoint.tensors.values())},
        "bits_per_weight": round(8 * expert_bytes / weights, 4) if complete else None,
        "problems": len(problems),
    }


def _sizes(manifest: Manifest) -> dict[str, int | None]:
    """The sizes of the experts as they are stored, else as the config states them."""
    first = next(iter(manifest.layers.values()), None)
    return {
        "experts": first.experts if first else manifest.sizes.experts,
        "top_k": manifest.sizes.top_k,
        "hidden": first.hidden if first else manifest.sizes.hidden,
        "intermediate": first.intermediate if first else manifest.sizes.intermediate,
    }


def describe_memory(manifest: Manifest, tp: int, ep: int) -> dict[str, Any]:
    """The memory that each rank needs to load the experts."""
    from dataclasses import asdict

    from lancebill.checkpoint.load.memory import plan_memory
    from lancebill.moe.layout import PlainLayout

    return {
        "tp": tp,
        "ep": ep,
        "layout": "plain: codes packed densely, scales as stored",
        "ranks": [asdict(rank) for rank in plan_memory(manifest, PlainLayout(), tp=tp, ep=ep)],
    }


def describe_split(checkpoint: Checkpoint, manifest: Manifest, gpu: str, tp: int, ep: int) -> dict[str, Any]:
    """The experts that fit on a rank's GPU beside all other tensors, and what the CPU has to read for a token.

    The other tensors are counted whole, because their cut over ranks is unknown. All experts are assumed equally
    likely. The rate is this machine's memory rate, shared by all ranks; only the CPU's part is counted.
    """
    from lancebill.bench.ceilings import read_rate
    from lancebill.checkpoint.load.layer_plan import plan_layer
    from lancebill.moe.device import Device
    from lancebill.moe.layout import PlainLayout
    from lancebill.moe.placement import Placement
    from lancebill.split.split import parse_bytes, share_budget

    layout, total, ranks = PlainLayout(), parse_bytes(gpu, "--gpu"), tp * ep
    others = sum(info.nbytes for name, info in checkpoint.tensors.items() if name not in manifest.expert_tensors)
    layers = manifest.stored_layers
    plans = [plan_layer(layer, Placement(tp_size=tp, ep_size=ep), uneven=manifest.naming.uneven) for layer in layers]
    sizes = [(len(plan.experts), plan.bytes(layout) // len(plan.experts)) for plan in plans]
    counts = share_budget(max(0, total - others), sizes)
    missing = [size * (experts - count) for (experts, size), count in zip(sizes, counts)]
    top_k = manifest.sizes.top_k or 0
    per_token = sum(top_k * share * ranks // layer.experts for share, layer in zip(missing, layers))
    rate = read_rate(Device("cpu")) if per_token and others <= total else None
    return {
        "tp": tp,
        "ep": ep,
        "fits": others <= total,
        "gpu_bytes": total,
        "other_bytes": others,
        "gpu_experts": {f"{layer.index} {layer.mixture or ''}".strip(): n for layer, n in zip(layers, counts)},
        "gpu_expert_bytes": sum(size * count for (_, size), count in zip(sizes, counts)),
        "host_expert_bytes": sum(missing),
        "cpu_bytes_per_token": per_token,
        "read_gbs": rate,
        "most_tokens_per_second": None if rate is None else round(rate * 1e9 / per_token, 1),
    }


def _groups(manifest: Manifest) -> list[dict[str, Any]]:
    """Layers grouped by their specs."""
    groups: dict[tuple[str, ...], list[StoredLayer]] = {}
    for layer in manifest.layers.values():
        groups.setdefault(tuple(_matrix(manifest, layer, name)["spec"] for name in ("w13", "w2")), []).append(layer)
    return [
        {
            "layers": ranges([layer.index for layer in members]),
            "mixture": members[0].mixture,
            "w13": _matrix(manifest, members[0], "w13"),
            "w2": _matrix(manifest, members[0], "w2"),
        }
        for members in groups.values()
    ]


def _matrix(manifest: Manifest, layer: StoredLayer, name: str) -> dict[str, Any]:
    from lancebill.checkpoint.resolve.naming import DOWN, GATE

    projection = layer.sample(DOWN if name == "w2" else GATE)
    spec = projection.scheme.spec
    return {
        "spec": str(spec),
        "bits_per_weight": round(spec.bits_per_weight(projection.n, projection.k), 4),
        "activations": _activations(manifest, projection),
        "act_order": projection.scheme.act_order,
        "bias": "bias" in projection.sources,
    }


def _activations(manifest: Manifest, projection: Projection) -> str | None:
    """The activation format the config declares; None means 16 bit."""
    declared = manifest.format.activations(manifest.config, projection.as_module(manifest.tensors))
    return None if declared is None else str(declared)


def _describe_layer(manifest: Manifest, index: int) -> dict[str, Any]:
    """The stored tensors of expert 0 of a layer, of each mixture."""
    from lancebill.errors import MissingTensor

    if index not in manifest.layers:
        raise MissingTensor(
            "no such MoE layer", where=f"layer {index}", expected=ranges(list(manifest.layers)) or "none"
        )
    rows = [
        {
            "projection": projection.name,
            "role": role,
            "tensor": source.tensor,
            "dtype": source.dtype,
            "shape": list(manifest.tensors[source.tensor].shape),
            "axes": source.axes,
        }
        for layer in manifest.stored_layers
        for (expert, _), projection in layer.projections.items()
        if expert == 0 and layer.index == index
        for role, source in projection.sources.items()
    ]
    return {"index": index, "tensors": rows}


def _name_form(layer: StoredLayer) -> str:
    form = layer.form
    words = ["stacked" if form.stacked else "per expert", "gate and up fused" if form.fused else "gate and up separate"]
    words += ["interleaved"] * form.interleaved + ["transposed"] * bool(form.transposed)
    return ", ".join(words if form.gated else [words[0], "not gated"])


def _weight_count(layer: StoredLayer) -> int:
    return layer.experts * layer.hidden * layer.intermediate * (3 if layer.gated else 2)


# Text output -----------------------------------------------------------------------------------------


def show(summary: Mapping[str, Any], out: Console) -> None:
    top = f", top {summary['top_k']}" if summary["top_k"] else ""
    names = f" ({summary['names']})" if summary["names"] else ""  # unknown if no layer is complete
    out.print(f"[bold]{escape(summary['path'])}[/]", soft_wrap=True)
    facts = ui.table("", "")
    facts.show_header = False
    facts.add_row("format", f"[bold cyan]{summary['format']}[/], names of {summary['family']}{names}")
    facts.add_row("experts", f"{summary['layers']} layers x {_of_mixtures(summary, 'experts')} experts{top}")
    facts.add_row("sizes", f"hidden {summary['hidden']}, intermediate {_of_mixtures(summary, 'intermediate')}")
    bits = f", {summary['bits_per_weight']:.3f} bits per weight" if summary["bits_per_weight"] else ""
    count = summary["bytes"]
    facts.add_row("bytes", f"{ui.size(count['experts'])} of experts{bits}; {ui.size(count['all'])} in total")
    facts.add_row("files", f"{summary['files']}, {summary['tensors']} tensors")
    out.print(facts)
    out.print()
    specs = ui.table("layers", "matrix", "spec", ">bits/weight", "activations")
    for group in summary["groups"]:
        for name in ("w13", "w2"):
            matrix = group[name]
            extra = " act-order" * matrix["act_order"] + " bias" * matrix["bias"]
            specs.add_row(
                " ".join(filter(None, (group["layers"], group["mixture"]))) if name == "w13" else "",
                name,
                f"[bold]{matrix['spec']}[/]{extra}",
                f"{matrix['bits_per_weight']:.3f}",
                matrix["activations"] or "16 bit",
            )
    out.print(specs)
    if "layer" in summary:
        _show_layer(summary["layer"], out)
    if "memory" in summary:
        _show_memory(summary["memory"], out)
    if "split" in summary:
        _show_split(summary["split"], out)
    if summary["problems"]:
        word = f"{summary['problems']} problem{'s' * (summary['problems'] > 1)}"
        out.print(f"[bold red]{word}[/]: see `lancebill verify`")


def _of_mixtures(summary: Mapping[str, Any], size: str) -> str:
    """A size of the experts; where layers have several mixtures, that of each."""
    mixtures = summary["mixtures"] or {}
    return " + ".join(f"{sizes[size]} ({name})" for name, sizes in mixtures.items()) or str(summary[size])


def _show_layer(layer: Mapping[str, Any], out: Console) -> None:
    out.print(f"\n[bold]layer {layer['index']}, expert 0[/]")
    rows = ui.table("projection", "role", "tensor", "dtype", "shape")
    for row in layer["tensors"]:
        rows.add_row(row["projection"], row["role"], escape(row["tensor"]), row["dtype"], escape(str(row["shape"])))
    out.print(rows)


def _show_memory(memory: Mapping[str, Any], out: Console) -> None:
    out.print(f"\n[bold]memory of the experts, tp {memory['tp']} x ep {memory['ep']}[/] ({memory['layout']})")
    rows = ui.table("tp rank", "ep rank", ">experts", ">intermediate", ">final", ">peak while loading")
    for rank in memory["ranks"]:
        rows.add_row(
            str(rank["tp_rank"]),
            str(rank["ep_rank"]),
            str(rank["experts"]),
            str(rank["intermediate"]),
            ui.size(rank["final"]),
            ui.size(rank["peak"]),
        )
    out.print(rows)


def _show_split(split: Mapping[str, Any], out: Console) -> None:
    counts = sorted(set(split["gpu_experts"].values()), reverse=True)
    held = " or ".join(map(str, counts))
    ranks = split["tp"] * split["ep"]
    rank = "" if ranks == 1 else f", rank 0 of tp {split['tp']} x ep {split['ep']}"
    title = f"\n[bold]on a GPU of {ui.size(split['gpu_bytes'])}{rank}[/]"
    out.print(f"{title}: {ui.size(split['other_bytes'])} for all other tensors{', not cut' * (ranks > 1)}")
    if not split["fits"]:
        out.print("  [bold red]too small[/]: these tensors do not fit, with or without experts")
        return
    out.print(f"  {held} experts of each layer, {ui.size(split['gpu_expert_bytes'])}")
    if not split["host_expert_bytes"]:
        out.print("  all experts fit")
        return
    out.print(f"  {ui.size(split['host_expert_bytes'])} of experts in host memory, computed by the CPU")
    if split["most_tokens_per_second"] is not None:
        of_all = "" if ranks == 1 else " of all ranks"
        reads = (
            f"{ui.size(split['cpu_bytes_per_token'])}{of_all} a token at {split['read_gbs']:.0f} GB/s, measured here"
        )
        out.print(f"  at most {split['most_tokens_per_second']} tokens/s one by one: the CPU reads {reads}")
