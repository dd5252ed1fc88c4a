"""Fill the tables and pictures of README.md from the files in benchmarks/results: no figure is typed by hand.

    python benchmarks/tables.py            rewrites README.md
    python benchmarks/tables.py --check    says whether it is what the files make it

A block begins with `<!-- results: NAME -->` and ends with `<!-- end -->`. Every function below that has the name of a
block makes its text. Files that a run has not written yet leave their part out.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
README, RESULTS = ROOT / "README.md", ROOT / "benchmarks" / "results"
BLOCK = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

SHAPE, SPEC, ACTIVATIONS, DEVICE = "qwen3-30b-a3b", "mxfp4", "fp8", "sm_80"  # what `explain` is shown on
INSTALLED = ("library", "package", "triton")  # reasons that say what a machine lacks

# What was asked of the GPU kernels before they were written: the mean over all sizes, and of the dense rate.
ASKED = {"deepseek-mxfp4-bf16": (1.4, 0.9), "deepseek-mxfp4-fp8": (1.12, 0.8), "deepseek-int4-bf16": (1.2, 0.9)}
ASKED_PEER = "humming"
ASKED_HOST_US = 25
OTHER_CPUS = ("xeon-avx512-prefill", "cascade-lake-cpu", "neoverse-n1-cpu")  # beside those of the table


def main() -> None:
    before = README.read_text(encoding="utf-8")
    after = filled(before)
    if "--check" in sys.argv[1:]:
        sys.exit(
            0 if before == after else "README.md is not what benchmarks/results makes it: run benchmarks/tables.py"
        )
    README.write_text(after, encoding="utf-8")


def filled(text: str) -> str:
    return BLOCK.sub(lambda match: f"{match[1]}{BLOCKS[match[2]]()}{match[3]}", text)


def table(head: Sequence[str], rows: Iterable[Sequence[object]], note: str = "") -> str:
    """Markdown; the first column to the left, figures to the right."""
    lines = [f"| {' | '.join(head)} |", "|" + "|".join("---" if i == 0 else "---:" for i in range(len(head))) + "|"]
    lines += [f"| {' | '.join(map(str, row))} |" for row in rows]
    return "\n".join(lines) + "\n" + (f"\n{note}\n" if note else "")


def record(name: str) -> dict[str, Any] | None:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def source(*names: str) -> str:
    return ", ".join(f"[{name}.json](benchmarks/results/{name}.json)" for name in names)


def explain() -> str:
    """What `lancebill explain` says of one question, less what only depends on what is installed here."""
    from lancebill.backends import oracle
    from lancebill.moe.model_shapes import parse_shape
    from lancebill.moe.problem import parse_device
    from lancebill.numbers.spec_names import parse_activation, parse_spec

    problem = parse_shape(SHAPE).problem(parse_spec(SPEC), parse_activation(ACTIVATIONS), tp=1)
    choice = oracle.explain(problem, parse_device(DEVICE))
    lines = [f"$ lancebill explain --shape {SHAPE} --weights {SPEC} --activations {ACTIVATIONS} --device {DEVICE}"]
    for verdict in choice.verdicts:
        taken = choice.chosen is not None and verdict.backend is choice.chosen.backend
        reasons = [reason for reason in verdict.reasons if reason.code not in INSTALLED]
        words = (
            "; ".join(map(str, reasons)) if verdict.reasons else ", ".join(verdict.plan.notes if verdict.plan else ())
        )
        state = "chosen" if taken else "possible" if verdict.supported else "no"
        lines.append(f"{verdict.backend.name:<11}{state:<10}{words}".rstrip())
    return "\n".join(["```", *lines, "```\n"])


def hopper() -> str:
    """Layers beside peers: what a part comes to over all its sizes, what falls short, then every cell."""
    runs = races()
    if not runs:
        return ""
    rows = newest(runs)
    parts = [_means(rows, runs), _missed(rows, runs), _race(rows), _picture(), _invariant(runs), _starting()]
    return "\n".join(part for part in parts if part)


def races() -> dict[str, dict[str, Any]]:
    """Runs that raced ours beside peers, the oldest first."""
    found = {file.stem: json.loads(file.read_text()) for file in sorted(RESULTS.glob("hopper-*.json"))}
    raced = {name: run for name, run in found.items() if run["rows"] and all("against" in row for row in run["rows"])}
    return dict(sorted(raced.items(), key=lambda item: str(item[1]["date"])))


def newest(runs: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Every cell once, as the newest run has it that raced this peer, with the names of run and peer."""
    rows = [
        row | {"run": name, "peer": next(iter(row["against"]))} for name, run in runs.items() for row in run["rows"]
    ]
    cells = {(row["part"], row["peer"], row["tokens"]): row for row in rows}
    order = list(dict.fromkeys((row["peer"], row["part"]) for row in rows))
    return sorted(cells.values(), key=lambda row: (order.index((row["peer"], row["part"])), row["tokens"]))


