"""Tables of whole layers on a GPU: ours against peers, from the files of `benchmarks/gpu_layer.py`."""

from __future__ import annotations

from typing import Any

from result_files import (
    RESULTS,
    ResultFile,
    geometric_mean,
    links,
    markdown_table,
    newest_files,
    result_files,
    table_by_tokens,
)

Runs = dict[str, dict[str, Any]]  # the record of each run by the name of its file, the oldest first


def gpu_layer() -> str:
    """For each machine: the mean ratio of each part, every cell, the roofline, what batch-invariant order costs."""
    pages = []
    for machine in dict.fromkeys(file.machine for file in result_files("gpu-layer")):
        runs = layer_runs(machine)
        if runs:
            rows = newest_cells(runs)
            parts = [_means(rows, runs), _slower(rows), _cells(rows), _picture(machine), batch_invariant_cost(runs)]
            pages.append("\n".join(part for part in parts if part))
    return "\n".join(pages)


def layer_runs(machine: str) -> Runs:
    """Runs that timed a peer in every row, the oldest first."""
    found = {file.name: file.record for file in result_files("gpu-layer", machine)}
    with_peers = {name: run for name, run in found.items() if run["rows"] and all("against" in r for r in run["rows"])}
    return dict(sorted(with_peers.items(), key=lambda item: str(item[1]["date"])))


def newest_cells(runs: Runs) -> list[dict[str, Any]]:
    """Every cell once, from the newest run that timed this peer; adds the names of run and peer to each row."""
    rows = [
        row | {"run": name, "peer": next(iter(row["against"]))} for name, run in runs.items() for row in run["rows"]
    ]
    cells = {(row["part"], row["peer"], row["tokens"]): row for row in rows}
    order = list(dict.fromkeys((row["peer"], row["part"]) for row in rows))
    return sorted(cells.values(), key=lambda row: (order.index((row["peer"], row["part"])), row["tokens"]))


def ratio(row: dict[str, Any]) -> float:
    """The peer's time over ours."""
    return float(row["against"][row["peer"]]["ratio"])


def mean_ratio(rows: list[dict[str, Any]], part: str, peer: str) -> float:
    """Geometric mean over all numbers of tokens."""
    return geometric_mean(ratio(row) for row in rows if (row["part"], row["peer"]) == (part, peer))


def _means(rows: list[dict[str, Any]], runs: Runs) -> str:
    lines = []
    for part, peer in dict.fromkeys((row["part"], row["peer"]) for row in rows):
        of_part = [row for row in rows if (row["part"], row["peer"]) == (part, peer)]
        ratios = {row["tokens"]: ratio(row) for row in of_part}
        worst = min(ratios, key=lambda tokens: ratios[tokens])
        mean, lowest = f"{mean_ratio(rows, part, peer):.2f}x", f"{ratios[worst]:.2f}x at {worst:,}"
        lines.append((f"{part}; {peer}", mean, lowest, _run_spread(part, peer, runs), _gemm_share(of_part[-1], runs)))
    head = ("part; peer", "mean", "lowest", "between runs", "our GEMMs, of the dense rate")
    note = (
        "The peer's time for a whole layer over ours, on an H200. mean: geometric, over the numbers of tokens in the "
        "table below. between runs: the largest difference of one cell's ratio between two runs of one commit. The "
        "dense rate is that of one GEMM of 8,192 cubed, timed in turns with our GEMMs alone, at the number of tokens "
        "given."
    )
    return markdown_table(head, lines, note)


def _slower(rows: list[dict[str, Any]]) -> str:
    slower = [f"{row['part']} than {row['peer']} at {row['tokens']:,} tokens" for row in rows if ratio(row) < 1]
    return f"Slower: {'; '.join(slower)}.\n" if slower else ""


