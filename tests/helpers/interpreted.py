"""Whole plans without a GPU: the row kernels in Triton's interpreter, the products by their definition.

Not collected by itself: `test_hopper_rows.py` runs it in a process of its own, where TRITON_INTERPRET is set before
Triton is imported. Scratch memory starts poisoned, so whatever a launch reads some launch before it has written.
"""

from __future__ import annotations

import builtins
import itertools
from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter as interpreting

from lancebill.backends.hopper import plan as planning
from lancebill.backends.hopper import row_steps as rowwise
from lancebill.backends.hopper import workspace
from lancebill.backends.hopper.kernels import decode, epilogue
from lancebill.backends.hopper.kernels import dispatch_combine as rows
from lancebill.backends.hopper.layout import HopperLayout
from lancebill.backends.hopper.plan import HopperPlan, make_plan, scratch
from lancebill.backends.hopper.step import CALL, COUNTERS, SCRATCH, Ref, Step
from lancebill.backends.hopper.steps import steps
from lancebill.backends.registry import registry
from lancebill.moe.dispatch import Contiguous, Indexed, to_batched, to_contiguous
from lancebill.moe.layout import Packed, as_integer
from lancebill.moe.problem import BATCHED, CONTIGUOUS, Device, Problem
from lancebill.numbers.codec import dequantize
from lancebill.numbers.spec_names import parse_activation
from lancebill.testing.layers import layer_problem, plausible_weight, routing, worst_row

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8e4nv": torch.float8_e4m3fn}
INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
KINDS = {"*fp32": torch.float32, "*i32": torch.int32}


def _rounded(values: np.ndarray, before: tl.dtype, after: tl.dtype, mode: object) -> np.ndarray:
    """To the nearest, saturating: the interpreter itself cuts off."""
    source, target = TYPES[str(before)], TYPES[str(after)]
    wide = torch.from_numpy(np.array(values)).view(source).float()
    wide = wide.clamp(-448, 448) if target == torch.float8_e4m3fn else wide
    return wide.to(target).view(INTEGER[target.itemsize]).numpy()


def scalars(*ends: object) -> list[tl.tensor]:
    return [tl.full((), i, tl.int32) for i in builtins.range(*map(_whole, ends))]


