"""The tables of vLLM's own load test and of split models in vLLM, from recorded results."""

from __future__ import annotations

from typing import Any

from result_files import ResultFile, links, markdown_table, result_files
from vllm_answers import compared

NOTHING = "Nothing has been measured yet.\n"


def vllm_bench_serve() -> str:
    """For each model and kind of activations the newest run that has ours and a peer."""
    newest: dict[tuple[str, str], tuple[ResultFile, list[dict[str, Any]]]] = {}
    for file in result_files("vllm-bench-serve"):
        for activations in ("bf16", "fp8"):
            held = [one for one in file.record["servers"] if one["activations"] == activations and one.get("cases")]
            if len({_is_ours(one) for one in held}) == 2:
                newest[file.record["model"], activations] = file, held
    return "\n".join(_load_table(*found) for found in newest.values()) or NOTHING


def _is_ours(server: dict[str, Any]) -> bool:
    return str(server["backend"]).startswith("ours")


def _load_table(file: ResultFile, servers: list[dict[str, Any]]) -> str:
    cases = [held["case"] for held in servers[0]["cases"] if all(_rate(one, held["case"]) for one in servers)]
    rows = []
    for server in sorted(servers, key=_is_ours):
        cells = []
        for case in cases:
            best = max(_rate(one, case) for one in servers if not _is_ours(one))
            rate = _rate(server, case)
            cells.append(f"{rate:,.0f} ({rate / best:.2f}x)" if _is_ours(server) else f"{rate:,.0f}")
        rows.append(("**lancebill**" if _is_ours(server) else server["backend"].removesuffix("-fp8"), *cells))
    record = file.record
    trials = {len(held["trials"]) for server in servers for held in server["cases"]}
    note = (
        f"{record['model']}, MXFP4 x {servers[0]['activations']}: tokens per second by `vllm bench serve`, of prompts "
        f"where one token is asked for, else of answers; median of {min(trials)} trials, servers in turns "
        f"(ours over the best peer). vLLM {record['versions']['vllm']}, FULL_AND_PIECEWISE; answers are streamed in "
        f"parts of {record['stream_interval']} tokens; {_without_figures(servers, cases)}{links(file.name)}"
    )
    return markdown_table(("", *map(_case_name, cases)), rows, note)


def _without_figures(servers: list[dict[str, Any]], cases: list[dict[str, int]]) -> str:
    """Cases that the table lacks because prompts were not answered."""
    reasons = {
        _case_name(held["case"]): trial["failure"].partition(":")[0]
        for server in servers
        for held in server["cases"]
        for trial in held["trials"]
        if held["case"] not in cases and "failure" in trial
    }
    return "".join(f"{name}: no figure, {reason}; " for name, reason in reasons.items())


def _rate(server: dict[str, Any], case: dict[str, int]) -> float:
    return next((float(held.get("tokens_per_s", 0.0)) for held in server["cases"] if held["case"] == case), 0.0)


def _case_name(case: dict[str, int]) -> str:
    lengths = f"{case['tokens_in']:,} in, {case['tokens_out']:,} out"
    return f"{lengths}: {case['prompts']} prompts, {case['concurrency']} at once"


def vllm_split() -> str:
    """The newest run: a model with half of its experts on the CPU, beside the whole one."""
    files = result_files("vllm-split")
    engines = [engine for file in files[-1:] for engine in file.record["engines"] if engine.get("decode")]
    if not engines:
        return NOTHING
    cases = [(case["prompts"], case["in"], case["out"]) for e in engines[:1] for case in (*e["prefill"], *e["decode"])]
    rows = [(_split_name(engine), *_split_rates(engine), *_memory(engine)) for engine in engines]
    head = [f"{count} x {new:,} new" if new > 1 else f"{count} prompts of {given:,}" for count, given, new in cases]
    answers = "; ".join(
        f"answers: {one['same_answers']} of {one['answers']} are the same, the others part where the margin is at most "
        f"{max(one['margins_where_answers_part'], default=0):.3f}; log-probabilities of given tokens differ by "
        f"{one['mean']:.4f} on average, {one['largest']:.3f} at most"
        for one in compared(engines)
    )
    note = (
        f"{engines[0]['model']} in vLLM {files[-1].record['versions']['vllm']} with FULL_AND_PIECEWISE graphs: tokens "
        f"per second, and memory in use on the GPU and in the process (growth over {_steps(engines)} steps); "
        f"{answers}; {links(files[-1].name)}"
    )
    return markdown_table(("experts", *head, "GPU memory", "host memory"), rows, note)


def _split_name(engine: dict[str, Any]) -> str:
    return "half on the CPU" if engine["backend"] == "ours-split" else "all on the GPU"


def _split_rates(engine: dict[str, Any]) -> list[str]:
    return [f"{case['tokens_per_s']:,.0f}" for case in (*engine["prefill"], *engine["decode"])]


def _memory(engine: dict[str, Any]) -> tuple[str, str]:
    """At the end, and what was added from the first part of the steps to the last: what the first one needs stays."""
    memory = engine.get("memory")
    if memory is None:
        return "", ""
    gpu, host = (
        f"{memory[name][-1] / 2**30:.2f} GiB ({(memory[name][-1] - memory[name][1]) / 2**20:+.1f} MiB)"
        for name in ("gpu_bytes", "host_bytes")
    )
    return gpu, host


def _steps(engines: list[dict[str, Any]]) -> str:
    steps = {engine["memory"]["steps"] for engine in engines if "memory" in engine}
    return " and ".join(f"{count:,}" for count in sorted(steps))
