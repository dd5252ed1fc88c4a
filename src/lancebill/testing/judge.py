"""Tests a backend on every case it supports, against a plain float64 implementation.

There are two tiers. Exact: small integers and power-of-two scales, where every order of summation gives the same
result, so results must be equal bit for bit. Tight: random data with a bound on the worst row, because an error over
the whole tensor would hide one token that went to the wrong expert. GPUs multiply 16-bit numbers, so there the bound
is 1.5 times the error of rounding to 16 bits. Outputs start as NaN. Inputs past a batched count are NaN. Output rows
past it, and the guard rows around the output, must not be written.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from lancebill.backends.base import Backend
from lancebill.moe.activation import Activation
from lancebill.moe.device import Device
from lancebill.moe.dispatch import Dispatch, Indexed, SlotGroups, to_batched, to_contiguous
from lancebill.moe.layout import W2, W13, MatrixShape, Packed
from lancebill.moe.problem import BATCHED, CONTIGUOUS, INDEXED, Problem
from lancebill.numbers.activations import round_activations
from lancebill.numbers.codec import dequantize, quantize
from lancebill.numbers.dtypes import BF16, F32, INTEGER
from lancebill.numbers.spec import ALL, QuantSpec, Scale
from lancebill.numbers.spec_names import ACTIVATIONS, parse_spec
from lancebill.numbers.weight import LogicalWeight
from lancebill.testing.layers import row_errors

EXACT, TIGHT = "exact", "tight"
GUARD = 4  # rows before and after the output that must not be written
KEPT = 8.0  # fills rows that must not be written
BOUND = 6e-3  # on the relative error of the worst row and of the median row
ROUNDINGS = 1.5  # on a GPU: allowed multiple of the error from rounding intermediate values


class Misjudged(AssertionError):
    """A backend's results are wrong; the text says where."""


@dataclass(frozen=True, eq=False)
class Case:
    """A problem with weights, inputs and routing; hashed by identity, so that results can be cached."""

    name: str
    tier: str
    problem: Problem
    weights: dict[str, list[LogicalWeight]]
    x: Tensor
    routed: Indexed


SPECS = (
    "bf16", "mxfp4", "nvfp4", "nvfp4-div", "nf4", "mxfp8", "mxfp6-e2m3", "int4-g32", "int4-g128", "int4-g32-zp",
    "int3-g64", "int8", "int2-g64-zp", "fp8-tensor", "fp8-channel", "fp8-block", "ternary-tensor",
    "uint4-g32:uint6-g256:fp16-min.g32:uint6-min.g256:fp16",
)  # fmt: skip
_ACTIVATIONS = (
    Activation("silu"), Activation("silu", limit=0.5), Activation("gelu"), Activation("gelu_tanh"),
    Activation("swigluoai", limit=1.0), Activation("swiglustep", limit=0.5), Activation("relu2_no_mul"),
)  # fmt: skip


@cache
def cases(seed: int = 0) -> tuple[Case, ...]:
    """Cases that cover specs, activations, biases, act-order, sizes, quantised inputs and routings."""
    return tuple(_generate_cases(seed))


def _generate_cases(seed: int) -> Iterator[Case]:
    for index, name in enumerate(SPECS):
        spec = parse_spec(name)
        yield exact_case(f"exact {name}", spec, seed + index)
        activation = _ACTIVATIONS[index % len(_ACTIVATIONS)]
        yield _tight(f"{name} {activation}", spec, activation, seed + index, bias=index % 3 == 0)
    mxfp4, zp = parse_spec("mxfp4"), parse_spec("int4-g32-zp")
    for activation in _ACTIVATIONS:
        yield _tight(f"mxfp4 {activation}", mxfp4, activation, seed, bias=True)
    for inputs in ("fp8", "fp8-g128", "int8", "mxfp8", "mxfp4", "nvfp4", "fp16"):
        yield _tight(f"mxfp4 x {inputs}", mxfp4, Activation(), seed, inputs=inputs)
    for name, inputs in ("int4-g32-h32", "bf16"), ("mxfp4-h128", "fp8"), ("nvfp4-h16", "bf16"), ("int8-h64", "int8"):
        yield _tight(f"{name} x {inputs}", parse_spec(name), Activation(), seed, inputs=inputs, bias=True)
    yield _tight("act-order", zp, Activation(), seed, act_order=True)
    yield _tight("odd sizes", parse_spec("int4-g32"), Activation(), seed, hidden=160, inter=96, tokens=33)
    yield _tight("wider", mxfp4, Activation(), seed, hidden=512, inter=384, tokens=40, bias=True)
    yield _tight("one token", mxfp4, Activation(), seed, tokens=1)
    yield _tight("one expert for all", mxfp4, Activation(), seed, one_hot=True)
    yield _tight("weight on input", mxfp4, Activation(), seed, weight_on_input=True)


