"""vLLM's load test: cases, engines, servers that are waited for, trials that are added to a record."""

from __future__ import annotations

import argparse
import gzip
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from project import ROOT

sys.path.insert(0, str(ROOT / "benchmarks" / "old"))

import vllm_bench_serve
from server_processes import Cores, processes, processor_seconds
from vllm_kernels import kernels_of_trace, time_of_experts
from vllm_load import Case
from vllm_servers import LOADED, Engine, Server, free_port
from vllm_serving import end, fork

ENGINE = Engine("tiny-gpt-oss", "ours")
FAR = 120.0


def server(log: Path, work: Any) -> Server:
    return Server(ENGINE, log.parent, fork(work, log), free_port(), log)


def test_a_case_and_its_warm_up() -> None:
    prefill, decode = Case.parse("128@32:65536/1"), Case.parse("256@64:1/4096")
    assert prefill == Case(128, 32, 65536, 1) and prefill.warm_up == Case(1, 32, 65536, 1)
    assert decode.warm_up == Case(64, 64, 1, 16)
    assert decode.repeats == 1 and Case.parse("1@1:1/512").repeats == 3
    figures = {"total_input_tokens": 800, "total_output_tokens": 40, "duration": 2.0}
    assert (prefill.rate(figures), decode.rate(figures)) == (400.0, 20.0)


def test_models_have_cases_of_their_own_and_come_one_after_the_other(tmp_path: Path) -> None:
    cases = vllm_bench_serve.cases_of_models(["4@2:8/1", "qwen3-30b=1@1:1/8"], ["tiny-gpt-oss", "qwen3-30b"])
    prefill, decode = Case(4, 2, 8, 1), Case(1, 1, 1, 8)
    assert cases == {"tiny-gpt-oss": [prefill], "qwen3-30b": [prefill, decode]}
    engines = [Engine("qwen3-30b", "ours"), ENGINE, Engine("qwen3-30b", "humming")]
    servers = [Server(engine, tmp_path, 0, 0, tmp_path) for engine in engines]
    asked = [(trial, case, server.engine) for trial, case, server in vllm_bench_serve.in_turns(servers, cases, 2)]
    assert asked[:2] == [(0, prefill, ENGINE), (1, prefill, ENGINE)]
    one_trial = [(prefill, engines[0]), (prefill, engines[2]), *[(decode, engines[0])] * 3, *[(decode, engines[2])] * 3]
    assert asked[2:] == [(trial, case, engine) for trial in (0, 1) for case, engine in one_trial]
    for wrong in ("other=4@2:8/1", "4@2"):
        with pytest.raises((KeyError, ValueError)):
            vllm_bench_serve.cases_of_models([wrong], ["qwen3-30b"])


def test_engines() -> None:
    assert Engine.parse("tiny-gpt-oss:ours") == ENGINE and not ENGINE.fills
    assert Engine.parse("qwen3-v4-experts:humming").fills
    for wrong in ("tiny-gpt-oss", "tiny-gpt-oss:other", "other:ours"):
        with pytest.raises(argparse.ArgumentTypeError, match=wrong):
            Engine.parse(wrong)


def test_a_server_that_says_it_has_loaded_is_not_waited_for_longer(tmp_path: Path) -> None:
    def load() -> None:
        os.write(1, LOADED.encode())  # sys.stdout is pytest's
        time.sleep(FAR)

    begin = time.monotonic()
    loading = server(tmp_path / "a.log", load)
    loading.wait_for_weights(begin + FAR)
    end(loading.process)
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


def test_processes_of_a_server_are_put_on_cores_and_their_time_is_counted(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.touch()  # the engine's process is seen before it has opened its log

    def start_engine_and_sleep() -> None:
        fork(lambda: busy(0.3), log)
        time.sleep(FAR)

    def busy(seconds: float) -> None:
        begin = time.process_time()
        while time.process_time() < begin + seconds:
            pass
        os.write(1, b"done")
        time.sleep(FAR)

    started = fork(start_engine_and_sleep, None)
    try:
        deadline = time.monotonic() + FAR
        while len(processes(started)) < 2 or "done" not in log.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        own, engine = processes(started)
        assert own == started and 0.2 < processor_seconds([started]) < FAR
        first, last = min(os.sched_getaffinity(0)), max(os.sched_getaffinity(0))
        Cores(engine=[last], server=[first], client=[first]).put(started)
        assert os.sched_getaffinity(own) == {first} and os.sched_getaffinity(engine) == {last}
    finally:
        for process in reversed(processes(started)):
            end(process)


def test_time_of_experts_counts_overlapping_launches_once(tmp_path: Path) -> None:
    events = [
        {"cat": "kernel", "name": "decode_gemm", "ts": 100.0, "dur": 10.0},
        {"cat": "kernel", "name": "decode_gemm", "ts": 104.0, "dur": 10.0},
        {"cat": "kernel", "name": "attention", "ts": 120.0, "dur": 30.0},
        {"cat": "cpu_op", "name": "decode_gemm", "ts": 90.0, "dur": 500.0},
        {"ph": "M", "name": "process_name"},
    ]
    trace = tmp_path / "a.pt.trace.json.gz"
    with gzip.open(trace, "wt") as file:
        json.dump({"traceEvents": events}, file)
    found = time_of_experts(kernels_of_trace(trace), ["gemm"], steps=2)
    assert (found["experts_us_per_step"], found["experts_busy_us_per_step"]) == (10.0, 7.0)
    assert found["us_per_step"] == 25.0 and list(found["all"]) == ["attention", "decode_gemm"]
