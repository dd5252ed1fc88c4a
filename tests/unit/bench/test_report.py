"""The tables of the documents, from records made by hand: which runs they take, ratios, and what is left out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report, runner
from benchmarks.runner import Case, Record, Row, short

Write = Callable[..., None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes a run of a subject into empty folders of results."""
    monkeypatch.setattr(runner, "RESULTS", tmp_path)

    def write(subject: str, run: str, *rows: Row, machine: str = "h200", **facts: Any) -> None:
        Record(tmp_path / subject / machine / f"{run}.json", {"date": run, "commit": "1", **facts}, rows).write()

    return write


def lines(block: str) -> list[str]:
    return report.BLOCKS[block]().splitlines()


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    row = Row(Case.of(shape="a", tokens=1), {"us": 1.5, "rates": [1, 2]}, {"peer": 3.0})
    record = Record(tmp_path / "run.json", {"commit": "1", "machine": {"cpu": "x"}}, [row])
    record.write()
    assert Record.read(record.path) == record and row.ratio("peer") == 2 and (row["tokens"], row["us"]) == (1, 1.5)
    assert [short(value) for value in (1234567.891, 0.000123456789, 3, "a", 0.0)] == [
        1234567.89, 0.000123457, 3, "a", 0.0,
    ]  # fmt: skip


def test_a_block_without_records_says_so(write: Write) -> None:
    blocks = set(report.BLOCKS) - {"explain", "headlines"}
    assert all(report.BLOCKS[name]() in ("", report.NOTHING) for name in blocks)


def race(peer: str, tokens: int, us: float = 10.0, peer_us: float = 20.0, **more: float) -> Row:
    labels = {"part": "a", "shape": "s", "weights": "w", "activations": "x", "tokens": tokens}
    return Row(Case.of(**labels), {"us": us, "floor_us": 5.0, **more}, {peer: peer_us})


def test_runs_with_different_peers_do_not_mix(write: Write, tmp_path: Path) -> None:
    """A cell comes from the newest run that timed its peer, even if a newer run timed another peer."""
    write("gpu-layer", "1", race("humming", 1), race("humming", 16), machine="h200")
    write("gpu-layer", "2", race("humming", 1, peer_us=22.0, of_dense=0.9))
    write("gpu-layer", "3", race("triton", 1))
    assert [(report.peer_of(row), row["tokens"], run.path.stem) for run, row in report.race_cells("h200")] == [
        ("humming", 1, "2"), ("humming", 16, "1"), ("triton", 1, "3"),
    ]  # fmt: skip
    assert "| s, w x x; humming | 10 (2.20x) | 10 (2.00x) |" in lines("gpu_layer")
    assert "| a; humming | 2.10x | 2.00x at 16 | 10.0% |  |" in lines("gpu_layer_means")


def test_batch_invariant_cost_is_that_of_the_worst_run(write: Write) -> None:
    for run, tokens, us in (("1", 1, 12.5), ("2", 1, 12.0), ("3", 4, 11.0)):
        write("gpu-layer", run, race("humming", tokens, invariant_us=us))
    assert "Batch-invariant order takes longer with few tokens: a 25% at 1, 10% at 4." in lines("gpu_layer")


def cell(tokens: int, us: float, peer: float | None, routing: str = "uniform") -> Row:
    labels = {"shape": "s", "weights": "w", "activations": "fp8", "routing": routing, "tokens": tokens}
    return Row(Case.of(**labels), {"us": us, "of_floor": 0.5}, {} if peer is None else {"humming": peer})


def test_a_cell_is_from_the_newest_run_that_timed_a_peer(write: Write) -> None:
    write("gpu-shapes", "1", cell(1, 50.0, 40.0), cell(64, 100.0, 150.0), cell(64, 100.0, None, "zipf"))
    write("gpu-shapes", "2", cell(1, 40.0, 44.0), cell(64, 90.0, None))
    assert "| s, w x fp8 | 40 (1.10x, 50%) | 100 (1.50x, 50%) |" in lines("gpu_shapes")
    assert "| w x fp8 | 2 | 1.28x | 1.10x (s at 1) | none |" in lines("gpu_shapes_means")
    # at half of the floor's speed: 1.94 times as fast at 97 % of it
    assert "| w x fp8 | 1.10x (2.13x) | 1.50x (2.91x) |" in lines("gpu_shapes_highest")
    assert "| s, w x fp8, zipf | 100 (50%) |" in lines("gpu_shapes_skewed")


def older(shape: str, tokens: int, activations: str = "bf16", us: float = 100.0, **more: Any) -> Row:
    labels = {"shape": shape, "weights": "w", "activations": activations, "routing": "uniform", "tokens": tokens}
    return Row(
        Case.of(**labels), {"us": us, "floor_us": 80.0, "gemm_us": 50.0, **more}, {"marlin": 150.0, "hopper": 90.0}
    )


def test_older_kernels_are_compared_with_hopper_where_reading_bounds_both(write: Write) -> None:
    write("gpu-older", "1", older("s", 16), older("s", 256, floor_us=50.0), older("s", 1024))
    assert "| w x bf16 | 3 | 1.50x, lowest 1.50x (s at 16) | 1 | 0.90x, lowest 0.90x (s at 16) |" in lines("gpu_older")


