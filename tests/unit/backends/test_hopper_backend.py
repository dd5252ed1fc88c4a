"""Layout, plans and refusals of the Hopper backend, without Triton and without a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lancebill.backends.base import TensorTable
from lancebill.backends.gpu.call import check_call, write_back
from lancebill.backends.gpu.kernels import triton_version as compat
from lancebill.backends.gpu.layout import FragmentLayout
from lancebill.backends.gpu.plan import scratch
from lancebill.backends.gpu.row_kernels import ID_ARGUMENTS, WEIGHT_ARGUMENTS
from lancebill.backends.gpu.step import CALL, SCRATCH, Ref
from lancebill.backends.gpu.tiles import bucket, buckets
from lancebill.backends.gpu.workspace import SECOND
from lancebill.backends.hopper.plan import make_plan
from lancebill.backends.hopper.steps import kernels, steps
from lancebill.backends.hopper.tuning import policy as tune
from lancebill.backends.registry import registry
from lancebill.errors import LaunchError
from lancebill.moe.activation import Activation
from lancebill.moe.device import Device
from lancebill.moe.dispatch import Batched, Contiguous, Indexed
from lancebill.moe.problem import BATCH_INVARIANT, BATCHED, CONTIGUOUS, INDEXED, Problem
from lancebill.numbers.codec import dequantize
from lancebill.numbers.dtypes import F32
from lancebill.numbers.weight import LogicalWeight
from lancebill.testing.layers import layer_problem, plausible_weight

SPECS = [
    "mxfp4", "nvfp4", "int4-g32", "int4-g64:fp16", "int4-g128", "int4", "int4-g128-zp", "int4-g32-zp", "int4-zp",
    "int8", "int8-g128", "fp8", "fp8-block", "fp8-tensor", "int8-g32:fp16", "mxfp8", "int2-g64", "int2-zp",
    "int3-g32-zp", "int3-g128:fp32", "nf4", "nf4-g32:fp16", "iq4-g32:fp16",
]  # fmt: skip
HOPPER = Device("cuda", 90)


def problem(spec: str = "mxfp4", activations: str = "bf16", **options) -> Problem:
    sizes = {"hidden": 256, "intermediate": 384, "experts": 4, "top_k": 2}
    return layer_problem(spec, activations, **{**sizes, **options})


def round_trip(layout: FragmentLayout, shape, weight: LogicalWeight) -> LogicalWeight:
    held = {role: tensor[0].fill_(-1) for role, tensor in layout.allocate(shape, 1).items()}
    layout.pack(shape, weight, held)
    return layout.unpack(shape, held)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("activations", ["bf16", "fp16"])
def test_packing_is_a_bijection(spec: str, activations: str) -> None:
    for options in ({"bias": True}, {"activation": Activation("relu2_no_mul")}):
        layer = problem(spec, activations, **options)
        layout = FragmentLayout(layer)
        for shape in layer.matrices.values():
            weight = plausible_weight(shape, 1)
            assert round_trip(layout, shape, weight).equals(weight)


INTEGERS = ("int4", "int4-g128", "int4-g128:fp16", "int4-g128-zp")
BYTE_FORMS = [
    *((spec, "fp8") for spec in ("fp8", "fp8-block", *INTEGERS)),
    *((spec, "int8") for spec in ("int8", "int8-g128", *INTEGERS)),
]


@pytest.mark.parametrize(("spec", "inputs"), BYTE_FORMS)
def test_packing_for_8_bit_inputs_is_a_bijection(spec: str, inputs: str) -> None:
    layer = problem(spec, inputs, bias=True)
    layout = FragmentLayout(layer)
    for shape in layer.matrices.values():
        weight = plausible_weight(shape, 1)
        assert round_trip(layout, shape, weight).equals(weight)
        assert layout.form(shape).promoted == ("-g" in spec or "block" in spec)


@pytest.mark.parametrize(("hidden", "intermediate"), [(2880, 96), (160, 32), (96, 2880)])
@pytest.mark.parametrize("activations", ["bf16", "fp8"])
def test_packing_pads(hidden: int, intermediate: int, activations: str) -> None:
    layer = problem("mxfp4", activations, hidden=hidden, intermediate=intermediate)
    layout = FragmentLayout(layer)
    for shape in layer.matrices.values():
        weight = plausible_weight(shape, 1)
        assert round_trip(layout, shape, weight).equals(weight)


@pytest.mark.parametrize(
    "spec",
    [
        "int4-g128",
        "int4-g128:fp16",
        "int4-g128-zp",
        "int8-g128",
        "fp8-block",
        "int2-g64",
        "int3-g64-zp",
        "nf4",
        "iq4-g64",
    ],
)
@pytest.mark.parametrize("activations", ["bf16", "fp16"])
@pytest.mark.parametrize("size", [2.0**-12, 1.0, 2.0**10])
def test_scales_of_any_size_survive_packing(spec: str, activations: str, size: float) -> None:
    """Packing moves scales by powers of two: up by the code's unit, down by the excess of the row."""
    layer = problem(spec, activations)
    weight = plausible_weight(layer.w13, 1)
    grown = replace(weight, scales=((weight.scales[0].float() * size).to(weight.scales[0].dtype),))
    assert round_trip(FragmentLayout(layer), layer.w13, grown).equals(grown)


