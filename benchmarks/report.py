"""Fills the generated blocks of README.md and docs/ from the records: no figure is typed by hand.

    python -m benchmarks report            rewrites them, and the picture of the roofline
    python -m benchmarks report --check    exits with 1 if one of them is not what the records make it

A block begins with `<!-- results: NAME -->` and ends with `<!-- end -->`; `BLOCKS` has the function that writes it.
What its figures mean is written on the page itself. A cell is from the newest run that has it. Cells and notes are
templates (`{us:,.0f}`) of the labels and figures of a row and of the facts of its record.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

from benchmarks import machine
from benchmarks.runner import RESULTS, Record, Row, newest, records

PAGES = (machine.ROOT / "README.md", *(machine.ROOT / "docs" / f"{name}.md" for name in ("results", "vllm", "hybrid")))
BLOCK = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
BLOCKS: dict[str, Callable[[], str]] = {}
RunRow = tuple[Record, Row]
Cell = str | Callable[[Row], str]
NOTHING = "Nothing has been measured yet.\n"


def main(check: bool) -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in PAGES}
    stale = {path: wanted for path, text in texts.items() if (wanted := fill_blocks(text)) != text}
    if check:
        names = ", ".join(path.relative_to(machine.ROOT).as_posix() for path in stale)
        sys.exit(f"not what benchmarks/results makes it: {names}; run `python -m benchmarks report`" if stale else 0)
    for path, wanted in stale.items():
        path.write_text(wanted, encoding="utf-8")
    for record in newest("gpu-layer"):
        draw_roofline(record.machine)


def fill_blocks(text: str) -> str:
    return BLOCK.sub(lambda match: f"{match[1]}{BLOCKS[match[2]]()}{match[3]}", text)


def block(write: Callable[[], Iterable[str]]) -> Callable[[], Iterable[str]]:
    """A block of the function's name, with what it yields: tables and lines, apart by an empty line."""
    BLOCKS[write.__name__] = lambda: "\n".join(filter(None, write())) or NOTHING
    return write


def of_each(subject: str, write: Callable[[Record], str]) -> None:
    """A block with what a function writes of the newest run of each machine."""
    BLOCKS[subject.replace("-", "_")] = lambda: "\n".join(map(write, newest(subject)))


# Templates and tables ------------------------------------------------------------------------------------


class _Nothing:
    """What a template names and a row does not have."""

    def __format__(self, _: str) -> str:
        return ""


class _Values(dict[str, Any]):
    def __missing__(self, name: str) -> _Nothing:
        return _Nothing()


class _Of:
    """`{least[us]}`: the least of a figure over all rows."""

    def __init__(self, choose: Callable[[Iterable[Any]], Any], rows: Iterable[Row]) -> None:
        self.choose, self.rows = choose, list(rows)

    def __getitem__(self, name: str) -> Any:
        return self.choose(row[name] for row in self.rows if name in row)


def fill(template: str, record: Record, row: Row | None = None, **more: object) -> str:
    values: dict[str, Any] = {
        **record.facts, "machine": record.machine_title, "links": links([record]), "busy": _busy(record),
        "least": _Of(min, record.rows), "most": _Of(max, record.rows), "first": record.rows[0].figures,
    }  # fmt: skip
    if row is not None:
        ours = next(iter(row.figures.values()))
        ratio = {name: peer / ours for name, peer in row.peers.items() if isinstance(ours, (int, float))}
        values |= {**dict(row.case.labels), **row.figures, "peers": row.peers, "ratio": ratio}
        values |= {"peer": next(iter(row.peers), ""), "first_ratio": next(iter(ratio.values()), None)}
    return template.format_map(_Values(values | more))


def _busy(record: Record) -> str:
    """The machine's load where it was more than the run's own threads."""
    found = record.facts.get("load", 0)
    return f"; the machine's load was {found:.1f}" if found >= record.facts.get("threads", math.inf) + 1 else ""


def links(items: Iterable[Record]) -> str:
    """Links from a page in docs/ to records."""
    return ", ".join(f"[{name}](../benchmarks/results/{name})" for name in dict.fromkeys(one.name for one in items))


def table(head: Sequence[str], rows: Iterable[Sequence[object]], note: str = "") -> str:
    """The first column is aligned left, the others right."""
    body = [f"| {' | '.join(map(str, row))} |" for row in rows]
    rule = "|" + "|".join("---" if i == 0 else "---:" for i in range(len(head))) + "|"
    text = "\n".join([f"| {' | '.join(head)} |", rule, *body]) + "\n" + (f"\n{note}\n" if note else "")
    return text if body else ""


def listed(
    head: str, line: str, note: str = "{machine}; {links}.", rows: Callable[[Record], Iterable[Row]] | None = None
) -> Callable[[Record], str]:
    """Writes a table with a line for each row of a record; cells are divided by bars."""

    def write(record: Record) -> str:
        chosen = record.rows if rows is None else rows(record)
        return table(head.split("|"), (fill(line, record, row).split("|") for row in chosen), fill(note, record))

    return write


def crossed(name: str, cell: str, note: str = "{machine}; {links}.", by: str = "tokens") -> Callable[[Record], str]:
    """Writes a table with a line for each name and a column for each number of tokens (or other label)."""
    return lambda record: pivot(
        [(record, row) for row in record.rows], name, cell, fill(note, record, record.rows[0]), by
    )


def pivot(rows: Iterable[RunRow], name: str, cell: Cell, note: str = "", by: str = "tokens") -> str:
    """`by`: a label, or a template."""
    cells: dict[str, dict[Any, str]] = {}
    for record, row in rows:
        text = fill(cell, record, row) if isinstance(cell, str) else cell(row)
        cells.setdefault(fill(name, record, row), {})[fill(by, record, row) if "{" in by else row[by]] = text
    columns = list(dict.fromkeys(chain.from_iterable(cells.values())))
    if all(isinstance(column, int) for column in columns):
        columns.sort()
    head = [f"{column:,}" if isinstance(column, int) else column for column in columns]
    lines = ([label, *(line.get(column, "") for column in columns)] for label, line in cells.items())
    return table((re.sub(r"[{}]", "", by), *head), lines, note)


def grouped(rows: Iterable[Row], name: str) -> dict[Any, list[Row]]:
    """Rows by a label."""
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault(row[name], []).append(row)
    return found


def geometric_mean(values: Iterable[float]) -> float:
    logarithms = [math.log(value) for value in values]
    return math.exp(sum(logarithms) / len(logarithms))


def by_date(runs: Iterable[Record]) -> list[Record]:
    return sorted(runs, key=lambda record: str(record.facts["date"]))


def machines(subject: str) -> list[str]:
    return list(dict.fromkeys(record.machine for record in records(subject)))


LAYER = "{shape}, {weights} x {activations}"
SOURCES = "Each cell is from the newest run that has it: {}.\n"