def check_backend(backend: Backend, device: Device) -> int:
    """Run every supported case in every dispatch form; returns how many ran."""
    ran = 0
    for case in cases():
        # With weights on the input, contiguous and batched rows are already weighted: nothing more to test.
        for form in (INDEXED,) if case.problem.weight_on_input else (INDEXED, CONTIGUOUS, BATCHED):
            formed = in_form(case, form)
            if next(backend.reasons(formed.problem, device), None) is None:
                check_case(backend, device, formed)
                ran += 1
    return ran


@cache
def in_form(case: Case, form: str) -> Case:
    """The same case in another dispatch form; cached, as is `expected`."""
    return replace(case, problem=replace(case.problem, dispatch=form))


def check_case(backend: Backend, device: Device, case: Case) -> None:
    """Run one case in its problem's dispatch form and compare the result."""
    packed, want = pack_weights(backend, case, device), expected(case)
    worst = median = BOUND
    if device.kind == "cuda" and case.tier == TIGHT:
        errors = row_errors(expected(case, rounded=True), want)
        worst, median = (max(BOUND, ROUNDINGS * float(error)) for error in (errors.max(), errors.median()))
    compare(case, compute(backend, case, packed, device), want, worst, median)


def compare(case: Case, got: Tensor, want: Tensor, worst: float = BOUND, median: float = BOUND) -> None:
    """Raise `Misjudged` where a result breaks the bounds of the case's tier."""
    got = got.double().cpu()
    if not torch.isfinite(got).all():
        raise Misjudged(f"{case.name}: rows {_bad_rows(~torch.isfinite(got))} were not written or are not finite")
    if case.tier == EXACT:
        if not torch.equal(got, want):
            raise Misjudged(f"{case.name}: rows {_bad_rows(got != want)} are not exact")
        return
    error = row_errors(got, want)
    if error.max() > worst:
        raise Misjudged(f"{case.name}: row {int(error.argmax())} is off by {error.max():.2e}, bound {worst:.2e}")
    if error.median() > median:
        raise Misjudged(f"{case.name}: the median row is off by {error.median():.2e}, bound {median:.2e}")
    columns = (got - want).norm(dim=0) / want.norm(dim=0).clamp(min=1e-30)
    if columns.max() > 4 * worst:
        raise Misjudged(f"{case.name}: column {int(columns.argmax())} is off by {columns.max():.2e}")


def pack_weights(backend: Backend, case: Case, device: Device) -> dict[str, Packed]:
    """The case's weights in the backend's layout."""
    layout = backend.layout(case.problem)
    packed: dict[str, Packed] = {}
    for matrix, shape in case.problem.matrices.items():
        packed[matrix] = layout.allocate(shape, case.problem.experts, device.torch)
        for expert, weight in enumerate(case.weights[matrix]):
            layout.pack(shape, weight, {name: t[expert] for name, t in packed[matrix].items()})
    return packed


def compute(backend: Backend, case: Case, packed: dict[str, Packed], device: Device) -> Tensor:
    """Run into a NaN buffer with guard rows; for contiguous and batched forms, also weight and sum the rows."""
    problem, routed = case.problem, case.routed
    target = device.torch
    indexed = Indexed(routed.ids.to(target), routed.weights.to(target))
    dispatch: Dispatch = indexed
    x, groups = case.x.to(target), None
    if problem.dispatch == CONTIGUOUS:
        x, dispatch, groups = to_contiguous(x, indexed, problem.experts)
    elif problem.dispatch == BATCHED:
        x, dispatch, groups = to_batched(x, indexed, problem.experts, capacity=indexed.ids.numel() + 3)
    plan = backend.plan(problem, x.shape[:-1].numel(), device)
    buffer = torch.full((x.shape[0] + 2 * GUARD, *x.shape[1:]), float("nan"), dtype=x.dtype, device=target)
    for tail in _tails(buffer[GUARD:-GUARD], groups, problem):
        tail.fill_(KEPT)
    out = backend.run(plan, x, dispatch, packed, buffer[GUARD:-GUARD])
    guards = torch.cat([buffer[:GUARD], buffer[-GUARD:]])
    if not guards.isnan().all():
        raise Misjudged(f"{case.name}: wrote outside its output")
    return out if groups is None else _combine(out, groups, indexed, problem)


def _tails(out: Tensor, groups: SlotGroups | None, problem: Problem) -> list[Tensor]:
    """Output rows past each expert's count; their inputs are NaN."""
    if groups is None or problem.dispatch != BATCHED:
        return []
    return [out[e, count:] for e, count in enumerate(groups.offsets.diff().tolist())]


