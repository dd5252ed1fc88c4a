"""Rows of summary.json for what is served, and the memory of CUDA graphs: from records made by hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from project import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import gpu_tables
import result_files
import summary


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(result_files, "RESULTS", tmp_path)
    return tmp_path


def write(results: Path, table: str, record: dict[str, Any]) -> None:
    path = results / table / "h200" / "a.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(record), encoding="utf-8")


def figures(*names: str) -> list[tuple[Any, ...]]:
    """These fields of the rows that have the first one."""
    return [tuple(row[name] for name in names) for row in summary.summary_rows() if names[0] in row]


def test_load_tests_have_the_other_servers_of_the_run_as_peers(results: Path) -> None:
    short, long = (
        {"prompts": 16, "concurrency": 8, "tokens_in": 64, "tokens_out": tokens_out} for tokens_out in (1, 9)
    )
    profile = {"kernels_of_one_sequence": {"experts_busy_us_per_step": 50.0}}

    def server(backend: str, *rates: float | None, activations: str = "bf16") -> dict[str, Any]:
        cases = [{"case": case, "tokens_per_s": rate} for case, rate in zip((short, long), rates) if rate is not None]
        return {"backend": backend, "activations": activations, "cases": cases}

    servers = [
        server("ours", 300.0, 30.0) | profile,
        server("humming", 200.0) | profile,
        server("marlin", 100.0, 20.0),
        server("ours-fp8", 400.0, activations="fp8"),
        {"model": "gpt-oss-120b", **server("triton", 50.0)},
        {"backend": "triton", "activations": "bf16", "failure": "out of memory"},
    ]
    unanswered = {"case": long, "trials": [{"failure": "400 Bad Request"}]}
    servers[1]["cases"].append(unanswered)
    write(results, "vllm-bench-serve", {"model": "qwen3-30b", "servers": servers})
    assert figures("tokens_per_s", "backend", "activations", "tokens_out", "peers") == [
        (300.0, "ours", "bf16", 1, {"humming": 200.0, "marlin": 100.0}),
        (30.0, "ours", "bf16", 9, {"marlin": 20.0}),
        (400.0, "ours-fp8", "fp8", 1, {}),
    ]
    assert figures("experts_busy_us_per_step", "peers") == [(50.0, {"humming": 50.0})]
    assert {(row["model"], row["concurrency"]) for row in summary.summary_rows() if "prompts" in row} == {
        ("qwen3-30b", 8)
    }


def test_split_models_have_the_whole_one_as_peer(results: Path) -> None:
    def engine(backend: str, rate: float, gpu: int) -> dict[str, Any]:
        return {
            "model": "gpt-oss-20b", "backend": backend, "activations": "bf16", "load_s": 2.0, "prefill": [],
            "decode": [{"prompts": 1, "in": 1, "out": 128, "tokens_per_s": rate}],
            "memory": {"steps": 100, "gpu_bytes": [0, gpu], "host_bytes": [0, 7]},
        }  # fmt: skip

    answers = {"model": "gpt-oss-20b", "reference": "ours", "backend": "ours-split", "answers": 8, "same_answers": 6}
    compared = [answers | {"mean": 0.1, "largest": 0.2}]
    engines = [engine("ours", 50.0, 9), engine("ours-split", 40.0, 5), {"model": "gpt-oss-20b", "failure": "killed"}]
    write(results, "vllm-split", {"engines": engines, "answers_compared": compared})
    assert figures("tokens_per_s", "backend", "peers") == [
        (50.0, "ours", {"ours-split": 40.0}), (40.0, "ours-split", {"ours": 50.0}),
    ]  # fmt: skip
    assert figures("gpu_bytes", "steps", "peers") == [(9, 100, {"ours-split": 5}), (5, 100, {"ours": 9})]
    assert figures("mean_logprob_difference", "backend", "against", "same_answers") == [(0.1, "ours-split", "ours", 6)]


def test_tests_of_vllm_are_counted_by_family(results: Path) -> None:
    name = "test_answers.py::test_tokens_and_log_probabilities[{}]"
    tests = [
        {"test": name.format("mixtral-bf16"), "outcome": "passed", "distance": 2e-6},
        {"test": name.format("mixtral-gptq"), "outcome": "failed"},
        {"test": "test_ranks.py::test_tp", "outcome": "passed"},
    ]
    write(results, "vllm-cpu", {"tests": tests})
    assert figures("model", "tests", "passed", "largest_logprob_difference") == [("mixtral", 2, 1, 2e-6)]
    assert figures("case", "tests", "passed") == [("test_ranks.py", 1, 1)]


def test_memory_of_graphs_is_a_line_and_rows_if_it_was_measured(results: Path) -> None:
    assert "CUDA graphs" not in gpu_tables.gpu_host()
    sizes = {"shared": (100 << 20, 0), "separate": (3000 << 20, 0), "reserved": (90 << 20, 40 << 20)}
    rows = [
        {"pool": pool, "device_bytes": held, "reserved_bytes": reserved, "seconds": 1.5}
        for pool, (held, reserved) in sizes.items()
    ]
    names = {"shape": "qwen3-30b-a3b", "weights": "mxfp4", "activations": "bf16", "layers": 48}
    write(results, "capture-memory", {**names, "sizes": [1, 2, 4], "rows": rows})
    assert (
        "* CUDA graphs of 48 layers (qwen3-30b-a3b's sizes) at 3 numbers of tokens take 100 MiB of GPU memory in one "
        "pool, 3,000 MiB in pools of their own, 90 MiB after `reserve` (of which 40 MiB are reserved) ([capture-memory/"
    ) in gpu_tables.gpu_host()
    assert figures("device_bytes", "pool", "reserved_bytes", "layers", "sizes") == [
        (held, pool, reserved, 48, 3) for pool, (held, reserved) in sizes.items()
    ]
