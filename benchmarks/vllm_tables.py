"""The tables of serving with vLLM, from the results of benchmarks/vllm_serving.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from result_files import ResultFile, links, markdown_table, result_files
from vllm_answers import compared as answers_compared
from vllm_models import CHECKPOINTS

Engine = dict[str, Any]
BUSY = "experts_busy_us_per_step"
TITLES = {
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


def vllm_serving() -> str:
    """For each model, kind of activations and length of answers the newest run that has ours and a peer."""
    blocks = [_serving_table(file, engines) for file, engines in _newest_groups().values()]
    return "\n".join([*blocks, *_answer_table()]) or "Nothing has been measured yet.\n"


def _is_ours(engine: Engine) -> bool:
    return str(engine["backend"]).startswith("ours")


def _whole(engines: list[Engine]) -> list[Engine]:
    """Those of which everything was measured."""
    return [one for one in engines if one["model"] in TITLES and one.get("decode") and "failure" not in one]


def _kind(engine: Engine) -> tuple[str, str, int]:
    """Runs of one kind replace each other in the tables."""
    return engine["model"], engine["activations"], max(case["out"] for case in engine["decode"])


def _newest_groups() -> dict[tuple[str, str, int], tuple[ResultFile, list[Engine]]]:
    groups: dict[tuple[str, str, int], tuple[ResultFile, list[Engine]]] = {}
    for file in result_files("vllm-serving"):
        engines = _whole(file.record["engines"])
        for key in dict.fromkeys(map(_kind, engines)):
            held = [engine for engine in engines if _kind(engine) == key]
            if len({_is_ours(engine) for engine in held}) == 2:
                groups[key] = file, held
    return {key: groups[key] for key in sorted(groups, key=lambda key: (list(TITLES).index(key[0]), *key[1:]))}


def _serving_table(file: ResultFile, engines: list[Engine]) -> str:
    cases = [*engines[0]["prefill"], *engines[0]["decode"]]
    head = [_case_name(case) for case in cases]
    rates = {engine["backend"]: _rates(engine) for engine in engines}
    best = [max(rates[e["backend"]][i] for e in engines if not _is_ours(e)) for i in range(len(cases))]
    rows = []
    for engine in sorted(engines, key=_is_ours):
        cells = [f"{rate:,.0f}" for rate in rates[engine["backend"]]]
        if _is_ours(engine):
            cells = [f"{cell} ({rate / top:.2f}x)" for cell, rate, top in zip(cells, _rates(engine), best, strict=True)]
        rows.append((_backend_name(engine), *cells, _load(engine), _experts(engine)))
    title = f"{TITLES[engines[0]['model']]}, MXFP4 x {engines[0]['activations']}"
    sizes, versions = file.record["sizes"], file.record["versions"]
    graphs = str(engines[0]["graphs"]).rpartition(".")[2]
    note = (
        f"{title}: tokens per second, {_trials(sizes['trials'])} (ours over the best peer); seconds to load "
        f"the checkpoint; µs during which kernels of experts run in a step of one sequence (sum: of their durations, "
        f"so that our two launches of a layer, which overlap, count twice; a figure beside a sum is of a later run "
        f"without peers). vLLM {versions['vllm']}, {graphs}, "
        f"{sizes['compiler']}; {file.record['client']}; {links(file.name, *_later_files(engines))}"
    )
    return markdown_table(("", *head, "load", "experts"), rows, note)


def _trials(count: int) -> str:
    return "one trial" if count == 1 else f"median of {count} trials"


def _case_name(case: dict[str, int]) -> str:
    if case["out"] == 1:
        return f"{case['prompts']} prompts of {case['in']:,}"
    return f"{case['prompts']} x {case['out']:,} new"


def _rates(engine: Engine) -> list[float]:
    return [case["tokens_per_s"] for case in (*engine["prefill"], *engine["decode"])]


def _load(engine: Engine) -> str:
    """Without a checkpoint this is the time to make random weights, which backends make differently."""
    return f"{engine['load_s']:.1f}" if engine["model"] in CHECKPOINTS else ""


def _experts(engine: Engine) -> str:
    kernels = engine.get("kernels_of_one_sequence")
    if kernels is None:
        return ""
    if BUSY in kernels:
        return f"{kernels[BUSY]:,.0f}"
    later = _later_run(engine)
    alone = "" if later is None else f", {later[1]['kernels_of_one_sequence'][BUSY]:,.0f}"
    return f"{kernels['experts_us_per_step']:,.0f} (sum){alone}"


def _later_run(engine: Engine) -> tuple[ResultFile, Engine] | None:
    """The newest run of an engine that has the time during which kernels of its experts run."""
    found = [
        (file, one)
        for file in result_files("vllm-serving")
        for one in _whole(file.record["engines"])
        if (one["model"], one["backend"]) == (engine["model"], engine["backend"])
        and BUSY in one.get("kernels_of_one_sequence", {})
    ]
    return found[-1] if found else None


def _later_files(engines: list[Engine]) -> list[str]:
    """The files of figures that `_experts` takes from a later run."""
    without = [one for one in engines if BUSY not in one.get("kernels_of_one_sequence", {BUSY: 0})]
    return [later[0].name for one in without if (later := _later_run(one)) is not None]


def _backend_name(engine: Engine) -> str:
    return "**lancebill**" if _is_ours(engine) else str(engine["backend"]).removesuffix("-fp8")


def _answer_table() -> Iterator[str]:
    """How far answers are from those of one of vLLM's own backends: the newest of every engine.

    Weights are random by tensor name, so they are the same in all runs.
    """
    newest: dict[tuple[str, str], tuple[ResultFile, Engine]] = {}
    for file in result_files("vllm-serving"):
        for engine in file.record["engines"]:
            if "answers" in engine and engine["model"] in TITLES:
                newest[engine["model"], engine["backend"]] = file, engine
    compared = answers_compared([engine for _, engine in newest.values()])
    if not compared:
        return
    rows = [
        (
            f"{TITLES[one['model']]}, {one['backend']}",
            one["reference"],
            f"{one['largest']:.3f}",
            f"{one['mean']:.4f}",
            f"{one['bounded']} <= {one['bound']}",
            f"{one['same_answers']} of {one['answers']}",
            f"{max(one['margins_where_answers_part'], default=0):.3f}",
        )
        for one in compared
    ]
    head = ("", "against", "largest", "mean", "bound", "same answers", "largest margin")
    names = dict.fromkeys(file.name for file, _ in newest.values())
    note = (
        "Differences of the log-probabilities of given tokens, and greedy answers. Where an answer parts from the "
        f"reference's, the margin is how much likelier the reference's token was to it than its second. "
        f"With random weights a rounding in an early layer may select other experts in a later one. {links(*names)}"
    )
    yield markdown_table(head, rows, note)