def _race(rows: list[dict[str, Any]]) -> str:
    """Ours in microseconds, and how much longer the first peer takes."""
    cells: dict[str, dict[int, str]] = {}
    for row in rows:
        what = f"{row['shape']}, {row['spec']} x {row['activations']}; {row['peer']}"
        cells.setdefault(what, {})[row["tokens"]] = f"{row['ours']['us']:,.0f} ({ratio(row):.2f}x)"
    note = (
        "µs of a whole layer on an H200, from ids to the combined output, and how many times longer the peer takes in "
        "the same run (the faster variant of humming and of triton_kernels, their routing sorts not counted). Each "
        f"cell is of the newest run that has it: {source(*dict.fromkeys(row['run'] for row in rows))}"
    )
    return _by_tokens(cells, note)


def _picture() -> str:
    picture = RESULTS / "hopper-h200.png"
    return f"![share of the floor, ours and peers](benchmarks/results/{picture.name})\n" if picture.exists() else ""


def _means(rows: list[dict[str, Any]], runs: dict[str, dict[str, Any]]) -> str:
    """How many times longer each part's first peer takes, over all sizes; what repeated runs differ by."""
    found = []
    for part, peer in dict.fromkeys((row["part"], row["peer"]) for row in rows):
        mine = [row for row in rows if (row["part"], row["peer"]) == (part, peer)]
        ratios = {row["tokens"]: ratio(row) for row in mine}
        slowest = min(ratios, key=lambda tokens: ratios[tokens])
        mean, least = f"{geometric_mean(ratios.values()):.2f}x", f"{ratios[slowest]:.2f}x at {slowest:,}"
        asked = f"{ASKED[part][0]:.2f}x" if part in ASKED and peer == ASKED_PEER else ""
        found.append((f"{part}; {peer}", mean, asked, least, _apart(part, peer, runs), _products(mine[-1], runs)))
    head = ("part; peer", "mean", "asked", "slowest cell", "between runs", "our products, of dense")
    note = (
        "How many times longer the peer takes for a whole layer on an H200. mean: geometric, over the sizes "
        "of the table below; asked: what it was to be. between runs: the most by which a cell's ratio differs between "
        "two runs of one commit. The dense rate is that of a product of 8,192 cubed, in turns with our products alone."
    )
    return table(head, found, note)