# README --------------------------------------------------------------------------------------------------

QUESTION = {"shape": "qwen3-30b-a3b", "weights": "mxfp4", "activations": "fp8", "device": "sm_80"}
INSTALLATION = ("library", "package", "triton")  # codes of reasons that depend on what is installed


@block
def explain() -> Iterable[str]:
    """The answer of `lancebill explain` to one question, without reasons that depend on what is installed here."""
    from lancebill.backends import oracle
    from lancebill.moe.device import parse_device
    from lancebill.moe.model_shapes import parse_shape
    from lancebill.numbers.spec_names import parse_activation, parse_spec

    specs = parse_spec(QUESTION["weights"]), parse_activation(QUESTION["activations"])
    choice = oracle.explain(parse_shape(QUESTION["shape"]).problem(*specs, tp=1), parse_device(QUESTION["device"]))
    lines = [" ".join(["$ lancebill explain", *(f"--{name} {value}" for name, value in QUESTION.items())])]
    for verdict in choice.verdicts:
        chosen = choice.chosen is not None and verdict.backend is choice.chosen.backend
        reasons = [str(reason) for reason in verdict.reasons if reason.code not in INSTALLATION]
        notes = verdict.plan.notes if verdict.plan else ()
        words = "; ".join(reasons) if verdict.reasons else ", ".join(notes)
        state = "chosen" if chosen else "possible" if verdict.supported else "no"
        lines.append(f"{verdict.backend.name:<11}{state:<10}{words}".rstrip())
    yield "\n".join(["```", *lines, "```\n"])


@block
def headlines() -> Iterable[str]:
    """Six numbers, each with its machine: ranges over all recorded cells, with their geometric mean."""
    vllm = [record for record in records("vllm-bench-serve") if rows_of(record, "rate", model="gpt-oss-20b")][-1]
    loads = load_ratios(vllm, model="gpt-oss-20b")
    race = [(record, row) for record, row in race_cells("h200") if row["part"] == "deepseek-mxfp4-bf16"]
    cpu = records("cpu-layer", "xeon-amx")
    calls = cpu_cells(cpu)["mxfp4 x bf16, amx, 2 threads; vllm-w4a8"]
    graphs = max(records("generate-graphs"), key=lambda record: record.rows[0]["layers"])
    memory, perplexity = by_date(newest("memory"))[-1], records("perplexity", "h200")[-1]
    peaks = {row["loader"]: row["peak_ratio"] for row in memory.rows if row["weights"] == "mxfp4"}
    lines: list[tuple[str, Record, dict[str, Any]]] = [
        ("gpt-oss-20b whole in vLLM {vllm}, MXFP4 x bf16, random weights: 1 to 64 sequences, prompts|"
         "{span} the rate of vLLM's fastest own kernels", vllm, {"span": span(loads)}),
        ("DeepSeek-V4-Flash layer, MXFP4 x bf16, random weights: 1 to 16,384 tokens|{span} the speed of Humming "
         "{humming}", race[0][0],
         {"humming": race[0][0].facts["machine"]["humming-kernels"],
          "span": span(row.ratio(HUMMING) for _, row in race if peer_of(row) == HUMMING)}),
        ("Qwen3-30B-A3B layer on 2 threads, MXFP4 x bf16, random weights: 1 and 16 tokens|{span} the speed of vLLM's "
         "W4A8 on int4", cpu[0], {"span": span(first_ratio(row) for rows in calls.values() for row in rows)}),
        ("`generate`, Qwen3-30B-A3B's shape, {layers} layers, MXFP4, random weights: one sequence|"
         "{tokens_per_s:,.0f} tokens/s; without CUDA graphs {peers[without graphs]:,.0f}", graphs, {}),
        ("Peak memory while an MXFP4 checkpoint is loaded|{lancebill:.2f}x its size; transformers {transformers:.2f}x",
         memory, peaks),
        ("Perplexity of SmolLM2-135M on WikiText-2, MXFP4 x bf16|{differs_by:.3%} from the reference backend's",
         perplexity, next(row.figures for row in perplexity.rows if row["variant"] == "mxfp4 x bf16")),
    ]  # fmt: skip
    cells = (fill(f"{line}|{{machine}}", record, record.rows[0], **more).split("|") for line, record, more in lines)
    yield table(("", "", "machine"), cells)


def load_ratios(record: Record, **labels: object) -> Iterable[float]:
    """Our rate over the best peer's, for each load."""
    loads: dict[Load, list[Row]] = {}
    for row in rows_of(record, "rate", **labels):
        loads.setdefault(load_of(row), []).append(row)
    for rows in loads.values():
        ours, peers = (
            [row["tokens_per_s"] for row in rows if _is_ours(row["backend"]) is own] for own in (True, False)
        )
        yield max(ours) / max(peers)


def span(ratios: Iterable[float]) -> str:
    held = list(ratios)
    return f"{min(held):.2f} to {max(held):.2f}x, mean {geometric_mean(held):.2f}x,"


# A layer on a GPU, beside every peer ---------------------------------------------------------------------

HUMMING, MARLIN, HOPPER = "humming", "marlin", "hopper"


def peer_of(row: Row) -> str:
    """The peer that a row is compared with: the first."""
    return next(iter(row.peers))


def first_ratio(row: Row) -> float:
    return row.ratio(peer_of(row))


def race_cells(name: str) -> list[RunRow]:
    """Every cell once, from the newest run that timed its peer, by peer and part."""
    rows = [(record, row) for record in by_date(records("gpu-layer", name)) for row in record.rows if row.peers]
    cells = {(row["part"], peer_of(row), row["tokens"]): (record, row) for record, row in rows}
    order = list(dict.fromkeys((peer_of(row), row["part"]) for _, row in rows))
    return sorted(cells.values(), key=lambda one: (order.index((peer_of(one[1]), one[1]["part"])), one[1]["tokens"]))


@block
def gpu_layer_means() -> Iterable[str]:
    """The geometric mean of each part, its lowest cell, the spread between runs, our GEMMs beside a dense GEMM."""
    for name in machines("gpu-layer"):
        lines, cells, runs = [], race_cells(name), records("gpu-layer", name)
        for part, peer in dict.fromkeys((row["part"], peer_of(row)) for _, row in cells):
            own = [(record, row) for record, row in cells if (row["part"], peer_of(row)) == (part, peer)]
            ratios = {row["tokens"]: first_ratio(row) for _, row in own}
            worst, (run, last) = min(ratios, key=ratios.__getitem__), own[-1]
            same = chain.from_iterable(each.rows for each in runs if each.facts["commit"] == run.facts["commit"])
            dense = [f"{row['of_dense']:.0%}" for row in same if row.case == last.case and "of_dense" in row]
            lines.append((
                f"{part}; {peer}", f"{geometric_mean(ratios.values()):.2f}x", f"{ratios[worst]:.2f}x at {worst:,}",
                _run_spread(runs, part, peer), f"{', '.join(dense)} at {last['tokens']:,}" if dense else "",
            ))  # fmt: skip
        head = ("part; peer", "mean", "lowest", "between runs", "our GEMMs, of the dense rate")
        yield table(head, lines, f"{links(runs)}.")


