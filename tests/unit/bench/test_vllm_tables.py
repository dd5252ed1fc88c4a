"""The tables of serving with vLLM: which runs they take, ratios, and how answers are compared."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from project import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import result_files
import vllm_answers
import vllm_bench_tables
import vllm_cpu_tables
import vllm_tables

START = {
    "commit": "1",
    "sizes": {"trials": 3, "compiler": "eager"},
    "versions": {"vllm": "0.26.0"},
    "client": "generate",
}


def engine(backend: str, rate: float, answers: dict[str, Any] | None = None) -> dict[str, Any]:
    made = {
        "model": "gpt-oss-120b",
        "backend": backend,
        "activations": "fp8" if backend.endswith("fp8") else "bf16",
        "graphs": "CUDAGraphMode.FULL_AND_PIECEWISE",
        "load_s": 2.5,
        "prefill": [{"prompts": 2, "in": 8192, "out": 1, "tokens_per_s": 10 * rate}],
        "decode": [{"prompts": 64, "in": 1, "out": 128, "tokens_per_s": rate}],
        "kernels_of_one_sequence": {"experts_busy_us_per_step": 50.0, "us_per_step": 90.0},
    }
    return made if answers is None else made | {"answers": answers}


def test_tables_join_the_newest_runs_that_have_ours_and_a_peer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(result_files, "RESULTS", tmp_path)
    assert vllm_tables.vllm_serving() == "Nothing has been measured yet.\n"
    runs = {
        "a": [engine("ours", 90.0), engine("triton", 100.0)],
        "b": [engine("ours", 300.0), engine("triton", 100.0), engine("marlin", 200.0), engine("ours-fp8", 1.0)],
        "c": [engine("ours", 1.0), engine("humming", 5.0) | {"failure": "out of memory"}],
        "d": [
            one | {"decode": [one["decode"][0] | {"out": 4096}]}
            for one in (engine("ours", 3.0), engine("humming", 2.0))
        ],
    }
    folder = tmp_path / "vllm-serving" / "h200"
    folder.mkdir(parents=True)
    for name, engines in runs.items():
        (folder / f"{name}.json").write_text(json.dumps(START | {"engines": engines}), encoding="utf-8")
    rows = [line for line in vllm_tables.vllm_serving().splitlines() if line.startswith("|")]
    assert rows[0] == "|  | 2 prompts of 8,192 | 64 x 128 new | load | experts |"
    assert rows[2:5] == [
        "| triton | 1,000 | 100 | 2.5 | 50 |",
        "| marlin | 2,000 | 200 | 2.5 | 50 |",
        "| **lancebill** | 3,000 (1.50x) | 300 (1.50x) | 2.5 | 50 |",
    ]
    assert rows[5] == "|  | 2 prompts of 8,192 | 64 x 4,096 new | load | experts |"  # longer answers: another table
    assert rows[7:] == ["| humming | 20 | 2 | 2.5 | 50 |", "| **lancebill** | 30 (1.50x) | 3 (1.50x) | 2.5 | 50 |"]


def test_time_of_experts_may_come_from_a_later_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(result_files, "RESULTS", tmp_path)
    sums = {"kernels_of_one_sequence": {"experts_us_per_step": 80.0, "us_per_step": 90.0}}
    runs = {"a": [engine("ours", 2.0) | sums, engine("triton", 1.0) | sums], "b": [engine("ours", 9.0)]}
    folder = tmp_path / "vllm-serving" / "h200"
    folder.mkdir(parents=True)
    for name, engines in runs.items():
        (folder / f"{name}.json").write_text(json.dumps(START | {"engines": engines}), encoding="utf-8")
    text = vllm_tables.vllm_serving()
    assert "| triton | 10 | 1 | 2.5 | 80 (sum) |" in text
    assert "| **lancebill** | 20 (2.00x) | 2 (2.00x) | 2.5 | 80 (sum), 50 |" in text
    assert "h200/a.json), [" in text and "h200/b.json)" in text


def test_answers_may_part_only_where_tokens_are_tied() -> None:
    given = {"prompt_logprobs": [[-1.0, -2.0]], "tokens": [[5, 6, 7]], "margins": [[3.0, 0.1, 2.0]]}
    near = {"prompt_logprobs": [[-1.0, -2.2]], "tokens": [[5, 9, 9]], "margins": [[3.0, 0.0, 0.0]]}
    far = {"prompt_logprobs": [[-1.0, -2.0]], "tokens": [[8, 6, 7]], "margins": [[0.0, 0.0, 0.0]]}
    engines = [engine("ours", 1.0, near), engine("triton", 1.0, given), engine("marlin", 1.0, far)]
    first, second = vllm_answers.compared(engines)
    assert (first["reference"], first["backend"], first["same_answers"]) == ("triton", "ours", 0)
    assert first["within_bound"] and first["tokens_equal_where_not_tied"]
    assert first["largest"] == pytest.approx(0.2) and first["mean"] == pytest.approx(0.1)
    assert second["within_bound"] and not second["tokens_equal_where_not_tied"]
    shallow = [one | {"model": "gpt-oss-1-layer"} for one in engines]
    assert [one["within_bound"] for one in vllm_answers.compared(shallow)] == [
        False,
        True,
    ]  # of the largest, not the mean


def test_runs_on_cpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(result_files, "RESULTS", tmp_path)
    assert vllm_cpu_tables.vllm_cpu() == "Nothing has been recorded yet.\n"
    reading = {"value": 0.25, "stderr": 0.05}
    records: dict[str, dict[str, Any]] = {
        "vllm-cpu": {
            "command": "make test-vllm-all",
            "packages": {"vllm-cpu": "0.32.0"},
            "collected": 5,
            "tests": [
                {
                    "test": "tests/with_vllm/test_answers.py::test_tokens_and_log_probabilities[mixtral-bf16]",
                    "outcome": "passed",
                    "distance": 2e-06,
                },
                {
                    "test": "tests/with_vllm/test_answers.py::test_tokens_and_log_probabilities[mixtral-gptq]",
                    "outcome": "failed",
                },
                {"test": "tests/with_vllm/test_ranks.py::test_tp", "outcome": "passed"},
            ],
        },
        "serve-accuracy": {
            "questions": 40,
            "shots": 4,
            "tokens": 160,
            "variants": [
                {"variant": "stored", "strict": reading, "flexible": reading},
                {"variant": "mxfp4", "strict": reading | {"p": 0.5}, "flexible": reading | {"p": 1.0}},
            ],
        },
        "decode-engines": {
            "compiled": True,
            "dtype": "float32",
            "threads": 2,
            "vllm": "0.32.0",
            "tokens_per_second": {"transformers": [9.0, 10.0, 11.0], "vllm": [17.0, 18.0, 19.0]},
            "medians": {"transformers": 10.0, "vllm": 18.0},
            "vllm_over_transformers": 1.8,
            "shares_of_vllm": {"experts": 0.25, "other": 0.75},
        },
    }
    for table, record in records.items():
        (tmp_path / table / "cpu").mkdir(parents=True)
        (tmp_path / table / "cpu" / "a.json").write_text(json.dumps(record), encoding="utf-8")
    text = vllm_cpu_tables.vllm_cpu()
    assert "with vLLM 0.32.0: 1 failed, 2 passed (3 of 5 tests; stopped by time); the largest difference" in text
    assert "of a log-probability is 2.0e-06" in text and "each family that ran, in fp32" in text
    assert "| mixtral | 1 of 2 | 2.0e-06 |" in text
    assert "| mxfp4 | 25.0% ± 5.0% | 25.0% ± 5.0% | 0.5 | 1 |" in text
    assert "2 threads, tokens per second, median of 3 turns: vLLM 0.32.0 (compiled) 18.0, transformers' own" in text
    assert "steps 10.0 (1.80x); where the time of vLLM goes: experts 25%, other 75%; [" in text


def load_case(tokens_out: int, rate: float) -> dict[str, Any]:
    case = {"prompts": 16, "concurrency": 8, "tokens_in": 64, "tokens_out": tokens_out}
    return {"case": case, "trials": [{"duration": 2.0}, {"duration": 3.0}], "tokens_per_s": rate}


def test_load_tests_join_the_newest_cases_that_have_ours_and_a_peer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(result_files, "RESULTS", tmp_path)
    assert vllm_bench_tables.vllm_bench_serve() == vllm_bench_tables.NOTHING
    start = {"versions": {"vllm": "0.26.0"}, "stream_interval": 8}

    def server(backend: str, *cases: dict[str, Any], model: str = "qwen3-30b") -> dict[str, Any]:
        graphs = json.dumps({"backend": "eager", "cudagraph_mode": "FULL"})
        options = {"options": ["--seed", "0", "--compilation-config", graphs]}
        return {"model": model, "backend": backend, "activations": "bf16", "cases": list(cases), **options}

    def unanswered(tokens_out: int) -> dict[str, Any]:
        refused = {"failure": "5 of 16 prompts were answered: 400 Bad Request"}
        return {"case": load_case(tokens_out, 0.0)["case"], "trials": [refused] * 2}

    failed = {"model": "qwen3-30b", "backend": "marlin", "activations": "bf16", "failure": "out of memory"}
    once = load_case(9, 40.0) | {"trials": [{"duration": 2.0}]}
    runs = {
        "a": [server("ours", load_case(1, 300.0), load_case(9, 30.0)), server("humming", load_case(1, 200.0)), failed],
        "b": [server("ours", load_case(1, 1.0), once), server("marlin", unanswered(1), load_case(9, 20.0))],
        "c": [server("ours", load_case(9, 7.0)), server("humming", unanswered(9))],
        "d": [server("ours", load_case(9, 7.0), model="gpt-oss-120b"), server("marlin", load_case(9, 7.0))],
    }
    (tmp_path / "vllm-bench-serve" / "h200").mkdir(parents=True)
    for name, servers in runs.items():
        path = tmp_path / "vllm-bench-serve" / "h200" / f"{name}.json"
        path.write_text(json.dumps(start | {"servers": servers}), encoding="utf-8")
    lines = vllm_bench_tables.vllm_bench_serve().splitlines()
    assert lines[0] == "|  | 64 in, 1 out: 16 prompts, 8 at once | 64 in, 9 out: 16 prompts, 8 at once |"
    assert lines[2:6] == [
        "| humming | 200 |  |",
        "| marlin |  | 20 |",
        "| **lancebill** | 300 (1.50x) | 40 (2.00x) |",
        "| trials differ by up to | 50% | one trial |",
    ]
    assert "Qwen3-30B-A3B, 48 layers, MXFP4" in lines[7] and "median of 1 to 2 trials" in lines[7]
    assert "vLLM 0.26.0, FULL, eager;" in lines[7]
    assert "h200/a.json), [" in lines[7] and "h200/b.json" in lines[7]
    assert len(lines) == 8
    times = {"ours": 60.0, "marlin": 80.0, "humming": 120.0}
    profiled = [
        server(backend) | {"kernels_of_one_sequence": {"experts_busy_us_per_step": us}} for backend, us in times.items()
    ]
    path.with_name("e.json").write_text(json.dumps(start | {"servers": profiled}), encoding="utf-8")
    lines = vllm_bench_tables.vllm_bench_serve().splitlines()
    assert lines[0].endswith("| experts |") and lines[2:5] == [
        "| humming | 200 |  | 120 |",
        "| marlin |  | 20 | 80 |",
        "| **lancebill** | 300 (1.50x) | 40 (2.00x) | 60 (0.75x) |",
    ]


def test_no_more_prompts_are_sent_at_once_than_there_are() -> None:
    case = {"prompts": 2, "concurrency": 32, "tokens_in": 64, "tokens_out": 1}
    assert vllm_bench_tables._case_name(case) == "64 in, 1 out: 2 prompts, 2 at once"


def test_split_models_beside_whole_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(result_files, "RESULTS", tmp_path)
    assert vllm_bench_tables.vllm_split() == vllm_bench_tables.NOTHING
    answers = {"prompt_logprobs": [[-1.0]], "tokens": [[5, 6]], "margins": [[1.0, 0.5]]}
    other = {"prompt_logprobs": [[-1.5]], "tokens": [[5, 7]], "margins": [[1.0, 0.5]]}
    memory = {"steps": 100, "gpu_bytes": [1 << 20, 3 << 20, 3 << 20], "host_bytes": [0, 0, 2 << 20]}
    engines = [engine("ours", 50.0, answers), engine("ours-split", 20.0, other) | {"memory": memory}]
    (tmp_path / "vllm-split" / "h200").mkdir(parents=True)
    record = json.dumps(START | {"engines": engines})
    (tmp_path / "vllm-split" / "h200" / "a.json").write_text(record, encoding="utf-8")
    lines = vllm_bench_tables.vllm_split().splitlines()
    assert lines[2:4] == [
        "| all on the GPU | 500 | 50 |  |  |",
        "| half on the CPU | 200 | 20 | 0.00 GiB (+0.0 MiB) | 0.00 GiB (+2.0 MiB) |",
    ]
    assert "growth over 100 steps" in lines[5]
    assert "0 of 1 are the same, the others part where the margin is at most 0.500" in lines[5]
    assert "differ by 0.5000 on average" in lines[5]


def test_runs_on_cpus_join_the_newest_of_each_test(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(result_files, "RESULTS", tmp_path)
    name = "test_answers.py::test_tokens_and_log_probabilities[{}]"
    runs = {
        "a": ("0.31.0", {"mixtral-gguf": "passed"}),
        "b": ("0.32.0", {"mixtral-bf16": "passed", "mixtral-gptq": "failed"}),
        "c": ("0.32.0", {"mixtral-gptq": "passed", "olmoe-bf16": "passed"}),
    }
    (tmp_path / "vllm-cpu" / "cpu").mkdir(parents=True)
    for run, (version, outcomes) in runs.items():
        tests = [
            {"test": name.format(cell), "outcome": outcome, "distance": 1e-6} for cell, outcome in outcomes.items()
        ]
        record = {"command": "make", "packages": {"vllm-cpu": version}, "collected": 3, "tests": tests}
        (tmp_path / "vllm-cpu" / "cpu" / f"{run}.json").write_text(json.dumps(record), encoding="utf-8")
    text = vllm_cpu_tables.vllm_cpu()
    assert "`make` with vLLM 0.32.0, in 2 runs: 3 passed; the largest difference" in text
    assert "| mixtral | 2 of 2 | 1.0e-06 |" in text and "each family, in fp32" in text
    assert "cpu/b.json), [" in text and "cpu/c.json" in text and "cpu/a.json" not in text