def test_act_order_survives_packing() -> None:
    layer = problem("int4-g128", act_order=True)
    weight = plausible_weight(layer.w13, 1)
    assert round_trip(FragmentLayout(layer), layer.w13, weight).equals(weight)


@pytest.mark.parametrize("activations", ["bf16", "fp16", "fp8"])
def test_large_exponents_move_to_the_row_factor(activations: str) -> None:
    """Rows with scales far above one stay exact."""
    layer = problem("mxfp4", activations)
    weight = plausible_weight(layer.w2, 1)
    weight = replace(weight, scales=((weight.scales[0].int() + 60).to(torch.uint8),))
    assert round_trip(FragmentLayout(layer), layer.w2, weight).equals(weight)


def test_exponents_out_of_range_are_rounded_and_counted() -> None:
    layer = problem("mxfp4", "fp8")
    layout, weight = FragmentLayout(layer), plausible_weight(layer.w2, 1)
    scales = weight.scales[0].clone()
    scales[3, 1] = scales[3].max() - 20
    weight = replace(weight, scales=(scales,))
    back = round_trip(layout, layer.w2, weight)
    assert layout.rerounded.groups == 1
    error = (dequantize(back) - dequantize(weight)).abs()
    step = 2.0 ** (float(scales[3].max()) - 127 - 11)  # an ulp of e2m1 at the lowest exponent in range
    assert error.max() <= step / 2 and error[3].any()


@pytest.mark.parametrize("activations", ["bf16", "fp16"])
def test_mxfp8_keeps_its_exponents(activations: str) -> None:
    """Scales far above one move to the row's factor; in fp16, groups far below their row's largest are rounded."""
    layer = problem("mxfp8", activations)
    layout, weight = FragmentLayout(layer), plausible_weight(layer.w2, 1)
    scales = (weight.scales[0].int() + 60).to(torch.uint8)
    weight = replace(weight, scales=(scales,))
    assert round_trip(layout, layer.w2, weight).equals(weight)
    scales = scales.clone()
    scales[3, 1] = scales[3].max() - 30
    weight = replace(weight, scales=(scales,))
    error = (dequantize(round_trip(layout, layer.w2, weight)) - dequantize(weight)).abs()
    assert layout.rerounded.groups == (activations == "fp16")
    assert error.max() <= 2.0 ** (float(scales[3].max()) - 127 - 22 - 10)  # half of e4m3's smallest number
    assert bool(error[3].any()) == (activations == "fp16")