def _combine(out: Tensor, groups: SlotGroups, routed: Indexed, problem: Problem) -> Tensor:
    """Weight and sum the rows of a contiguous or batched result, as its caller would."""
    rows = out
    if problem.dispatch == BATCHED:
        rows = torch.cat([out[e, :c] for e, c in enumerate(groups.offsets.diff().tolist())])
        if not all(bool((tail == KEPT).all()) for tail in _tails(out, groups, problem)):
            raise Misjudged("wrote rows past an expert's count")
    total = torch.zeros(routed.tokens, rows.shape[1], dtype=torch.float64, device=rows.device)
    weights = routed.weights.reshape(-1)[groups.slots].double()
    return total.index_add_(0, groups.rows(problem.top_k), rows.double() * weights.unsqueeze(1))


@cache
def expected(case: Case, *, rounded: bool = False) -> Tensor:
    """The result in float64, token by token and slot by slot, with inputs quantised as the problem says.

    `rounded`: the hidden rows, the result of each slot, and weights whose scales vary along K are rounded to the
    input's dtype. Other scales are applied after the GEMM, so their weights are not rounded.
    """
    problem = case.problem
    out = torch.zeros(case.x.shape[0], problem.hidden, dtype=torch.float64)

    def round_once(values: Tensor) -> Tensor:
        return values.to(case.x.dtype).double() if rounded else values.double()

    def stored(weight: LogicalWeight) -> Tensor:
        values = dequantize(replace(weight, spec=weight.spec.unrotated))
        return round_once(values) if _varies_along_k(weight.spec) else values.double()

    matrices = {matrix: [stored(weight) for weight in weights] for matrix, weights in case.weights.items()}
    for token, slots in enumerate(case.routed.ids.tolist()):
        for slot, expert in enumerate(slots):
            if expert < 0:
                continue
            weight = case.routed.weights[token, slot].double()
            row = case.x[token : token + 1].double()
            row = row * weight if problem.weight_on_input else row
            hidden = round_once(problem.activation(_matmul(case, W13, matrices, expert, row)))
            result = round_once(_matmul(case, W2, matrices, expert, hidden)[0])
            result = result.to(case.x.dtype).double() if problem.dispatch != INDEXED else result
            out[token] += result if problem.weight_on_input else weight * result
    return out if problem.dispatch != INDEXED else out.to(case.x.dtype).double()


def _varies_along_k(spec: QuantSpec) -> bool:
    return any(level.block[1] != ALL for level in spec.scales)


def _matmul(case: Case, matrix: str, matrices: dict[str, list[Tensor]], expert: int, row: Tensor) -> Tensor:
    spec = case.problem.inputs_of(matrix)
    row = _rotated(row, case.problem.matrices[matrix].spec.rotation)
    row = round_activations(row.float(), spec).double()
    bias = case.weights[matrix][expert].bias
    result = row @ matrices[matrix][expert].t()
    return result if bias is None else result + bias.double()


def _rotated(row: Tensor, block: int) -> Tensor:
    """Every `block` columns times the Hadamard matrix of that size, over its norm; by the matrix itself."""
    if not block:
        return row
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < block:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (row.view(-1, block) @ matrix / math.sqrt(block)).view(row.shape)


def exact_case(
    name: str, spec: QuantSpec, seed: int, *, experts: int = 3, hidden: int = 128, inter: int = 128, tokens: int = 7
) -> Case:
    """A case with exact results: ungated squared ReLU maps integers to integers; scales are powers of two.

    As many inputs of a row are not zero however many there are, so that sums have no more bits than fp32.
    """
    g = torch.Generator().manual_seed(seed)
    size = {"experts": experts, "hidden": hidden, "inter": inter, "tokens": tokens}
    problem = _problem(spec, Activation("relu2_no_mul"), size, inputs="fp32", dtype=torch.float32)
    weights = {
        matrix: [_integer_weight(shape, g) for _ in range(problem.experts)]
        for matrix, shape in problem.matrices.items()
    }
    x = torch.randint(-1, 2, (tokens, hidden), generator=g).float()
    x *= torch.rand(x.shape, generator=g) < 12.8 / hidden
    return Case(name, EXACT, problem, weights, x, _routing(problem, tokens, g, whole=True))


