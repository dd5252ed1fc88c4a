"""Comparison with peers, time to the first result in a fresh process, host time, and the roofline plot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lancebill.bench.compare import best, compare, geometric_mean, summarize
from lancebill.bench.first_forward import FirstForward, first_forward
from lancebill.bench.results import BenchSetup
from lancebill.bench.roofline import draw_roofline, fractions, is_race
from lancebill.bench.run import run_benchmark
from lancebill.bench.sustained import Steady
from lancebill.cli.main import app
from lancebill.errors import LaunchError, SpecError
from lancebill.moe.model_shapes import parse_shape


def cell(part: str, tokens: int, ours: float, **peers_us: float) -> dict[str, Any]:
    ours_row = {"us": ours, "noise": 0.02}
    against = {name: compare(ours_row, {"us": us, "noise": 0.01}) for name, us in peers_us.items()}
    return {"part": part, "tokens": tokens, "ours": ours_row, "against": against}


def test_ratios_and_summary_of_a_run() -> None:
    assert compare({"us": 10, "noise": 0.01}, {"us": 20, "noise": 0.03}) == {
        "ratio": 2.0,
        "noise": 0.03,
        "slower_beyond_noise": False,
    }
    found = summarize([cell("a", 1, 10, it=20), cell("a", 4, 10, it=9.9), cell("a", 16, 10, it=5), cell("b", 1, 3)])
    assert found["a"]["cells"] == 3 and found["b"]["against"] == {}
    assert found["a"]["against"]["it"]["slower"] == [16]  # 1 % slower at 4 is noise
    assert found["a"]["against"]["it"]["geometric_mean"] == pytest.approx((2 * 0.99 * 0.5) ** (1 / 3), abs=1e-4)


def test_best_is_the_fastest_variant() -> None:
    times = {"x": {"us": 3.0}, "y": {"us": 2.0}, "z": {"us": 1.0}}
    assert best(times, ("x", "y", "absent")) == ("y", {"us": 2.0})
    assert best(times, ()) is None
    assert geometric_mean([]) is None


def test_noise_is_the_spread_between_rounds() -> None:
    times = Steady((10.0, 11.0, 10.5))
    assert times.median == 10.5 and times.noise == pytest.approx(1 / 10.5)
    assert times.describe()["rounds"] == [10.0, 11.0, 10.5]


def test_first_forward_in_a_fresh_process() -> None:
    answer = first_forward(FirstForward("4,64,64,2", "mxfp4", "bf16", "cpu", 3, "reference"))
    assert answer.backend == "reference" and answer.compiled == 0 and 0 < answer.seconds < 60
    with pytest.raises(LaunchError, match="the measuring process failed"):
        first_forward(FirstForward("4,64,64,2", "mxfp4", "bf16", "cpu", 3, "no-such-backend"))


def test_first_forward_of_the_command(tmp_path: Path) -> None:
    file = tmp_path / "first.json"
    words = ["bench", "--shape", "4,64,64,2", "--weights", "mxfp4", "--tokens", "2", "--backend", "reference"]
    done = CliRunner().invoke(app, [*words, "--first-forward", "--json", str(file)])
    assert done.exit_code == 0, done.output
    rows = json.loads(file.read_text())["first_forward"]
    assert [row["compiled"] for row in rows] == [0, 0]
    assert "kernels compiled" in done.output


def test_host_time_needs_a_gpu() -> None:
    with pytest.raises(SpecError, match="on a GPU"):
        run_benchmark(BenchSetup(parse_shape("4,64,64,2"), "bf16", tokens=(1,), host=True))


def race() -> dict[str, Any]:
    rows = [
        cell(part, tokens, us, humming=1.5 * us) | {"floor_us": 0.8 * us}
        for part in ("deepseek-mxfp4-bf16", "qwen3-mxfp4-bf16")
        for tokens, us in ((64, 640.0), (1, 30.0))
    ]
    for row in rows:
        row["against"]["humming"]["us"] = 1.5 * row["ours"]["us"]
    ceilings = {"bf16": 700.0, "fp8": 1250.0, "read_gbs": 4390.0}
    return {"rows": rows, "ceilings": ceilings, "machine": {"gpu": "a GPU, 580"}, "window_us": 40_000.0}


def test_fractions_of_the_floor() -> None:
    lines = fractions([row for row in race()["rows"] if row["part"] == "qwen3-mxfp4-bf16"])
    assert [tokens for tokens, _ in lines["lancebill"]] == [1, 64]
    assert [share for _, share in lines["lancebill"]] == pytest.approx([0.8, 0.8])
    assert [share for _, share in lines["humming"]] == pytest.approx([0.8 / 1.5] * 2)


def test_the_roofline_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "roofline.svg"
    draw_roofline(race(), file)
    text = file.read_text()
    assert text.count('id="axes_') == 2
    assert is_race(race()) and not is_race({"rows": [{"steady_us": 1.0}]}) and not is_race({"meta": {}})
