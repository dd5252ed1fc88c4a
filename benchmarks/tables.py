"""Fill the generated blocks of PAGES from benchmarks/results: no figure is typed by hand.

    python benchmarks/tables.py            rewrites them, and benchmarks/results/summary.json
    python benchmarks/tables.py --check    exits with 1 if one of them is not what the results make it

A block begins with `<!-- results: NAME -->` and ends with `<!-- end -->`; `BLOCKS` has the function that writes it.
A table whose results are not recorded is left out.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

import summary
from cpu_tables import cpu_linear, cpu_prompts, cpu_streams
from gpu_tables import gpu_host, gpu_layer, gpu_linear, layer_runs, mean_ratio, newest_cells
from hybrid_tables import hybrid, hybrid_generate, pack
from older_tables import gpu_older
from result_files import (
    ROOT,
    ResultFile,
    geometric_mean,
    links,
    markdown_table,
    newest_files,
    result_files,
    table_by_tokens,
)
from rounding_tables import rounding
from shape_tables import gpu_shapes
from vllm_bench_tables import vllm_bench_serve, vllm_split
from vllm_cpu_tables import vllm_cpu
from vllm_tables import vllm_serving

PAGES = (ROOT / "README.md", *(ROOT / "docs" / name for name in ("results.md", "vllm.md", "hybrid.md")))
BLOCK = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

# The question that README shows to `lancebill explain`.
SHAPE, SPEC, ACTIVATIONS, DEVICE = "qwen3-30b-a3b", "mxfp4", "fp8", "sm_80"
INSTALLATION = ("library", "package", "triton")  # codes of reasons that depend on what is installed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check: bool = parser.parse_args().check
    texts = {path: path.read_text(encoding="utf-8") for path in PAGES}
    wanted = {path: fill_blocks(text) for path, text in texts.items()}
    texts[summary.PATH] = summary.PATH.read_text(encoding="utf-8") if summary.PATH.exists() else ""
    wanted[summary.PATH] = summary.summary_text()
    stale = [path for path in wanted if texts[path] != wanted[path]]
    if check:
        names = ", ".join(path.relative_to(ROOT).as_posix() for path in stale)
        sys.exit(f"not what benchmarks/results makes it: {names}; run benchmarks/tables.py" if stale else 0)
    for path in stale:
        path.write_text(wanted[path], encoding="utf-8")


def fill_blocks(text: str) -> str:
    return BLOCK.sub(lambda match: f"{match[1]}{BLOCKS[match[2]]()}{match[3]}", text)


# README --------------------------------------------------------------------------------------------------


def explain() -> str:
    """The answer of `lancebill explain` to one question, without reasons that depend on what is installed here."""
    from lancebill.backends import oracle
    from lancebill.moe.device import parse_device
    from lancebill.moe.model_shapes import parse_shape
    from lancebill.numbers.spec_names import parse_activation, parse_spec

    problem = parse_shape(SHAPE).problem(parse_spec(SPEC), parse_activation(ACTIVATIONS), tp=1)
    choice = oracle.explain(problem, parse_device(DEVICE))
    lines = [f"$ lancebill explain --shape {SHAPE} --weights {SPEC} --activations {ACTIVATIONS} --device {DEVICE}"]
    for verdict in choice.verdicts:
        chosen = choice.chosen is not None and verdict.backend is choice.chosen.backend
        reasons = [reason for reason in verdict.reasons if reason.code not in INSTALLATION]
        words = (
            "; ".join(map(str, reasons)) if verdict.reasons else ", ".join(verdict.plan.notes if verdict.plan else ())
        )
        state = "chosen" if chosen else "possible" if verdict.supported else "no"
        lines.append(f"{verdict.backend.name:<11}{state:<10}{words}".rstrip())
    return "\n".join(["```", *lines, "```\n"])


def headlines() -> str:
    """Six numbers, each with its machine."""
    rows = [
        _vllm_headline(),
        _layer_headline(),
        _cpu_headline(),
        _generate_headline(),
        _memory_headline(),
        _perplexity_headline(),
    ]
    return markdown_table(("", "", "machine"), rows)


def _vllm_headline() -> tuple[str, str, str]:
    """A whole model in vLLM, beside the fastest of vLLM's own kernels in the same run."""
    cell = {"model": "gpt-oss-20b", "prompts": 16, "tokens_out": 512}
    rows = [row for row in summary.summary_rows(("vllm-bench-serve",)) if cell.items() <= row.items()]
    ours, best = rows[-1]["tokens_per_s"], max(rows[-1]["peers"].values())
    result = f"{ours:,.0f} tokens/s, {ours / best:.2f}x vLLM's fastest own kernels"
    return "gpt-oss-20b whole in vLLM, MXFP4 x bf16, 16 sequences", result, "NVIDIA H200"