def _run_spread(runs: Iterable[Record], part: str, peer: str) -> str:
    """The largest spread of a cell's ratio among runs of one commit."""
    ratios: dict[tuple[str, int], list[float]] = {}
    for record in runs:
        for row in record.rows:
            if row["part"] == part and peer in row.peers:
                ratios.setdefault((record.facts["commit"], row["tokens"]), []).append(row.ratio(peer))
    spreads = [max(each) / min(each) - 1 for each in ratios.values() if len(each) > 1]
    return f"{max(spreads):.1%}" if spreads else ""


@block
def gpu_layer() -> Iterable[str]:
    """Every cell, the roofline, and what batch-invariant order costs."""
    for name in machines("gpu-layer"):
        cells = race_cells(name)
        slower = [fill("{part} than {peer} at {tokens:,} tokens", *one) for one in cells if first_ratio(one[1]) < 1]
        yield f"Slower: {'; '.join(slower)}.\n" if slower else ""
        yield pivot(cells, f"{LAYER}; {{peer}}", "{us:,.0f} ({first_ratio:.2f}x)")
        yield SOURCES.format(links(record for record, _ in cells))
        yield f"![share of the roofline, ours and peers](../benchmarks/results/gpu-layer/{name}/roofline.png)\n"
        yield invariant_cost(records("gpu-layer", name))


def invariant_cost(runs: Iterable[Record]) -> str:
    """How much longer batch-invariant order takes where it launches other kernels, in the worst run."""
    costs: dict[str, dict[int, float]] = {}
    for row in (row for record in runs for row in record.rows if "invariant_us" in row):
        of_part, cost = costs.setdefault(row["part"], {}), row["invariant_us"] / row["us"] - 1
        of_part[row["tokens"]] = max(cost, of_part.get(row["tokens"], 0.0))
    said = [
        f"{part} {', '.join(f'{cost:.0%} at {count}' for count, cost in sorted(of_part.items()))}"
        for part, of_part in costs.items()
    ]
    return f"Batch-invariant order takes longer with few tokens: {'; '.join(said)}.\n" if said else ""


