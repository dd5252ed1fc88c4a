"""Rows of summary.json for whole models that are served: in vLLM, by our server, and split between a GPU and the CPU.

Where vLLM's backends are compared, each of ours is a row, `backend` is its name, and the peers are the other backends
of the same run, model and activations.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from result_files import ResultFile
from vllm_cpu_tables import CELL

Row = dict[str, Any]
Case = tuple[tuple[str, int], ...]  # what was asked for: (name of the field, value)
Measured = dict[tuple[str, str, str, Case], float]  # by model, activations, backend and case
OF_EXPERTS = ("experts_busy_us_per_step", "experts_us_per_step")  # during which their kernels run; sum of their times


def vllm_serving(file: ResultFile) -> Iterator[Row]:
    """Tokens of prompts (one new token each) or new tokens per second inside vLLM; vllm-split has the same records."""
    record = file.record
    engines = [engine for engine in record["engines"] if "decode" in engine]
    rates = {
        (*_names(record, engine), _case(case["prompts"], case["in"], case["out"])): case["tokens_per_s"]
        for engine in engines
        for case in (*engine["prefill"], *engine["decode"])
    }
    yield from _ours_beside_others(rates, "tokens_per_s")
    loads: Measured = {(*_names(record, engine), ()): engine["load_s"] for engine in engines if "load_s" in engine}
    yield from _ours_beside_others(loads, "load_s")
    yield from _times_of_experts(record, engines)
    for name in ("gpu_bytes", "host_bytes"):
        used: Measured = {
            (*_names(record, engine), (("steps", engine["memory"]["steps"]),)): engine["memory"][name][-1]
            for engine in engines
            if "memory" in engine
        }
        yield from _ours_beside_others(used, name)
    yield from _answers(record)


def vllm_bench_serve(file: ResultFile) -> Iterator[Row]:
    """The cases of `vllm bench serve` that were answered, and the experts' time in a step."""
    record, servers = file.record, file.record["servers"]
    rates = {
        (*_names(record, server), tuple(held["case"].items())): held["tokens_per_s"]
        for server in servers
        for held in server.get("cases", ())
        if held.get("tokens_per_s")
    }
    yield from _ours_beside_others(rates, "tokens_per_s")
    yield from _times_of_experts(record, servers)


def _names(record: dict[str, Any], engine: dict[str, Any]) -> tuple[str, str, str]:
    return engine.get("model") or record["model"], engine["activations"], engine["backend"]


def _case(prompts: int, tokens_in: int, tokens_out: int) -> Case:
    return ("prompts", prompts), ("tokens_in", tokens_in), ("tokens_out", tokens_out)


def _times_of_experts(record: dict[str, Any], engines: list[dict[str, Any]]) -> Iterator[Row]:
    """GPU time of the experts in a step of one sequence, by vLLM's profiler."""
    profiles = {_names(record, engine): engine.get("kernels_of_one_sequence") or {} for engine in engines}
    for unit in OF_EXPERTS:
        times: Measured = {(*names, ()): profile[unit] for names, profile in profiles.items() if unit in profile}
        yield from _ours_beside_others(times, unit)


def _ours_beside_others(measured: Measured, unit: str) -> Iterator[Row]:
    for (model, activations, backend, case), figure in measured.items():
        if not backend.startswith("ours"):
            continue
        peers = {
            other: value
            for (*kind, other, others_case), value in measured.items()
            if kind == [model, activations] and others_case == case and other != backend
        }
        names = {"model": model, "weights": "mxfp4", "activations": activations, "backend": backend}
        yield {**names, **dict(case), unit: figure, "peers": peers}