def _layer_headline() -> tuple[str, str, str]:
    ratio = mean_ratio(newest_cells(layer_runs("h200")), "deepseek-mxfp4-bf16", "humming")
    label = "DeepSeek-V4-Flash layer, MXFP4 x bf16, mean over 1 to 16,384 tokens"
    return label, f"{ratio:.2f}x the speed of Humming", "NVIDIA H200"


def _cpu_headline() -> tuple[str, str, str]:
    files = result_files("cpu-layer", "xeon-amx")
    rows = _rows_by_contestant(files)["mxfp4 x bf16, amx, 2 threads; vllm-w4a8"][1]
    ratios = geometric_mean(_cpu_ratios(rows, "min"))
    milliseconds = min(row["min_us"] for row in rows) / 1e3
    label = "Qwen3-30B-A3B layer, MXFP4 x bf16, 1 token, 2 threads"
    return label, f"{milliseconds:.2f} ms, {ratios:.2f}x the speed of vLLM's W4A8 on int4", files[0].machine_title


def _generate_headline() -> tuple[str, str, str]:
    file = max(result_files("generate-graphs"), key=lambda file: (file.record["model"]["layers"], file.name))
    rates = {row["decode"]: f"{row['tokens_per_second']:,.0f}" for row in file.record["rows"]}
    label = f"`generate`, Qwen3-30B-A3B shape, {file.record['model']['layers']} layers, MXFP4, one sequence"
    return label, f"{rates['graphs']} tokens/s; without CUDA graphs {rates['eager']}", file.machine_title


def _memory_headline() -> tuple[str, str, str]:
    file = max(newest_files("memory"), key=lambda file: str(file.record["date"]))
    peaks = {loader_name(row): row["peak_resident_ratio"] for row in file.record["results"] if row["spec"] == "mxfp4"}
    result = f"{peaks['lancebill']:.2f}x its size; transformers {peaks['transformers']:.2f}x"
    return "Peak memory while an MXFP4 checkpoint is loaded", result, file.machine_title


def _perplexity_headline() -> tuple[str, str, str]:
    file = next(file for file in newest_files("perplexity") if file.machine == "h200")
    row = next(r for r in file.record["rows"] if (r["weights"], r["activations"]) == ("mxfp4", "bf16"))
    result = f"{row['differs_by']:.3%} from the reference backend's"
    return "Perplexity of SmolLM2-135M on WikiText-2, MXFP4 x bf16", result, file.machine_title


# docs/results.md -----------------------------------------------------------------------------------------


def cpu_layer() -> str:
    """For each machine: every instruction set level against its first peer, with the most threads of each run."""
    machines = dict.fromkeys(file.machine for file in result_files("cpu-layer"))
    return "\n".join(_cpu_table(result_files("cpu-layer", machine)) for machine in sorted(machines, key=_amx_first))


def _amx_first(machine: str) -> tuple[bool, str]:
    return machine != "xeon-amx", machine