def draw_roofline(name: str) -> None:
    """floor / time against tokens, of our layer and of peers, one panel for each part."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    panels = grouped((row for _, row in race_cells(name)), "part")
    across = min(3, len(panels))
    down = -(-len(panels) // across)
    figure = Figure(figsize=(4.2 * across, 3.2 * down + 0.4), layout="constrained")
    for i, (part, rows) in enumerate(panels.items()):
        axes = figure.add_subplot(down, across, i + 1, title=part, xscale="log", ylim=(0, 1.08))
        lines: dict[str, dict[int, float]] = {}
        for row in sorted(rows, key=lambda row: int(row["tokens"])):
            for peer, us in {"lancebill": row["us"], **row.peers}.items():
                lines.setdefault(peer, {})[row["tokens"]] = row["floor_us"] / us
        for color, (peer, points) in zip(("#0b6e4f", "#c2853d", "#8a94a0", "#7b6fa8", "#b0646f"), lines.items()):
            axes.plot(*zip(*points.items()), marker="o", markersize=3.5, color=color, label=peer)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
        axes.grid(True, alpha=0.2)
        axes.legend(frameon=False, fontsize=7, loc="lower right")
    figure.suptitle("floor / time against tokens; peers without their routing sort unless noted", fontsize=9)
    figure.savefig(RESULTS / "gpu-layer" / name / "roofline.png", dpi=72)


# Layers of many models on a GPU --------------------------------------------------------------------------

REACHABLE = 0.97  # of the floor, in the best cells
FEW_TOKENS = 256


def newest_cells(subject: str) -> list[RunRow]:
    """Every cell once: from the newest run that timed a peer, else from the newest run."""
    found: dict[object, RunRow] = {}
    for record in by_date(records(subject)):
        for row in record.rows:
            if row.peers or not found.get((record.machine, row.case), (record, row))[1].peers:
                found[record.machine, row.case] = record, row
    return list(found.values())


def uniform_cells() -> list[RunRow]:
    return [one for one in newest_cells("gpu-shapes") if one[1]["routing"] == "uniform"]


def _shape_cell(row: Row) -> str:
    versus = f"{row.ratio(HUMMING):.2f}x, " if HUMMING in row.peers else ""
    return f"{row['us']:,.0f} ({versus}{row['of_floor']:.0%})"


def _spec(row: Row) -> str:
    return f"{row['weights']} x {row['activations']}"


def _mean_and_lowest(rows: Iterable[Row], peer: str) -> list[str]:
    ratios = {f"{row['shape']} at {row['tokens']:,}": row.ratio(peer) for row in rows}
    lowest = min(ratios, key=ratios.__getitem__, default="")
    return [f"{geometric_mean(ratios.values()):.2f}x", f"{ratios[lowest]:.2f}x ({lowest})"] if ratios else []


@block
def gpu_shapes_means() -> Iterable[str]:
    """The geometric mean of all cells of each spec, the lowest, and the cells below 1."""
    lines, rows = [], [row for _, row in uniform_cells() if HUMMING in row.peers]
    for spec in dict.fromkeys(map(_spec, rows)):
        own = [row for row in rows if _spec(row) == spec]
        slower = [f"{row['shape']} at {row['tokens']:,}" for row in own if row.ratio(HUMMING) < 1]
        lines.append((spec, len(own), *_mean_and_lowest(own, HUMMING), ", ".join(slower) or "none"))
    yield table(("weights x activations", "cells", "geometric mean", "lowest", "slower than Humming"), lines)


@block
def gpu_shapes_highest() -> Iterable[str]:
    """The means by tokens, and how high they could be: a cell near the floor cannot become much faster."""
    rows = [one for one in uniform_cells() if HUMMING in one[1].peers]

    def cell(row: Row) -> str:
        own = [each for _, each in rows if (_spec(each), each["tokens"]) == (_spec(row), row["tokens"])]
        highest = (each.ratio(HUMMING) * max(1.0, REACHABLE / each["of_floor"]) for each in own)
        return f"{geometric_mean(each.ratio(HUMMING) for each in own):.2f}x ({geometric_mean(highest):.2f}x)"

    yield pivot(rows, "{weights} x {activations}", cell)


@block
def gpu_shapes() -> Iterable[str]:
    yield pivot(uniform_cells(), LAYER, _shape_cell, SOURCES.format(links(run for run, _ in uniform_cells())).strip())


@block
def gpu_shapes_skewed() -> Iterable[str]:
    skewed = [one for one in newest_cells("gpu-shapes") if one[1]["routing"] != "uniform"]
    yield pivot(skewed, f"{LAYER}, {{routing}}", _shape_cell, f"{links(record for record, _ in skewed)}.")


@block
def gpu_shapes_read() -> Iterable[str]:
    """Few tokens beside only reading, from the newest run that has any."""
    runs = [record for record in by_date(records("gpu-shapes")) if any("read_us" in row for row in record.rows)]
    rows = [(record, row) for record in runs[-1:] for row in record.rows if "read_us" in row]
    yield pivot(rows, LAYER, "{us:.1f} ({read_us:.1f}, {of_read:.0%}; {of_floor:.0%})", f"{links(runs[-1:])}.")


def _bound_by_reading(row: Row) -> bool:
    """Whether reading the weights takes clearly longer than multiplying, even at the rate of bf16."""
    return bool(row["floor_us"] > 1.01 * row["gemm_us"])


def older_means(rows: Sequence[Row]) -> str:
    """Mean and lowest ratio to Marlin, and to our Hopper kernels with few tokens where reading bounds both."""
    lines = []
    for spec in dict.fromkeys(map(_spec, rows)):
        own = [row for row in rows if _spec(row) == spec]
        read = [row for row in own if row["tokens"] <= FEW_TOKENS and _bound_by_reading(row)]
        marlin, hopper = (", lowest ".join(_mean_and_lowest(*pair)) for pair in ((own, MARLIN), (read, HOPPER)))
        lines.append((spec, len(own), marlin, len(read), hopper))
    where = f"bound by reading, up to {FEW_TOKENS} tokens"
    return table(("weights x activations", "cells", "against Marlin", where, "of these against `hopper`"), lines)


@block
def gpu_older() -> Iterable[str]:
    """Kernels for older GPUs with 16-bit activations."""
    compared = [one for one in newest_cells("gpu-older") if MARLIN in one[1].peers]
    yield older_means([row for _, row in compared])
    yield pivot(compared, LAYER, f"{{us:,.0f}} ({{ratio[{MARLIN}]:.2f}}x, {{ratio[{HOPPER}]:.2f}}x)")
    yield SOURCES.format(links(records("gpu-older"))) if compared else ""


@block
def gpu_older_int8() -> Iterable[str]:
    yield integers(records("gpu-older"))


def integers(runs: Iterable[Record]) -> str:
    """Layers with int8 activations beside the same layer with bf16 activations in the same run."""
    found = []
    for record in runs:
        times = {row.case: row["us"] for row in record.rows}
        for row in record.rows:
            plain = times.get(row.case.replace(activations="bf16"))
            if row["activations"] == "int8" and plain is not None:
                found.append((record, Row(row.case, {**row.figures, "plain_us": plain})))

    def cell(row: Row) -> str:
        most = f" of at most {row['plain_us'] / row['floor_us']:.2f}x" if _bound_by_reading(row) else ""
        return f"{row['us']:,.0f} ({row['plain_us'] / row['us']:.2f}x{most})"

    return pivot(found, "{shape}, {weights}", cell)


# The host's side of a GPU, and matrices ------------------------------------------------------------------

_FIRST_FORWARD = (
    "The first result of a fresh process with the shipped kernels takes {least[seconds]:.2f} to {most[seconds]:.2f} s "
    "after `import torch`; {most[compiled]} kernels are compiled ({links})."
)
_ROUTING = "Routing from logits adds, in a CUDA graph at {counts} tokens of {model}: {added} µs ({links})."
_CAPTURE_MEMORY = (
    "CUDA graphs of {layers} layers ({shape}'s sizes) at {sizes} numbers of tokens take {shared:,.0f} MiB of GPU "
    "memory in one pool, {separate:,.0f} MiB in pools of their own, {reserved:,.0f} MiB after `reserve` (of which "
    "{reserved_mib:,.0f} MiB are reserved) ({links})."
)
_SANITIZERS = (
    "compute-sanitizer on {cases} small layers, which cover every branch of the kernels: {said}, at {commit:.7} "
    "({links})."
)


@block
def gpu_host() -> Iterable[str]:
    """Time to the first result, what routing adds, memory of CUDA graphs, and the sanitizers' verdicts."""
    lines = [fill(_FIRST_FORWARD, record) for record in newest("first-forward")]
    for record in newest("routing"):
        for rows in grouped(record.rows, "model").values():
            counts, added = zip(*((str(row["tokens"]), f"{row['added_us']:.1f}") for row in rows))
            lines.append(fill(_ROUTING, record, rows[0], counts=", ".join(counts), added=", ".join(added)))
    for record in newest("capture-memory"):
        pools = {row["pool"]: row["device_mib"] for row in record.rows}
        lines.append(fill(_CAPTURE_MEMORY, record, record.rows[-1], **pools))
    for record in newest("sanitize"):
        verdicts = ", ".join(
            f"{row['tool']} {'clean' if row['verdict'] == 'clean' else str(row['unordered']) + ' findings'}"
            for row in record.rows
        )
        lines.append(fill(_SANITIZERS, record, said=verdicts))
    yield "".join(f"* {line}\n" for line in lines)


of_each("host-time", listed(
    "layer|tokens|eager|int64, bf16: host|device|each of 8, eager|compiled|replayed|one, compiled|torch's share",
    f"{LAYER}|{{tokens}}|{{host_us:.0f}}|{{routed_host_us:+.1f}}|{{routed_device_us:+.1f}}|{{eager_each_us:.0f}}|"
    "{compiled_each_us:.0f}|{replayed_each_us:.0f}|{compiled_us:.0f}|{torch_us:.0f}",
))  # fmt: skip
of_each("gpu-linear", crossed(
    "{size}, {weights}", "{us:.1f} ({of_read:.0%}; {host_us:.1f})",
    "{machine}; host time of `nn.Linear`: {least[nn_host_us]:.1f} to {most[nn_host_us]:.1f} µs; {links}.", "rows",
))  # fmt: skip
of_each("cpu-linear", crossed(
    "{size}, {weights}", "{ms:.2f} ({of_read:.0%})", "{machine}, {threads} threads{busy}; {links}.", "rows",
))  # fmt: skip

# A layer on a CPU ----------------------------------------------------------------------------------------


@block
def cpu_layer() -> Iterable[str]:
    """For each machine: every instruction set level against its first peer, with the most threads of each run."""
    for name in sorted(machines("cpu-layer"), key=lambda name: (name != "xeon-amx", name)):
        runs = records("cpu-layer", name)
        cells = cpu_cells(runs)
        ratios = [list(map(ratio, rows)) for line in cells.values() for rows in line.values()
                  for ratio in (first_ratio, _median_ratio)]  # fmt: skip
        spread = max(max(each) / min(each) - 1 for each in ratios)
        most = max(record.facts["layer"]["experts"] for record in runs)
        notes = [f"{runs[0].machine_title}", f"several runs differ by up to {spread:.0%}" if spread else ""]
        for record in (record for record in runs if record.facts["layer"]["experts"] < most):
            fewer = f"{record.path.stem} has {record.facts['layer']['experts']} of the {most} experts"
            notes.append(f"{fewer}, at a load of {record.facts['load']:.1f}")
        counts = sorted(set(chain.from_iterable(cells.values())))
        lines = ([label, *(_cpu_cell(line.get(count)) for count in counts)] for label, line in cells.items())
        head = ["tokens", *(f"{count:,}" for count in counts)]
        yield table(head, lines, f"{'; '.join(filter(None, [*notes, links(runs)]))}.")