def _cells(rows: list[dict[str, Any]]) -> str:
    """Our microseconds, and the first peer's time over ours."""
    cells: dict[str, dict[int, str]] = {}
    for row in rows:
        label = f"{row['shape']}, {row['spec']} x {row['activations']}; {row['peer']}"
        cells.setdefault(label, {})[row["tokens"]] = f"{row['ours']['us']:,.0f} ({ratio(row):.2f}x)"
    note = (
        "µs of a whole layer on an H200, from `topk_ids` to the combined output, and the peer's time over ours in the "
        "same run. For humming and triton_kernels the faster variant counts, without its routing sort. Each cell is "
        f"from the newest run that has it: {links(*dict.fromkeys(row['run'] for row in rows))}"
    )
    return table_by_tokens(cells, note)


def _picture(machine: str) -> str:
    picture = RESULTS / "gpu-layer" / machine / "roofline.png"
    name = picture.relative_to(RESULTS).as_posix()
    return f"![share of the roofline, ours and peers](../benchmarks/results/{name})\n" if picture.exists() else ""


def _run_spread(part: str, peer: str, runs: Runs) -> str:
    """The largest spread of a ratio among runs of one commit."""
    cells: dict[tuple[str, int], list[float]] = {}
    for run in runs.values():
        for row in run["rows"]:
            if row["part"] == part and peer in row["against"]:
                cells.setdefault((run["commit"], row["tokens"]), []).append(row["against"][peer]["ratio"])
    spreads = [max(ratios) / min(ratios) - 1 for ratios in cells.values() if len(ratios) > 1]
    return f"{max(spreads):.1%}" if spreads else ""


def _gemm_share(cell: dict[str, Any], runs: Runs) -> str:
    """The share of the dense rate that our GEMMs reach, in each run of the cell's commit that timed them."""
    commit = runs[cell["run"]]["commit"]
    shares = [
        f"{row['products']['of_dense']:.0%}"
        for run in runs.values()
        for row in run["rows"]
        if run["commit"] == commit
        and (row["part"], row["tokens"]) == (cell["part"], cell["tokens"])
        and "products" in row
    ]
    return f"{', '.join(shares)} at {cell['tokens']:,}" if shares else ""


def batch_invariant_cost(runs: Runs) -> str:
    """How much longer batch-invariant order takes where it launches other kernels, in the worst run."""
    costs: dict[str, dict[int, float]] = {}
    for row in (row for run in runs.values() for row in run["rows"] if "batch_invariant" in row):
        of_part, cost = costs.setdefault(row["part"], {}), row["batch_invariant"]["us"] / row["ours"]["us"] - 1
        of_part[row["tokens"]] = max(cost, of_part.get(row["tokens"], 0.0))
    lines = [
        f"{part} {', '.join(f'{cost:.0%} at {n}' for n, cost in sorted(of_part.items()))}"
        for part, of_part in costs.items()
    ]
    if not lines:
        return ""
    return (
        f"Batch-invariant order takes longer with few tokens: {'; '.join(lines)}. "
        "With more tokens it launches the same kernels.\n"
    )


def gpu_host() -> str:
    """Time to the first result, host time of a call, memory of CUDA graphs, and the sanitizers' verdicts."""
    lines = [_first_forward(file) for file in newest_files("first-forward")]
    lines += [line for file in newest_files("routing") for line in _routing(file)]
    lines += [_capture_memory(file) for file in newest_files("capture-memory")]
    lines += [_sanitizers(file) for file in newest_files("sanitize")]
    bullets = "\n".join(f"* {line}" for line in lines) + "\n"
    return "\n".join([bullets, *(_host_time(file) for file in newest_files("host-time"))])


def _first_forward(file: ResultFile) -> str:
    runs = file.record["first_forward"]
    seconds, compiled = [run["seconds"] for run in runs], max(run["compiled"] for run in runs)
    return (
        "The first result of a fresh process with the shipped kernels takes "
        f"{min(seconds):.2f} to {max(seconds):.2f} s after `import torch`; {compiled} kernels are compiled "
        f"({links(file.name)})."
    )