def _cpu_table(files: list[ResultFile]) -> str:
    contestants = _rows_by_contestant(files)
    cells = {label: {tokens: _cpu_cell(rows) for tokens, rows in by.items()} for label, by in contestants.items()}
    spread = max(_cpu_spread(rows) for by in contestants.values() for rows in by.values())
    several = (
        f" Ratios are the geometric mean of several runs on a shared host, which differ by up to {spread:.0%}."
        if spread
        else ""
    )
    note = (
        f"ms of a layer of Qwen3-30B-A3B on {files[0].machine_title}: the fastest call with cold caches, and the "
        f"peer's time over ours (of the fastest calls, of the medians).{several}{_part_of_experts(files)} "
        f"{links(*(file.name for file in files))}"
    )
    return table_by_tokens(cells, note)


def _part_of_experts(files: list[ResultFile]) -> str:
    """Says which runs had fewer experts than the others, and the machine's load in them."""
    most = max(file.record["layer"]["experts"] for file in files)
    return "".join(
        f" {file.path.stem} has {file.record['layer']['experts']} of the {most} experts; the machine's load was "
        f"{file.record['load']:.1f}."
        for file in files
        if file.record["layer"]["experts"] < most
    )


def _rows_by_contestant(files: list[ResultFile]) -> dict[str, dict[int, list[dict[str, Any]]]]:
    """Rows of all runs by contestant and tokens, with the most threads of each run."""
    found: dict[str, dict[int, list[dict[str, Any]]]] = {}
    for file in files:
        threads = max(row["threads"] for row in file.record["rows"])
        for row in file.record["rows"]:
            if row["threads"] == threads and row["faster_than"]:
                level, activations = summary.level_and_activations(row["who"])
                peer = next(iter(row["faster_than"]))
                label = f"{row['spec']} x {activations}, {level}, {threads} threads; {peer}"
                found.setdefault(label, {}).setdefault(row["tokens"], []).append(row)
    return found


def _cpu_ratios(rows: list[dict[str, Any]], kind: str) -> list[float]:
    return [next(iter(row["faster_than"].values()))[kind] for row in rows]


def _cpu_cell(rows: list[dict[str, Any]]) -> str:
    fastest, median = (geometric_mean(_cpu_ratios(rows, kind)) for kind in ("min", "median"))
    return f"{min(row['min_us'] for row in rows) / 1e3:.2f} ({fastest:.2f}x, {median:.2f}x)"


def _cpu_spread(rows: list[dict[str, Any]]) -> float:
    """The largest relative difference between runs."""
    return max(max(ratios) / min(ratios) - 1 for ratios in (_cpu_ratios(rows, kind) for kind in ("min", "median")))


def generate() -> str:
    tables = [*(_generate_table(file) for file in newest_files("generate")), _graphs_table(), _demo_table()]
    return "\n".join(filter(None, tables))


def _demo_table() -> str:
    """One stream of the demo model on CPUs, in turns with llama.cpp: the newest run of each machine."""
    files = newest_files("demo-decode")
    rows = []
    for file in files:
        rates, ratio = file.record["tokens_per_second"], file.record["ours_over_theirs"]
        rows.append((file.machine_title, f"{rates['ours']:.1f}", f"{rates['theirs']:.1f}", f"{ratio:.2f}x"))
    note = (
        "Tokens per second of one stream of the demo model (MXFP4 experts): `lancebill generate` and llama.cpp in "
        "turns on the same numbers, after the first token; medians. llama.cpp is a wheel whose code ends at AVX2. "
        + links(*(file.name for file in files))
    )
    return markdown_table(("machine", "lancebill", "llama.cpp", "ratio"), rows, note) if files else ""


