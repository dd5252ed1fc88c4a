"""Plans of layers for one token by strips of features on Hopper: when they are used, and what they cover."""

from __future__ import annotations

from dataclasses import replace

import pytest
from strip_sizes import STRIP_SIZES, STRIPS

from lancebill.backends.gpu.plan import scratch
from lancebill.backends.hopper.plan import make_plan
from lancebill.backends.hopper.steps import steps
from lancebill.jit.build import build_all, get_binary
from lancebill.jit.compile import KernelSource
from lancebill.moe.activation import Activation
from lancebill.moe.problem import BATCH_INVARIANT, CONTIGUOUS, FAST, Problem
from lancebill.testing.layers import layer_problem

PROCESSORS = 132


def layer(spec: str = "mxfp4", activations: str = "bf16", **more: object) -> Problem:
    sizes = {"hidden": 2880, "intermediate": 768, "experts": 128, "top_k": 4, **more}
    order, everywhere = sizes.pop("order", FAST), sizes.pop("global_experts", sizes["experts"])
    return replace(layer_problem(spec, activations, **sizes), order=order, global_experts=everywhere)


UNGATED = Activation("relu2_no_mul")


@pytest.mark.parametrize("spec", ["mxfp4", "int8", "int4-g32"])
@pytest.mark.parametrize("sizes", [{}, {"intermediate": 224, "top_k": 1}, {"hidden": 3104, "activation": UNGATED}])
def test_blocks_cover_all_features_of_all_slots(spec: str, sizes: dict[str, object]) -> None:
    """Nothing is exchanged between blocks: no pieces, and no counters."""
    problem = layer(spec, **sizes)
    plan = make_plan(problem, 1)
    first, second = steps(plan)
    assert plan.decode and plan.slot_strips is not None and not plan.counts
    assert not {"parts13", "parts2"} & set(scratch(plan))
    features = 16 if problem.activation.gated else 32
    blocks, slots = first.grid(1)
    assert (blocks - 1) * features < problem.intermediate <= blocks * features and slots == problem.top_k
    blocks, rows = second.grid(1)
    assert (blocks - 1) * 16 < problem.hidden <= blocks * 16 and rows == 1


@pytest.mark.parametrize(
    ("problem", "tokens"),
    [
        (layer(), 2), (layer("nf4"), 1), (layer("int2-g64"), 1), (layer(activations="fp8"), 1),
        (layer(order=BATCH_INVARIANT), 1), (layer(intermediate=2880), 1), (layer(hidden=2048), 1),
        (layer(global_experts=129), 1), (layer(hidden=2944, intermediate=64, top_k=64), 1),
    ],
)  # fmt: skip
def test_others_have_tiles(problem: Problem, tokens: int) -> None:
    """More tokens; words in another order, or slow to unpack; rows that are quantised; an order that must not depend
    on the number of rows; much to read, or so few features that some SMs would read little; experts of other ranks;
    more choices than a warp has lanes."""
    assert make_plan(problem, tokens).slot_strips is None


@pytest.mark.parametrize("spec", ["mxfp4", "int8"])
@pytest.mark.parametrize("sizes", STRIP_SIZES)
def test_sizes_of_the_gpu_tests_have_strips(spec: str, sizes: dict[str, object]) -> None:
    assert make_plan(layer(spec, **{**STRIPS, **sizes}), 1).slot_strips is not None


@pytest.mark.parametrize(
    "sizes", [{}, {"intermediate": 1440}, {"intermediate": 96}, {"hidden": 7168, "intermediate": 256, "top_k": 8}]
)
def test_hidden_rows_fit_and_all_blocks_run_at_once(sizes: dict[str, object]) -> None:
    problem = layer(**sizes)
    plan = make_plan(problem, 1)
    strips = plan.slot_strips
    assert strips is not None and strips.slots >= problem.top_k and 64 * strips.slices >= problem.intermediate
    assert strips.slices % strips.second_parts == 0 and strips.window % (strips.first_parts * strips.first_ahead) == 0
    for step in steps(plan):
        found, (across, down) = get_binary(step.source), step.grid(1)
        blocks = -(-across * down // PROCESSORS)
        assert blocks * found.registers * found.threads <= 65536 and blocks * (found.shared + 1024) <= 228 * 1024


HEAVY = ("int4-g64:fp16", "int4-g128-zp", "int8-g32:fp32")  # the most registers
FORMS = (
    *HEAVY, "mxfp4", "nvfp4", "int4", "int4-g32", "int4-g32-zp", "int4-g128", "int4-g128:fp32", "int8", "int8-g128",
    "int8-g32:fp16", "int8-g64:fp32", "int8-g128:fp32", "fp8", "fp8-block", "fp8-g32:fp32", "mxfp8",
)  # fmt: skip


def test_strips_of_every_form_compile(all_kernels: bool) -> None:
    """Spills are compile errors."""
    sources: dict[KernelSource, None] = {}
    for spec in FORMS if all_kernels else HEAVY:
        for activations in ("bf16", "fp16") if all_kernels else ("fp16",):
            problem = layer(spec, activations, hidden=3072, bias=True)
            plan = make_plan(problem, 1)
            assert plan.slot_strips is not None
            single = replace(problem, w13=replace(problem.w13, spec=problem.w2.spec), w2=None, experts=1)
            single = replace(single, dispatch=CONTIGUOUS, global_experts=1, activation=UNGATED, top_k=1)
            for rows in (1, 8, 16) if all_kernels else (16,):
                plan_of_matrix = make_plan(single, rows)
                assert plan_of_matrix.strips is not None
                sources |= dict.fromkeys(step.source for step in steps(plan_of_matrix))
            sources |= dict.fromkeys(step.source for step in steps(plan))
    assert build_all(sources) == {}