def test_unsupported_problems_have_reasons() -> None:
    backend = registry()["hopper"]

    def codes(layer: Problem, device: Device = HOPPER) -> set[str]:
        return {reason.code for reason in backend.check(layer, device)} - {"triton"}

    assert codes(problem()) == set()
    assert codes(problem(), Device("cpu")) == {"device"}
    assert codes(problem(), Device("cuda", 100)) == {"device"}
    for given in (replace(problem(), dispatch=CONTIGUOUS), replace(problem(), dispatch=BATCHED), linear()):
        assert codes(given) == set()
    assert "input" in codes(replace(problem(), input=F32))
    assert "spec" in codes(problem("int5")) and "spec" in codes(problem("mxfp6-e2m3"))
    assert "group" in codes(problem("nf4-channel"))
    assert "activations" in codes(problem("mxfp4", "mxfp4"))
    assert "group" in codes(problem("int4-g16")) and "group" in codes(problem("int2-g16"))
    assert "group" in codes(problem("int4-g64", "fp8"))
    assert "group" in codes(problem("int4-g192", hidden=768, intermediate=384))  # not aligned with stages
    assert "spec" in codes(problem("int8", "fp8")) and "spec" in codes(problem("nvfp4", "fp8"))
    assert "spec" in codes(problem("int4-zp", "fp8")) and "spec" in codes(problem("nf4", "fp8"))
    assert "spec" in codes(problem("mxfp8", "fp8")) and "spec" in codes(problem("int3-g128", "fp8"))
    assert codes(problem("fp8-block", "fp8-static")) == set()
    assert "spec" in codes(problem("mxfp4", "int8")) and "spec" in codes(problem("fp8", "int8"))
    assert "group" in codes(problem("int4-g64", "int8")) and "spec" in codes(problem("int4-zp", "int8"))
    assert codes(problem("int4-g128", "int8")) == codes(problem("int8", "int8-static")) == set()
    for intermediate, own in ((1 << 15, False), (1 << 14, True)):
        for wider, found in ((0, set()), (32, {"sizes"})):
            layer = problem("mxfp4", "fp8", intermediate=intermediate + wider)
            assert codes(replace(layer, pre_scale=own)) == found
    assert codes(problem("mxfp4", "bf16", intermediate=1 << 16)) == set()
    layer = problem()
    assert layer.w2 is not None
    assert codes(replace(layer, w2=replace(layer.w2, act_order=True))) == {"act-order"}


def test_missing_or_old_triton_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "triton_version", lambda: None)
    assert "triton" in {reason.code for reason in registry()["hopper"].check(problem(), HOPPER)}
    monkeypatch.setattr(compat, "triton_version", lambda: "3.5.1")
    assert compat.problem() == "Triton 3.5.1 is too old"


def linear(spec: str = "mxfp4", activations: str = "bf16") -> Problem:
    layer = problem(spec, activations)
    return replace(layer, w13=replace(layer.matrices["w2"], name="w13"), w2=None, experts=1, global_experts=1, top_k=1)


@pytest.mark.parametrize("activations", ["bf16", "fp8"])
@pytest.mark.parametrize("tokens", [1, 5, 16, 100, 1000, 5000, 20000])
@pytest.mark.parametrize("work", [INDEXED, CONTIGUOUS, BATCHED, "single"])
def test_plans_are_consistent(tokens: int, activations: str, work: str) -> None:
    layer = linear("mxfp4", activations)
    if work != "single":
        layer = replace(problem("mxfp4", activations, experts=64, top_k=4), dispatch=work)
    plan = make_plan(layer, tokens)
    assert plan.tokens >= tokens and plan.workspace_bytes > 0 and plan == make_plan(layer, tokens)
    assert plan.work == work and plan.slots == plan.tokens * (4 if work == INDEXED else 1)
    scratch_tensors = scratch(plan)
    caller_tensors = {"x", "out"} | ({*ID_ARGUMENTS, *WEIGHT_ARGUMENTS} if work == INDEXED else {"edges"})
    for step in steps(plan):
        assert sorted(step.values) == sorted(name for name, _ in step.source.arguments)
        assert min(step.grid(tokens)) > 0
        for value in step.values.values():
            if isinstance(value, Ref) and value.owner == SCRATCH:
                assert value.name in scratch_tensors
            elif isinstance(value, Ref) and value.owner == CALL:
                assert value.name in caller_tensors


