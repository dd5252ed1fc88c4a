"""vLLM's load test: cases, engines, servers that are waited for, trials that are added to a record."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from project import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import vllm_bench_serve
from vllm_bench_serve import Case, Engine, Server

ENGINE = Engine("tiny-gpt-oss", "ours")
FAR = 20.0


def server(log: Path, work: Any) -> Server:
    return Server(ENGINE, log.parent, vllm_bench_serve.fork(work, log), vllm_bench_serve.free_port(), log)


def test_a_case_and_its_warm_up() -> None:
    prefill, decode = Case.parse("128@32:65536/1"), Case.parse("256@64:1/4096")
    assert prefill == Case(128, 32, 65536, 1) and prefill.warm_up == Case(1, 32, 65536, 1)
    assert decode.warm_up == Case(64, 64, 1, 16)
    figures = {"total_input_tokens": 800, "total_output_tokens": 40, "duration": 2.0}
    assert (prefill.rate(figures), decode.rate(figures)) == (400.0, 20.0)


def test_engines() -> None:
    assert Engine.parse("tiny-gpt-oss:ours") == ENGINE and not ENGINE.fills
    assert Engine.parse("qwen3-v4-experts:humming").fills
    for wrong in ("tiny-gpt-oss", "tiny-gpt-oss:other", "other:ours"):
        with pytest.raises(argparse.ArgumentTypeError, match=wrong):
            Engine.parse(wrong)


def test_a_server_that_says_it_has_loaded_is_not_waited_for_longer(tmp_path: Path) -> None:
    def load() -> None:
        os.write(1, vllm_bench_serve.LOADED.encode())  # sys.stdout is pytest's
        time.sleep(FAR)

    begin = time.monotonic()
    loading = server(tmp_path / "a.log", load)
    loading.wait_for_weights(begin + FAR)
    vllm_bench_serve.end(loading.process)
    assert time.monotonic() - begin < FAR / 2


def test_a_server_that_ended_is_not_waited_for_and_says_why(tmp_path: Path) -> None:
    begin = time.monotonic()
    ended = server(tmp_path / "a.log", lambda: os.write(1, b"out of memory"))
    ended.wait_for_weights(begin + FAR)
    assert ended.wait(begin + FAR) == "the server ended: out of memory"
    assert time.monotonic() - begin < FAR / 2


def test_trials_are_added_to_the_server_of_their_model() -> None:
    others = {"model": "gpt-oss-120b", "backend": "ours", "cases": []}
    record: dict[str, Any] = {"servers": [others, {"model": "tiny-gpt-oss", "backend": "ours", "cases": []}]}
    case = Case(4, 2, 8, 1)
    for seconds in (1.0, 4.0, 2.0):
        vllm_bench_serve.add_trial(record, ENGINE, case, {"total_input_tokens": 32, "duration": seconds})
    vllm_bench_serve.add_trial(record, ENGINE, case, {"failure": "3 of 4 prompts were answered"})
    (held,) = record["servers"][1]["cases"]
    assert held["tokens_per_s"] == 16.0 and len(held["trials"]) == 4 and not others["cases"]