def _missed(rows: list[dict[str, Any]], runs: dict[str, dict[str, Any]]) -> str:
    """What was asked and is not reached, in the worst of the runs; what is slower than its peer."""
    found = []
    for part, (mean, share) in ASKED.items():
        mine = [row for row in rows if (row["part"], row["peer"]) == (part, ASKED_PEER)]
        got = geometric_mean(ratio(row) for row in mine) if mine else mean
        if got < mean:
            found.append(f"{part} a mean of {mean:.2f}x ({got:.2f}x)")
        shares = _shares(mine[-1], runs) if mine else []
        if shares and min(shares) < share:
            found.append(f"{part} products at {share:.0%} of dense ({min(shares):.0%} in the slower run)")
    slower = [row for row in rows if ratio(row) < 1]
    found += [f"{row['part']} the time of {row['peer']} at {row['tokens']:,} tokens" for row in slower]
    host = record("host-time")
    told = [us for row in host["rows"] for us in row["processes_us"]] if host else [row["host_us"] or 0 for row in rows]
    worst = max(told, default=0)
    if worst > ASKED_HOST_US:
        found.append(f"{ASKED_HOST_US} µs of host time of an eager call (up to {worst:.0f} µs)")
    return f"Not reached: {'; '.join(found)}.\n" if found else ""


def ratio(row: dict[str, Any]) -> float:
    """How many times longer the peer takes."""
    return float(row["against"][row["peer"]]["ratio"])


def geometric_mean(values: Iterable[float]) -> float:
    logarithms = [math.log(value) for value in values]
    return math.exp(sum(logarithms) / len(logarithms))


def _apart(part: str, peer: str, runs: dict[str, dict[str, Any]]) -> str:
    """Cells that two runs of one commit have."""
    cells: dict[tuple[str, int], list[float]] = {}
    for run in runs.values():
        for row in run["rows"]:
            if row["part"] == part and peer in row["against"]:
                cells.setdefault((run["commit"], row["tokens"]), []).append(row["against"][peer]["ratio"])
    apart = [max(ratios) / min(ratios) - 1 for ratios in cells.values() if len(ratios) > 1]
    return f"{max(apart):.1%}" if apart else ""


def _products(last: dict[str, Any], runs: dict[str, dict[str, Any]]) -> str:
    """What our products reach of the dense rate at the most tokens, in each run that timed them."""
    shares = ", ".join(f"{share:.0%}" for share in _shares(last, runs))
    return f"{shares} at {last['tokens']:,}" if shares else ""


def _shares(last: dict[str, Any], runs: dict[str, dict[str, Any]]) -> list[float]:
    """In all runs of the commit that the cell is of."""
    commit = runs[last["run"]]["commit"]
    return [
        row["products"]["of_dense"]
        for run in runs.values()
        for row in run["rows"]
        if run["commit"] == commit
        and (row["part"], row["tokens"]) == (last["part"], last["tokens"])
        and "products" in row
    ]


def _invariant(runs: dict[str, dict[str, Any]]) -> str:
    """What batch-invariant order costs where it launches other kernels, in the worst of the runs."""
    costs: dict[str, dict[int, float]] = {}
    for row in (row for run in runs.values() for row in run["rows"] if "batch_invariant" in row):
        mine, cost = costs.setdefault(row["part"], {}), row["batch_invariant"]["us"] / row["ours"]["us"] - 1
        mine[row["tokens"]] = max(cost, mine.get(row["tokens"], 0.0))
    said = [
        f"{part} {', '.join(f'{cost:.0%} at {n}' for n, cost in sorted(mine.items()))}" for part, mine in costs.items()
    ]
    if not said:
        return ""
    return (
        f"Batch-invariant order takes longer with few tokens: {'; '.join(said)}. "
        "At the other sizes it launches the same kernels.\n"
    )


