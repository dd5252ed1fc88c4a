"""Plans of the Hopper backend: forms, tiles and decode chunks for a problem and a number of tokens. Pure functions."""

from __future__ import annotations

from dataclasses import replace

from lancebill.backends.gpu.kernels.weight_form import ROWS, WeightForm
from lancebill.backends.gpu.layout import FragmentLayout
from lancebill.backends.gpu.plan import SINGLE, GemmPlan, GpuPlan, form_notes, gemm_plan, may_decode, scratch
from lancebill.backends.gpu.roofline import activated_experts
from lancebill.backends.gpu.tiles import Rule, SlotStrips, bucket, reachable
from lancebill.backends.gpu.workspace import pieces
from lancebill.backends.hopper.tuning import policy as tune
from lancebill.moe.problem import Problem

MOST_SINGLE_ROWS = 2  # of one matrix, which is read for each row where each is a tile
_READ_RATE = 4.3e6  # bytes per microsecond
_TENSOR_RATE = {False: 6.5e8, True: 1.2e9}  # flops per microsecond; True: 8-bit inputs


def make_plan(problem: Problem, tokens: int, tried: Rule | None = None, decode: bool | None = None) -> GpuPlan:
    """The plan for a batch. `tried` and `decode` override the tuning data; the tuner compares such plans."""
    tokens = bucket(max(tokens, 1))
    layout = FragmentLayout(problem)
    plan = GpuPlan(problem, tokens, 0.0)
    slots = plan.expected_slots
    forms = [layout.form(shape) for shape in problem.matrices.values()]
    units = problem.experts * layout.padded(problem.w13)[0] // ROWS
    rule = tried or tune.rule(forms[0], slots, problem.experts, units)
    rule = reachable(tune.fitting(rule, forms), tokens)  # an expert has at most one row of a token
    few_rows = tried is None and decode is None and _has_few_rows(plan, layout, forms[0])
    decode = not few_rows and _decodes(plan, layout, forms[0]) if decode is None else decode
    launches = () if decode or few_rows else rule.launches
    gemms = [_grouped_gemm(plan, layout, name, rule, launches) for name in problem.matrices]
    strips = tune.strips(gemms[0].form, tokens, gemms[0].units, gemms[0].slices) if few_rows else None
    if few_rows and strips is None:
        gemms = [_few_rows_gemm(plan, gemms[0])]
    slot_strips = _slot_strips(plan, gemms) if decode else None
    if decode and slot_strips is None:
        gemms = [_decode_gemm(plan, gemm) for gemm in gemms]
    plan = replace(
        plan,
        estimate_us=_estimate(problem, layout, slots),
        notes=(_tiles_note(rule, bool(strips or slot_strips), few_rows, decode), *form_notes(forms)),
        rule=rule,
        w13=gemms[0],
        w2=gemms[1] if problem.w2 is not None else None,
        decode=decode,
        few_rows=few_rows,
        strips=strips,
        slot_strips=slot_strips,
        graphed=tune.graphed(tokens),
    )
    return replace(plan, workspace_bytes=pieces(scratch(plan))[1])


def _tiles_note(rule: Rule, strips: bool, few_rows: bool, decode: bool) -> str:
    if strips:
        return "strips of features"
    if few_rows:
        return "one tile"
    return "one tile per slot" if decode else f"token tiles {rule.tiles}"


def _has_few_rows(plan: GpuPlan, layout: FragmentLayout, form: WeightForm) -> bool:
    """Whether all rows of one matrix are one tile. 8-bit rows are not quantised by its kernels."""
    few = plan.work == SINGLE and plan.tokens <= tune.MOST_FEW_ROWS
    return few and not form.byte_inputs and may_decode(plan, layout)


def _decodes(plan: GpuPlan, layout: FragmentLayout, form: WeightForm) -> bool:
    """Whether to use one tile per slot."""
    if plan.work == SINGLE and plan.slots > MOST_SINGLE_ROWS:
        return False
    longest = max(-(-shape.k // form.slice_columns) for shape in plan.problem.matrices.values())
    return may_decode(plan, layout) and tune.decodes(form.activations, plan.slots, longest)


def _grouped_gemm(
    plan: GpuPlan, layout: FragmentLayout, name: str, rule: Rule, launches: tuple[tuple[int, ...], ...]
) -> GemmPlan:
    """The GEMM of one matrix, with the tile sizes of each launch."""
    gemm, slots, problem = gemm_plan(layout, name), plan.expected_slots, plan.problem
    gated, paired = problem.is_gated(name), rule.paired and gemm.units % 2 == 0
    expected = round(gemm.units * max(activated_experts(problem, slots), slots / rule.full_tile))
    many = plan.work == SINGLE  # measured for experts only
    tiles = tuple(tune.tile(gemm.form, sizes, gated, paired, None if many else expected) for sizes in launches)
    largest = max(layout.bytes(shape) for shape in problem.matrices.values())
    together = 1 if many else tune.together(largest, slots / problem.experts / rule.full_tile)
    full = (replace(tile, together=together) if max(tile.sizes) >= rule.full_tile else tile for tile in tiles)
    return replace(gemm, tiles=tuple(full), promote=tune.promotes(gemm.form))


def _decode_gemm(plan: GpuPlan, gemm: GemmPlan) -> GemmPlan:
    """The GEMM with one tile per slot."""
    slots = plan.expected_slots
    chunks, blocks = tune.decode_chunks(gemm.form, slots * gemm.units, gemm.slices, known=slots == plan.slots)
    tiles = (tune.decode_tile(gemm.form, gemm.slices, blocks),)
    return replace(gemm, each=chunks.stages, shares=chunks.shares, pieces=chunks.pieces, tiles=tiles)


def _slot_strips(plan: GpuPlan, gemms: list[GemmPlan]) -> SlotStrips | None:
    """How blocks share the strips of both matrices; None if they had better share tiles. With experts of other ranks
    most blocks would have nothing to do."""
    problem = plan.problem
    one = plan.work != SINGLE and plan.tokens == 1 and problem.experts == problem.global_experts
    if not one or len(gemms) != 2 or any(gemm.byte_inputs for gemm in gemms):
        return None
    return tune.slot_strips(problem.top_k, gemms[0], gemms[1])


def _few_rows_gemm(plan: GpuPlan, gemm: GemmPlan) -> GemmPlan:
    """The GEMM with all rows in one tile."""
    tile, chunks = tune.few_rows(gemm.form, plan.tokens, gemm.units, gemm.slices)
    return replace(gemm, each=chunks.stages, shares=chunks.shares, pieces=chunks.pieces, tiles=(tile,))


def _estimate(problem: Problem, layout: FragmentLayout, slots: int) -> float:
    """A roofline in microseconds: weights over the read rate or flops over the tensor rate, plus 10 for launches."""
    loaded = activated_experts(problem, slots) * sum(layout.bytes(shape) for shape in problem.matrices.values())
    flops = 2 * slots * sum(shape.n * shape.k for shape in problem.matrices.values())
    eight_bit = layout.form(problem.w13).byte_inputs
    return max(loaded / _READ_RATE, flops / _TENSOR_RATE[eight_bit]) + 10