def test_int8_is_compared_with_bf16_of_the_same_run(write: Write) -> None:
    """And with what is possible, where reading the weights takes longer than multiplying."""
    write("gpu-older", "1", older("s", 1, us=120.0), older("s", 1, "int8"), older("t", 1, "int8"))
    write("gpu-older", "2", older("t", 1))
    assert lines("gpu_older_int8")[2:] == ["| s, w | 100 (1.20x of at most 1.50x) |"]


def served(backend: str, rate: float, tokens_out: int = 9, model: str = "qwen3-30b", **more: Any) -> Row:
    labels = {"model": model, "activations": "fp8" if "fp8" in backend else "bf16", "backend": backend, "what": "rate"}
    load = {"prompts": 16, "concurrency": 8, "tokens_in": 64, "tokens_out": tokens_out}
    return Row(Case.of(**labels, **load), {"tokens_per_s": rate, "trials": 2, "spread": 0.5, **more})


def kernels(backend: str, **figures: float) -> Row:
    labels = {"model": "qwen3-30b", "activations": "bf16", "backend": backend, "what": "kernels"}
    return Row(Case.of(**labels), figures)


FACTS = {"vllm": "0.26.0", "graphs": "FULL", "compiler": "eager", "stream_interval": 8, "trials": 3}


def test_load_tests_join_the_newest_loads_that_have_ours_and_a_peer(write: Write) -> None:
    write("vllm-bench-serve", "a", served("ours", 300.0, 1), served("ours", 30.0), served("humming", 200.0, 1), **FACTS)
    once = served("ours", 40.0, trials=1)
    write("vllm-bench-serve", "b", served("ours", 1.0, 1), once, served("marlin", 20.0), **FACTS)
    write("vllm-bench-serve", "c", served("ours", 7.0), served("ours-fp8", 7.0), **FACTS)
    write("vllm-bench-serve", "d", kernels("ours", experts_us=60.0), kernels("marlin", experts_us=80.0), **FACTS)
    found = lines("vllm_bench_serve")
    assert found[0] == "|  | 64 in, 1 out: 16 prompts, 8 at once | 64 in, 9 out: 16 prompts, 8 at once | experts |"
    assert found[2:6] == [
        "| humming | 200 |  |  |",
        "| marlin |  | 20 | 80 |",
        "| **lancebill** | 300 (1.50x) | 40 (2.00x) | 60 (0.75x) |",
        "| trials differ by up to | 50% | one trial |  |",
    ]
    assert "Qwen3-30B-A3B, 48 layers, MXFP4 x bf16; median of 1 to 2 trials; vLLM 0.26.0" in found[7]
    assert all(f"h200/{run}.json" in found[7] for run in "abd") and len(found) == 8


def test_time_of_experts_may_come_from_a_later_run(write: Write) -> None:
    sums = [kernels(backend, experts_sum_us=80.0) for backend in ("ours", "triton")]
    write("vllm-serving", "a", served("ours", 20.0), served("triton", 10.0), *sums, **FACTS)
    write("vllm-serving", "b", served("ours", 90.0), kernels("ours", experts_us=50.0), **FACTS)
    found = lines("vllm_serving")
    assert "| triton | 10 |  | 80 (sum) |" in found and "| **lancebill** | 20 (2.00x) |  | 80 (sum), 50 |" in found
    assert "h200/a.json), [" in found[-1] and "h200/b.json)" in found[-1]


def test_longer_answers_are_another_table(write: Write) -> None:
    for run, tokens in (("a", 128), ("b", 4096)):
        write("vllm-serving", run, served("ours", 30.0, tokens), served("triton", 10.0, tokens), **FACTS)
    assert [line for line in lines("vllm_serving") if line.startswith("|  |")] == [
        "|  | 16 x 128 new | load | experts |", "|  | 16 x 4,096 new | load | experts |",
    ]  # fmt: skip


def test_tests_of_vllm_are_joined_for_one_version_and_counted_by_family(write: Write) -> None:
    def tests(*cells: str, outcome: str = "passed") -> list[Row]:
        names = [f"test_answers.py::test_tokens_and_log_probabilities[{each}]" for each in cells]
        return [Row(Case.of(test=name), {"outcome": outcome, "distance": 1e-6}) for name in names]

    facts = {"command": "make", "collected": 3}
    write("vllm-cpu", "a", *tests("mixtral-gguf"), vllm="1", **facts)
    write("vllm-cpu", "b", *tests("mixtral-bf16"), *tests("mixtral-gptq", outcome="failed"), vllm="2", **facts)
    write("vllm-cpu", "c", *tests("mixtral-gptq"), vllm="2", **facts)
    found = lines("vllm_cpu")
    assert found[0].startswith("`make` with vLLM 2: 2 passed of 3 tests; stopped by time; the largest difference")
    assert "| mixtral | 2 of 2 | 1.0e-06 |" in found and "a.json" not in found[0]
