"""benchmarks/results/summary.json: every recorded figure of ours as one flat row, with the peers of the same run.

    python benchmarks/summary.py            rewrites it
    python benchmarks/summary.py --check    exits with 1 if it is not what the files make it

A row names its table, machine, shape or model, weights, activations (where something is computed) and file. Units are
in the names of fields; the values in `peers` have the unit of the row's own figure, of the first if it has several.
`LEFT_OUT` names folders of results that are not here. On GPUs, `humming` and
`triton_kernels` are timed without their routing sort, `NAME with sort` includes it; `torch-grouped` includes it,
`torch-grouped, sorted` does not; `torch GEMMs` are the two GEMMs alone.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import summary_serving
from result_files import RESULTS, ResultFile, result_files

PATH = RESULTS / "summary.json"
Row = dict[str, Any]
CPU_SHAPE = "qwen3-30b-a3b"  # the layer that benchmarks/cpu_layer.py measures
ACTIVATIONS = {"A16": "bf16", "A8": "int8"}
RENAMED_PEERS = {"torch products": "torch GEMMs"}  # names in files recorded earlier


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    text = summary_text()
    if parser.parse_args().check:
        same = PATH.exists() and PATH.read_text(encoding="utf-8") == text
        sys.exit(0 if same else f"{PATH.name} is not what the results make it: run benchmarks/summary.py")
    PATH.write_text(text, encoding="utf-8")


def summary_text() -> str:
    """One row on each line."""
    return "[\n" + ",\n".join(json.dumps(row, ensure_ascii=False) for row in summary_rows()) + "\n]\n"


def summary_rows(tables: Iterable[str] | None = None) -> list[Row]:
    """Of all tables, or of these."""
    return [
        {"table": table, "machine": file.machine, **row, "file": file.name}
        for table in (TABLES if tables is None else tables)
        for file in result_files(table)
        for row in TABLES[table](file)
    ]


def level_and_activations(contestant: str) -> tuple[str, str]:
    """`amx A16` of a CPU run: the instruction set level, and how inputs are represented."""
    level, _, width = contestant.partition(" ")
    return level, ACTIVATIONS[width]


def _gpu_layer(file: ResultFile) -> Iterator[Row]:
    for row in file.record["rows"]:
        yield {
            "shape": row["shape"],
            "weights": row["spec"],
            "activations": row["activations"],
            "tokens": row["tokens"],
            "us": row["ours"]["us"],
            "peers": {RENAMED_PEERS.get(name, name): peer["us"] for name, peer in row["against"].items()},
        }


def _gpu_shapes(file: ResultFile) -> Iterator[Row]:
    for row in file.record["rows"]:
        labels = {name: row[name] for name in ("shape", "weights", "activations", "routing", "tokens")}
        peers = {name: peer["us"] for name, peer in row["against"].items()}
        yield {**labels, "us": row["ours"]["us"], "of_floor": row["of_floor"], "peers": peers}


def _cpu_layer(file: ResultFile) -> Iterator[Row]:
    """The fastest call of each of our contestants."""
    rows = file.record["rows"]
    fastest = {(row["spec"], row["tokens"], row["threads"], row["who"]): row["min_us"] for row in rows}
    for row in rows:
        if row["who"].partition(" ")[2] not in ACTIVATIONS:
            continue
        level, activations = level_and_activations(row["who"])
        run = row["spec"], row["tokens"], row["threads"]
        yield {
            "shape": CPU_SHAPE,
            "weights": row["spec"],
            "activations": activations,
            "level": level,
            "threads": row["threads"],
            "tokens": row["tokens"],
            "us": row["min_us"],
            "peers": {peer: fastest[(*run, peer)] for peer in row["faster_than"]},
        }


def _first_forward(file: ResultFile) -> Iterator[Row]:
    """One row for each process; `run` counts the processes of one layer."""
    runs: Counter[tuple[str, ...]] = Counter()
    for row in file.record["first_forward"]:
        labels = {name: row[name] for name in ("shape", "weights", "activations", "tokens")}
        runs[tuple(map(str, labels.values()))] += 1
        yield {**labels, "run": runs[tuple(map(str, labels.values()))], "seconds": row["seconds"], "peers": {}}


def _host_time(file: ResultFile) -> Iterator[Row]:
    for row in file.record["rows"]:
        labels = {name: row[name] for name in ("shape", "weights", "activations", "tokens")}
        yield {**labels, "host_us": row["host_us"], "peers": {}}


def _routing(file: ResultFile) -> Iterator[Row]:
    """What routing adds: microseconds in a CUDA graph, or to a call on a CPU and as a share of it."""
    for row in file.record["rows"]:
        labels = {name: row[name] for name in ("model", "intermediate", "weights", "tokens")}
        found = {name: row[name] for name in ("added_us", "added_host_us", "threads", "share") if name in row}
        yield {**labels, **found, "peers": {}}


def _gpu_linear(file: ResultFile) -> Iterator[Row]:
    """One matrix with few rows: a replayed call with cold caches, against a kernel that only reads, and host time."""
    for row in file.record["rows"]:
        names = ("n", "k", "rows", "us", "of_read", "host_us")
        yield {"weights": row["spec"], "activations": "bf16", **{name: row[name] for name in names}, "peers": {}}


def _generate(file: ResultFile) -> Iterator[Row]:
    rows, model = file.record["rows"], file.record["model"]
    for row in rows:
        if row["backend"] == "transformers":
            continue
        weights, _, activations = row["experts"].rpartition(":")
        same_batch = [r for r in rows if r["batch"] == row["batch"] and r["backend"] == "transformers"]
        yield {
            "model": f"{model['shape']}, {model['layers']} layers",
            "weights": weights,
            "activations": activations,
            "decode": row.get("decode", "eager"),
            "batch": row["batch"],
            "tokens_per_s": row["tokens_per_second"],
            "peers": {f"transformers {r['experts']}": r["tokens_per_second"] for r in same_batch},
        }


def _demo_decode(file: ResultFile) -> Iterator[Row]:
    """One stream of the demo model on a CPU, in turns with llama.cpp."""
    rates = file.record["tokens_per_second"]
    labels = {"model": "the demo model", "weights": "mxfp4", "tokens": file.record["tokens"]}
    yield {**labels, "tokens_per_s": rates["ours"], "peers": {"llama.cpp": rates["theirs"]}}


def _cpu_linear(file: ResultFile) -> Iterator[Row]:
    """One matrix with few rows: the fastest call with cold caches, against reading as many bytes."""
    for row in file.record["rows"]:
        names = ("n", "k", "rows", "threads", "us", "of_read")
        yield {"weights": row["spec"], "activations": "bf16", **{name: row[name] for name in names}, "peers": {}}


def _cpu_streams(file: ResultFile) -> Iterator[Row]:
    """A model of the demo's size: native steps of several sequences, then streams of its server."""
    record, served = file.record, file.record["served"]
    labels = {"model": "of the demo's size", "weights": "mxfp4", "threads": record["threads"]}
    for row in record["steps"]:
        yield {**labels, "rows": row["rows"], "step_ms": row["median_ms"], "peers": {}}
    for streams, rate in served.get("tokens_per_second", {}).items():
        yield {**labels, "streams": int(streams), "tokens_per_s": rate, "peers": {}}