def _graphs_table() -> str:
    """Our decode steps with and without CUDA graphs: the newest run of each model."""
    newest = {tuple(file.record["model"].values()): file for file in result_files("generate-graphs")}
    rows = []
    for (shape, layers, _), file in newest.items():
        by = {row["decode"]: row for row in file.record["rows"]}
        cells = [f"{by[decode]['tokens_per_second']:,.0f}" for decode in ("eager", "graphs")]
        rows.append((f"{shape}, {layers} layers, {by['graphs']['experts']}", *cells, by["graphs"]["same_tokens"]))
    note = (
        "Tokens per second of `generate` for one sequence, random weights, with transformers' own steps and with CUDA "
        "graphs; the share of tokens before the first difference between both. (Captured steps round norms and "
        "attention differently, and with random weights the best logits are close. 48 layers without graphs: one run "
        "without warm-up.) " + links(*(file.name for file in newest.values()))
    )
    return markdown_table(("model", "without graphs", "with graphs", "same tokens"), rows, note)


def _generate_table(file: ResultFile) -> str:
    record = file.record
    batches = sorted({row["batch"] for row in record["rows"]})
    by = {(row["experts"], row["batch"]): row for row in record["rows"]}
    rows = []
    for name in dict.fromkeys(row["experts"] for row in record["rows"]):
        first = by[name, batches[0]]
        label = (
            f"lancebill {name.replace(':', ' x ')}" if first["backend"] != "transformers" else f"transformers {name}"
        )
        cells = [f"{by[name, batch]['tokens_per_second']:,.0f}" for batch in batches]
        rows.append((label, f"{first['expert_bytes'] / 1e9:.1f} GB", *cells))
    model = record["model"]
    note = (
        f"Tokens per second of `generate` on one {file.machine_title}: {model['shape']} with {model['layers']} layers "
        f"and random weights, prompts of {record['prompt_tokens']} tokens, {record['new_tokens']} new tokens; "
        f"{links(file.name)}"
    )
    return markdown_table(("experts", "size", *(f"batch {batch}" for batch in batches)), rows, note)


def perplexity() -> str:
    return "\n".join(_perplexity_table(file) for file in newest_files("perplexity"))


def _perplexity_table(file: ResultFile) -> str:
    record, rows = file.record, []
    if "dense" in record:
        difference = f"{record['mixture_differs_by']:.1e} from dense"
        rows.append(("fp32, dense model", "", f"{record['dense']['perplexity']:.4f}", ""))
        mixture = record["mixture"]
        rows.append(("fp32, mixture of experts", mixture["backend"], f"{mixture['perplexity']:.4f}", difference))
    for row in record["rows"]:
        difference = f"{row['differs_by']:.3%} from reference"
        label = f"{row['weights']} x {row['activations']}"
        rows.append((label, row["backend"], f"{row['kernels']['perplexity']:.4f}", difference))
    extent = "the whole test set" if record["whole_text"] else "its beginning"
    note = (
        f"SmolLM2-135M on WikiText-2, {record['tokens']:,} tokens ({extent}), on {file.machine_title}; "
        f"{links(file.name)}"
    )
    return markdown_table(("weights x activations", "backend", "perplexity", "difference"), rows, note)


def questions() -> str:
    return "\n".join(_questions_table(file) for file in newest_files("questions"))


def _questions_table(file: ResultFile) -> str:
    rows = []
    for row in file.record["variants"]:
        score = [f"{row[name]['value']:.1%} ± {row[name]['stderr']:.1%}" for name in ("strict", "flexible")]
        p_values = [f"{row[name]['p']:.2g}" if "p" in row[name] else "" for name in ("strict", "flexible")]
        rows.append((row["variant"], *score, *p_values))
    count, shots = file.record["variants"][0]["strict"]["questions"], file.record["options"]["shots"]
    note = (
        f"{count} questions of GSM8K, {shots} examples in the prompt, SmolLM2-135M; "
        f"p by McNemar's test against the first variant; {links(file.name)}"
    )
    return markdown_table(("variant", "strict", "flexible", "p, strict", "p, flexible"), rows, note)


