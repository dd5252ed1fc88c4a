"""Plans: tiles, launches and scratch memory for a problem and a number of tokens. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from lancebill.backends.base import Plan
from lancebill.backends.hopper.kernels.weight_form import E2M1_CODE, E4M3, ROWS, WeightForm
from lancebill.backends.hopper.layout import HopperLayout
from lancebill.backends.hopper.tuning import policy as tune
from lancebill.backends.hopper.tuning.policy import Rule, Tile
from lancebill.backends.hopper.workspace import SECOND, pieces
from lancebill.moe.problem import FAST, INDEXED, Problem

SINGLE = "single"
REROUNDED = "groups more than 11 powers of two below their row's largest scale are rounded again; loading counts them"
MOST_SIZES = 8  # tile sizes, and launches of a GEMM; `CLASSES` in kernels/dispatch_combine.py
SMALL = 256  # most tokens that a single launch dispatches
_CHUNKS = {1024: 128, 4096: 256}  # most tokens: slots that one program counts; above: _MOST_COUNTED
_MOST_COUNTED = 1024
_READ_RATE, _TENSOR_RATE = 4.3e6, {False: 6.5e8, True: 1.2e9}  # bytes and flops per microsecond; the latter by fp8


@dataclass(frozen=True)
class GemmPlan:
    """The GEMM of one matrix: its form, sizes, tiles, and the conversion of its input rows."""

    form: WeightForm
    units: int
    slices: int
    scale_blocks: int
    tiles: tuple[Tile, ...]
    each: int = 0  # stages of a chunk, when decoding; more if there would be more than `shares` chunks
    shares: int = 0
    pieces: int = 1  # the most chunks that share a tile, when decoding
    ordered: bool = False  # permute input columns per expert (act-order)
    scaled: bool = False  # multiply the input by a vector per expert
    static: bool = False  # quantise the input with a scale per expert
    promote: bool = False  # add sums to fp32 totals after every slice

    @property
    def fp8(self) -> bool:
        return self.form.activations == E4M3

    @property
    def converts_rows(self) -> bool:
        """Whether input rows must be converted before the GEMM."""
        return self.fp8 or self.ordered or self.scaled


@dataclass(frozen=True)
class HopperPlan(Plan):
    """What one call launches. `tokens` is the bucket: the plan serves every batch up to this size."""

    rule: Rule | None = None
    w13: GemmPlan | None = None
    w2: GemmPlan | None = None
    decode: bool = False  # each slot is a tile

    @property
    def work(self) -> str:
        """The problem's dispatch, or "single" if all rows belong to the only expert."""
        return SINGLE if self.problem.w2 is None and self.problem.experts == 1 else self.problem.dispatch

    @property
    def slots(self) -> int:
        """Rows of the GEMMs."""
        return self.tokens * (self.problem.top_k if self.work == INDEXED else 1)

    @property
    def expected_slots(self) -> int:
        """The rows of this rank's experts, if a router chooses all experts equally often."""
        problem = self.problem
        everywhere = problem.global_experts if self.work == INDEXED else problem.experts
        return min(self.slots, -(-self.slots * problem.experts // everywhere))

    @property
    def first_gemm(self) -> GemmPlan:
        assert self.w13 is not None
        return self.w13

    def gemm(self, name: str) -> GemmPlan:
        gemm = {"w13": self.w13, "w2": self.w2}[name]
        assert gemm is not None
        return gemm

    @property
    def needs_owners(self) -> bool:
        """Whether a kernel needs each row's expert (the `owners` tensor)."""
        if self.work == SINGLE:
            return False
        if self.work == INDEXED:
            return True
        return self.first_gemm.converts_rows or (self.w2 is not None and self.w2.converts_rows)


def make_plan(problem: Problem, tokens: int, tried: Rule | None = None, decode: bool | None = None) -> HopperPlan:
    """The plan for a batch. `tried` and `decode` override the tuning data; the tuner compares such plans."""
    tokens = tune.bucket(max(tokens, 1))
    layout = HopperLayout(problem)
    plan = HopperPlan(problem, tokens, 0.0)
    slots = plan.expected_slots
    forms = [layout.form(shape) for shape in problem.matrices.values()]
    units = problem.experts * layout.padded(problem.w13)[0] // ROWS
    rule = tried or tune.rule(forms[0].activations, slots, problem.experts, units)
    rule = tune.reachable(tune.fitting(rule, forms), tokens)  # an expert has at most one row of a token
    decode = _decodes(plan, layout, forms[0]) if decode is None else decode
    launches = () if decode else rule.launches
    gemms = [_grouped_gemm(layout, name, form, launches, rule.paired) for name, form in zip(problem.matrices, forms)]
    if decode:
        gemms = [_decode_gemm(plan, gemm) for gemm in gemms]
    plan = replace(
        plan,
        estimate_us=_estimate(problem, layout, slots),
        notes=(
            "one tile per slot" if decode else f"token tiles {rule.tiles}",
            *(form.name for form in forms),
            *(REROUNDED for form in forms[:1] if form.code == E2M1_CODE and form.activations == E4M3),
        ),
        rule=rule,
        w13=gemms[0],
        w2=gemms[1] if problem.w2 is not None else None,
        decode=decode,
    )
    return replace(plan, workspace_bytes=pieces(scratch(plan))[1])


def _decodes(plan: HopperPlan, layout: HopperLayout, form: WeightForm) -> bool:
    """Whether to use one tile per slot: few slots, and input rows that do not depend on the expert."""
    problem = plan.problem
    longest = max(-(-shape.k // form.slice_columns) for shape in problem.matrices.values())
    if plan.work not in (INDEXED, SINGLE) or problem.order != FAST:
        return False
    if not tune.decodes(form.activations, plan.slots, longest):
        return False
    if any(plan.slots * layout.padded(shape)[0] // ROWS > SECOND for shape in problem.matrices.values()):
        return False  # more tiles than there are counters
    per_expert = problem.w13.act_order or problem.pre_scale
    return not (per_expert or problem.activations.static or problem.second_activations.static)


def _grouped_gemm(
    layout: HopperLayout, name: str, form: WeightForm, launches: tuple[tuple[int, ...], ...], paired: bool
) -> GemmPlan:
    """The GEMM of one matrix, with the tile sizes of each launch."""
    problem = layout.problem
    shape = problem.matrices[name]
    n, k = layout.padded(shape)
    units = n // ROWS
    blocks = k // form.block_columns if form.block_columns else 1
    activations = problem.activations if name == "w13" else problem.second_activations
    return GemmPlan(
        form,
        units,
        k // form.slice_columns,
        blocks,
        tuple(tune.tile(form, sizes, problem.is_gated(shape.name), paired and units % 2 == 0) for sizes in launches),
        ordered=shape.act_order,
        scaled=problem.pre_scale,
        static=activations.static,
        promote=tune.promotes(form),
    )


def _decode_gemm(plan: HopperPlan, gemm: GemmPlan) -> GemmPlan:
    """The GEMM with one tile per slot."""
    slots = plan.expected_slots
    chunks = tune.chunk(gemm.form, slots * gemm.units, gemm.slices, known=slots == plan.slots)
    tiles = (tune.decode_tile(gemm.form, gemm.slices),)
    return replace(gemm, each=chunks.stages, shares=chunks.shares, pieces=chunks.pieces, tiles=tiles)


def scratch(plan: HopperPlan) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every intermediate tensor."""
    problem, slots, first = plan.problem, plan.slots, plan.first_gemm
    element = {True: torch.float8_e4m3fn, False: problem.input.storage}
    experts = experts_padded(problem)
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "x_scales": ((slots,), torch.float32),
        "tiles": ((MOST_SIZES * list_capacity(plan), 4), torch.int32),
        "counts": ((4 * MOST_SIZES,), torch.int32),
    }
    if plan.work == INDEXED or first.converts_rows:
        tensors["x"] = (slots, row_width(first, problem.hidden)), element[first.fp8]
    if plan.work == INDEXED:
        tensors["y"] = (slots, problem.w2.n if problem.w2 else 0), problem.input.storage
        tensors["slots"] = tensors["places"] = (slots,), torch.int32
        tensors["counted"] = (chunks(plan, slots), experts), torch.int32
    if plan.needs_owners:
        tensors["owners"] = (slots,), torch.int32
    if plan.decode:
        for name, gemm in (("parts13", plan.w13), ("parts2", plan.w2)):
            if gemm is not None:
                whole = name == "parts13" and plan.w2 is not None and gemm.pieces == 1
                tensors[name] = (0 if whole else slots * gemm.units * gemm.pieces, ROWS), torch.float32
    if plan.w2 is not None:
        tensors["h"] = (slots, problem.intermediate), problem.input.storage
    if plan.w2 is not None and plan.w2.fp8:
        tensors["h8"] = (slots, row_width(plan.w2, problem.intermediate)), torch.float8_e4m3fn
        tensors["h_scales"] = (slots,), torch.float32
    return tensors


def row_width(gemm: GemmPlan, columns: int) -> int:
    """Columns of an input row in memory: fp8 rows are padded to whole slices."""
    side = gemm.form.slice_columns
    return -(-columns // side) * side if gemm.fp8 else columns


def experts_padded(problem: Problem) -> int:
    """Experts rounded up to a power of two, at least 256: Triton's scan traps with fewer elements than threads."""
    return max(256, tune.power_of_two(problem.experts))


def list_capacity(plan: HopperPlan) -> int:
    """The most tiles of a launch: all full tiles, and one partial tile per expert."""
    assert plan.rule is not None
    return -(-plan.slots // plan.rule.full_tile) + experts_padded(plan.problem)


def chunk(plan: HopperPlan) -> int:
    return next((slots for tokens, slots in _CHUNKS.items() if plan.tokens <= tokens), _MOST_COUNTED)


def chunks(plan: HopperPlan, slots: int) -> int:
    return -(-slots // chunk(plan))


def _estimate(problem: Problem, layout: HopperLayout, slots: int) -> float:
    """A roofline in microseconds: weights over the read rate or flops over the tensor rate, plus 10 for launches."""
    activated = problem.experts * (1 - (1 - 1 / problem.experts) ** slots)
    loaded = activated * sum(layout.bytes(shape) for shape in problem.matrices.values())
    flops = 2 * slots * sum(shape.n * shape.k for shape in problem.matrices.values())
    fp8 = layout.form(problem.w13).activations == E4M3
    return max(loaded / _READ_RATE, flops / _TENSOR_RATE[fp8]) + 10
