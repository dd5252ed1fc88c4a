"""Plots time against tokens for one benchmark, with the floor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lancebill.errors import SpecError, UnsupportedProblem

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_OURS = ("#0b6e4f", "#08415c", "#7b2d8b", "#a23b00")
_PEERS = ("#9aa5b1", "#c2a878", "#7c9885", "#b08ea2")


def check_file(path: Path) -> None:
    """Raise if no plot can be written there. Called before the benchmark, not after it."""
    try:
        import matplotlib.backend_bases as canvas
    except ImportError:
        raise UnsupportedProblem(
            "a plot needs matplotlib, which is not installed", hint="pip install matplotlib"
        ) from None
    known = canvas.FigureCanvasBase.get_supported_filetypes()
    if path.suffix and path.suffix[1:].lower() not in known:  # matplotlib appends a missing suffix
        expected = ", ".join(f".{suffix}" for suffix in sorted(known))
        raise SpecError("no plot has this suffix", where=str(path), expected=expected, got=path.suffix)


def draw_times(report: Mapping[str, Any], path: Path) -> None:
    """Write the plot; the suffix of `path` selects the file format."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    rows = [row for row in report["rows"] if row["part"] == "layer"]
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for color, name in zip(_cycle(_PEERS), sorted({peer for row in rows for peer in row["peers"]})):
        points = [(r["tokens"], r["peers"][name], r["peers_spread"][name]) for r in rows if name in r["peers"]]
        _line(axes, points, name, color, 1.4)
    for color, name in zip(_cycle(_OURS), sorted({row["backend"] for row in rows})):
        points = [(r["tokens"], r["us"], r["spread"]) for r in rows if r["backend"] == name]
        _line(axes, points, f"lancebill {name}", color, 2.4)
    floor = sorted({(row["tokens"], row["floor_us"]) for row in rows})
    axes.plot(*zip(*floor), linestyle="--", color="black", linewidth=1, label="floor (measured ceilings)")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sorted({row["tokens"] for row in rows}))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axes.set_xlabel("tokens")
    axes.set_ylabel("time of the layer, us (median, middle half of the calls)")
    axes.grid(True, which="both", alpha=0.2)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False)
    axes.set_title(_title(report), loc="left", fontsize=10)
    figure.savefig(path, dpi=150)


def _line(
    axes: Axes, points: Sequence[tuple[int, float, Sequence[float]]], label: str, color: str, width: float
) -> None:
    """A line through the medians, with the quartiles as a band."""
    ordered = sorted({tokens: (us, tuple(spread)) for tokens, us, spread in points}.items())
    tokens = [count for count, _ in ordered]
    axes.plot(
        tokens, [us for _, (us, _) in ordered], marker="o", markersize=4, color=color, linewidth=width, label=label
    )
    low, high = ([spread[i] for _, (_, spread) in ordered] for i in (0, 1))
    axes.fill_between(tokens, low, high, color=color, alpha=0.15, linewidth=0)


def _title(report: Mapping[str, Any]) -> str:
    meta, row = report["meta"], report["rows"][0]
    threads = f"{meta['threads']} thread{'s' * (meta['threads'] != 1)}"
    where = meta["gpu"].split(",")[0] if meta["gpu"] else f"{meta['machine']['cpu']['model']}, {threads}"
    return f"{row['shape']}: {row['weights']} x {row['activations']}, {row['routing']} routing\n{where}"


def _cycle(colors: Sequence[str]) -> list[str]:
    return list(colors) * 8
