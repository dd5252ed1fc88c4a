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
import vllm_tables


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
    }
    folder = tmp_path / "vllm-serving" / "h200"
    folder.mkdir(parents=True)
    start = {
        "commit": "1",
        "sizes": {"trials": 3, "compiler": "eager"},
        "versions": {"vllm": "0.26.0"},
        "client": "generate",
    }
    for name, engines in runs.items():
        (folder / f"{name}.json").write_text(json.dumps(start | {"engines": engines}), encoding="utf-8")
    rows = [line for line in vllm_tables.vllm_serving().splitlines() if line.startswith("|")]
    assert rows[0] == "|  | 2 prompts of 8,192 | 64 x 128 new | load | experts |"
    assert rows[2:] == [
        "| triton | 1,000 | 100 | 2.5 | 50 |",
        "| marlin | 2,000 | 200 | 2.5 | 50 |",
        "| **lancebill** | 3,000 (1.50x) | 300 (1.50x) | 2.5 | 50 |",
    ]


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