def _host_time(file: ResultFile) -> str:
    """Eager and compiled calls; ids and weights as routers give them."""
    rows = []
    for row in file.record["rows"]:
        given, compiled = row["given"], row["compiled"]
        plain, routed = given["int32, fp32"], given["int64, bf16"]
        changes = [f"{routed[name] - plain[name]:+.1f}" for name in ("host_us", "device_us")]
        label = f"{row['shape']}, {row['weights']} x {row['activations']}"
        names = ("eager_each_us", "each_us", "replayed_each_us", "alone_us", "torch_us")
        rows.append([label, row["tokens"], f"{row['host_us']:.0f}", *changes, *(f"{compiled[n]:.0f}" for n in names)])
    header = (
        "layer", "tokens", "eager", "int64, bf16: host", "device", "each of 8, eager", "compiled", "replayed",
        "one, compiled", "torch's share",
    )  # fmt: skip
    note = (
        "µs of host time until the next operator can be launched. int64, bf16: how much more the host and the device "
        "need with such ids and weights than with int32 and fp32. Compiled: what each layer adds to a graph of several "
        "(replayed: with `reduce-overhead`). One, compiled: a graph of one layer; torch's share is what it needs for "
        f"`x + 1`. {links(file.name)}"
    )
    return markdown_table(header, rows, note)


def _routing(file: ResultFile) -> list[str]:
    """What `forward_routed` takes longer than `forward` in a CUDA graph; nothing for files of CPUs."""
    added: dict[str, dict[int, str]] = {}
    for row in file.record["rows"]:
        if "added_host_us" in row:
            added.setdefault(row["model"], {})[row["tokens"]] = f"{row['added_us']:.1f}"
    return [
        f"Routing from logits adds, in a CUDA graph at {', '.join(map(str, by_tokens))} tokens of {model}: "
        f"{', '.join(by_tokens.values())} µs ({links(file.name)})."
        for model, by_tokens in added.items()
    ]


def _capture_memory(file: ResultFile) -> str:
    run = file.record
    rows = {row["pool"]: row for row in run["rows"]}
    shared, separate, reserved = (_mib(rows[pool]["device_bytes"]) for pool in ("shared", "separate", "reserved"))
    return (
        f"CUDA graphs of {run['layers']} layers ({run['shape']}'s sizes) at {len(run['sizes'])} numbers of tokens take "
        f"{shared} of GPU memory in one pool, {separate} in pools of their own, {reserved} after `reserve` (of which "
        f"{_mib(rows['reserved']['reserved_bytes'])} are reserved) ({links(file.name)})."
    )


def _mib(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"


def _sanitizers(file: ResultFile) -> str:
    run = file.record
    verdicts = ", ".join(f"{verdict['tool']} {_verdict(verdict)}" for verdict in run["verdicts"])
    return (
        f"compute-sanitizer on {len(run['cases'])} small layers, which cover every branch of the kernels: "
        f"{verdicts}, at {run['commit'][:7]} ({links(file.name)})."
    )


def _verdict(verdict: dict[str, Any]) -> str:
    return "clean" if verdict["verdict"] == "clean" else f"{verdict['unordered']} findings"


def gpu_linear() -> str:
    return "\n".join(_linear_table(file) for file in newest_files("gpu-linear"))


def _linear_table(file: ResultFile) -> str:
    cells: dict[str, dict[int, str]] = {}
    for row in file.record["rows"]:
        cell = f"{row['us']:.1f} ({row['of_read']:.0%}; {row['host_us']:.1f})"
        cells.setdefault(f"{row['n']} x {row['k']}, {row['spec']}", {})[row["rows"]] = cell
    counts = sorted({count for by in cells.values() for count in by})
    rows = [(name, *(by.get(count, "") for count in counts)) for name, by in cells.items()]
    dense = [row["nn_host_us"] for row in file.record["rows"] if "nn_host_us" in row]
    beside = f"; that of `nn.Linear`: {min(dense):.1f} to {max(dense):.1f} µs" if dense else ""
    note = (
        f"µs of `QuantizedLinear` with so many rows of bf16 on {file.machine_title}: a replayed CUDA graph of one call "
        "with evicted caches (the time of a kernel that only reads as many bytes, as a share of it; host time of an "
        f"eager call{beside}). {links(file.name)}"
    )
    return markdown_table(("rows", *(str(count) for count in counts)), rows, note)
