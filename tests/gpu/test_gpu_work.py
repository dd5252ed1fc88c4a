"""Other dispatches than by ids (contiguous rows, batches per expert, single linears), and input scales of experts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from calls import (
    GPU,
    OURS,
    call,
    check_error,
    gpu_backend,
    packed,
    plan_of,
    poison_scratch,
    skip_unless_ours,
    skip_unsupported,
)
from torch import Tensor

from lancebill.backends.gpu import workspace
from lancebill.backends.gpu.plan import scratch
from lancebill.backends.registry import registry
from lancebill.moe.activation import Activation
from lancebill.moe.dispatch import Batched, Contiguous, Dispatch, Indexed, to_batched, to_contiguous
from lancebill.moe.problem import BATCHED, CONTIGUOUS, Problem
from lancebill.numbers.rotation import rotate
from lancebill.numbers.spec_names import parse_activation
from lancebill.testing.layers import layer_problem, routing

skip_unless_ours()

FORMS = [
    ("mxfp4", "bf16", {}),
    ("mxfp4", "fp8", {}),
    ("int4-g128", "bf16", {"act_order": True}),
    ("nvfp4", "bf16", {"bias": True}),
    ("mxfp4", "fp8-static", {}),
    ("int4-g128", "int8-static", {"hidden": 512, "intermediate": 256}),
    ("int8", "int8", {}),
    ("int8", "int8", {"pre_scale": True}),
    ("int4-g128-h128", "bf16", {}),
    ("int4-g128-h128", "int8", {}),
    ("mxfp4", "bf16", {"pre_scale": True}),
    ("mxfp4", "fp8", {"pre_scale": True}),
    ("mxfp4", "bf16", {"activation": Activation("relu2_no_mul")}),
]


def make_problem(spec: str, activations: str, options: dict[str, object], **further: object) -> Problem:
    own = {name: value for name, value in options.items() if name != "pre_scale"}
    sizes = {"hidden": 512, "intermediate": 256, "experts": 12, "top_k": 3, **own}
    layer = layer_problem(spec, "bf16", **sizes)  # type: ignore[arg-type]
    activation = parse_activation(activations)
    return replace(layer, activations=activation, pre_scale="pre_scale" in options, **further)  # type: ignore[arg-type]


DISPATCHED, SINGLE = [1, 60, 900], [1, 2, 9, 33, 500, 3000]


def linear(spec: str, activations: str, options: dict[str, object]) -> Problem:
    problem = make_problem(
        spec, activations, {**options, "activation": Activation("relu2_no_mul")}, dispatch=CONTIGUOUS
    )
    return replace(problem, w2=None, experts=1, global_experts=1, top_k=1)


def compare(problem: Problem, x: Tensor, dispatch: Dispatch, columns: int, valid: Tensor) -> None:
    """Compare the rows of the mask `valid` with the reference; runs must agree, other rows stay untouched."""
    skip_unsupported(problem)
    ours, reference = gpu_backend(), registry()["reference"]
    weights = packed(problem, OURS)
    call(ours, problem, x, dispatch, weights, columns)
    poison_scratch()
    got = call(ours, problem, x, dispatch, weights, columns)
    assert torch.equal(got[valid], call(ours, problem, x, dispatch, weights, columns)[valid])
    wide = torch.full((*x.shape[:-1], columns), float("nan"), device="cuda")
    plan = reference.plan(problem, x.shape[:-1].numel(), GPU)
    want = reference.run(plan, x, dispatch, packed(problem, "reference"), wide)
    assert bool(got[~valid].isnan().all()), "a row without an expert was written"
    plain = replace(problem, activations=parse_activation("bf16"))
    truth = want
    if problem.activations != plain.activations:
        weights = packed(plain, "reference")
        truth = reference.run(reference.plan(plain, 1, GPU), x, dispatch, weights, torch.full_like(wide, float("nan")))
    check_error(got[valid], want[valid], truth[valid], torch.arange(int(valid.sum()), device="cuda"))


@pytest.mark.plans(
    lambda spec, activations, options, tokens, form: [
        (
            make_problem(spec, activations, options, dispatch=form),
            2 * tokens + 7 if form == CONTIGUOUS else 12 * (tokens + 3),
        )
    ]
)
@pytest.mark.parametrize(("spec", "activations", "options"), FORMS)
@pytest.mark.parametrize("tokens", DISPATCHED)
@pytest.mark.parametrize("form", [CONTIGUOUS, BATCHED])
def test_rows_grouped_by_the_caller(
    spec: str, activations: str, options: dict[str, object], tokens: int, form: str
) -> None:
    """Experts with no row, one row and all rows; padding rows are NaN."""
    problem = make_problem(spec, activations, options, dispatch=form)
    x = torch.randn(tokens, 512, device="cuda").bfloat16()
    routed = routing(problem, tokens, 3, kind="one")
    ids = torch.where(routed.ids == 2, -1, routed.ids)
    ids[0, 0], ids[1:, :] = 3, torch.where(ids[1:, :] == 3, -1, ids[1:, :])
    routed = Indexed(ids.contiguous(), routed.weights)
    if form == CONTIGUOUS:
        rows, dispatch, _ = to_contiguous(x, routed, problem.experts)
        valid = torch.arange(len(rows) + 7, device="cuda") < len(rows)
        rows = torch.cat([rows, torch.full((7, 512), float("nan"), device="cuda").bfloat16()])
        compare(problem, rows, dispatch, 512, valid)
        return
    rows, batched, _ = to_batched(x, routed, problem.experts, tokens + 3)
    valid = torch.arange(tokens + 3, device="cuda").unsqueeze(0) < batched.counts.unsqueeze(1)
    compare(problem, rows, Batched(batched.counts), 512, valid)


@pytest.mark.plans(lambda tokens, **form: [(linear(**form), tokens)])
@pytest.mark.parametrize(("spec", "activations", "options"), FORMS)
@pytest.mark.parametrize("tokens", SINGLE)
def test_single_linear(spec: str, activations: str, options: dict[str, object], tokens: int) -> None:
    problem = linear(spec, activations, options)
    x = torch.randn(tokens, 512, device="cuda").bfloat16()
    valid = torch.ones(tokens, dtype=torch.bool, device="cuda")
    compare(problem, x, Contiguous(torch.tensor([0, tokens], device="cuda")), problem.w13.n, valid)


SIZES = {"hidden": 1152, "intermediate": 1920}  # the last stage of a unit is half full
FEW_ROWS = [
    *((spec, SIZES) for spec in ("nvfp4", "int4-g32", "int4-g64:fp16", "int4-g128", "int4", "int4-g128-zp", "int8")),
    *((spec, SIZES) for spec in ("int8-g128", "fp8", "fp8-block", "mxfp8", "int2-g64", "int3-g32-zp", "nf4")),
    ("int3-g128:fp32", {**SIZES, "bias": True}),
    ("iq4-g32:fp16", {**SIZES, "bias": True}),
    ("mxfp4", {"hidden": 4096, "intermediate": 12800}),  # with 16 rows chunks that end inside a unit
    ("mxfp4", {"hidden": 12800, "intermediate": 14336}),  # with 7 and 16 rows one unit for each block
    ("mxfp4", {"hidden": 256, "intermediate": 34816, "bias": True}),  # with 16 rows chunks of one unit
    ("int8", {"hidden": 480, "intermediate": 6160, "bias": True}),  # strips, the last block's partly padding
    ("int4-g128", {"hidden": 4096, "intermediate": 11008}),  # blocks with two strips
    ("fp8", {"hidden": 4096, "intermediate": 16400}),  # blocks with four strips, and a padded one
    ("mxfp4", {"hidden": 4096, "intermediate": 31008, "bias": True}),  # more blocks of strips than run at once
    ("int8", {"hidden": 11040, "intermediate": 2064}),  # many windows of x; strips of a row that end inside a step
]


@pytest.mark.plans(lambda spec, options, tokens: [(linear(spec, "bf16", options), tokens)])
@pytest.mark.parametrize(("spec", "options"), FEW_ROWS)
@pytest.mark.parametrize("tokens", [1, 7, 16])
def test_few_rows_of_one_matrix(spec: str, options: dict[str, object], tokens: int) -> None:
    problem = linear(spec, "bf16", options)
    x = torch.randn(tokens, problem.hidden, device="cuda").bfloat16()
    valid = torch.ones(tokens, dtype=torch.bool, device="cuda")
    compare(problem, x, Contiguous(torch.tensor([0, tokens], device="cuda")), problem.w13.n, valid)


EXACT = ("mxfp4", "nvfp4", "int4", "int4-g32", "int4-g128", "int4-g128-zp", "int8", "int8-g128", "int2-g64")


@pytest.mark.plans(lambda spec, tokens: [(linear(spec, "bf16", SIZES), tokens)])
@pytest.mark.parametrize("spec", EXACT)
@pytest.mark.parametrize("tokens", [1, 2, 8, 9])
def test_few_rows_are_exact(spec: str, tokens: int) -> None:
    """A few inputs of one among zeros, and scales that are powers of two: sums are exact, and rounded once."""
    problem = linear(spec, "bf16", SIZES)
    x = (torch.rand(tokens, problem.hidden, device="cuda") < 24 / problem.hidden).bfloat16()
    edges = Contiguous(torch.tensor([0, tokens], device="cuda"))
    got = call(gpu_backend(), problem, x, edges, packed(problem, OURS, exact=True), problem.w13.n)
    reference, exact = registry()["reference"], torch.empty(tokens, problem.w13.n, device="cuda")
    weights = packed(problem, "reference", exact=True)
    reference.run(reference.plan(problem, tokens, GPU), x, edges, weights, exact)
    assert torch.equal(got, exact.bfloat16())


def rows_of_first_gemm(problem: Problem, x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute a linear with more rows than are decoded; its input rows and their scales as the kernel wrote them."""
    tokens, backend, device = len(x), gpu_backend(), torch.device("cuda", 0)
    plan = plan_of(problem, tokens)
    assert not plan.decode
    edges = Contiguous(torch.tensor([0, tokens], device="cuda"))
    call(backend, problem, x.cuda(), edges, packed(problem, OURS), problem.w13.n)
    stream = torch.cuda.current_stream().cuda_stream
    held = workspace.WORKSPACES.of_stream(device, stream, plan.workspace_bytes)
    found = workspace.views(held.memory, scratch(plan))
    return found["x"][:tokens].cpu().float(), found["x_scales"][:tokens].cpu()