def test_rows_grouped_by_the_caller_are_read_in_place() -> None:
    for work in (CONTIGUOUS, BATCHED):
        plan = make_plan(replace(problem(), dispatch=work), 500)
        assert "x" not in scratch(plan) and "y" not in scratch(plan)
        first = next(step for step in steps(plan) if step.source.kernel == "grouped_gemm")
        assert first.values["x_desc"] == Ref(CALL, "x", mapped=256)
        fp8 = make_plan(replace(problem(activations="fp8"), dispatch=work), 500)
        assert [step.source.kernel for step in steps(fp8)].count("prepare_rows") == 2


def test_promoted_sums_have_tiles_that_fit_in_registers() -> None:
    plan = make_plan(problem("int4-g128", "fp8"), 20000)
    assert plan.first_gemm.promote and plan.rule is not None and max(plan.rule.sizes) <= tune.MOST_PROMOTED
    assert not make_plan(problem("mxfp4", "fp8"), 20000).first_gemm.promote


def test_small_layers_do_not_pair_units() -> None:
    sizes = {"hidden": 1024, "intermediate": 1024, "top_k": 4}
    for experts, many in ((16, False), (512, True)):  # 256 and 8,192 units, with equal rows per expert
        plan = make_plan(problem(**sizes, experts=experts), 4 * experts)
        assert plan.rule is not None and plan.rule.paired == many
        assert (2 in {tile.units for tile in plan.first_gemm.tiles}) == many


@pytest.mark.parametrize(
    ("tiles", "blocks"),
    [
        (1, 2),
        (226, 2),
        (436, 4),
        (1132, 3),
        (1528, 4),
        (100_000, 4),
    ],  # 1132 tiles are 2.1 rounds of four or 2.9 of three
)
def test_blocks_of_an_sm_are_busy_in_the_last_round(tiles: int, blocks: int) -> None:
    assert tune.well_filled(4, tiles) == blocks and tune.well_filled(2, tiles) == 2


def test_few_tiles_share_the_memory_of_an_sm() -> None:
    """Mixtral's w2 has 32 units of 8 experts, less than two for each SM; its w13 has 224."""
    plan = make_plan(problem(hidden=4096, intermediate=14336, experts=8, top_k=2), 8)
    (many,), (few,) = plan.first_gemm.tiles, plan.gemm("w2").tiles
    assert not plan.decode and (many.blocks, few.blocks) == (4, 2) and few.stages > many.stages


@pytest.mark.parametrize(("tokens", "top_k"), [(2048, 8), (4096, 8), (4096, 4), (8192, 8), (8192, 4), (16384, 8)])
def test_programs_that_place_ids_all_run_at_once(tokens: int, top_k: int) -> None:
    """An SM has registers for one. Fewer would each place more slots, one after the other."""
    (place,) = [step for step in steps(make_plan(problem(top_k=top_k), tokens)) if step.source.kernel == "place_ids"]
    assert place.grid(tokens)[0] == 128 + 1  # the last one writes the lists


def test_batch_invariant_plans_never_split_k() -> None:
    layer = replace(problem(), order=BATCH_INVARIANT)
    assert not make_plan(layer, 1).decode and make_plan(problem(), 1).decode


@pytest.mark.parametrize("activations", ["bf16", "fp8"])
def test_batch_invariant_order_is_free_except_when_decoding(activations: str) -> None:
    """Above the decode limit it launches the same kernels as the fast order."""
    layer = problem(activations=activations)
    for tokens in buckets(8192):
        fast, invariant = (kernels(order, tokens) for order in (layer, replace(layer, order=BATCH_INVARIANT)))
        assert (fast == invariant) == (not make_plan(layer, tokens).decode)


def test_decoding_needs_a_counter_for_every_tile() -> None:
    for hidden, intermediate in ((65536, 64), (64, 1 << 17)):
        layer = problem(hidden=hidden, intermediate=intermediate, experts=128, top_k=8)
        assert make_plan(layer, 1).decode
        many = make_plan(layer, 4)
        assert many.decode == (32 * max(many.first_gemm.units, many.gemm("w2").units) <= SECOND)