def cpu_cells(runs: Iterable[Record]) -> dict[str, dict[int, list[Row]]]:
    """Rows of all runs by contestant and tokens."""
    found: dict[str, dict[int, list[Row]]] = {}
    for row in (row for record in runs for row in record.rows if row.peers):
        label = f"{_spec(row)}, {row['level']}, {row['threads']} threads; {peer_of(row)}"
        found.setdefault(label, {}).setdefault(row["tokens"], []).append(row)
    return found


def _median_ratio(row: Row) -> float:
    return row.ratio(f"{peer_of(row)}, median", "median_us")


def _cpu_cell(rows: list[Row] | None) -> str:
    if rows is None:
        return ""
    fastest, median = (geometric_mean(map(ratio, rows)) for ratio in (first_ratio, _median_ratio))
    return f"{min(row['us'] for row in rows) / 1e3:.2f} ({fastest:.2f}x, {median:.2f}x)"


# Whole models --------------------------------------------------------------------------------------------

of_each("generate", crossed(
    "{who} {experts}, {expert_gb:.1f} GB", "{tokens_per_s:,.0f}",
    "{machine}; {shape} with {layers} layers, prompts of {prompt_tokens} tokens, {new_tokens} new tokens; {links}.",
    "sequences",
))  # fmt: skip
of_each("demo-decode", listed(
    "machine|lancebill|llama.cpp|ratio",
    "{machine}|{tokens_per_s:.1f}|{peers[llama.cpp]:.1f}|{over_llama_cpp:.2f}x", "{links}.",
))  # fmt: skip


@block
def generate_graphs() -> Iterable[str]:
    """Our decode steps with and without CUDA graphs: the newest run of each model."""
    found = {row.case: (record, row) for record in records("generate-graphs") for row in record.rows}.values()
    line = "{shape}, {layers} layers, {experts}|{peers[without graphs]:,.0f}|{tokens_per_s:,.0f}|{same_tokens}"
    head = ("model", "without graphs", "with graphs", "same tokens")
    yield table(head, (fill(line, *one).split("|") for one in found), f"{links(record for record, _ in found)}.")


of_each("cpu-prompts", listed(
    "tokens|native|own operators|experts|dense|attention",
    "{tokens:,}|{seconds:.2f}|{peers[own operators]:.2f}|{experts:.2f}|{dense:.2f}|{attention:.2f}",
    "{machine}; {model}{busy}; {links}.",
))  # fmt: skip


def _kind(name: str) -> Callable[[Record], list[Row]]:
    return lambda record: [row for row in record.rows if row["what"] == name]


_STREAMS = {
    "step": listed(
        "sequences|a step|throughput", "{sequences}|{ms:.1f}|{throughput:.2f}x",
        "{machine}, {threads} threads{busy}; {model}. {note}{links}.", _kind("step"),
    ),
    "served": listed(
        "streams|tokens/s|first tokens, last over first|at most|last over a lone one",
        "{sequences}|{tokens_per_s:.1f} ({over_one:.2f}x)|{over_first:.2f}|{over_first_most:.1f} in {runs} runs|"
        "{over_lone:.1f}", "", _kind("served"),
    ),
    "long prompt": listed(
        "tokens of a long prompt|read in|streams beside it|longest wait|before",
        "{tokens:,}|{first_token_s:.1f} s|{sequences}|{largest_gap_ms:.0f} ms|{gap_before_ms:.0f} ms", "",
        _kind("long prompt"),
    ),
    "parts": listed(
        "sequences x tokens|all|experts|dense|head|attention|rest",
        "{sequences} x {tokens}|{all:.1f}|{experts:.1f}|{dense:.1f}|{head:.1f}|{attention:.1f}|{rest:.1f}", "",
        _kind("parts"),
    ),
    "prompt": listed(
        "prompts x tokens|native|own operators", "{sequences} x {tokens}|{ms:.1f}|{peers[own operators]:.1f}", "",
        _kind("prompt"),
    ),
}  # fmt: skip


@block
def cpu_streams() -> Iterable[str]:
    for record in records("cpu-streams"):
        yield from (write(record) for write in _STREAMS.values())


of_each("serve", lambda record: fill(
    "* {machine}: {clients} clients for {seconds:.0f} s, {requests:,} requests, {server_errors} server errors, {stuck} "
    "stuck, {afterwards} afterwards; memory {quarter_mb:.0f} MB after a quarter of the time, {end_mb:.0f} MB at the "
    "end; {links}\n", record, record.rows[0],
))  # fmt: skip

# Accuracy ------------------------------------------------------------------------------------------------

of_each("perplexity", listed(
    "weights x activations|backend|perplexity|difference",
    "{variant}|{backend}|{perplexity:.4f}|{difference}", "{machine}; {tokens:,} tokens ({extent}); {links}.",
))  # fmt: skip
_SCORES = (
    "variant|strict|flexible|p, strict|p, flexible",
    "{variant}|{strict:.1%} ± {strict_stderr:.1%}|{flexible:.1%} ± "
    "{flexible_stderr:.1%}|{strict_p:.2g}|{flexible_p:.2g}",
    "{questions} questions of GSM8K, {shots} examples in the prompt; {machine}; {links}.",
)
of_each("questions", listed(*_SCORES))
_ROUNDING = (
    "{weights}|{plain_error:.2%}|{search_error:.2%}|{plain_divergence:.4f}|{search_divergence:.4f}|{tokens:,} tokens|"
    "{stored_perplexity:.2f}|{plain_perplexity:.2f}|{search_perplexity:.2f}|{more_loss:+.3f} ± {more_loss_stderr:.3f}|"
    "{seconds_ratio:.2f}x"
)


@block
def rounding() -> Iterable[str]:
    """A row for each spec: of all runs of a machine the one over most tokens, the newest of those."""
    for last in newest("rounding"):
        chosen: dict[str, RunRow] = {}
        for record in sorted(records("rounding", last.machine), key=lambda record: int(record.facts["tokens"])):
            chosen |= {row["weights"]: (record, row) for row in record.rows}
        head = "spec|error|with search|divergence|with search|perplexity|stored|plain|with search|loss difference|time"
        lines = (fill(_ROUNDING, *chosen[spec]).split("|") for spec in sorted(chosen))
        sources = links(record for record, _ in chosen.values())
        yield table(
            head.split("|"), lines, fill("{machine}; windows of {window} tokens; {sources}.", last, sources=sources)
        )