def memory() -> str:
    return "\n".join(_memory_table(file) for file in newest_files("memory"))


def _memory_table(file: ResultFile) -> str:
    rows = [
        (row["spec"], loader_name(row), f"{row['peak_resident_ratio']:.2f}x", f"{row['held_bytes'] / 1e9:.2f} GB")
        for row in file.record["results"]
        if "error" not in row
    ]
    size = file.record["results"][0]["checkpoint_bytes"] / 1e9
    note = (
        f"Peak memory while a checkpoint of {size:.1f} GB is loaded, relative to its size, and the model's tensors "
        f"afterwards; on {file.machine_title}; {links(file.name)}"
    )
    return markdown_table(("experts stored as", "loaded by", "peak", "tensors"), rows, note)


def loader_name(row: dict[str, Any]) -> str:
    """Who loaded a checkpoint; files recorded before the project's present name have another one for us."""
    return "transformers" if row["who"] == "transformers" else "lancebill"


def convert() -> str:
    return "\n".join(_convert_table(file) for file in newest_files("convert"))


def _convert_table(file: ResultFile) -> str:
    rows = []
    for row in file.record["results"]:
        way = "" if row.get("search", True) else ", without search"
        used = row.get("cpu_seconds", 2 * row["seconds"])  # files recorded earlier: two cores were busy
        rate, peak = row["source_bytes"] / used / 1e6, row["peak_anonymous_bytes"] / 2**20
        rows.append((f"bf16 to {row['spec']}{way}", f"{rate:.0f} MB/s", f"{peak:.0f} MiB"))
    note = f"`lancebill convert`, source read for each second of one core, on {file.machine_title}; {links(file.name)}"
    return markdown_table(("conversion", "source read", "memory"), rows, note)


def verify() -> str:
    return "\n".join(_verify_table(file) for file in newest_files("verify"))


def _verify_table(file: ResultFile) -> str:
    headers, values = file.record["metadata"], file.record["values"]
    rows = [(f"{row['format']}, {row['spec']}", f"{row['gigabytes_per_second']:.2f} GB/s") for row in values]
    note = (
        f"`lancebill verify --values`, bytes read for each second of one core, on {file.machine_title}. The headers of "
        f"{headers['bytes'] / 1e9:.0f} GB ({headers['tensors']:,} tensors) take {headers['cpu_seconds']:.1f} s of one "
        f"core; {links(file.name)}"
    )
    return markdown_table(("checkpoint", "values checked"), rows, note)


def serve() -> str:
    return "\n".join(_serve_line(file) for file in newest_files("serve"))


def _serve_line(file: ResultFile) -> str:
    run = file.record
    memory = run["resident_mb"]
    return (
        f"{run['clients']} clients for {run['seconds']:.0f} s on {file.machine_title}: {_serve_outcome(run)}; "
        f"memory {memory['after_a_quarter']:.0f} MB after a quarter of the time, "
        f"{memory['at_the_end']:.0f} MB at the end; {links(file.name)}\n"
    )


def _serve_outcome(run: Mapping[str, Any]) -> str:
    requests = sum(run["outcomes"].values())
    bad = "streams cut off, malformed and huge bodies, slow senders"
    after = "answers afterwards" if run["answers_after"] else "does not answer afterwards"
    return f"{requests:,} requests ({bad}), {run['server_errors']} server errors, {run['stuck']} stuck, {after}"


BLOCKS: dict[str, Callable[[], str]] = {
    block.__name__: block
    for block in (
        explain, headlines, gpu_layer, gpu_shapes, gpu_older, gpu_host, gpu_linear, cpu_layer, cpu_linear, generate,
        cpu_prompts, cpu_streams, perplexity, questions, memory, convert, rounding, verify, serve, vllm_cpu,
        vllm_serving, vllm_bench_serve, vllm_split, hybrid, hybrid_generate, pack,
    )
}  # fmt: skip

if __name__ == "__main__":
    main()
