"""Tuning without a GPU: candidates, winners, rules made of winners, plans of candidates, the journal."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from lancebill.backends.ampere.plan import make_plan as ampere_plan
from lancebill.backends.ampere.tuning import policy as ampere
from lancebill.backends.gpu.kernels.limits import MOST_SLOTS
from lancebill.backends.gpu.kernels.weight_form import (
    BF16,
    E2M1_CODE,
    E4M3,
    E4M3_CODE,
    E8M0_G32,
    NO_SCALE,
    WeightForm,
)
from lancebill.backends.gpu.plan import GpuPlan
from lancebill.backends.gpu.tiles import Rule, bucket, buckets
from lancebill.backends.hopper.plan import make_plan
from lancebill.backends.hopper.steps import steps
from lancebill.backends.hopper.tuning import policy as hopper
from lancebill.backends.hopper.tuning import search
from lancebill.backends.hopper.tuning.search import Candidate, Cell
from lancebill.bench import tuning
from lancebill.bench.sustained import Steady
from lancebill.bench.tuning import Journal, Search, TuningLayer, plan_of
from lancebill.bench.workload import Batch
from lancebill.cli.main import app
from lancebill.errors import SpecError
from lancebill.moe.device import Device
from lancebill.testing.layers import layer_problem

FLAGS = Rule.parse("16+8")
SIZES = {"hidden": 4096, "intermediate": 2048, "experts": 256, "top_k": 6}


def cell(tokens: int, layer: str = "a", kind: str = search.SIXTEEN_BIT) -> Cell:
    return Cell(layer, kind, tokens, 6 * tokens, 256)


def test_candidates_fit_the_rows() -> None:
    few, many = search.first_round(cell(5), FLAGS), search.first_round(cell(16384), FLAGS)
    assert Candidate() in few and Candidate() not in many  # decoding is tried for few slots only
    assert max(c.rule.full_tile for c in few if c.rule) <= 24
    assert min(c.rule.full_tile for c in many if c.rule) == 128
    assert all(c.rule.overlap for c in few if c.rule)
    assert len(search.second_round(FLAGS)) == 3 and Candidate(FLAGS) not in search.second_round(FLAGS)


@pytest.mark.parametrize("tokens", [1, 16, 256, 4096, 16384])
def test_every_batch_has_candidates(tokens: int) -> None:
    found = search.first_round(cell(tokens), FLAGS)
    assert len(found) >= 3
    assert [search.parse_candidate(c.name) for c in found] == found


def test_the_winner_has_the_best_mean_over_layers() -> None:
    """Not the best of any layer, but never far behind."""
    first, second, third = (Candidate(Rule.parse(tiles)).name for tiles in ("16", "32+16", "48+32+16"))
    cells = [cell(64, "a"), cell(64, "b")]
    times = {
        cells[0].name: {first: 100.0, second: 103.0, third: 150.0},
        cells[1].name: {first: 150.0, second: 103.0, third: 100.0},
    }
    assert search.winners(cells, times)[search.SIXTEEN_BIT] == {1.5: Rule.parse("32+16")}
    del times[cells[1].name][second]  # it did not run there
    assert search.winners(cells, times)[search.SIXTEEN_BIT][1.5].tiles == "16"


def test_cells_without_times_have_no_winner() -> None:
    first, second = cell(64, "a"), cell(64, "b")
    assert search.winners([first, second], {first.name: {}}) == {}


def test_rules_have_limits_between_winners_and_no_duplicates() -> None:
    small, large = Rule.parse("16+8"), Rule.parse("128+96/64+160j", paired=True)
    found = search.rules_from_winners({1.0: small, 4.0: small, 64.0: large})
    assert found == [
        {"rows_up_to": 16.0, "tiles": "16+8", "overlap": True, "paired": False},
        {"rows_up_to": None, "tiles": "128+96/64+160j", "overlap": True, "paired": True},
    ]


def test_decode_limit_is_where_tiles_win() -> None:
    tiles, decode = Candidate(FLAGS).name, Candidate().name
    cells = [cell(tokens) for tokens in (1, 4, 8, 16)]
    us = {1: (30, 20), 4: (90, 80), 8: (120, 130), 16: (200, 190)}
    times = {c.name: {tiles: us[c.tokens][0], decode: us[c.tokens][1]} for c in cells}
    assert search.decode_slots(cells, times, search.SIXTEEN_BIT) == 24
    assert search.decode_slots(cells, times, search.EIGHT_BIT) is None


def test_data_that_was_not_measured_stays() -> None:
    data = hopper.data()
    only = cell(4096)
    times = {only.name: {Candidate(Rule.parse("64+32+16", overlap=False, paired=True)).name: 9.0}}
    found = search.merge_into_data(data, [only], times, "a GPU", "today")
    (entry,) = found["16-bit"]
    assert entry == {
        "rows_up_to": None, "tiles": "64+32+16", "overlap": False, "paired": True
    }  # fmt: skip
    assert found["8-bit"] == data["8-bit"] and found["decode_slots"] == data["decode_slots"]
    assert (found["gpu"], found["measured"]) == ("a GPU", "today")
    assert set(data) <= set(found) and data["16-bit"] != found["16-bit"]


@pytest.mark.parametrize("activations", ["bf16", "fp8"])
def test_candidates_use_the_plans_of_the_backend(activations: str) -> None:
    """The rule in use gives the plan in use; another rule gives other tiles and other kernels."""
    problem = layer_problem("mxfp4", activations, **SIZES)
    used = make_plan(problem, 1024)
    assert used.rule is not None
    same = plan_of(problem, 1024, Candidate(used.rule))
    assert [step.source for step in steps(same)] == [step.source for step in steps(used)]
    other = plan_of(problem, 1024, Candidate(Rule.parse("64+32")))
    assert [tile.sizes for tile in other.gemm("w13").tiles] == [(64,), (32,)]
    assert not {s.source for s in steps(other)} <= {s.source for s in steps(used)}
    few = plan_of(problem, 4, Candidate())
    assert few.decode and few.workspace_bytes > 0
    assert TuningLayer("it", problem).cell(4).kind == (
        search.SIXTEEN_BIT if activations == "bf16" else search.EIGHT_BIT
    )


@pytest.mark.parametrize(
    ("weights", "activations", "more"),
    [
        ("mxfp4", "fp8", True), ("fp8", "fp8", True), ("int4", "fp8", True), ("int4", "int8", False),
        ("int4-g128", "fp8", False), ("int4-g128-zp", "fp8", False),
    ],
)  # fmt: skip
def test_tiles_of_48_are_a_launch_only_where_they_have_a_third_block(
    weights: str, activations: str, more: bool
) -> None:
    """Of the same layer with 24 rows for each expert."""
    gemm = make_plan(layer_problem(weights, activations, **SIZES), 1024).gemm("w13")
    blocks = {tile.sizes: tile.blocks for tile in gemm.tiles}
    assert ((48, 32) in blocks) == more
    assert set(blocks.values()) == ({2, 3} if more else {2})
    assert all((count == 3) == (sizes == (48, 32)) for sizes, count in blocks.items())


def test_a_search_can_be_resumed(tmp_path: Path) -> None:
    path, where = tmp_path / "x.cells.json", cell(64)
    journal = Journal(path)
    journal.note(where, {"16+8 overlap": 12.5}, {"decode": "does not compile"})
    reopened = Journal(path)
    assert reopened.is_measured(where, Candidate(FLAGS)) and reopened.is_measured(where, Candidate())
    assert not reopened.is_measured(cell(256), Candidate(FLAGS))
    reopened.note(where, {"8": 11.0}, {})
    assert json.loads(path.read_text())["times"][where.name] == {"16+8 overlap": 12.5, "8": 11.0}
    assert [file.name for file in tmp_path.iterdir()] == ["x.cells.json"]


@pytest.mark.parametrize(
    ("words", "why"), [(("--device", "cpu"), "cannot be tuned"), (("--out", "nowhere/x.json"), "no such folder")]
)
def test_usage_errors(words: tuple[str, str], why: str) -> None:
    done = CliRunner().invoke(app, ["tune", "--shape", "4,256,256,2", *words])
    assert done.exit_code == 2 and why in done.output


class Stopwatch:
    """Fake times by the first tile: 32 is fastest, best followed by 16 alone. Overlap saves a tenth, pairing 1 us."""

    def __init__(self, device: torch.device) -> None:
        self.measured: list[str] = []

    def measure(self, contestants: Mapping[str, object]) -> dict[str, Steady]:
        self.measured += contestants
        return {name: Steady((self._us(search.parse_candidate(name)),)) for name in contestants}

    def _us(self, candidate: Candidate) -> float:
        rule = candidate.rule
        if rule is None:
            return 99.0
        return (100 + (rule.tiles != "80/64/48/32")) * (0.9 if rule.overlap else 1.0) - rule.paired


def wrong_with_48(plan: GpuPlan, packed: object, batch: Batch, out: Tensor) -> Tensor:
    return torch.ones_like(out) * (1 + (plan.gemm("w13").tiles[0].sizes == (48,)))


PLANS: dict[str, tuple[ModuleType, Callable[..., GpuPlan]]] = {
    "hopper": (hopper, make_plan),
    "ampere": (ampere, lambda problem, tokens, **tried: ampere_plan(problem, tokens, Device("cuda", 80), **tried)),
}


@pytest.mark.parametrize("name", PLANS)
def test_no_tuning_data_make_a_kernel_decode_more_slots_than_it_holds(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel would leave the results of further slots zero. A plan that was asked for is refused."""
    (policy, plan), problem = PLANS[name], layer_problem("mxfp4", "bf16", **SIZES)
    slots = {tokens: plan(problem, tokens).slots for tokens in range(1, 20)}
    data, many = dict(policy.data()), 96
    data["decode_slots"] = dict.fromkeys(data["decode_slots"], many) if name == "hopper" else many
    monkeypatch.setattr(policy, "data", lambda: data)
    assert {plan(problem, tokens).decode for tokens, count in slots.items() if count <= MOST_SLOTS} == {True}
    for tokens, count in slots.items():
        if count > MOST_SLOTS:
            assert not plan(problem, tokens).decode
            with pytest.raises(SpecError, match=r"(?s)do not hold so many slots.*<= 32"):
                plan(problem, tokens, decode=True)


