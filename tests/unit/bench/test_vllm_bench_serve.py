"""vLLM's load test: loads, turns, servers that are waited for, answers and kernels that are compared."""

from __future__ import annotations

import gzip
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.machine import processes, processor_seconds
from benchmarks.runner import Case
from benchmarks.vllm import Load, compare_answers, compared, end, fork, launches_of_trace, time_of_experts
from benchmarks.vllm_load import LOADED, Cores, Server, free_port, in_turns

ENGINE = Case.of(model="tiny-gpt-oss", backend="ours")
FAR = 120.0


def server(log: Path, work: Any) -> Server:
    return Server(ENGINE, log.parent, fork(work, log), free_port(), log)


def test_a_load_and_its_warm_up() -> None:
    prefill, decode = Load.parse("128@32:65536/1"), Load.parse("256@64:1/4096")
    assert prefill == Load(128, 32, 65536, 1) and prefill.warm_up == Load(1, 32, 65536, 1)
    assert decode.warm_up == Load(64, 64, 1, 16)
    assert decode.repeats == 1 and Load.parse("1@1:1/512").repeats == 3


def test_servers_of_a_model_take_turns_and_models_come_one_after_the_other(tmp_path: Path) -> None:
    prefill, decode = Load(4, 2, 8, 1), Load(1, 1, 1, 8)
    engines = [Case.of(model="qwen3-30b", backend="ours"), ENGINE, Case.of(model="qwen3-30b", backend="humming")]
    loads = {engines[0]: [prefill, decode], ENGINE: [prefill], engines[2]: [prefill]}
    servers = [Server(engine, tmp_path, 0, 0, tmp_path) for engine in engines]
    asked = [(trial, load, server.engine) for trial, server, load in in_turns(servers, loads, 2)]
    one_trial = [(prefill, engines[0]), (prefill, engines[2]), *[(decode, engines[0])] * 3]
    assert asked[:-2] == [(trial, load, engine) for trial in (0, 1) for load, engine in one_trial]
    assert asked[-2:] == [(0, prefill, ENGINE), (1, prefill, ENGINE)]


def answers(given: list[float], tokens: list[int], margins: list[float]) -> dict[str, Any]:
    return {"given": [given], "tokens": [tokens], "margins": [margins]}


def test_answers_may_part_only_where_tokens_are_tied() -> None:
    given = answers([-1.0, -2.0], [5, 6, 7], [3.0, 0.1, 2.0])
    near, far = answers([-1.0, -2.2], [5, 9, 9], [0.0] * 3), answers([-1.0, -2.0], [8, 6, 7], [0.0] * 3)
    first, second = (compared(given, each, 6, "bf16") for each in (near, far))
    assert first["within_bound"] and first["equal_where_not_tied"] and first["same_answers"] == 0
    assert first["largest"] == pytest.approx(0.2) and first["mean"] == pytest.approx(0.1)
    assert second["within_bound"] and not second["equal_where_not_tied"]
    assert not compared(given, near, 1, "bf16")["within_bound"]  # of one layer the largest counts, not the mean


def test_answers_are_compared_with_those_of_an_earlier_run(tmp_path: Path) -> None:
    for backend, tokens in (("ours", [1, 2]), ("marlin", [1, 3])):
        file = tmp_path / f"tiny-gpt-oss-{backend}.answers.json"
        file.write_text(json.dumps(answers([-1.0], tokens, [1.0, 0.5])), encoding="utf-8")
    found = compare_answers(tmp_path, ENGINE)
    assert (found["against"], found["largest_margin"]) == ("marlin", 0.5)
    assert compare_answers(tmp_path, ENGINE.replace(backend="marlin")) == {}
    assert compare_answers(tmp_path, ENGINE.replace(model="qwen3-30b")) == {}


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
    found = time_of_experts(launches_of_trace(trace), ["gemm"], steps=2)
    assert found == {"experts_sum_us": 10.0, "experts_us": 7.0, "all_us": 25.0}