# Loading -------------------------------------------------------------------------------------------------

of_each("memory", listed(
    "experts stored as|loaded by|peak|tensors", "{weights}|{loader}|{peak_ratio:.2f}x|{held_gb:.2f} GB",
    "{machine}; a checkpoint of {first[checkpoint_gb]:.1f} GB; {links}.",
))  # fmt: skip
of_each("convert", listed(
    "conversion|source read|memory", "bf16 to {weights}, {search} search|{core_mb_per_s:.0f} MB/s|{peak_mib:.0f} MiB",
))  # fmt: skip
of_each("verify", listed(
    "checkpoint|values checked", "{format}, {weights}|{core_gb_per_s:.2f} GB/s",
    "{machine}; the headers of {first[gb]:.0f} GB ({first[tensors]:,} tensors) take {first[cpu_seconds]:.1f} s of one "
    "core; {links}.", _kind("values"),
))  # fmt: skip
_PACKED_ON_GPU = listed(
    "stored as|from|GB/s|of the copy rate|ms|MiB beside the result",
    "{checkpoint}|{source}|{gb_per_s:.0f}|{of_copy:.1%}|{ms:.0f}|{peak_mib:,.0f}",
    "{machine}; a layer of {first[packed_gb]:.1f} GB; copies from pinned memory: {pinned_copy_gbs:.0f} GB/s; {links}.",
)
_PACKED_ON_CPU = crossed(
    "{checkpoint}", "{core_gb_per_s:.2f} ({gb_per_s:.1f})",
    "{machine}; a layer of {first[packed_gb]:.1f} GB; a core copies {copy_gbs:.1f} GB/s; {links}.",
    "{source}, {threads}",
)  # fmt: skip
of_each("pack", lambda record: (_PACKED_ON_GPU if "pinned_copy_gbs" in record.facts else _PACKED_ON_CPU)(record))

# Experts on a GPU and in host memory ---------------------------------------------------------------------

_HYBRID_NOTE = (
    "{machine}, {threads} threads; memory is read at {rates} GB/s, PCIe copies {wire_gbs:.0f} GB/s; {links}.{kept}"
)


def _split_tables(kind: str, name: str, cell: str, kept: Callable[[list[Row]], str] = lambda rows: "") -> None:
    """A block with the rows of a kind: of each layer from the newest run that has some."""

    def write() -> Iterable[str]:
        seen: set[tuple[str, str, str]] = set()
        for record in reversed(records("hybrid")):
            rows = [row for row in record.rows if row["kind"] == kind
                    and (record.machine, row["shape"], row["weights"]) not in seen]  # fmt: skip
            seen |= {(record.machine, row["shape"], row["weights"]) for row in rows}
            if rows:
                rates = " to ".join(dict.fromkeys(f"{rate:.0f}" for rate in sorted(record.facts["read_gbs"])))
                shown = [(record, _shown(row)) for row in rows if kind != "decode" or row["routing"] == "uniform"]
                yield pivot(shown, name, cell, fill(_HYBRID_NOTE, record, rates=rates, kept=kept(rows)))

    BLOCKS[f"hybrid_{kind}"] = lambda: "\n".join(write())


def _shown(row: Row) -> Row:
    """With the peers of a row as one text."""
    wrong = [f"{name} wrong" for name in row.figures.get("wrong", ())]
    beside = ", ".join([*(f"{name} {peer / row['cpu_us']:.2f}x" for name, peer in row.peers.items()), *wrong])
    return Row(row.case, {**row.figures, "beside": beside})


def _within_bar(rows: list[Row]) -> str:
    over = [row["split_us"] / row["bar_us"] for row in rows]
    kept = f"{sum(each <= 1 for each in over)} of {len(rows)} cells are within what is asked"
    return f" {kept}, the worst takes {max(over):.2f} times it."


def _within_best(rows: list[Row]) -> str:
    over = [row["over_best"] for row in rows]
    slower = sum(row["prefill_ms"] > min(row["cpu_ms"], row["copied_ms"]) for row in rows)
    kept = f"{sum(each <= 1.15 for each in over)} of {len(rows)} cells take at most 1.15 times the best"
    return f" {kept}, the worst {max(over):.2f} times; {slower} are slower than one way alone."


_split_tables("decode", "{shape}, {weights}, {share} %", "{split_us:,.0f} ({bar_us:,.0f})", _within_bar)
_split_tables("prefill", "{shape}, {weights}", "{prefill_ms:.1f} ({cpu_ms:.1f}; {copied_ms:.1f}; best {best_ms:.1f})",
              _within_best)  # fmt: skip
_split_tables("peers", "{shape}, {weights}", "{cpu_us:,.0f} ({beside})")
_split_tables("moves", "{shape}, {weights}", "{recency_us:,.0f} ({still_us:,.0f}; {always_us:,.0f})")


def _split_models(record: Record) -> str:
    """Whole small models with half of their experts in host memory."""
    found = grouped(record.rows, "what")
    calls, (model,), (before,), (after,), (ended,) = (
        found[what] for what in ("call", "model", "before", "after", "SIGINT")
    )
    rates = [row["tokens_per_s"] for row in calls]
    lines = {
        "tokens/s (the same model whole on the GPU)": f"{model['tokens_per_s']:,.0f} ({model.peers['whole']:,.0f})",
        "tokens before the first that differs from the whole model's, of 64": model["equal_tokens"],
        f"{1000 * len(calls):,} steps of a tiny model in {len(calls)} calls":
            f"{min(rates):,.0f} to {max(rates):,.0f} tokens/s",
        "calls with the tokens of the first one": f"{sum(row['same'] for row in calls)} of {len(calls)}",
        "memory, threads and mailboxes after its first call; from there to the last one":
            f"{_growth(before, calls[0])}; {_growth(calls[0], calls[-1])}",
        "a call after one that was interrupted": "the same tokens" if after["same"] else "not the same",
        "a process that gets SIGINT": f"ends after {ended['seconds']:.1f} s with status {ended['status']}",
        "GPU memory that is missing afterwards": f"{ended['lost_gpu_bytes']:,} bytes",
    }  # fmt: skip
    note = "{machine}; {layers} layers of {experts} experts, MXFP4; the tiny model has {tiny} layers; {links}."
    return table(("", "measured"), lines.items(), fill(note, record, model, tiny=before["layers"]))


def _growth(before: Row, after: Row) -> str:
    units = {
        "rss": "bytes of host memory",
        "gpu": "bytes of GPU memory",
        "threads": "threads",
        "mailboxes": "mailboxes",
    }
    grown = [f"{after[name] - before[name]:+,} {unit}" for name, unit in units.items() if after[name] != before[name]]
    return ", ".join(grown) or "nothing grew"


