"""Plans of one matrix with a few rows on Hopper: when all rows are one tile, and how blocks share the matrix."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lancebill.backends.gpu.chunks import even_chunks
from lancebill.backends.gpu.plan import GpuPlan, scratch
from lancebill.backends.gpu.step import CALL, Ref
from lancebill.backends.hopper.plan import make_plan
from lancebill.backends.hopper.steps import steps
from lancebill.jit.build import get_binary
from lancebill.moe.activation import Activation
from lancebill.moe.problem import BATCH_INVARIANT, CONTIGUOUS, Problem
from lancebill.testing.layers import layer_problem

PROCESSORS, BLOCKS = 132, 3


def linear(spec: str = "mxfp4", activations: str = "bf16", n: int = 4096, k: int = 4096, **more: object) -> Problem:
    layer = layer_problem(
        spec, activations, hidden=k, intermediate=n, experts=1, top_k=1, activation=Activation("relu2_no_mul")
    )
    return replace(layer, dispatch=CONTIGUOUS, w2=None, **more)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 2000), st.integers(1, 300))
def test_chunks_share_all_stages_evenly(tiles: int, stages: int) -> None:
    chunks = even_chunks(tiles, stages, PROCESSORS, BLOCKS)
    total, each = tiles * stages, chunks.stages
    count = -(-total // each)
    assert count <= PROCESSORS * BLOCKS, "all blocks run at once"
    owners = [set[int]() for _ in range(tiles)]
    for chunk in range(count):
        for stage in range(chunk * each, min((chunk + 1) * each, total)):
            owners[stage // stages].add(chunk)
    assert max(map(len, owners)) <= chunks.pieces <= 8
    assert (chunks.pieces == 1) == (max(map(len, owners)) == 1)
    if count > PROCESSORS and chunks.pieces < 8:
        assert each * -(-count // PROCESSORS) <= 1.05 * (total / PROCESSORS + BLOCKS), "no SM ends much later"


@pytest.mark.parametrize("rows", [9, 16])
def test_up_to_16_rows_are_one_tile_and_one_launch(rows: int) -> None:
    plan = make_plan(linear("nf4"), rows)
    (step,) = steps(plan)
    assert plan.few_rows and plan.counts and not plan.decode and plan.strips is None
    assert dict(step.source.arguments)["x_desc"].box[0] == 16  # type: ignore[union-attr]
    assert step.grid(rows) == step.grid(1) and step.values["x_desc"] == Ref(CALL, "x", mapped=4096)
    gemm, (tile,) = plan.first_gemm, plan.first_gemm.tiles
    assert gemm.pieces > 1
    assert scratch(plan)["parts13"][0] == (gemm.units * gemm.pieces * max(tile.sizes), 128)


def not_one_tile() -> list[tuple[Problem, int]]:
    invariant, scaled = linear(order=BATCH_INVARIANT), linear(pre_scale=True)
    return [(linear(), 17), (linear(activations="fp8"), 8), (linear("int8", "int8"), 8), (invariant, 4), (scaled, 4)]


@pytest.mark.parametrize(("problem", "rows"), not_one_tile())
def test_others_are_not_one_tile(problem: Problem, rows: int) -> None:
    """Many rows; rows that are quantised or scaled first; an order that must not depend on the number of rows."""
    plan = make_plan(problem, rows)
    assert isinstance(plan, GpuPlan) and not plan.few_rows


@pytest.mark.parametrize(("n", "blocks"), [(14336, 2), (16896, 2), (33792, 2), (45056, 3)])
@pytest.mark.parametrize("rows", [8, 16])
def test_units_for_most_processors_are_not_cut(n: int, blocks: int, rows: int) -> None:
    """Each block has one unit, and no partial sums. Blocks that are few have more shared memory."""
    plan = make_plan(linear(n=n, k=14336), rows)
    gemm, (tile,), (step,) = plan.first_gemm, plan.first_gemm.tiles, steps(plan)
    assert plan.few_rows and gemm.pieces == 1 and "parts13" not in scratch(plan)
    assert tile.blocks == blocks and step.grid(rows) == (n // 128, 1)


@pytest.mark.parametrize("n", [4096, 12800, 17024, 25600])
def test_units_for_fewer_processors_are_cut(n: int) -> None:
    """More than a sixth of all processors would have nothing to do at the end."""
    plan = make_plan(linear("nf4", n=n), 16)
    assert plan.few_rows and plan.first_gemm.pieces > 1


@pytest.mark.parametrize("n", [16, 1904, 8192, 14336, 151936])
@pytest.mark.parametrize("rows", [1, 2, 8])
def test_strips_cover_all_features_and_need_no_scratch(n: int, rows: int) -> None:
    """Nothing is exchanged between blocks: no pieces, and no counters."""
    plan = make_plan(linear("int8", n=n), rows)
    (step,), strips = steps(plan), plan.strips
    assert plan.few_rows and strips is not None and strips.rows >= rows
    assert "parts13" not in scratch(plan) and not plan.counts
    blocks, _ = step.grid(rows)
    assert (blocks - 1) * strips.features < n <= blocks * strips.features
    assert 128 % strips.features == 0, "a block's strips are of one unit"
    assert strips.features <= 64, "the halves of a unit of 8-bit codes are apart"


@pytest.mark.parametrize("k", [64, 1088, 4096, 5120, 7168, 11008])
@pytest.mark.parametrize("rows", [1, 8, 16])
def test_windows_begin_with_rounds_and_few_slices_are_taken_twice(k: int, rows: int) -> None:
    strips = make_plan(linear("int8", k=k), rows).strips
    assert strips is not None and strips.window % (strips.parts * strips.ahead) == 0
    together, slices = strips.parts * strips.ahead, k // 64
    assert -(-slices // together) * together <= 1.15 * slices or strips.ahead == 2


@pytest.mark.parametrize(
    ("problem", "rows"),
    [
        (linear("int2-g64"), 1),
        (linear("nf4"), 1),
        (linear(k=14336), 8),
        (linear(n=65536, k=8192), 8),
        (linear(n=65536), 16),
    ],
)
def test_others_have_no_strips(problem: Problem, rows: int) -> None:
    """Words in another order, or slow to unpack; many rows of long rows, or of many features."""
    plan = make_plan(problem, rows)
    assert plan.few_rows and plan.strips is None and steps(plan)


@pytest.mark.parametrize(("n", "rows"), [(8448, 1), (6336, 8), (12672, 8), (16896, 8), (6336, 16), (8448, 16)])
@pytest.mark.parametrize("spec", ["mxfp4", "int8"])
def test_all_blocks_of_strips_are_resident(spec: str, n: int, rows: int) -> None:
    """At the most features for which a share of the matrix is used, with what the kernel was compiled to."""
    (step,) = steps(make_plan(linear(spec, n=n), rows))
    found, blocks = get_binary(step.source), -(-step.grid(rows)[0] // PROCESSORS)
    assert blocks * found.registers * found.threads <= 65536 and blocks * (found.shared + 1024) <= 228 * 1024


def test_the_kernel_compiles() -> None:
    (step,) = steps(make_plan(linear("int4-g128", n=17024), 16))
    found = get_binary(step.source)
    assert found.registers * found.threads * BLOCKS <= 65536 and found.shared <= 228 * 1024 // BLOCKS - 1024