def _answers(record: dict[str, Any]) -> Iterator[Row]:
    """How far log-probabilities of given tokens are from those of one backend, `against`."""
    compared = record.get("answers_compared", ())
    means: Measured = {(one["model"], _activations(one), one["backend"], ()): one["mean"] for one in compared}
    found = {(one["model"], one["backend"]): one for one in compared}
    for row in _ours_beside_others(means, "mean_logprob_difference"):
        one = found[row["model"], row["backend"]]
        compared_with = {"against": one["reference"], "largest_logprob_difference": one["largest"]}
        same = {"answers": one["answers"], "same_answers": one["same_answers"]}
        yield row | compared_with | same


def _activations(engine: dict[str, Any]) -> str:
    return "fp8" if str(engine["backend"]).endswith("-fp8") else "bf16"


def vllm_cpu(file: ResultFile) -> Iterator[Row]:
    """Tests of each family, with log-probabilities beside transformers', and other tests by file."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for test in file.record["tests"]:
        match = CELL.search(test["test"])
        group = ("model", match["family"]) if match else ("case", test["test"].partition("::")[0])
        groups.setdefault(group, []).append(test)
    for (field, name), tests in groups.items():
        counts = {"tests": len(tests), "passed": sum(test["outcome"] == "passed" for test in tests)}
        distances = [test["distance"] for test in tests if "distance" in test]
        largest = {"largest_logprob_difference": max(distances)} if distances else {}
        yield {field: name, **counts, **largest, "peers": {}}


def decode_engines(file: ResultFile) -> Iterator[Row]:
    """One sequence of the demo's model with our experts in each engine, in turns: medians."""
    record, medians = file.record, file.record["medians"]
    how = {name: record[name] for name in ("dtype", "threads", "compiled")}
    how |= {"model": "demo", "weights": record["model"], "clock": record.get("clock", "wall clock")}
    for engine, rate in medians.items():
        peers = {other: value for other, value in medians.items() if other != engine}
        yield {**how, "engine": engine, "tokens_per_s": rate, "peers": peers}


def serve(file: ResultFile) -> Iterator[Row]:
    """Clients that misbehave: how many requests were answered or refused, and the server's memory in MB."""
    record = file.record
    figures = {name: record[name] for name in ("server_errors", "stuck", "slowest_seconds")}
    memory = {f"resident_mb_{when}": value for when, value in record["resident_mb"].items()}
    requests = {"seconds": record["seconds"], "requests": sum(record["outcomes"].values())}
    yield {"clients": record["clients"], **requests, **figures, **memory, "peers": {}}


def serve_accuracy(file: ResultFile) -> Iterator[Row]:
    """Questions and reference solutions asked of a running server."""
    record = file.record
    for row in record["variants"]:
        weights, _, activations = row["variant"].partition("/")
        names = {"model": "SmolLM2-135M", "weights": weights} | ({"activations": activations} if activations else {})
        scores = {reading: row[reading]["value"] for reading in ("strict", "flexible")}
        likelihood = {"nats_per_token": row["likelihood"]["nats"]} if "likelihood" in row else {}
        yield {**names, "questions": record["questions"], **scores, **likelihood, "peers": {}}


def hybrid_generate(file: ResultFile) -> Iterator[Row]:
    """Small models with half of their experts on the GPU: speed, memory after calls of many steps, and Ctrl-C."""
    record = file.record
    model, steps = record["model"], record["steps"]
    split = {"weights": "mxfp4", "gpu_percent": 50}
    whole = {"whole": model["whole_tokens_per_s"]}
    name = f"{model['layers']} layers of {model['experts']} experts"
    yield {"model": name, **split, "tokens_per_s": model["tokens_per_s"], "peers": whole}
    for number, call in enumerate(steps["rows"], 1):
        figures = {"tokens_per_s": call["tokens_per_s"], "host_bytes": call["rss"], "gpu_bytes": call["gpu"]}
        yield {"model": f"tiny, {steps['split_layers']} layers", **split, "call": number, **figures, "peers": {}}
    interrupt = {"seconds_until_it_ends": record["interrupt"]["end_s"], "lost_gpu_bytes": record["lost_gpu"]}
    yield {"model": name, **split, "case": "SIGINT", **interrupt, "peers": {}}
