"""`make test-gpu`: what its cells cover, some of them on the CPU, and what its runner does with bad ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from project import HELPERS, ROOT

pytest.importorskip("transformers")
pytest.importorskip("gguf")

for name in ("families", "e2e", "gpu"):
    sys.path.insert(0, str(ROOT / "tests" / name))

from all_cells import all_cells  # noqa: E402
from cells import Place  # noqa: E402
from gpu_record import joined  # noqa: E402
from model_cells import ONE_FAMILY, OTHERWISE, format_examples  # noqa: E402
from run_cells import FAILED, PASSED, SKIPPED  # noqa: E402
from tiny_models import JUDGED  # noqa: E402

from lancebill.checkpoint.resolve.naming import TABLE  # noqa: E402
from lancebill.formats import registry  # noqa: E402
from lancebill.integrations.transformers.gguf_rows import ROWS  # noqa: E402
from lancebill.testing.families import judged_types  # noqa: E402

CELLS = {str(cell): cell for cell in all_cells()}
SAMPLE = (
    "format gptq int4-g32:fp16-zp-gptq-actorder", "pair mxfp4 and int8", "family mixtral", "family hunyuan_v1_moe",
    "gguf qwen3moe qwen3_moe",
    "layer refit on both, mxfp4 ", "linear weight on both, nvfp4", "model reload_experts", "command generate",
)  # fmt: skip


def test_names_are_distinct() -> None:
    assert len(CELLS) == len(list(all_cells()))


def test_every_format_family_and_architecture_has_a_cell() -> None:
    found = {name.split()[0]: set[str]() for name in CELLS}
    for name in CELLS:
        kind, what = name.split()[:2]
        found[kind].add(what)
    assert found["format"] | OTHERWISE.keys() == registry().keys() and not found["format"] & OTHERWISE.keys()
    assert found["family"] == {name for row in TABLE for name in judged_types(row)} >= set(JUDGED)
    assert found["gguf"] == set(ROWS)


def test_every_spec_of_a_format_has_a_cell() -> None:
    named = {example.scheme.spec for _, example in format_examples()}
    everywhere = [
        e for name, fmt in registry().items() if name not in (*OTHERWISE, *ONE_FAMILY) for e in fmt.examples()
    ]
    assert {example.scheme.spec for example in everywhere} == named


def test_every_test_function_of_tests_gpu_has_a_cell() -> None:
    files = {path.name for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert {name.split()[1].partition("::")[0] for name in CELLS if name.startswith("pytest ")} == files


def test_there_are_24_figures_of_speed() -> None:
    import timed_cells as timed

    layers, linears = (sum(len(given) for given in sizes) for sizes in (
        [sizes for _, _, sizes in timed.LAYERS.values()], timed.LINEARS.values(),
    ))  # fmt: skip
    assert layers + linears + len(timed.STEPS) == 24


@pytest.mark.parametrize("name", SAMPLE)
def test_cells_on_the_cpu(name: str, tmp_path: Path) -> None:
    CELLS[name].run(Place("cpu", tmp_path))


def test_a_crash_is_one_cell(tmp_path: Path) -> None:
    """And so are a failure, a skip, and a cell without an end. In another process: this one may have threads."""
    command = [sys.executable, str(HELPERS / "bad_cells.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert {name: cell["outcome"] for name, cell in found.items()} == {
        "test passes": PASSED, "test fails": FAILED, "test skips": SKIPPED, "test dies": FAILED, "test sleeps": FAILED,
        "test waits": FAILED,
    }  # fmt: skip
    assert found["test passes"]["notes"] == {"device": "cpu"}
    reasons = ("wrong numbers", "not here", "died: -6", "too long", "time of this part")
    for name, reason in zip(("fails", "skips", "dies", "sleeps", "waits"), reasons):
        assert reason in found[f"test {name}"]["reason"]


def test_the_record_counts_what_both_parts_found() -> None:
    same = {"commit": "c", "gpu": "NVIDIA H200, 1", "versions": {}, "seconds": 3}
    times = {"rates": {"bf16": 1.0}, "times": {"linear": {"share": 0.5}}}
    first = {"a": {"outcome": PASSED, "notes": {"experts on": ["hopper"]}}, "b": {"outcome": SKIPPED, "reason": "why"}}
    second = {"c": {"outcome": FAILED, "reason": "slower", "notes": times}, "d": {"outcome": SKIPPED, "reason": "why"}}
    found = joined([{**same, "cells": first}, {**same, "cells": second}])
    assert (found["passed"], found["failed"], found["skipped"]) == (1, 1, 2)
    assert found["failures"] == {"c": "slower"} and found["skips"] == {"why": 2}
    assert found["times"] == times["times"] and found["backends"] == {"hopper": 1}
    with pytest.raises(AssertionError, match="commit"):
        joined([{**same, "cells": first}, {**same, "commit": "d", "cells": second}])
