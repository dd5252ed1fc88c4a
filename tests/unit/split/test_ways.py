"""Which way each expert of a large batch goes, by estimate."""

from __future__ import annotations

import json
from dataclasses import replace

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from typer.testing import CliRunner
from without_gpu import RATES, needs_kernels

from lancebill.backends.cpu import native
from lancebill.cli.main import app
from lancebill.split.cpu_rows import MOST_ROWS, few_enough
from lancebill.split.ways import BOTH_WORTH, LATE, ExpertSize, Rates, _Batch, batch_costs, choose_ways, expected_ways

EXPERT = ExpertSize(bytes=10_000_000, flops=40_000_000, row_bytes=4096 * 6)


def test_the_fastest_division_is_chosen() -> None:
    few = choose_ways(np.ones(4), 1, EXPERT, RATES)
    many = choose_ways(np.full(64, 512.0), 8192, EXPERT, RATES)
    assert not few.streamed, "few tokens: reading an expert is faster for the CPU than copying it"
    assert len(many.streamed) > 55, "many tokens: a copy takes as long as for few"
    between = choose_ways(np.arange(1.0, 65), 600, EXPERT, RATES)
    assert between.cpu and between.streamed
    assert max(between.cpu) < min(between.streamed), "the CPU gets those with few tokens"
    assert between.estimate_us <= min(
        choose_ways(np.arange(1.0, 65), 600, EXPERT, only).estimate_us
        for only in (
            Rates(50, 1e-3, 1e-3, 200),  # all are copied
            Rates(1e-3, 150, 5000, 200),  # the CPU computes all
        )
    )
    begun = choose_ways(np.arange(1.0, 65), 600, EXPERT, RATES, begun=(0, 1))
    assert len(begun.cpu) >= len(between.cpu) - 2 and {0, 1} <= {*begun.streamed}, "what is copied stays on the GPU"
    assert choose_ways(np.array([0.0, 0, 0, 0, 2]), 2, EXPERT, RATES).cpu == (4,)
    assert choose_ways(np.zeros(0), 2, EXPERT, RATES).estimate_us == 0


def test_both_ways_must_save_more_than_estimates_are_wrong() -> None:
    """With little for the CPU to win, all experts are copied, or none."""
    counts = np.full(64, 240.0)
    taken = choose_ways(counts, 2048, EXPERT, RATES)
    always = choose_ways(counts, 2048, EXPERT, RATES, worth=1.0)
    assert taken.streamed == tuple(range(64)) and taken.estimate_us == taken.copied_us
    assert always.cpu and BOTH_WORTH * taken.copied_us < always.estimate_us < taken.copied_us
    for tokens in (64, 200, 512, 2048, 8192):
        found = expected_ways(64, tokens, 8, 128, EXPERT, RATES)
        alone = min(found.copied_us, found.cpu_alone_us)
        assert found.estimate_us == alone or (found.cpu and found.streamed and found.estimate_us <= BOTH_WORTH * alone)


@pytest.mark.parametrize("tokens", [64, 512, 2048, 8192])
def test_no_other_division_is_faster_by_estimate(tokens: int) -> None:
    g = torch.Generator().manual_seed(tokens)
    counts = sorted(torch.poisson(torch.full((96,), tokens / 16.0), generator=g).clamp(min=1).tolist())
    rates = replace(RATES, cpu_points=((1.0, 60.0), (8.0, 190.0), (64.0, 450.0)), wave_us=150.0, wave_experts=10)
    batch = _Batch(np.array(counts), batch_costs(tokens, EXPERT, rates))
    found = choose_ways(np.array(counts), tokens, EXPERT, rates, worth=1.0)
    late = np.maximum(LATE * batch.cpu_us, batch.stream_us)
    assert max(LATE * found.cpu_us, found.stream_us) == late.min() and len(late) == 97
    assert batch.us.min() <= found.estimate_us <= LATE * batch.us.min()
    assert found.rows == batch.rows[len(found.cpu)] <= tokens


def test_a_batch_that_one_call_has_no_room_for_is_divided_so_that_rows_fit() -> None:
    counts, points = np.full(64, 300.0), ((1.0, 50.0), (300.0, 150.0))
    found = choose_ways(counts, 4096, EXPERT, replace(RATES, cpu_points=points), worth=1.0)
    assert len(found.cpu) == 6 and 6 * 300 <= MOST_ROWS < 7 * 300 and found.rows <= 6 * 300
    found = choose_ways(counts, 4096, EXPERT, replace(RATES, cpu_points=points, copy_gbs=10), worth=1.0)
    assert not found.streamed, "the whole batch goes in pieces"
    assert few_enough(MOST_ROWS, MOST_ROWS + 1) and not few_enough(MOST_ROWS, MOST_ROWS), "else all rows are sent"