def _whole(value: object) -> int:
    return int(value.handle.data.flat[0]) if isinstance(value, tl.tensor) else int(value)  # type: ignore[call-overload]


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launches to wait for; loop bounds as the newest numpy wants them; floats rounded as the GPU rounds."""
    torch.manual_seed(0)
    monkeypatch.setattr(interpreting, "_convert_float", _rounded)
    monkeypatch.setattr(rows, "gdc_wait", lambda **_: None)
    monkeypatch.setattr(rows, "gdc_launch_dependents", lambda **_: None)
    monkeypatch.setattr(rows, "range", scalars, raising=False)


class Machine:
    """Runs the steps of a plan one by one."""

    def __init__(self, plan: HopperPlan, weights: Mapping[str, Packed], call: Mapping[str, Tensor]) -> None:
        self.plan, self.layout = plan, HopperLayout(plan.problem)
        memory = torch.full((workspace.pieces(scratch(plan))[1],), 0xFF, dtype=torch.uint8)
        zeros = torch.zeros(workspace.COUNTERS, dtype=torch.int32)
        views = workspace.views(memory, scratch(plan))
        self.tensors = {SCRATCH: views, COUNTERS: {"all": zeros}, CALL: call, **weights}

    def run(self, tokens: int) -> None:
        for step in steps(self.plan):
            {"grouped": self._grouped, "slotwise": self._slotwise}.get(step.source.kernel, self._rows)(step, tokens)

    def tensor(self, ref: Ref) -> Tensor:
        held = self.tensors[ref.owner][ref.name].reshape(-1)
        return held[ref.offset // held.element_size() :]

    def _rows(self, step: Step, tokens: int) -> None:
        kinds, arguments = dict(step.source.arguments), {}
        for name, value in step.values.items():
            if isinstance(value, Ref):
                tensor = self.tensor(value)
                arguments[name] = tensor.view(KINDS.get(str(kinds[name]), tensor.dtype))
            else:
                arguments[name] = value(tokens) if callable(value) else value
        vars(rows)[step.source.kernel][step.grid(tokens)](**arguments, **dict(step.source.constants))

    def _weight(self, name: str, expert: int) -> tuple[Tensor, Tensor | float]:
        shape = self.plan.problem.matrices[name]
        held = {role: t[expert] for role, t in self.tensors[name].items() if role in self.layout.storage(shape)}
        weight = replace(self.layout.unpack(shape, held), perm=None)  # columns as the kernel sees them
        return dequantize(weight), 0.0 if weight.bias is None else weight.bias

    def _product(self, step: Step, name: str, expert: int, x: Tensor, scales: Tensor) -> Tensor:
        matrix, bias = self._weight(name, expert)
        narrow = self.plan.product(name).narrow
        if narrow:  # whole slices in their own order, zeros where the matrix has no column
            column = torch.arange(x.shape[1]).view(-1, 4, 8, 4).transpose(1, 2).reshape(-1)
            x, whole = torch.empty(x.shape).index_copy_(1, column, x.float()), x.shape[1]
            matrix = torch.cat([matrix, torch.full((len(matrix), whole - matrix.shape[1]), 1e9)], 1)
        projected = x.float() @ matrix.t()
        if narrow:
            projected = projected * scales.unsqueeze(1)
        projected = projected + bias
        constants = dict(step.source.constants)
        return projected if constants["KIND"] in ("rows", "kept") else self.plan.problem.activation(projected)

    def _grouped(self, step: Step, tokens: int) -> None:
        values, kind = step.values, dict(step.source.constants)["KIND"]
        refs = {name: value for name, value in values.items() if isinstance(value, Ref)}
        name, width = refs["w_desc"].owner, refs["x_desc"].mapped
        x, out = self.tensor(refs["x_desc"]).view(-1, width), self.tensor(refs["out"]).view(-1, values["columns"])
        tiles, count = self.tensor(refs["tiles"]).view(-1, 4), int(self.tensor(refs["tile_count"])[0])
        taken = self.tensor(refs["taken"])
        assert taken[0] == 0  # nobody else's, and given back by the dispatch
        taken[0] += count
        size = dict(step.source.constants)["TOKENS"]
        for expert, row, number, _ in tiles[:count].tolist():
            assert 0 < number <= size
            scales = self.tensor(refs["token_scales"])[row : row + number]
            result = self._product(step, name, expert, x[row : row + number], scales)
            where = (
                self.tensor(refs["slots"])[row : row + number].long() if kind == "rows" else slice(row, row + number)
            )
            out[where] = result.to(out.dtype)

    def _slotwise(self, step: Step, tokens: int) -> None:
        """Only single linears here: layers of few tokens have kernels of their own, proved on the GPU."""
        refs = {name: value for name, value in step.values.items() if isinstance(value, Ref)}
        ids, out = self.tensor(refs["ids"])[:tokens], self.tensor(refs["out"]).view(tokens, -1)
        assert not ids.any()
        rows_ = refs["x" if self.plan.first.narrow else "x_desc"]
        x, scales = self.tensor(rows_).view(-1, step.values["width"])[:tokens], torch.ones(tokens)
        if self.plan.first.narrow:  # as the kernel does: a scale for the row, whole slices in their own order
            scales = x.float().abs().amax(1) / 448
            scales = torch.where(scales > 0, scales, 1.0)
            whole = F.pad(x.float() / scales.unsqueeze(1), (0, -x.shape[1] % 128)).to(torch.float8_e4m3fn).float()
            x = whole.view(tokens, -1, 4, 8, 4).transpose(2, 3).reshape(tokens, -1)
        out.copy_(self._product(step, "w13", 0, x, scales))


def layer(spec: str, activations: str, **options: object) -> Problem:
    sizes = {"hidden": 96, "intermediate": 64, "experts": 7, "top_k": 3, **options}
    made = layer_problem(spec, "bf16", **sizes)
    return replace(made, activations=parse_activation(activations))


@cache
def packed(problem: Problem, backend: str) -> dict[str, Packed]:
    """Equal weights for every backend, and what experts say of their inputs."""
    layout, found = registry()[backend].layout(problem), {}
    for number, (name, shape) in enumerate(problem.matrices.items()):
        held = layout.allocate(shape, problem.experts)
        for expert in range(problem.experts):
            weight = plausible_weight(shape, 100 * number + expert)
            layout.pack(shape, weight, {role: tensor[expert] for role, tensor in held.items()})
        generator = torch.Generator().manual_seed(number)
        if problem.pre_scale:
            factors = torch.rand(problem.experts, shape.k, generator=generator) + 0.5
            held["pre_scale"] = as_integer(factors)
        if problem.activations.static:
            held["input_scale"] = as_integer(torch.rand(problem.experts, generator=generator) * 0.01 + 0.005)
        found[name] = held
    return found


def judge(problem: Problem, x: Tensor, dispatch: object, out: Tensor) -> Tensor:
    reference = registry()["reference"]
    plan = reference.plan(problem, x.shape[0], Device("cpu"))
    return reference.run(plan, x, dispatch, packed(problem, "reference"), out)  # type: ignore[arg-type]


FORMS = [
    ("mxfp4", "bf16", {}),
    ("mxfp4", "fp8", {}),
    ("int4-g32", "bf16", {"act_order": True}),
    ("mxfp4", "fp8-static", {}),
    ("int4-g128-zp", "fp8", {"hidden": 128, "intermediate": 128}),
    ("mxfp4", "bf16", {"pre_scale": True}),
    ("mxfp4", "fp8", {"pre_scale": True}),
    # fp8 rows of whole slices: wider than the matrix, narrower than a power of two
    ("mxfp4", "fp8", {"hidden": 288, "intermediate": 160}),
    ("mxfp4", "fp8-static", {"hidden": 288, "intermediate": 320, "pre_scale": True}),
    ("int4-g128", "fp8", {"hidden": 384, "intermediate": 128, "act_order": True}),
    ("mxfp4", "fp8-static", {"pre_scale": True, "top_k": 1, "weight_on_input": True}),
]


def make(spec: str, activations: str, options: Mapping[str, object], **further: object) -> Problem:
    own = {name: value for name, value in options.items() if name != "pre_scale"}
    return replace(layer(spec, activations, **own), pre_scale="pre_scale" in options, **further)  # type: ignore[arg-type]


@pytest.mark.parametrize(("spec", "activations", "options"), FORMS)
@pytest.mark.parametrize("launches", [1, 3])
def test_indexed(
    spec: str, activations: str, options: dict[str, object], launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if launches == 3:
        monkeypatch.setattr(rowwise, "SMALL", 8)
    problem, tokens = make(spec, activations, options), 12
    x = torch.randn(tokens, problem.hidden).bfloat16()
    routed = routing(problem, tokens, 3, "cpu", "holes")
    out = torch.full_like(x, float("nan"))
    plan = make_plan(problem, tokens)
    assert (
        sum(step.source.kernel in ("dispatch_small", "count_ids", "place_ids", "send_rows") for step in steps(plan))
        == launches
    )
    wild = (
        torch.tensor([-1, problem.experts, -9, 255, 1 << 20]).repeat(tokens)[: routed.ids.numel()].view_as(routed.ids)
    )
    ids = torch.where(routed.ids < 0, wild, routed.ids).to(torch.int32)  # what is no expert's contributes nothing
    weights = routed.weights if problem.weight_on_input else routed.weights.masked_fill(routed.ids < 0, float("nan"))
    call = {"x": x, "out": out, "ids": ids, "weights": weights}
    Machine(plan, packed(problem, "hopper"), call).run(tokens)
    check(out, judge(problem, x, routed, torch.empty(x.shape)), activations)


@pytest.mark.parametrize("launches", [1, 3])
@pytest.mark.parametrize("activations", ["bf16", "fp8"])
def test_a_smaller_batch_after_a_larger_one(activations: str, launches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One plan and its scratch memory serve all batches of a bucket: what the larger one left is nobody's."""
    if launches == 3:
        monkeypatch.setattr(rowwise, "SMALL", 8)
    problem = make("mxfp4", activations, {})
    plan = make_plan(problem, 12)
    machine = Machine(plan, packed(problem, "hopper"), {})
    for tokens, kind in ((12, "uniform"), (11, "holes"), (1, "one")):
        x, routed = torch.randn(tokens, problem.hidden).bfloat16(), routing(problem, tokens, tokens, "cpu", kind)
        out = torch.full_like(x, float("nan"))
        machine.tensors[CALL] = {"x": x, "out": out, "ids": routed.ids, "weights": routed.weights}
        machine.run(tokens)
        check(out, judge(problem, x, routed, torch.empty(x.shape)), activations)