def _cpu_prompts(file: ResultFile) -> Iterator[Row]:
    """Prompts of the demo's model on one thread, natively and by the model's own operators."""
    for row in file.record["rows"]:
        how = {"model": "demo", "weights": file.record["model"], "threads": 1, "tokens": row["tokens"]}
        yield {**how, "seconds": row["native_seconds"], "peers": {"own operators": row["own_seconds"]}}


def _perplexity(file: ResultFile) -> Iterator[Row]:
    for row in file.record["rows"]:
        yield {
            "model": file.record["model"],
            "weights": row["weights"],
            "activations": row["activations"],
            "tokens": file.record["tokens"],
            "perplexity": row["kernels"]["perplexity"],
            "peers": {"reference": row["reference"]["perplexity"]},
        }


def _questions(file: ResultFile) -> Iterator[Row]:
    for row in file.record["variants"]:
        weights, activations, backend = row["variant"].split("/")
        scores = {"strict": row["strict"]["value"], "flexible": row["flexible"]["value"]}
        labels = {"model": "SmolLM2-135M", "weights": weights, "activations": activations, "backend": backend}
        yield {**labels, "questions": row["strict"]["questions"], **scores, "peers": {}}


def _memory(file: ResultFile) -> Iterator[Row]:
    rows, model = file.record["results"], file.record["model"]
    for row in rows:
        if row["who"] == "transformers" or "error" in row:
            continue
        peers = [r for r in rows if r["spec"] == row["spec"] and r["who"] == "transformers" and "error" not in r]
        yield {
            "model": f"{model['experts']} experts of {model['hidden']} x {model['inter']}, {model['layers']} layers",
            "weights": row["spec"],
            "peak_over_checkpoint": row["peak_resident_ratio"],
            "peers": {r["who"]: r["peak_resident_ratio"] for r in peers},
        }


def _convert(file: ResultFile) -> Iterator[Row]:
    model = file.record["model"]
    for row in file.record["results"]:
        yield {
            "model": f"{model['experts']} experts of {model['hidden']} x {model['inter']}, {model['layers']} layers",
            "weights": row["spec"],
            "mb_per_s": row["megabytes_per_second"],
            **({name: row[name] for name in ("search", "cpu_seconds") if name in row}),
            "peak_bytes": row["peak_anonymous_bytes"],
            "peers": {},
        }


