"""Several ranks, in processes of their own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import engine
import models

pytestmark = pytest.mark.xdist_group("ranks")  # the two processes of `cells` are started once
MINUTES = 60
BOUND = 1e-5  # of log-probabilities, in fp32: ranks sum experts in another order
HERE = Path(__file__).parent
# Cells of `two_ranks`. Two processes run all of them, one after another.
SAMPLE = ("ep2", "dp2-ep2", "balanced", "elastic", "dispatch-batches")
CELLS = (*SAMPLE, "dp2", "dispatch-tokens", "dispatch-grouped")
Results = list[dict[str, Any]]  # of one cell, by rank


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [int(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports


@pytest.fixture(scope="module")
def cells(folder: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Results]:
    """The results of all cells."""
    chosen = CELLS if request.config.getoption("--vllm-all") else SAMPLE
    out = tmp_path_factory.mktemp("ranks")
    model, other = (str(models.converted("qwen3_moe", "ct-int4", folder, seed)) for seed in (7, 8))
    job = {"model": model, "other": other, "out": str(out), "cells": dict(zip(chosen, free_ports(len(chosen))))}
    (out / "job.json").write_text(json.dumps(job))
    shared = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, str(HERE / "two_ranks.py"), str(out / "job.json")]
    logs = [(out / f"{rank}.log").open("w+") for rank in range(2)]
    processes = [
        subprocess.Popen(words, stdout=log, stderr=log, env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank, log in enumerate(logs)
    ]
    wait_for_all(processes, 15 * MINUTES)
    for process, log in zip(processes, logs):
        log.seek(0)
        assert process.returncode == 0, log.read()[-3000:]
    return {name: [json.loads((out / f"{name}-{rank}.json").read_text()) for rank in range(2)] for name in chosen}


def wait_for_all(processes: list[subprocess.Popen[bytes]], seconds: float) -> None:
    """If one fails, the others wait for it without end: they are stopped."""
    end = time.monotonic() + seconds
    while any(process.poll() is None for process in processes):
        if time.monotonic() > end or any(process.poll() not in (None, 0) for process in processes):
            for process in processes:
                process.kill()
        time.sleep(0.2)


@pytest.fixture(scope="module")
def want(folder: Path) -> engine.Answers:
    """What one rank answers: transformers with our experts."""
    return engine.reference(models.converted("qwen3_moe", "ct-int4", folder))


def results_of(cells: dict[str, Results], name: str) -> Results:
    if name not in cells:
        pytest.skip("only with --vllm-all")
    return cells[name]


def check(answers: Any, want: engine.Answers, first: int = 0) -> None:
    """`first` is the first prompt that was asked."""
    got, part = engine.Answers(*answers), engine.Answers(want.tokens[first:], want.logprobs[first:])
    assert got.tokens == part.tokens and got.distance(part) <= BOUND


@pytest.mark.parametrize("linear", ["offer", "off"])
def test_tensor_parallel_workers_of_vllm(
    linear: str,
    folder: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """vLLM starts the processes itself; the plugin must be in each of them. All matrices are quantised."""
    if linear == "off" and not request.config.getoption("--vllm-all"):
        pytest.skip("only with --vllm-all")
    model = models.quantised_everywhere("glm4_moe", "fp8-block", folder)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with engine.engine(model, {"mode": "require", "linear": linear}, tensor_parallel_size=2) as llm:
        made = engine.ask(llm)
    text = "".join(capfd.readouterr())
    assert text.count("lancebill's") == 2 and "is dequantised" not in text
    assert text.count("matrices stay in bfloat16") == (2 if linear == "offer" else 0)
    check([made.tokens, made.logprobs], engine.reference(model))


@pytest.mark.parametrize("name", ["ep2", "dp2", "dp2-ep2"])
def test_parallel_ranks(cells: dict[str, Results], want: engine.Answers, name: str) -> None:
    """Data-parallel ranks have prompts of their own, and the second one fewer."""
    for rank, result in enumerate(results_of(cells, name)):
        check(result["answers"], want, first=rank if name.startswith("dp") else 0)


@pytest.mark.parametrize("way", ["tokens", "grouped", "batches"])
def test_all_to_all_backends(cells: dict[str, Results], want: engine.Answers, way: str) -> None:
    """`dispatch` stands in for DeepEP, and brings rows in each of the ways that vLLM's backends do."""
    for rank, result in enumerate(results_of(cells, f"dispatch-{way}")):
        for answers in result["answers"]:
            check(answers, want, first=rank)
        assert (
            len(result["calls"]) == 4 and min(result["calls"]) > 0
        )  # both layers, before and after vLLM's new kernels


def test_load_balancing(cells: dict[str, Results], want: engine.Answers, folder: Path) -> None:
    """vLLM rearranges the experts by the load that it measured: bytes are where its map says, answers stay."""
    other = engine.reference(models.converted("qwen3_moe", "ct-int4", folder, 8))
    for result in results_of(cells, "balanced"):
        assert result["wrong"] == []
        before, after = result["maps"][:2]
        assert all(sorted(set(row)) == list(range(8)) for row in after)
        ranks = [[{frozenset(row[:5]), frozenset(row[5:])} for row in held] for held in (before, after)]
        assert ranks[0] != ranks[1]  # experts went to another rank
        for answers, expected in zip(result["answers"], (want, want, other, want), strict=True):
            check(answers, expected)


def test_another_number_of_ranks(cells: dict[str, Results], want: engine.Answers) -> None:
    for result in results_of(cells, "elastic"):
        assert result["wrong"] == []
        for answers in result["answers"]:
            check(answers, want)
    assert results_of(cells, "elastic")[0]["distance"] == 0