def test_the_search_decodes_only_what_kernels_hold() -> None:
    tried = {slots: Candidate() in search.first_round(Cell("a", search.SIXTEEN_BIT, slots, slots, 256), FLAGS)
             for slots in (MOST_SLOTS, MOST_SLOTS + 1)}  # fmt: skip
    assert tried == {MOST_SLOTS: True, MOST_SLOTS + 1: False}


@pytest.mark.parametrize("tiles", ["128/112/96/80/64/48/32/24/16", "256", "12", "0", "64/32+264j"])
def test_token_tiles_that_no_kernel_has_are_refused(tiles: str) -> None:
    with pytest.raises(SpecError, match="no kernel has these token tiles"):
        Rule.parse(tiles)


def test_the_search_covers_every_tile_list_of_the_data() -> None:
    rules = [entry for kind in (search.SIXTEEN_BIT, search.EIGHT_BIT) for entry in hopper.data()[kind]]
    assert rules and {entry["tiles"] for entry in rules} <= set(search.TILES)


def test_a_search_tries_tiles_then_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling, launching and timing are faked; the test checks what is measured and which results are kept."""
    problem = layer_problem("mxfp4", "bf16", hidden=256, intermediate=128, experts=8, top_k=2)
    monkeypatch.setattr(tuning, "Windows", Stopwatch)
    monkeypatch.setattr(tuning, "build_all", lambda sources: {})
    monkeypatch.setattr(tuning, "_run", wrong_with_48)
    path, printed = tmp_path / "it.cells.json", list[str]()
    hunt = Search([TuningLayer("small", problem)], (48,), Journal(path), torch.device("cpu"))
    hunt.run(printed.append)
    (where,) = hunt.cells
    times, failed = hunt.journal.times[where.name], hunt.journal.failed[where.name]
    best = "80/64/48/32"
    assert search.best_of(times) == f"{best} overlap paired" and best in times and f"{best} overlap" in times
    assert {why for name, why in failed.items() if name.startswith("80/64/48+32")} == {"wrong result"}
    assert search.winners(hunt.cells, hunt.journal.times)[search.SIXTEEN_BIT] == {12.0: Rule.parse(best, paired=True)}
    resumed = Search([TuningLayer("small", problem)], (48,), Journal(path), torch.device("cpu"))
    resumed.run(printed.append)
    assert resumed.windows.measured == []  # type: ignore[attr-defined]


@pytest.mark.parametrize("activations", [BF16, E4M3])
@pytest.mark.parametrize("slices", [1, 7, 16, 56, 224])
@pytest.mark.parametrize("tiles", [1, 64, 192, 256, 396, 397, 448, 4000])
def test_chunks_keep_blocks_equally_busy(activations: str, slices: int, tiles: int) -> None:
    """No block has much more work than an equal share, and no tile more pieces than planned.

    That holds too where another number of tiles was expected.
    """
    form = WeightForm(E2M1_CODE, E8M0_G32, 32, activations)
    blocks = -(-slices // hopper.decode_slices(form))
    for expected in (tiles, 64, 256):
        cut, per_sm = hopper.decode_chunks(form, expected, slices, known=expected == tiles)
        resident = per_sm * 132
        each = max(cut.stages, -(-tiles * blocks // cut.shares))
        chunks = -(-tiles * blocks // each)
        if expected <= tiles:
            busy = 2 * 132 if activations == E4M3 and blocks <= 8 else resident  # short fp8 tiles stay whole
            share = max(1.1 * -(-tiles * blocks // busy), 4, blocks / 7 + 1)
            assert -(-chunks // resident) * each <= share
        starts = [tile * blocks for tile in range(tiles)]
        assert max((start + blocks - 1) // each - start // each + 1 for start in starts) <= cut.pieces <= 8
        if expected == tiles:
            assert (cut.pieces == 1) == (each % blocks == 0)


def test_decoding_takes_two_blocks_where_they_have_whole_tiles_or_are_enough() -> None:
    """Tiles have 28 stages: 256 are one for each of 264 blocks, 396 one for each of 396, and 8 are 64 chunks."""
    form = WeightForm(E2M1_CODE, E8M0_G32, 32, BF16)
    found = {tiles: hopper.decode_chunks(form, tiles, 4 * 28) for tiles in (256, 396, 8)}
    assert {tiles: (cut.stages, blocks) for tiles, (cut, blocks) in found.items()} == {
        256: (28, 2),
        396: (28, 3),
        8: (4, 2),
    }
    assert hopper.decode_tile(form, 4 * 28, 2).stages > hopper.decode_tile(form, 4 * 28).stages
    assert hopper.decode_chunks(form, 256, 4 * 28, known=False)[1] == 3


@pytest.mark.parametrize(
    ("tiles", "stages", "each", "blocks"),
    [(92, 6, 3, 2), (92, 12, 3, 3), (40, 32, 4, 3), (96, 8, 4, 2), (80, 32, 7, 3)],
    ids=["half-tiles", "quarters", "eighths", "thirds-do-not-fit", "quarters-are-too-long"],
)
def test_decoding_prefers_equal_parts_of_tiles(tiles: int, stages: int, each: int, blocks: int) -> None:
    """Chunks that do not end inside a tile may be short, but not much longer than others."""
    form = WeightForm(E2M1_CODE, E8M0_G32, 32, BF16)
    found, per_sm = hopper.decode_chunks(form, tiles, 4 * stages)
    assert (found.stages, per_sm) == (each, blocks)


@pytest.mark.parametrize("blocks", [2, 3])
@pytest.mark.parametrize("slices", [1, 16, 56, 128])
def test_decode_rows_and_stages_fit_in_shared_memory(slices: int, blocks: int) -> None:
    """The planned number of blocks fits if slices overlap; at least one block fits if they cannot (Triton >= 3.8)."""
    for code, scale, group in ((E2M1_CODE, E8M0_G32, 32), (E4M3_CODE, NO_SCALE, 0)):
        form = WeightForm(code, scale, group, E4M3)
        tile = hopper.decode_tile(form, slices, blocks)
        stages = tile.stages * hopper.stage_bytes(form, 0, tile.slices) + hopper.RESERVED
        assert tile.row_slices >= slices and tile.stages >= 2
        assert tile.blocks * (stages + 128 * (tile.row_slices + 8)) <= hopper.SHARED_PER_SM
        assert stages + 8 * 128 * tile.row_slices <= hopper.SHARED_PER_SM


def test_buckets_lists_every_bucket() -> None:
    assert buckets(5000) == tuple(sorted({bucket(n) for n in range(1, 4097)} | {5120}))


def test_journals_drop_candidates_with_unknown_flags(tmp_path: Path) -> None:
    path, where = tmp_path / "it.cells.json", cell(64).name
    times = {"16+8 overlap": 2.0, "16+8 overlap tokens_inner": 1.0, "decode": 3.0}
    path.write_text(json.dumps({"times": {where: times}, "failed": {where: {"8 tokens_inner": "wrong", "8": "wrong"}}}))
    journal = Journal(path)
    assert journal.times == {where: {"16+8 overlap": 2.0, "decode": 3.0}} and journal.failed == {where: {"8": "wrong"}}