@pytest.mark.parametrize(("spec", "activations", "options"), FORMS[:-1])
@pytest.mark.parametrize("form", [CONTIGUOUS, BATCHED])
def test_finished(spec: str, activations: str, options: dict[str, object], form: str) -> None:
    """Experts of none, one and many rows; rows past the counts stay as they were."""
    problem, tokens = make(spec, activations, options, dispatch=form), 18
    x = torch.randn(tokens, problem.hidden).bfloat16()
    routed = routing(problem, tokens, 3, "cpu", "one")
    routed = Indexed(torch.where(routed.ids == 2, -1, routed.ids), routed.weights)
    if form == CONTIGUOUS:
        rows_, dispatch, _ = to_contiguous(x, routed, problem.experts)
        edges, rows_ = dispatch.offsets, torch.cat([rows_, torch.full((5, problem.hidden), float("nan")).bfloat16()])
    else:
        rows_, batched, _ = to_batched(x, routed, problem.experts, 18)
        dispatch, edges = batched, batched.counts  # type: ignore[assignment]
    marks = torch.arange(rows_[..., 0].numel()).view(rows_.shape[:-1]).unsqueeze(-1).expand(rows_.shape)
    out = marks.to(torch.bfloat16).contiguous()
    want = judge(problem, rows_, dispatch, out.float())
    plan = make_plan(problem, rows_.shape[:-1].numel())
    assert plan.decode is False
    Machine(plan, packed(problem, "hopper"), {"x": rows_, "out": out, "edges": edges}).run(rows_.shape[:-1].numel())
    touched = (want != marks.to(torch.bfloat16).float()).any(-1)
    assert 0 < int(touched.sum()) < touched.numel()
    assert torch.equal(out[~touched], marks.to(torch.bfloat16)[~touched])
    check(out[touched], want[touched], activations)