def _starting() -> str:
    """What the host does: a first result, and every call after it; and what the sanitizers say."""
    lines = []
    first = record("first-forward")
    if first is not None:
        seconds = [run["seconds"] for run in first["first_forward"]]
        compiled = max(run["compiled"] for run in first["first_forward"])
        lines.append(
            "A first result of a fresh process with the shipped kernels comes "
            f"{min(seconds):.2f} to {max(seconds):.2f} s after `import torch`, {compiled} kernels compiled "
            f"({source('first-forward')})."
        )
    host = record("host-time")
    if host is not None:
        took: dict[str, dict[int, str]] = {}
        processes = sorted({len(row["processes_us"]) for row in host["rows"]})
        for row in host["rows"]:
            among = f"{row['host_us']:.0f} ({min(row['processes_us']):.0f}-{max(row['processes_us']):.0f})"
            took.setdefault(f"{row['weights']} x {row['activations']}", {})[row["tokens"]] = among
        lines += [
            f"Host time of an eager call of {what} at {', '.join(map(str, by_tokens))} tokens: "
            f"{', '.join(by_tokens.values())} µs, median (and range) of "
            f"{' or '.join(map(str, processes))} processes ({source('host-time')})."
            for what, by_tokens in took.items()
        ]
    checked = record("sanitize")
    if checked is not None:
        clean = [verdict["tool"] for verdict in checked["verdicts"] if verdict["verdict"] == "clean"]
        lines.append(
            f"compute-sanitizer on {len(checked['cases'])} small layers of every kind of weights, inputs and work: "
            f"{', '.join(clean) or 'no tool'} clean at {checked['commit'][:7]} ({source('sanitize')})."
        )
    return "\n".join(lines) + "\n"


def _by_tokens(cells: dict[str, dict[int, str]], note: str) -> str:
    tokens = sorted({at for row in cells.values() for at in row})
    rows = [(name, *(row.get(at, "") for at in tokens)) for name, row in cells.items()]
    return table(("tokens", *(f"{at:,}" for at in tokens)), rows, note)


def cpu() -> str:
    """Every level of instructions beside its first peer, on all the threads that were measured, over all runs."""
    found: dict[str, dict[int, list[dict[str, Any]]]] = {}
    names, machines = [], []
    for file in sorted(RESULTS.glob("cpu-*.json")):
        run = json.loads(file.read_text())
        if "levels" not in run:
            continue
        names.append(file.stem)
        machines.append(run["machine"]["cpu"]["model"])
        threads = max(row["threads"] for row in run["rows"])
        for row in run["rows"]:
            if row["threads"] == threads and row["faster_than"]:
                peer = next(iter(row["faster_than"]))
                what = f"{row['spec']}, {row['who']}, {threads} threads; {peer}"
                found.setdefault(what, {}).setdefault(row["tokens"], []).append(row)
    if not found:
        return ""
    cells = {what: {tokens: _cpu_cell(rows) for tokens, rows in by.items()} for what, by in found.items()}
    spread = max(_spread(rows) for by in found.values() for rows in by.values())
    note = (
        f"ms of a layer of Qwen3-30B-A3B on {', '.join(dict.fromkeys(machines))}, fastest call, cold caches, and how "
        "many times longer the peer takes (fastest call, median; the mean of the runs that have the cell, each on a "
        f"host that others used too: their ratios differ by up to {spread:.0%}): {source(*names)}. Without AMX, and on "
        f"other CPUs: {source(*OTHER_CPUS)}"
    )
    return _by_tokens(cells, note)


def _cpu_ratios(rows: list[dict[str, Any]], kind: str) -> list[float]:
    return [next(iter(row["faster_than"].values()))[kind] for row in rows]


def _cpu_cell(rows: list[dict[str, Any]]) -> str:
    fastest, median = (geometric_mean(_cpu_ratios(rows, kind)) for kind in ("min", "median"))
    return f"{min(row['min_us'] for row in rows) / 1e3:.2f} ({fastest:.2f}x, {median:.2f}x)"


def _spread(rows: list[dict[str, Any]]) -> float:
    """By how much runs differ in a ratio."""
    return max(max(ratios) / min(ratios) - 1 for ratios in (_cpu_ratios(rows, kind) for kind in ("min", "median")))


