"""A GPU backend against the reference by the worst row, for all forms, sizes, routings and activations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from calls import OURS, check_error, plan_of, skip_unless_ours, skip_unsupported
from strip_sizes import STRIP_SIZES, STRIPS
from torch import Tensor

from lancebill.moe.activation import Activation
from lancebill.moe.dispatch import Indexed
from lancebill.moe.problem import Problem
from lancebill.numbers.spec_names import ACTIVATIONS
from lancebill.testing.layers import layer_problem, make_layer, routing, worst_row

skip_unless_ours()

SPECS = [
    *((s, a) for a in ("bf16", "fp16") for s in (
        "mxfp4", "nvfp4", "int4-g32", "int4-g64:fp16", "int4-g128", "int4", "int4-g128-zp", "int4-g32-zp", "int4-zp",
        "int8", "int8-g128", "fp8", "fp8-block", "int4-g128-h128",
    )),
    *((s, "fp8") for s in ("mxfp4", "fp8", "fp8-block", "int4", "int4-g128", "int4-g128-zp")),
    *((s, "int8") for s in ("int4", "int4-g128", "int4-g128-zp", "int4-g128-h128", "int8", "int8-g128")),
]  # fmt: skip


BATCHES = [3, 70, 600]
FEW, MANY = 5, 32  # tokens of so many experts rarely share one: each slot is a tile
TILES = [1, 2, 17, 33, 65, 97, 129, 300, 1500, 5000]
# Thousands of tiles with one stage each: in the first GEMM, and in the second.
FLAT = [{"hidden": 128, "intermediate": 4096, "experts": 64}, {"hidden": 4096, "intermediate": 128, "experts": 64}]
TAKEN = [("mxfp4", "bf16"), ("mxfp4", "fp8"), ("int4-g128", "fp8"), ("int4-g128", "int8"), ("int8", "int8")]
SIZED = (FEW, 200, 2000)
SIZES = [(2880, 2880), (288, 96), (2048, 768), (160, 32), (4096, 2048)]
FUNCTIONS = [
    Activation("silu"),
    Activation("silu", limit=0.5),
    Activation("gelu"),
    Activation("gelu_tanh"),
    Activation("swigluoai", limit=0.7),
    Activation("swiglustep", limit=0.4),
    Activation("situ", beta=1.5),
    Activation("situ", limit=0.8),
    Activation("relu2_no_mul"),
    Activation("silu_no_mul"),
    Activation("gelu_no_mul"),
    Activation("gelu_tanh_no_mul"),
]


def make_problem(spec: str, activations: str, **sizes: Any) -> Problem:
    return layer_problem(spec, activations, **{"hidden": 512, "intermediate": 256, "experts": 8, "top_k": 2, **sizes})


def large_enough(spec: str) -> dict[str, int]:
    """Sizes at which the error of a spec's worst row is meaningful.

    Random zero points from 0 to 16 give the weights of a group a mean as large as their spread. With only two groups
    the second matrix then has nearly rank two, and maps some hidden rows to little more than their rounding errors.
    """
    return {"hidden": 4096, "intermediate": 2048} if spec.endswith("-zp") else {}


def compare(spec: str, activations: str, tokens: int, kind: str = "uniform", **sizes: Any) -> None:
    """Compare `tokens` rows with the reference; two runs must agree bit for bit.

    The reference computes at least 64 rows, since the worst of three rows says little.
    """
    problem = make_problem(spec, activations, **sizes)
    skip_unsupported(problem)
    ours, reference = make_layer(problem, OURS), make_layer(problem, "reference")
    count = max(tokens, 64)
    generator = torch.Generator("cuda").manual_seed(tokens)
    x = torch.randn(count, problem.hidden, generator=generator, device="cuda").to(problem.input.storage)
    routed = routing(problem, count, 7, kind=kind)
    want = reference(x, routed, torch.empty_like(x, dtype=torch.float32))
    ids, weights = routed.ids[:tokens].contiguous(), routed.weights[:tokens].contiguous()
    got = ours(x[:tokens], Indexed(ids, weights))
    assert torch.equal(got, ours(x[:tokens], Indexed(ids, weights))), "two runs differ"
    routed_rows = (routed.ids >= 0).any(1)
    assert not got[~routed_rows[:tokens]].any()
    unquantised = want
    if problem.activations.spec.quantized:
        plain = make_layer(replace(problem, activations=ACTIVATIONS["bf16"]), "reference")
        unquantised = plain(x, routed, torch.empty_like(want))
    rows = torch.arange(tokens, device="cuda")[routed_rows[:tokens]]
    check_error(got[rows], want[routed_rows], unquantised[routed_rows], rows_among(rows, routed_rows))


def rows_among(rows: Tensor, routed_rows: Tensor) -> Tensor:
    """The indices of `rows` among the rows of the mask `routed_rows`."""
    return (routed_rows.cumsum(0) - 1)[rows]


@pytest.mark.plans(lambda spec, activations, tokens: [(make_problem(spec, activations, **large_enough(spec)), tokens)])
@pytest.mark.parametrize(("spec", "activations"), SPECS)
@pytest.mark.parametrize("tokens", BATCHES)
def test_every_form(spec: str, activations: str, tokens: int) -> None:
    compare(spec, activations, tokens, **large_enough(spec))


STRIP_OPTIONS = [{**STRIP_SIZES[0], "bias": True}, {**STRIP_SIZES[1], "weight_on_input": True}, *STRIP_SIZES[2:]]
STRIP_SPECS = [(spec, inputs) for spec, inputs in SPECS if inputs in ("bf16", "fp16") and not spec.endswith("h128")]


def one_token(spec: str, activations: str, **options: Any) -> Problem:
    return make_problem(spec, activations, **{**STRIPS, **options})


@pytest.mark.plans(lambda spec, activations, options: [(one_token(spec, activations, **options), 1)])
@pytest.mark.parametrize(("spec", "activations"), STRIP_SPECS)
@pytest.mark.parametrize("options", STRIP_OPTIONS)
def test_one_token(spec: str, activations: str, options: dict[str, Any]) -> None:
    problem = one_token(spec, activations, **options)
    assert OURS != "hopper" or plan_of(problem, 1).slot_strips is not None
    compare(spec, activations, 1, **{**STRIPS, **options})


@pytest.mark.plans(lambda function: [(one_token("mxfp4", "bf16", activation=function), 1)])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.name)
def test_one_token_with_every_activation(function: Activation) -> None:
    compare("mxfp4", "bf16", 1, **STRIPS, activation=function)


@pytest.mark.plans(lambda ids, dtype: [(one_token("int4-g32", "bf16", bias=True), 1)])
@pytest.mark.parametrize("ids", [[-1, 3, -1, 5], [7, -1, -1, -1], [2, 16, 99, 0], [-1, -1, -1, -1]])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_one_token_with_choices_that_are_no_experts(ids: list[int], dtype: torch.dtype) -> None:
    problem = one_token("int4-g32", "bf16", bias=True)
    ours, reference = make_layer(problem, OURS), make_layer(problem, "reference")
    x = torch.randn(1, problem.hidden, device="cuda").bfloat16()
    chosen, weights = torch.tensor([ids], device="cuda", dtype=dtype), torch.rand(1, 4, device="cuda")
    got = ours(x, Indexed(chosen, weights), torch.full_like(x, float("nan"))).float()
    inside = torch.where((chosen >= 0) & (chosen < problem.experts), chosen, -1)
    want = reference(x, Indexed(inside, weights), torch.empty_like(x, dtype=torch.float32))
    assert torch.allclose(got, want, rtol=0, atol=1e-2 * float(want.abs().max()))


@pytest.mark.plans(lambda spec, activations, tokens: [(make_problem(spec, activations), tokens)])
@pytest.mark.parametrize(("spec", "activations"), [("mxfp4", "bf16"), ("mxfp4", "fp8"), ("int4-g128", "int8")])
@pytest.mark.parametrize("tokens", TILES)
def test_every_tile_class(tokens: int, spec: str, activations: str) -> None:
    compare(spec, activations, tokens)


@pytest.mark.plans(lambda spec, activations, sizes, tokens: [(make_problem(spec, activations, **sizes), tokens)])
@pytest.mark.parametrize(("spec", "activations"), TAKEN)
@pytest.mark.parametrize("sizes", FLAT)
@pytest.mark.parametrize("tokens", [100, 1000])
def test_many_tiles_for_a_block(tokens: int, sizes: dict[str, int], spec: str, activations: str) -> None:
    """With one stage per tile, the producer is as many tiles ahead of the consumer as there are stages."""
    compare(spec, activations, tokens, **sizes)


def sizes_of(tokens: int, **sizes: int) -> dict[str, int]:
    return {**sizes, "experts": MANY if tokens == FEW else 8}


@pytest.mark.plans(
    lambda activations, **sizes: [(make_problem("mxfp4", activations, **sizes_of(m, **sizes)), m) for m in SIZED]
)
@pytest.mark.parametrize(("hidden", "intermediate"), SIZES)
@pytest.mark.parametrize("activations", ["bf16", "fp8"])
def test_sizes(hidden: int, intermediate: int, activations: str) -> None:
    for tokens in SIZED:
        compare("mxfp4", activations, tokens, **sizes_of(tokens, hidden=hidden, intermediate=intermediate))


@pytest.mark.plans(lambda kind, tokens: [(make_problem("mxfp4", "bf16", experts=60, top_k=6), tokens)])
@pytest.mark.parametrize("kind", ["zipf", "one", "holes"])
@pytest.mark.parametrize("tokens", [4, 100, 1000, 3000])
def test_routings(kind: str, tokens: int) -> None:
    compare("mxfp4", "bf16", tokens, kind, experts=60, top_k=6)


@pytest.mark.plans(lambda tokens, **sizes: [(make_problem("mxfp4", "bf16", **sizes), tokens)])
@pytest.mark.parametrize("tokens", [3, 90])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", FUNCTIONS, ids=str)
def test_activations(activation: Activation, bias: bool, tokens: int) -> None:
    compare("mxfp4", "bf16", tokens, activation=activation, bias=bias)


def unsplit(activation: Activation) -> dict[str, Any]:
    """Sizes of so many tiles that K is not split when decoding."""
    intermediate = 2048 if activation.gated else 4096
    return {"activation": activation, "bias": True, "intermediate": intermediate, "experts": MANY}


@pytest.mark.plans(lambda inputs, activation: [(make_problem("mxfp4", inputs, **unsplit(activation)), FEW)])
@pytest.mark.parametrize("inputs", ["bf16", "fp8"])
@pytest.mark.parametrize("activation", FUNCTIONS, ids=str)
def test_activations_without_a_split_of_k(activation: Activation, inputs: str) -> None:
    compare("mxfp4", inputs, FEW, **unsplit(activation))
    plan = plan_of(make_problem("mxfp4", inputs, **unsplit(activation)), FEW)
    assert plan.decode and plan.first_gemm.pieces == 1


def test_act_order() -> None:
    compare("int4-g128", "bf16", 90, act_order=True)
    compare("int4-g128", "bf16", 1500, act_order=True)


def test_weight_on_input() -> None:
    for tokens in (3, 90):
        compare("mxfp4", "bf16", tokens, top_k=1, weight_on_input=True, bias=True)
    compare("mxfp4", "bf16", 8, top_k=1, weight_on_input=True, bias=True, intermediate=2048, experts=MANY)


def test_a_row_that_is_not_finite_is_nan() -> None:
    """int8 has no NaN: the scale of such a row is. Other rows keep their bits."""
    problem = make_problem("int8", "int8")
    layer, routed = make_layer(problem, OURS), routing(problem, 40, 1)
    x = torch.randn(40, 512, device="cuda").bfloat16()
    want = layer(x, routed)
    x[3, 5], x[7, 300] = float("inf"), float("nan")
    got, broken = layer(x, routed), torch.tensor([3, 7], device="cuda")
    want[broken] = float("nan")
    assert torch.equal(got.nan_to_num(-1e4), want.nan_to_num(-1e4)) and bool(got[broken].isnan().all())


def test_graph_capture_and_streams() -> None:
    problem = layer_problem("mxfp4", "bf16", hidden=512, intermediate=256, experts=8, top_k=2)
    layer = make_layer(problem, OURS)
    x = torch.randn(40, 512, device="cuda").bfloat16()
    routed, out = routing(problem, 40, 1), torch.empty(40, 512, device="cuda", dtype=torch.bfloat16)
    want = layer(x, routed)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        layer(x, routed, out)  # allocates this stream's workspace
        stream.synchronize()
        out.fill_(float("nan"))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            layer(x, routed, out)
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, want)


@pytest.mark.plans(lambda activations, tokens: [(make_problem("mxfp4", activations, experts=MANY), tokens)])
@pytest.mark.parametrize("activations", ["bf16", "fp8"])
@pytest.mark.parametrize("tokens", [4, 100, 3000])
def test_ids_without_an_expert_contribute_nothing(tokens: int, activations: str) -> None:
    """-1, other negative numbers, the number of experts (a common padding id) and larger ids are all ignored."""
    problem = make_problem("mxfp4", activations, experts=MANY)
    skip_unsupported(problem)
    layer = make_layer(problem, OURS)
    x = torch.randn(tokens, 512, device="cuda").bfloat16()
    routed = routing(problem, tokens, 7, kind="holes")
    invalid = torch.tensor([MANY, -9, 255, 256, 1 << 20], device="cuda").repeat(tokens)[: routed.ids.numel()]
    ids = torch.where(routed.ids < 0, invalid.view_as(routed.ids), routed.ids).to(torch.int32)
    assert not torch.equal(ids, routed.ids)
    assert torch.equal(layer(x, type(routed)(ids, routed.weights)), layer(x, routed))


@pytest.mark.parametrize("activations", ["bf16", "fp8"])
@pytest.mark.parametrize("tokens", [1, 3, 5, 90])
def test_a_rank_of_expert_parallelism(tokens: int, activations: str) -> None:
    """No, some or all slots have local experts, which are fewer or more than the plan expects."""
    sizes = {"hidden": 1024, "intermediate": 768, "experts": 8, "top_k": 6}
    problem = replace(layer_problem("mxfp4", activations, **sizes), global_experts=64)
    skip_unsupported(problem)
    ours, reference = make_layer(problem, OURS), make_layer(problem, "reference")
    generator = torch.Generator("cuda").manual_seed(tokens)
    places = torch.full((64,), -1, dtype=torch.int32, device="cuda")
    places[::8] = torch.arange(8, dtype=torch.int32, device="cuda")
    for step in (1, 2, 4, 8):
        x = torch.randn(tokens, 1024, generator=generator, device="cuda").bfloat16()
        weights = torch.rand(tokens, 6, generator=generator, device="cuda")
        ids = torch.randint(0, 64 // step, (tokens, 6), generator=generator, device="cuda") * step
        local = places[ids]
        got = ours(x, Indexed(ids, weights, places))
        want = reference(x, Indexed(local, weights), torch.empty_like(x, dtype=torch.float32))
        has_local = (local >= 0).any(1)
        assert not got[~has_local].any() and bool(got.isfinite().all())
        if bool(has_local.any()):
            assert worst_row(got[has_local], want[has_local]) < (2e-2 if activations == "bf16" else 8e-2)
        assert torch.equal(got, ours(x, Indexed(ids, weights, places)))


@pytest.mark.parametrize("tokens", [1, 60])
def test_strided_views(tokens: int) -> None:
    """Inputs are strided or offset rows of a larger batch, and outputs strided rows of a larger tensor."""
    problem = layer_problem("mxfp4", "bf16", hidden=512, intermediate=256, experts=8, top_k=6)
    layer = make_layer(problem, OURS)
    x, routed = torch.randn(2 * tokens + 1, 512, device="cuda").bfloat16(), routing(problem, 2 * tokens + 1, 1)
    for rows in (slice(1, tokens + 1), slice(1, None, 2)):
        ids, weights = routed.ids[rows], routed.weights[rows]
        want = layer(x[rows].contiguous(), Indexed(ids.clone(), weights.clone()))
        out = torch.full((2 * tokens, 512), float("nan"), dtype=torch.bfloat16, device="cuda")
        layer(x[rows], Indexed(ids, weights), out[::2])
        assert torch.equal(out[::2], want) and bool(out[1::2].isnan().all())