@pytest.mark.parametrize(("spec", "activations", "options"), FORMS[:-1])
@pytest.mark.parametrize("tokens", [1, 40])
def test_single(spec: str, activations: str, options: dict[str, object], tokens: int) -> None:
    problem = make(spec, activations, options)
    problem = replace(problem, w2=None, experts=1, global_experts=1, top_k=1, dispatch=CONTIGUOUS)
    x = torch.randn(tokens, problem.hidden).bfloat16()
    out = torch.full((tokens, problem.w13.n), float("nan"), dtype=torch.bfloat16)
    edges = torch.tensor([0, tokens])
    Machine(make_plan(problem, tokens), packed(problem, "hopper"), {"x": x, "out": out, "edges": edges}).run(tokens)
    check(out, judge(problem, x, Contiguous(edges), torch.empty(out.shape)), activations)


def check(got: Tensor, want: Tensor, activations: str) -> None:
    """A hidden number that rounds to another e4m3 number moves a result of so few columns by a few hundredths."""
    assert worst_row(got.float().nan_to_num(nan=1e9), want.float()) < (0.1 if activations.startswith("fp8") else 8e-3)


class Gluon:
    """Gluon's language on Triton's interpreter: the same functions, layouts left out."""

    def __getattr__(self, name: str) -> object:
        return vars(tl)[name]

    def arange(self, start: int, end: int, layout: object) -> tl.tensor:
        return tl.arange(start, end)

    def BlockedLayout(self, *sizes: object) -> None:
        return None

    def SliceLayout(self, *parts: object) -> None:
        return None