of_each("hybrid-generate", _split_models)

# Models in vLLM ------------------------------------------------------------------------------------------

MODELS = {
    "qwen3-v4-experts": "Qwen3's attention with the experts of DeepSeek-V4-Flash, 6 layers",
    "qwen3-v4-experts-1-layer": "Qwen3's attention with the experts of DeepSeek-V4-Flash, 1 layer",
    "gpt-oss-120b": "gpt-oss-120b, 6 layers",
    "gpt-oss-20b": "gpt-oss-20b, all 24 layers",
    "gpt-oss-1-layer": "gpt-oss-120b, 1 layer",
    "qwen3-30b": "Qwen3-30B-A3B, 48 layers",
    "qwen3-30b-6-layers": "Qwen3-30B-A3B, 6 layers",
    "qwen3-30b-1-layer": "Qwen3-30B-A3B, 1 layer",
    "deepseek-v4-flash": "DeepSeek-V4-Flash, 6 layers",
}
Kind = tuple[str, str, int]  # model, activations, most tokens of an answer
Load = tuple[int, int, int, int]  # prompts, how many at once, tokens in, tokens out


def rows_of(record: Record, what: str, **labels: object) -> list[Row]:
    wanted = {"what": what, **labels}.items()
    return [row for row in record.rows if wanted <= dict(row.case.labels).items()]


def rates_of(record: Record, **labels: object) -> dict[str, float]:
    """Tokens per second by backend."""
    return {row["backend"]: row["tokens_per_s"] for row in rows_of(record, "rate", **labels)}


def _is_ours(backend: str) -> bool:
    return backend.startswith("ours")


def compares(rows: Iterable[Row]) -> bool:
    """Whether both ours and a peer have a figure."""
    return len({_is_ours(row["backend"]) for row in rows}) == 2


def load_of(row: Row) -> Load:
    concurrency = row["concurrency"] if "concurrency" in row else row["prompts"]
    return row["prompts"], concurrency, row["tokens_in"], row["tokens_out"]


def load_title(load: Load) -> str:
    prompts, concurrency, given, new = load
    asked = "one prompt" if prompts == 1 else f"{prompts} prompts, {min(prompts, concurrency)} at once"
    return f"{given:,} in, {new:,} out: {asked}"


class Column:
    """A case of one run: what each backend has and, of ours, the ratio to the best of the others."""

    def __init__(
        self, title: str, record: Record, rows: list[Row], figure: str = "tokens_per_s", best: Any = max
    ) -> None:
        self.title, self.record, self.rows, self.best = title, record, rows, best
        self.figures = {row["backend"]: float(row[figure]) for row in rows if figure in row}

    def cell(self, backend: str) -> str:
        if backend not in self.figures:
            return ""
        peer = self.best(figure for name, figure in self.figures.items() if not _is_ours(name))
        ratio = f" ({self.figures[backend] / peer:.2f}x)" if _is_ours(backend) else ""
        return f"{self.figures[backend]:,.0f}{ratio}"


def backend_lines(columns: Sequence[Column]) -> dict[str, list[str]]:
    """The cells of each backend that has a rate, ours last."""
    backends = {backend for column in columns if column.best is max for backend in column.figures}
    ordered = sorted(backends, key=lambda name: (_is_ours(name), name))
    return {name: [_backend_title(name), *(column.cell(name) for column in columns)] for name in ordered}


def _backend_title(name: str) -> str:
    return "**lancebill**" if _is_ours(name) else name.removesuffix("-fp8")


@block
def vllm_serving() -> Iterable[str]:
    """For each model, kind of activations and length of answers the newest run that has ours and a peer."""
    groups: dict[Kind, tuple[Record, list[Row]]] = {}
    for record in records("vllm-serving"):
        kinds: dict[Kind, list[Row]] = {}
        for row in rows_of(record, "rate"):
            same = rows_of(record, "rate", model=row["model"], backend=row["backend"])
            kind = row["model"], row["activations"], max(each["tokens_out"] for each in same)
            kinds.setdefault(kind, []).append(row)
        groups |= {kind: (record, rows) for kind, rows in kinds.items() if compares(rows)}
    for kind in sorted(groups, key=lambda kind: (list(MODELS).index(kind[0]), *kind[1:])):
        yield _serving_table(*groups[kind])


_SERVING_NOTE = (
    "{title}, MXFP4 x {activations}; median of {trials} trials; vLLM {vllm}, {graphs}, {compiler}; {machine}; {used}."
)


def _serving_table(record: Record, rates: list[Row]) -> str:
    model, activations = rates[0]["model"], rates[0]["activations"]
    loads: dict[Load, list[Row]] = {}
    for row in rates:
        loads.setdefault(load_of(row), []).append(row)
    columns = [
        Column(f"{load[0]} prompts of {load[2]:,}" if load[3] == 1 else f"{load[0]} x {load[3]:,} new", record, rows)
        for load, rows in loads.items()
    ]
    seconds = {row["backend"]: f"{row['load_s']:.1f}" for row in rows_of(record, "load", model=model)}
    used, lines = [record], []
    for backend, cells in backend_lines(columns).items():
        later, experts = _experts_time(record, model, backend)
        used += later
        lines.append([*cells, seconds.get(backend, ""), experts])
    note = fill(_SERVING_NOTE, record, title=MODELS[model], activations=activations, used=links(used))
    return table(("", *(column.title for column in columns), "load", "experts"), lines, note)


def _experts_time(record: Record, model: str, backend: str) -> tuple[list[Record], str]:
    """What the experts' kernels take in a step of one sequence; of older runs the sum, and a later run's time."""
    own = rows_of(record, "kernels", model=model, backend=backend)
    if not own or "experts_us" in own[0]:
        return [], "".join(f"{row['experts_us']:,.0f}" for row in own)
    timed = [(run, row) for run in records("vllm-serving")
             for row in rows_of(run, "kernels", model=model, backend=backend) if "experts_us" in row][-1:]  # fmt: skip
    alone = "".join(f", {row['experts_us']:,.0f}" for _, row in timed)
    return [run for run, _ in timed], f"{own[0]['experts_sum_us']:,.0f} (sum){alone}"


@block
def vllm_answers() -> Iterable[str]:
    """How far answers are from those of one of vLLM's own backends with the same weights: the newest of each."""
    found = {(row["model"], row["backend"]): (record, row)
             for record in records("vllm-serving") for row in rows_of(record, "answers")}  # fmt: skip
    line = (
        "{title}, {backend}|{against}|{largest:.3f}|{mean:.4f}|{bounded} <= {bound}|{same_answers} of {answers}|"
        "{largest_margin:.3f}"
    )
    order = sorted(found, key=lambda one: list(MODELS).index(one[0]))
    lines = (fill(line, *found[one], title=MODELS[one[0]]).split("|") for one in order)
    head = ("", "against", "largest", "mean", "bound", "same answers", "largest margin")
    yield table(head, lines, f"{links(record for record, _ in found.values())}.")