def _integer_weight(shape: MatrixShape, g: torch.Generator) -> LogicalWeight:
    """Mostly zero codes, others with small multiples of 1/2 as values; power-of-two scales, integer zero points."""
    spec = shape.spec
    n, k = shape.n, shape.k
    if not spec.quantized:
        return LogicalWeight(spec, torch.randint(-2, 3, (n, k), generator=g).to(spec.dtype.storage))
    table = spec.dtype.table
    legal = [c for c in spec.dtype.valid_codes if abs(table[c]) <= 4 and float(table[c] * 2).is_integer()]
    codes = torch.tensor(legal, dtype=torch.uint8)[torch.randint(len(legal), (n, k), generator=g)]
    codes[torch.rand(n, k, generator=g) < 0.8] = int(spec.dtype.encode(torch.zeros(1))[0])
    zero = None
    if spec.zero is not None:
        zero = torch.randint(0, 3, spec.zero.shape(n, k), generator=g).to(torch.int16)
    scales = tuple(_power_scale(s, n, k, g) for s in spec.scales)
    minimum = tuple(_power_scale(s, n, k, g) for s in spec.minimum)
    return LogicalWeight(spec, codes, scales, zero, minimum)


def _power_scale(scale: Scale, n: int, k: int, g: torch.Generator) -> Tensor:
    shape = scale.shape(n, k)
    if scale.dtype.kind == INTEGER:
        return scale.dtype.encode(torch.ones(shape))
    return scale.dtype.encode(torch.exp2(torch.randint(-1, 2, shape, generator=g).float()))


def _tight(
    name: str,
    spec: QuantSpec,
    activation: Activation,
    seed: int,
    *,
    inputs: str = "bf16",
    hidden: int = 128,
    inter: int = 128,
    tokens: int = 13,
    bias: bool = False,
    act_order: bool = False,
    one_hot: bool = False,
    weight_on_input: bool = False,
) -> Case:
    g = torch.Generator().manual_seed(seed)
    size = {"experts": 4, "hidden": hidden, "inter": inter, "tokens": tokens}
    problem = _problem(
        spec, activation, size, inputs=inputs, bias=bias, act_order=act_order, weight_on_input=weight_on_input
    )
    weights = {
        matrix: [_random_weight(shape, g) for _ in range(problem.experts)] for matrix, shape in problem.matrices.items()
    }
    x = torch.randn(tokens, hidden, generator=g).to(torch.bfloat16)
    return Case(name, TIGHT, problem, weights, x, _routing(problem, tokens, g, one_hot=one_hot))


def _random_weight(shape: MatrixShape, g: torch.Generator) -> LogicalWeight:
    """Gaussian values with a random scale per row, quantised."""
    n, k, spec = shape.n, shape.k, shape.spec
    values = torch.randn(n, k, generator=g) * torch.exp2(torch.randn(n, 1, generator=g)) / k**0.5
    weight = quantize(values, spec)
    perm = None
    if shape.act_order:
        size = spec.group or k
        perm = torch.cat([c.sort().values for c in torch.randperm(k, generator=g).split(size)]).to(torch.int32)
    bias = torch.randn(n, generator=g) if shape.bias else None
    return replace(weight, perm=perm, bias=bias)


def _problem(
    spec: QuantSpec,
    activation: Activation,
    size: dict[str, int],
    *,
    inputs: str,
    dtype: torch.dtype = torch.bfloat16,
    bias: bool = False,
    act_order: bool = False,
    weight_on_input: bool = False,
) -> Problem:
    hidden, inter = size["hidden"], size["inter"]
    rows = spec.stacked(inter) if activation.gated else spec
    w13 = MatrixShape(W13, inter * (2 if activation.gated else 1), hidden, rows, bias, act_order)
    return Problem(
        w13,
        MatrixShape(W2, hidden, inter, spec, bias),
        experts=size["experts"],
        global_experts=size["experts"],
        top_k=1 if weight_on_input else 2,
        activation=activation,
        input=F32 if dtype == torch.float32 else BF16,
        activations=ACTIVATIONS[inputs],
        weight_on_input=weight_on_input,
    )


def _routing(
    problem: Problem, tokens: int, g: torch.Generator, *, whole: bool = False, one_hot: bool = False
) -> Indexed:
    """Random experts; some slots are -1, and one expert gets no rows."""
    busy = 1 if one_hot else problem.experts - 1
    ids = torch.stack([torch.randperm(max(busy, problem.top_k), generator=g)[: problem.top_k] for _ in range(tokens)])
    ids = ids.clamp(max=busy - 1) if one_hot else ids
    ids[torch.rand(ids.shape, generator=g) < 0.15] = -1
    if not one_hot and tokens > 1:
        ids[-1] = -1  # a padding row: its output must be zero
    weights = torch.rand(ids.shape, generator=g) + 0.25
    if whole:
        weights = torch.exp2(torch.randint(-1, 2, ids.shape, generator=g).float())
    return Indexed(ids.to(torch.int32), weights)


def _bad_rows(mask: Tensor) -> list[int]:
    rows: list[int] = mask.any(dim=1).nonzero().flatten().tolist()
    return rows[:8]