@pytest.mark.parametrize("exponent", [-90, -61, -20, 0, 20, 61, 90])
@pytest.mark.parametrize(("spec", "activations"), [("mxfp4", "fp8"), ("int8", "int8")])
def test_rows_are_quantised_as_by_division(spec: str, activations: str, exponent: int) -> None:
    """Code for code, although the kernel multiplies by a corrected reciprocal of the row's scale."""
    problem, tokens = linear(spec, activations, {}), 3000
    skip_unsupported(problem)
    x = (torch.randn(tokens, 512) * torch.rand(tokens, 1) * 2.0**exponent).bfloat16()
    codes, scales = rows_of_first_gemm(problem, x)
    codes = codes.view(tokens, -1, 8, 4, 4).transpose(2, 3).reshape(tokens, -1)  # undo the column order of 8-bit rows
    largest = x.float().abs().amax(1)
    assert torch.equal(scales, largest / torch.full_like(largest, problem.activations.spec.dtype.max))
    numbers = x.float() / scales.unsqueeze(1)
    assert torch.equal(codes, numbers.round() if activations == "int8" else numbers.to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("spec", ["int4-g128-h32", "int4-g128-h128", "int4-g128-h512"])
def test_rows_are_rotated_as_by_the_definition(spec: str) -> None:
    """Bit for bit: the kernel adds in the order of the fast transform, and rounds once."""
    problem = linear(spec, "bf16", {})
    x = torch.randn(300, 512).bfloat16()
    rotated, _ = rows_of_first_gemm(problem, x)
    assert torch.equal(rotated, rotate(x.float(), problem.w13.spec.rotation).bfloat16().float())


@pytest.mark.plans(lambda spec, activations, options, tokens: [(make_problem(spec, activations, options), tokens)])
@pytest.mark.parametrize("options", [{}, {"pre_scale": True}, {"top_k": 1, "weight_on_input": True}])
@pytest.mark.parametrize(
    ("spec", "activations"),
    [("mxfp4", "bf16"), ("mxfp4", "fp8"), ("mxfp4", "fp8-static"), ("int8", "int8"), ("int4-g128", "int8-static")],
)
@pytest.mark.parametrize("tokens", [2, 60, 1500])
def test_input_scales_of_experts(options: dict[str, object], spec: str, activations: str, tokens: int) -> None:
    """Static scales and stored factors per expert, applied while rows are dispatched."""
    problem = make_problem(spec, activations, options)
    x = torch.randn(tokens, 512, device="cuda").bfloat16()
    valid = torch.ones(tokens, dtype=torch.bool, device="cuda")
    compare(problem, x, routing(problem, tokens, 5), 512, valid)


@pytest.mark.plans(lambda activations, tokens: [(make_problem("mxfp4", activations, {}), tokens)])
@pytest.mark.parametrize("activations", ["fp8", "fp8-static", "int8-static"])
@pytest.mark.parametrize("tokens", [60, 1500])
def test_rows_that_no_slot_has_are_not_read(activations: str, tokens: int) -> None:
    """Slots without an expert leave rows that nothing writes; their experts would be any number."""
    problem = make_problem("mxfp4", activations, {})
    skip_unsupported(problem)
    dispatch, weights = routing(problem, tokens, 5, kind="holes"), packed(problem, OURS)
    x = torch.randn(tokens, 512, device="cuda").bfloat16()
    want = call(gpu_backend(), problem, x, dispatch, weights, 512)
    poison_scratch(0x5A)
    assert torch.equal(call(gpu_backend(), problem, x, dispatch, weights, 512), want)


@pytest.mark.parametrize("form", [CONTIGUOUS, BATCHED])
def test_other_dtypes_are_converted(form: str) -> None:
    """Parallel layers pass fp32 tensors; rows without an expert keep their bits."""
    problem, backend = make_problem("mxfp4", "bf16", {}, dispatch=form), gpu_backend()
    weights = packed(problem, OURS)
    x = torch.randn(12, 40, 512, device="cuda").bfloat16()
    counts = torch.arange(12, dtype=torch.int32, device="cuda") * 3
    dispatch: Dispatch = Batched(counts)
    valid = torch.arange(40, device="cuda").unsqueeze(0) < counts.unsqueeze(1)
    if form == CONTIGUOUS:
        x, valid = x.flatten(0, 1), torch.arange(480, device="cuda") < int(counts.sum())
        dispatch = Contiguous(torch.cat([counts.new_zeros(1), counts]).cumsum(0))
    plan, out = backend.plan(problem, 480, GPU), torch.full(x.shape, 0.1, device="cuda")
    bf16 = backend.run(plan, x, dispatch, weights, torch.zeros_like(x))
    fp32 = backend.run(plan, x.float(), dispatch, weights, out)
    assert torch.equal(fp32[valid], bf16[valid].float()) and bool((fp32[~valid] == 0.1).all())


def test_tile_lists_need_no_host_synchronisation() -> None:
    """A captured graph replayed with other counts gives correct results: tile lists are made on the device."""
    problem = make_problem("mxfp4", "bf16", {}, dispatch=BATCHED)
    backend, weights = gpu_backend(), packed(problem, OURS)
    x = torch.randn(12, 40, 512, device="cuda").bfloat16()
    counts, out = torch.full((12,), 40, dtype=torch.int32, device="cuda"), torch.empty_like(x)
    plan = backend.plan(problem, 480, GPU)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        want = backend.run(plan, x, Batched(counts), weights, torch.empty_like(x)).clone()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            backend.run(plan, x, Batched(counts), weights, out)
        counts.copy_(torch.arange(12, device="cuda") * 3)
        out.fill_(float("nan"))
        graph.replay()
    torch.cuda.synchronize()
    valid = torch.arange(40, device="cuda").unsqueeze(0) < counts.unsqueeze(1)
    assert torch.equal(out[valid], want[valid]) and bool(out[~valid].isnan().all())
