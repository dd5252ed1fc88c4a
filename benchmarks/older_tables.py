"""Tables of kernels for older GPUs, which a Hopper GPU runs as their proxy; from files of `gpu_shapes.py`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from result_files import geometric_mean, links, markdown_table, result_files, table_by_tokens
from shape_tables import newest_cells

Row = dict[str, Any]
MARLIN, HOPPER, PLAIN, INTEGERS = "marlin", "hopper", "bf16", "int8"
FEW_TOKENS = 256
_NOTE = (
    "µs of a whole layer: kernels compiled for sm_80, whose PTX an H200's driver compiles (Marlin's time over ours, "
    "and that of our Hopper kernels over ours, in the same run). This is a proxy for GPUs before Hopper, which have "
    "other rates: it compares kernels that use the same instructions, and says nothing about the times on such a GPU. "
    "Marlin is vLLM 0.26.0's layer, also mma.sync, also compiled for the H200 from PTX for sm_80. Bound by reading: "
    "reading the activated weights takes longer than multiplying at the rate of a dense GEMM, both as measured."
)
_INTEGER_NOTE = (
    "The same kernels with int8 activations: µs (the time with bf16 activations over it, in the same run). Where "
    "reading the weights bounds a layer, the ratio cannot exceed the second number: the time with bf16 activations "
    "over that of reading the weights of the activated experts at the measured rate."
)


def gpu_older() -> str:
    """For each machine: mean ratios, all cells with 16-bit activations, then int8 activations."""
    pages = []
    for machine in dict.fromkeys(file.machine for file in result_files("gpu-older")):
        files = result_files("gpu-older", machine)
        ceilings = {file.name: {"ceilings": file.record["ceilings"]} for file in files}
        compared = [row | ceilings[row["run"]] for row in newest_cells(files) if MARLIN in row["against"]]
        timed = [row | {"run": file.name} | ceilings[file.name] for file in files for row in file.record["rows"]]
        tables = [means(compared), cells(compared), integers(timed)]
        sources = links(*(file.name for file in files))
        pages.append("\n".join([*filter(None, tables), f"Each cell is from the newest run that has it: {sources}\n"]))
    return "\n".join(pages)


def means(rows: list[Row]) -> str:
    """Geometric mean and lowest ratio to Marlin, and to our Hopper kernels with few tokens where reading bounds."""
    lines = []
    for spec in dict.fromkeys((row["weights"], row["activations"]) for row in rows):
        own = [row for row in rows if (row["weights"], row["activations"]) == spec]
        read = [row for row in own if row["tokens"] <= FEW_TOKENS and _bound_by_reading(row)]
        lines.append((" x ".join(spec), len(own), _summary(own, MARLIN), len(read), _summary(read, HOPPER)))
    where = f"bound by reading, up to {FEW_TOKENS} tokens"
    head = ("weights x activations", "cells", "against Marlin", where, "of these against `hopper`")
    return markdown_table(head, lines) if lines else ""


def _summary(rows: Iterable[Row], peer: str) -> str:
    ratios = {f"{row['shape']} at {row['tokens']:,}": row["against"][peer]["ratio"] for row in rows}
    if not ratios:
        return ""
    lowest = min(ratios, key=lambda cell: ratios[cell])
    return f"{geometric_mean(ratios.values()):.2f}x, lowest {ratios[lowest]:.2f}x ({lowest})"


def cells(rows: list[Row]) -> str:
    table: dict[str, dict[int, str]] = {}
    for row in rows:
        ratios = ", ".join(f"{row['against'][peer]['ratio']:.2f}x" for peer in (MARLIN, HOPPER))
        label = f"{row['shape']}, {row['weights']} x {row['activations']}"
        table.setdefault(label, {})[row["tokens"]] = f"{row['ours']['us']:,.0f} ({ratios})"
    return table_by_tokens(table, _NOTE) if table else ""


def integers(rows: list[Row]) -> str:
    """Layers with int8 activations beside the same layer with bf16 activations in the same run."""
    times = {
        (row["run"], row["shape"], row["weights"], row["activations"], row["tokens"]): row["ours"]["us"] for row in rows
    }
    table: dict[str, dict[int, str]] = {}
    for row in rows:
        shape, weights, tokens, us = row["shape"], row["weights"], row["tokens"], row["ours"]["us"]
        plain = times.get((row["run"], shape, weights, PLAIN, tokens))
        if row["activations"] == INTEGERS and plain is not None:
            most = f" of at most {plain / row['floor_us']:.2f}x" if _bound_by_reading(row) else ""
            table.setdefault(f"{shape}, {weights}", {})[tokens] = f"{us:,.0f} ({plain / us:.2f}x{most})"
    return table_by_tokens(table, _INTEGER_NOTE) if table else ""


def _bound_by_reading(row: Row) -> bool:
    """Whether reading the weights takes clearly longer than multiplying, even at the rate of bf16."""
    multiplying = row["tflops"] * row["ours"]["us"] / row["ceilings"][PLAIN]
    return bool(row["floor_us"] > 1.01 * multiplying)