def generate() -> str:
    found = record("generate")
    if found is None:
        return ""
    batches = sorted({row["batch"] for row in found["rows"]})
    by = {(row["experts"], row["batch"]): row for row in found["rows"]}
    rows = []
    for name in dict.fromkeys(row["experts"] for row in found["rows"]):
        first = by[name, batches[0]]
        who = f"lancebill {name.replace(':', ' x ')}" if first["backend"] != "transformers" else f"transformers {name}"
        cells = [f"{by[name, batch]['tokens_per_second']:,.0f}" for batch in batches]
        rows.append((who, f"{first['expert_bytes'] / 1e9:.1f} GB", *cells))
    model, device = found["model"], found["machine"]["device"]
    note = (
        f"Tokens a second of `generate` on one {device}: {model['shape']} with {model['layers']} layers and random "
        f"weights, prompts of {found['prompt_tokens']} tokens, {found['new_tokens']} new ones; {source('generate')}"
    )
    return table(("experts", "size", *(f"batch {batch}" for batch in batches)), rows, note)


def perplexity() -> str:
    parts = []
    for name in ("perplexity-cpu", "perplexity-cuda"):
        found = record(name)
        if found is None:
            continue
        rows = []
        if "dense" in found:
            apart = f"{found['mixture_differs_by']:.1e} from dense"
            rows.append(("fp32, dense model", "", f"{found['dense']['perplexity']:.4f}", ""))
            mixture = found["mixture"]
            rows.append(("fp32, the mixture", mixture["backend"], f"{mixture['perplexity']:.4f}", apart))
        for row in found["rows"]:
            what = f"{row['weights']} x {row['activations']}"
            apart = f"{row['differs_by']:.3%} from reference"
            rows.append((what, row["backend"], f"{row['kernels']['perplexity']:.4f}", apart))
        whole = "the whole test set" if found["whole_text"] else "its beginning"
        note = (
            f"SmolLM2-135M on WikiText-2, {found['tokens']:,} tokens ({whole}), on "
            f"{found['machine']['device'].partition(',')[0]}; {source(name)}"
        )
        parts.append(table(("weights x activations", "backend", "perplexity", "differs by"), rows, note))
    return "\n".join(parts)


def questions() -> str:
    found = record("gsm8k")
    if found is None:
        return ""
    rows = []
    for row in found["variants"]:
        score = [f"{row[name]['value']:.1%} ± {row[name]['stderr']:.1%}" for name in ("strict", "flexible")]
        p = row["flexible"].get("p")
        rows.append((row["variant"], *score, "" if p is None else f"{p:.2g}"))
    asked, shots = found["variants"][0]["strict"]["questions"], found["options"]["shots"]
    note = f"{asked} questions of GSM8K, {shots} examples shown, SmolLM2-135M; p by McNemar's test; {source('gsm8k')}"
    return table(("variant", "strict", "flexible", "p against the first"), rows, note)


def memory() -> str:
    found = record("memory")
    if found is None:
        return ""
    rows = [
        (row["spec"], row["who"], f"{row['peak_resident_ratio']:.2f}x", f"{row['held_bytes'] / 1e9:.2f} GB")
        for row in found["results"]
        if "error" not in row
    ]
    size = found["results"][0]["checkpoint_bytes"] / 1e9
    note = f"The most memory while a checkpoint of {size:.1f} GB is loaded, over its size; {source('memory')}"
    return table(("experts stored as", "loaded by", "peak", "held after"), rows, note)


def convert() -> str:
    found = record("convert")
    if found is None:
        return ""
    rows = []
    for row in found["results"]:
        peak = row["peak_anonymous_bytes"] / 2**20
        rows.append((f"bf16 to {row['spec']}", f"{row['megabytes_per_second']:.0f} MB/s", f"{peak:.0f} MiB"))
    return table(("conversion on 2 cores", "of source", "memory"), rows, source("convert"))


BLOCKS: dict[str, Callable[[], str]] = {
    made.__name__: made for made in (explain, hopper, cpu, generate, perplexity, questions, memory, convert)
}

if __name__ == "__main__":
    main()