@needs_kernels
@hypothesis.settings(deadline=None)
@hypothesis.given(
    st.lists(st.integers(0, 300), max_size=40),
    st.sampled_from([1, 64, 512, 2048, 2049, 20000]),
    st.tuples(*(st.floats(low, 4.0) for low in (1.0, 1.0, 2.0, 1.0))),
    st.sampled_from([BOTH_WORTH, 1.0]),
    st.sets(st.integers(0, 39), max_size=4),
    st.booleans(),
)
def test_the_library_divides_as_defined(
    used: list[int], tokens: int, powers: tuple[float, ...], worth: float, begun: set[int], points: bool
) -> None:
    copy_gbs, cpu_gbs, cpu_gflops, run_us = (10**power for power in powers)
    lines = ((1.0, 30.0), (16.0, 30.0), (64.0, cpu_gbs)) if points else ()
    rates = Rates(copy_gbs, cpu_gbs, cpu_gflops, 200.0, wave_us=50.0, wave_experts=5, run_us=run_us, cpu_points=lines)
    counts, copied = np.array(used, dtype=np.float64), sorted(expert for expert in begun if expert < len(used))
    want, got = (
        choose_ways(counts, tokens, EXPERT, rates, worth, copied, library) for library in (None, native.library())
    )
    assert got.estimate_us == pytest.approx(want.estimate_us, rel=1e-9), "the same, or as fast"
    assert {*got.cpu} | {*got.streamed} == {*want.cpu} | {*want.streamed}
    if len(got.cpu) == len(want.cpu):
        assert got.cpu == want.cpu and got.streamed == want.streamed
        for name in ("cpu_us", "stream_us", "cpu_alone_us", "copied_us", "rows"):
            assert getattr(got, name) == pytest.approx(getattr(want, name), rel=1e-9)


def test_costs_of_a_wave_grow_with_its_experts() -> None:
    rates = replace(RATES, wave_us=100.0, token_us=0.5, expert_us=10.0, expert_token_us=0.02)
    costs = rates.wave_costs(EXPERT, 1000)
    assert costs.fixed + costs.pack == pytest.approx(600 + EXPERT.bytes / rates.pack_gbs / 1e3), "of one expert"
    assert costs.pack == pytest.approx(30 + EXPERT.bytes / rates.pack_gbs / 1e3), "of each further one"
    assert costs.copy == pytest.approx(EXPERT.bytes / rates.copy_gbs / 1e3)


def test_pieces_of_neighbouring_experts_take_time() -> None:
    counts, pieces = np.full(64, 240.0), replace(RATES, run_us=30.0)
    apart, joined = (_Batch(counts, batch_costs(2048, EXPERT, rates)).stream_us for rates in (pieces, RATES))
    more = apart - joined
    assert more[0] == more[-1] == 0, "all copied are one piece"
    assert more[32] == pytest.approx(30 * 16), "half of them, at random: every second one begins a piece"
    assert choose_ways(counts, 2048, EXPERT, pieces).copied_us == choose_ways(counts, 2048, EXPERT, RATES).copied_us


def test_the_time_of_the_cpu_is_on_lines_through_what_was_measured() -> None:
    rates = replace(RATES, cpu_points=((1.0, 100.0), (16.0, 130.0), (64.0, 610.0)))
    taken = batch_costs(64, EXPERT, rates).expert(np.array([0.5, 1, 8.5, 16, 40, 64, 128, 2048]))
    assert taken.tolist() == [100, 100, 115, 130, 370, 610, 1250, 20450], "with half a token it is read whole"
    pieces = choose_ways(np.array([4096.0]), 4096, EXPERT, rates, worth=1.0)
    whole = choose_ways(np.array([2048.0]), 2048, EXPERT, rates, worth=1.0)
    rows_us = 1.5 * EXPERT.row_bytes * 2048 / rates.copy_gbs / 1e3
    assert pieces.cpu_alone_us == pytest.approx(2 * whole.cpu_alone_us - rates.call_us), "a piece reads experts again"
    assert whole.cpu_alone_us == pytest.approx(taken[-1] + rates.call_us + rows_us)


def test_more_tokens_never_send_fewer_experts_to_the_gpu() -> None:
    sizes = (1, 8, 64, 512, 2048, 8192, 32768)
    sent = [len(expected_ways(64, tokens, 8, 128, EXPERT, RATES).streamed) for tokens in sizes]
    assert sent == sorted(sent) and sent[0] == 0 and sent[-1] > 60
    text = str(expected_ways(64, 2048, 8, 128, EXPERT, RATES))
    assert "the CPU computes" in text and "are copied to the GPU" in text


def test_explain_prints_the_ways() -> None:
    words = ["explain", "--shape", "qwen3-30b-a3b", "--weights", "mxfp4", "--device", "sm_90", "--gpu-experts", "64"]
    text = CliRunner().invoke(app, [*words, "--tokens", "2048"]).output
    assert "experts in host memory: the CPU computes" in " ".join(text.split())
    figures = json.loads(CliRunner().invoke(app, [*words, "--tokens", "1", "--json"]).output)["missing_experts"]
    assert not figures["streamed"] and figures["cpu_us"] > 0