@pytest.fixture
def decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """What decoding does around its products, in the interpreter too."""
    for name, stand_in in (("gl", Gluon()), ("tl", tl), ("range", scalars), ("column_at", rows.column_at.fn)):
        monkeypatch.setattr(decode, name, stand_in, raising=False)
    for name in ("sum_parts", "expert_of", "load_slices", "row_scale", "over_scale", "held_layout"):
        monkeypatch.setattr(decode, name, vars(decode)[name].fn)


def keep_part(
    x: tl.tensor, out: tl.tensor, scales: tl.tensor, row: int, first: int, width: int, SLICES: tl.constexpr
) -> None:
    """A part where the test can see it."""
    scale = decode.row_scale(x + row * width, width)
    part = decode.over_scale(decode.load_slices(x + row * width, first, width, SLICES), scale)
    place = tl.arange(0, SLICES).expand_dims(1) * 128 + tl.arange(0, 128).expand_dims(0)
    tl.store(out + place, part)
    tl.store(scales + row, scale)


@pytest.mark.usefixtures("decoding")
@pytest.mark.parametrize("slices", [8, 16])
@pytest.mark.parametrize("columns", [96, 288, 2048, 2080, 4128])
def test_decoding_quantises_as_rows_are_prepared(columns: int, slices: int) -> None:
    """Whoever multiplies a part of a row has all of its slices, and the numbers that `prepare_rows` writes."""
    length, held = -(-columns // 128) * 128, slices * 128
    x = (torch.randn(3, columns) * torch.tensor([[1.0], [1e-3], [0.0]])).bfloat16()
    wanted = torch.zeros(3, -(-length // held) * held, dtype=torch.float8_e4m3fn)  # zeros past the row's end
    codes = torch.full((3, length), float("nan")).to(torch.float8_e4m3fn)
    scales, wanted_scales = torch.full((3,), float("nan")), torch.full((3,), float("nan"))
    prepare, w = rows.prepare_rows[(3,)], rowwise.power_of_two(length)
    prepare(x, scales, scales, scales, scales, codes, wanted_scales, columns, w, True, False, False, False, False)
    wanted[:, :length] = codes
    keep = triton.jit(keep_part)
    for row, start in itertools.product(range(3), range(0, length, held)):
        ours = torch.full((held,), float("nan")).to(torch.float8_e4m3fn)
        keep[(1,)](x, ours, scales, row, start // 128, columns, slices)
        assert torch.equal(ours.float(), wanted[row, start : start + held].float())  # whatever a zero's sign
    assert torch.equal(scales, wanted_scales)


def test_what_a_static_scale_cannot_hold_is_the_largest_number() -> None:
    x = torch.tensor([[float("inf"), -float("inf"), 3e38, -3e38, 1.0, 0.0] + 122 * [0.5]])
    codes, scales = torch.zeros(1, 128).to(torch.float8_e4m3fn), torch.zeros(1)
    owners, given = torch.zeros(1, dtype=torch.int32), torch.tensor([0.01])
    rows.prepare_rows[(1,)](x, owners, scales, scales, given, codes, scales, 128, 128, True, False, False, True, True)
    found = codes.float().view(-1, 8, 4, 4).transpose(1, 2).reshape(-1)
    assert found[:6].tolist() == [448, -448, 448, -448, 96, 0] and scales.item() == given.item()


def finish(
    out: tl.tensor, parts: tl.tensor, factors: tl.tensor, bias: tl.tensor, slot: int, e: int, unit: int, units: int,
    columns: int, KIND: tl.constexpr, ACTIVATION: tl.constexpr, WHOLE: tl.constexpr,
) -> None:  # fmt: skip
    """A unit of a row, finished from sums in registers, of whose columns seven of eight are nobody's, or from parts."""
    limits = float("inf"), 1.0, 1.0
    if WHOLE:
        n, only = unit * 128 + tl.arange(0, 64), tl.arange(0, 8).expand_dims(0) == 0
        halves = []
        for first in (0, 64):
            sums = tl.load(parts + slot * units * 128 + n + first).expand_dims(1)
            halves.append(tl.where(only, sums, float("nan")))
            halves[-1].type.layout = None
        top, bottom = tl.load(factors + n), tl.load(factors + n + 64)
        decode.finish_sums(out, *halves, top, bottom, bias, 0.7, slot, e, unit, units, columns, *limits, KIND,
                           ACTIVATION, True)  # fmt: skip
    else:
        decode.finish_slot(out, parts, bias, 0.7, slot, e, unit, units, columns, *limits, 1, KIND, ACTIVATION, True)


@pytest.mark.usefixtures("decoding")
@pytest.mark.parametrize(
    ("kind", "activation", "columns"),
    [("gated", "gelu", 120), ("ungated", "relu2_no_mul", 240), ("ungated", "gelu_no_mul", 160)],
)
def test_whole_sums_end_as_parts_do(monkeypatch: pytest.MonkeyPatch, kind: str, activation: str, columns: int) -> None:
    monkeypatch.setattr(epilogue, "gl", Gluon())
    for name in ("gate", "squash", "_gelu"):
        monkeypatch.setattr(epilogue, name, vars(epilogue)[name].fn)
    for name in ("gate", "squash", "finish_sums", "finish_slot"):
        monkeypatch.setattr(decode, name, vars(decode)[name].fn)
    units, slots = 2, 3
    parts, factors, bias = torch.randn(slots, 256), torch.rand(256) + 0.5, torch.randn(5, 256)
    found = []
    for whole, given in ((True, parts), (False, parts * factors)):
        out = torch.full((slots + 1, columns), float("nan"), dtype=torch.bfloat16)
        for slot, unit in itertools.product(range(slots), range(units)):
            triton.jit(finish)[(1,)](
                out, given, factors, bias, slot, 2 * slot % 5, unit, units, columns, kind, activation, whole
            )
        assert out[slots].isnan().all() and not out[:slots].isnan().any()
        found.append(out[:slots])
    assert torch.equal(*found)


@pytest.mark.usefixtures("decoding")
@pytest.mark.parametrize(("split", "narrow"), [(1, False), (2, True)])
def test_decoding_sums_a_tokens_slots(split: int, narrow: bool) -> None:
    """In slot order, whatever the slots hold that are no expert's."""
    tokens, top_k, units, columns = 3, 3, 2, 240
    ids = torch.tensor([[4, 0, 2], [-1, 5, 1 << 20], [3, -9, 1]], dtype=torch.int32)
    mine = ((ids >= 0) & (ids < 5)).unsqueeze(-1)
    parts, bias = torch.randn(tokens, top_k, split, units * 128), torch.randn(5, units * 128)
    scales, weights = torch.rand(tokens, top_k, 1), torch.rand(tokens, top_k, 1)
    rows_ = (parts.sum(2) * (scales if narrow else 1) + bias[ids.clamp(0, 4).long()]) * weights
    want = torch.where(mine, rows_, 0.0).sum(1)[:, :columns]
    for tensor in (parts.view(tokens, top_k, -1), scales, weights):
        tensor.masked_fill_(~mine, float("nan"))
    out = torch.full((tokens, columns), float("nan"), dtype=torch.bfloat16)
    finish = triton.jit(decode.finish_token.fn)
    for token, unit in itertools.product(range(tokens), range(units)):
        constants = map(tl.constexpr, (split, top_k, True, narrow, True))
        finish[(1,)](out, parts, bias, scales, ids, 5, weights, token, unit, units, columns, *constants)
    assert worst_row(out, want) < 8e-3 and not out[1].any()


assert planning.SMALL == rowwise.SMALL