def _rounding(file: ResultFile) -> Iterator[Row]:
    """Both ways of rounding the demo model's experts: with scale search, and plainly as the peer."""
    record = file.record
    for row in record["rows"]:
        yield {
            "model": record["model"],
            "weights": row["spec"],
            "tokens": record["tokens"],
            "perplexity": row["search"]["perplexity"],
            "divergence_nats": row["search"]["divergence"]["mean"],
            "rms_error": row["search"]["rms_error"],
            "seconds_ratio": row["seconds_ratio"],
            "peers": {"plain": row["plain"]["perplexity"], "stored": record["stored_perplexity"]},
        }


def _verify(file: ResultFile) -> Iterator[Row]:
    for row in file.record["values"]:
        figures = {"gb_per_s": row["gigabytes_per_second"], "cpu_seconds": row["cpu_seconds"]}
        yield {"format": row["format"], "weights": row["spec"], **figures, "peers": {}}


def _hybrid(file: ResultFile) -> Iterator[Row]:
    """Split layers, and the CPU's part beside peers whose result is right."""
    for row in file.record["rows"]:
        layer = {"shape": row["shape"], "weights": row["spec"], "activations": "bf16", "tokens": row["tokens"]}
        how = {"kind": row["kind"], "gpu_percent": row["share"], "routing": row["routing"]}
        if row["kind"] == "decode":
            yield {**layer, **how, "us": row["split_us"], "peers": {"cpu": row["cpu_us"], "gpu": row["gpu_us"]}}
        elif row["kind"] == "prefill":
            yield {**layer, **how, "us": row["prefill_us"], "peers": {"cpu": row["cpu_us"], "copied": row["copied_us"]}}
        elif row["kind"] == "peers":
            names = [name for name in ("llama.cpp", "kt-kernel") if f"{name}_us" in row]
            right = [name for name in names if math.isfinite(row[f"{name}_difference"])]
            yield {**layer, **how, "us": row["cpu_us"], "peers": {name: row[f"{name}_us"] for name in right}}
        else:
            yield {**layer, **how, "us": row["recency_us"], "peers": {"without moves": row["still_us"]}}


def _pack(file: ResultFile) -> Iterator[Row]:
    for row in file.record["results"]:
        how = {"case": row["case"], "source": row["source"], "weights": row["spec"]}
        how |= {"threads": row["threads"]} if "threads" in row else {}
        yield {**how, "gb_per_s": row["bytes_per_s"] / 1e9, "of_copy_rate": row.get("copy_share"), "peers": {}}


def _capture_memory(file: ResultFile) -> Iterator[Row]:
    """GPU memory of a model's CUDA graphs; `pool`: whose memory captured calls take."""
    record = file.record
    labels = {name: record[name] for name in ("shape", "weights", "activations", "layers")}
    for row in record["rows"]:
        figures = {name: row[name] for name in ("device_bytes", "reserved_bytes", "seconds")}
        yield {**labels, "sizes": len(record["sizes"]), "pool": row["pool"], **figures, "peers": {}}


TABLES: dict[str, Callable[[ResultFile], Iterator[Row]]] = {
    "gpu-layer": _gpu_layer,
    "gpu-shapes": _gpu_shapes,
    "gpu-older": _gpu_shapes,
    "cpu-layer": _cpu_layer,
    "cpu-linear": _cpu_linear,
    "cpu-prompts": _cpu_prompts,
    "cpu-streams": _cpu_streams,
    "first-forward": _first_forward,
    "host-time": _host_time,
    "routing": _routing,
    "generate": _generate,
    "generate-graphs": _generate,
    "demo-decode": _demo_decode,
    "gpu-linear": _gpu_linear,
    "perplexity": _perplexity,
    "questions": _questions,
    "memory": _memory,
    "convert": _convert,
    "rounding": _rounding,
    "verify": _verify,
    "hybrid": _hybrid,
    "hybrid-generate": summary_serving.hybrid_generate,
    "pack": _pack,
    "capture-memory": _capture_memory,
    "serve": summary_serving.serve,
    "serve-accuracy": summary_serving.serve_accuracy,
    "decode-engines": summary_serving.decode_engines,
    "vllm-serving": summary_serving.vllm_serving,
    "vllm-split": summary_serving.vllm_serving,
    "vllm-bench-serve": summary_serving.vllm_bench_serve,
    "vllm-cpu": summary_serving.vllm_cpu,
}
LEFT_OUT = {  # folders of benchmarks/results that are no table here, and why
    "reliability": "counts of cases and failures; docs/reliability.md has all of them",
    "sanitize": "verdicts of compute-sanitizer and what it said, no figures",
}

if __name__ == "__main__":
    main()