_SPLIT = (
    "answers: {same_answers} of {answers} are the same, the others part where the margin is at most "
    "{largest_margin:.3f}; log-probabilities of given tokens differ by {mean:.4f} on average, {largest:.3f} at most"
)


@block
def vllm_split() -> Iterable[str]:
    """The newest run: a model with half of its experts on the CPU, beside the whole one."""
    for record in records("vllm-split")[-1:]:
        lines: dict[str, list[str]] = {}
        for row in rows_of(record, "rate"):
            name = "half on the CPU" if row["backend"] == "ours-split" else "all on the GPU"
            lines.setdefault(name, [name]).append(f"{row['tokens_per_s']:,.0f}")
        for line, row in zip(lines.values(), rows_of(record, "memory")):
            line += [
                f"{row[f'{place}_gib']:.2f} GiB ({row[f'{place}_growth_mib']:+.1f} MiB)" for place in ("gpu", "host")
            ]
        loads = dict.fromkeys(map(load_of, rows_of(record, "rate")))
        answers = "; ".join(fill(_SPLIT, record, row) for row in rows_of(record, "answers"))
        note = fill(
            "{model} in vLLM {vllm}; {most[steps]:,} steps; {said}; {links}.", record, record.rows[0], said=answers
        )
        yield table(("experts", *map(load_title, loads), "GPU memory", "host memory"), lines.values(), note)


_LOAD_NOTE = (
    "{title}, MXFP4 x {activations}; median of {counts} trials; vLLM {vllm}, {graphs}, {compiler}; answers are "
    "streamed in parts of {stream_interval} tokens; {used}."
)


@block
def vllm_bench_serve() -> Iterable[str]:
    """A table for each model and kind of activations: of each load the newest run that has ours and a peer."""
    tables: dict[tuple[str, str], dict[Load | None, Column]] = {}
    for record in records("vllm-bench-serve"):
        groups: dict[tuple[tuple[str, str], Load | None], list[Row]] = {}
        for row in record.rows:
            load = load_of(row) if row["what"] == "rate" else None
            groups.setdefault(((row["model"], row["activations"]), load), []).append(row)
        for (kind, load), rows in groups.items():
            if compares(rows):
                column = Column(load_title(load), record, rows) if load else Column(
                    "experts", record, rows, "experts_us", min)  # fmt: skip
                tables.setdefault(kind, {})[load] = column
    for (model, activations), columns in sorted(tables.items()):
        yield _load_table(model, activations, columns)


def _load_table(model: str, activations: str, columns: dict[Load | None, Column]) -> str:
    loads = sorted((load for load in columns if load is not None), key=lambda load: (load[3] > 1, load[1], load[3]))
    chosen, last = [columns[load] for load in loads], [columns[None]] if None in columns else []
    counts = [min(row["trials"] for row in column.rows) for column in chosen]
    spreads = ["one trial" if count == 1 else f"{max(row['spread'] for row in column.rows):.0%}"
               for count, column in zip(counts, chosen)]  # fmt: skip
    lines = [*backend_lines([*chosen, *last]).values(), ["trials differ by up to", *spreads, *("" for _ in last)]]
    note = fill(
        _LOAD_NOTE, chosen[-1].record, title=MODELS.get(model, model), activations=activations,
        counts=" to ".join(dict.fromkeys(map(str, (min(counts), max(counts))))),
        used=links(column.record for column in (*chosen, *last)),
    )  # fmt: skip
    return table(("", *(column.title for column in (*chosen, *last))), lines, note)


# vLLM on CPUs --------------------------------------------------------------------------------------------

FAMILY = re.compile(r"test_tokens_and_log_probabilities\[(?P<family>\w+)-")


@block
def vllm_cpu() -> Iterable[str]:
    """Of each test the newest run with the newest version of vLLM: all of them, then those of each family."""
    for runs in (records("vllm-cpu", name) for name in machines("vllm-cpu")):
        facts = runs[-1].facts
        same = [record for record in runs if record.facts["vllm"] == facts["vllm"]]
        found = {row["test"]: (record, row) for record in same for row in record.rows}
        tests, used = [row for _, row in found.values()], links(record for record, _ in found.values())
        counts = ", ".join(f"{len(rows)} {outcome}" for outcome, rows in sorted(grouped(tests, "outcome").items()))
        stopped = "" if len(tests) == facts["collected"] else f" of {facts['collected']} tests; stopped by time"
        yield (
            f"`{facts['command']}` with vLLM {facts['vllm']}: {counts}{stopped}; the largest difference of a "
            f"log-probability is {_largest(tests):.1e}; {used}\n"
        )
        families: dict[str, list[Row]] = {}
        for row in tests:
            if match := FAMILY.search(row["test"]):
                families.setdefault(match["family"], []).append(row)
        lines = (
            (family, f"{sum(row['outcome'] == 'passed' for row in own)} of {len(own)}", f"{_largest(own):.1e}")
            for family, own in sorted(families.items(), key=lambda item: (-len(item[1]), item[0]))
        )
        yield table(("family", "equal", "largest difference"), lines)


def _largest(tests: Iterable[Row]) -> float:
    return max((row["distance"] for row in tests if "distance" in row), default=math.nan)


_LIKELIHOOD = listed(
    "variant|nats a token|more than the first|standard error|p|same likeliest token",
    "{variant}|{nats:.4f}|{more_nats:+.4f}|{more_nats_stderr:.4f}|{nats_p:.2g}|{same_likeliest:.1%}",
    "The first {solutions} solutions, {first[solution_tokens]:,} tokens.",
)


@block
def serve_accuracy() -> Iterable[str]:
    for record in newest("serve-accuracy"):
        yield listed(*_SCORES)(record)
        yield _LIKELIHOOD(record) if record.facts.get("solutions") else ""


_DECODE = (
    "* {machine}, {dtype}, threads: {threads}, {clock}, median of {turns} turns: vLLM {vllm} ({mode}) {by[vllm]:.1f}, "
    "transformers' own steps {by[transformers]:.1f} ({over:.2f}x), the native steps of `lancebill generate` "
    "{by[native]:.1f}; where the time of vLLM goes: {shares}; {links}"
)


@block
def decode_engines() -> Iterable[str]:
    lines = []
    for record in newest("decode-engines"):
        by, (vllm,) = (
            {row["engine"]: row["tokens_per_s"] for row in record.rows},
            rows_of(record, "rate", engine="vllm"),
        )
        shares = ", ".join(f"{name} {share:.0%}" for name, share in vllm["shares"].items())
        over = by["vllm"] / by["transformers"]
        lines.append(fill(_DECODE, record, by={"native": math.nan} | by, over=over, shares=shares))
    yield "".join(f"{line}\n" for line in lines)