def test_arguments_the_kernels_cannot_take_are_refused() -> None:
    plan = make_plan(problem(), 3)
    x, ids, weights = torch.zeros(3, 256).bfloat16(), torch.zeros(3, 2, dtype=torch.int32), torch.zeros(3, 2)
    for given in (Indexed(ids, weights), Indexed(ids.long(), weights.half(), ids[0])):
        check_call(plan, x, given, x)
    for match, given in (
        ("ids is on another device", (x, Indexed(ids.to("meta"), weights), x)),
        ("out is on another device", (x, Indexed(ids, weights), x.to("meta"))),
        ("x does not fit", (x.view(6, 128), Indexed(ids, weights), x)),
        ("out does not fit", (x, Indexed(ids, weights), x[:2])),
        ("ids has another dtype", (x, Indexed(ids.short(), weights), x)),
        ("expert_map is on another device", (x, Indexed(ids, weights, ids[0].to("meta")), x)),
        ("weights has another dtype", (x, Indexed(ids, weights.double()), x)),
    ):
        with pytest.raises(LaunchError, match=match):
            check_call(plan, *given)
    edges = torch.zeros(9, dtype=torch.int64)
    for form, given, match in (
        (CONTIGUOUS, Contiguous(edges), "offsets do not fit"),
        (BATCHED, Batched(edges.int()), "counts do not fit"),
        (BATCHED, Contiguous(edges), "for batched work"),
    ):
        rows = x if form == CONTIGUOUS else x.expand(plan.problem.experts, *x.shape)
        with pytest.raises(LaunchError, match=match):
            check_call(make_plan(replace(plan.problem, dispatch=form), 3), rows, given, rows)


def test_moved_scales_change_the_addresses_of_a_program() -> None:
    """Allocators reuse memory: new codes may have the address of old ones while their scales have another."""
    codes = torch.zeros(4)
    before, after = ({"w13": {"codes": codes, "scales": torch.zeros(4)}} for _ in range(2))
    assert TensorTable.of(before).addresses() == TensorTable.of(before).addresses()
    assert before["w13"]["scales"].data_ptr() != after["w13"]["scales"].data_ptr()
    assert TensorTable.of(before).addresses() != TensorTable.of(after).addresses()


def test_rows_into_another_dtype() -> None:
    """Only rows with an expert are written."""
    result = torch.ones(2, 3, 4, dtype=torch.bfloat16)
    out = write_back(result, Batched(torch.tensor([1, 3], dtype=torch.int32)), torch.zeros(2, 3, 4))
    assert out[:, :, 0].tolist() == [[1, 0, 0], [1, 1, 1]]
    out = write_back(result.flatten(0, 1), Contiguous(torch.tensor([0, 1, 4])), torch.zeros(6, 4))
    assert out[:, 0].tolist() == [1, 1, 1, 1, 0, 0]
    out = write_back(result.flatten(0, 1), Contiguous(torch.tensor([2, 3, 4])), torch.zeros(6, 4))
    assert out[:, 0].tolist() == [0, 0, 1, 1, 0, 0]
    ids = torch.zeros(6, 1, dtype=torch.int32)
    assert bool((write_back(result.flatten(0, 1), Indexed(ids, ids.float()), torch.zeros(6, 4)) == 1).all())


def test_buckets_are_at_most_a_quarter_larger() -> None:
    for tokens in range(1, 3000):
        rounded = bucket(tokens)
        assert tokens <= rounded <= max(tokens + 1, tokens * 1.25) and bucket(rounded) == rounded


def test_stages_fit_in_shared_memory() -> None:
    for activations in ("bf16", "fp16", "fp8"):
        for spec in SPECS:
            try:
                plan = make_plan(problem(spec, activations), 64)
            except Exception as error:  # no kernel for this spec
                assert type(error).__name__ == "NoForm"
                continue
            assert plan.w13 is not None
            for size in tune._SHAPES:
                tile = tune.tile(plan.w13.form, (size,), False)
                used = tile.stages * tune.stage_bytes(plan.w13.form, size, tile.slices)
                assert tile.blocks * (used + 1024) <= tune.SHARED_PER_SM
