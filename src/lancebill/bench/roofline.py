"""Plots floor / time against tokens for our layer and for peers, one panel for each part.

The floor is the larger of flops / dense GEMM rate and bytes / read rate, both measured in the same run over the same
window. 100% is the best that any kernel could reach at those rates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_OURS = "#0b6e4f"
_PEERS = ("#c2853d", "#8a94a0", "#7b6fa8", "#b0646f")
_ACROSS = 3


def is_race(record: Mapping[str, Any]) -> bool:
    """Whether a results file compares our times with peers and has floors."""
    rows = record.get("rows") or [{}]
    return all("against" in row and "floor_us" in row for row in rows)


def fractions(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """For us and each peer: (tokens, floor / time)."""
    lines: dict[str, list[tuple[int, float]]] = {"lancebill": []}
    for row in sorted(rows, key=lambda row: int(row["tokens"])):
        tokens, floor = int(row["tokens"]), float(row["floor_us"])
        lines["lancebill"].append((tokens, floor / float(row["ours"]["us"])))
        for name, peer in row["against"].items():
            lines.setdefault(name, []).append((tokens, floor / float(peer["us"])))
    return lines


def draw_roofline(record: Mapping[str, Any], path: Path) -> None:
    """Write the plot; the suffix of `path` selects the file format."""
    from matplotlib.figure import Figure

    parts = list(dict.fromkeys(row["part"] for row in record["rows"]))
    across = min(_ACROSS, len(parts))
    down = -(-len(parts) // across)
    figure = Figure(figsize=(4.2 * across + 0.6, 3.4 * down + 0.7), layout="constrained")
    for i, part in enumerate(parts):
        axes = figure.add_subplot(down, across, i + 1)
        _panel(axes, [row for row in record["rows"] if row["part"] == part], part)
        axes.set_xlabel("tokens" if i // across == down - 1 else "")
        axes.set_ylabel("floor / time" if i % across == 0 else "")
    figure.suptitle(_title(record), x=0.01, ha="left", fontsize=9)
    figure.savefig(path, dpi=150)


def _panel(axes: Axes, rows: Sequence[Mapping[str, Any]], title: str) -> None:
    from matplotlib.ticker import FuncFormatter

    lines = fractions(rows)
    for color, (name, points) in zip((_OURS, *_PEERS * 4), lines.items()):
        width = 2.4 if name == "lancebill" else 1.3
        axes.plot(*zip(*points), marker="o", markersize=3.5, color=color, label=name, linewidth=width, zorder=1 + width)
    axes.axhline(1, color="black", linestyle="--", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({int(row["tokens"]) for row in rows}))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    axes.set_ylim(0, 1.08)
    axes.tick_params(labelsize=7)
    axes.grid(True, alpha=0.2)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False, fontsize=7, loc="lower right")
    axes.set_title(title, loc="left", fontsize=9)


def _title(record: Mapping[str, Any]) -> str:
    rates = record["ceilings"]
    gpu = str(record["machine"]["gpu"]).split(",")[0]
    dense = ", ".join(f"{name} {rates[name]:,.0f}" for name in ("bf16", "fp8") if name in rates)
    return (
        f"{gpu}: reads {rates['read_gbs']:,.0f} GB/s, dense GEMMs {dense} TFLOP/s "
        f"over windows of {record['window_us'] / 1e3:.0f} ms; peers without their routing sort unless noted"
        + (
            "\nrates shown are the last run's; each point uses the rates of its own run"
            if record.get("several")
            else ""
        )
    )
