"""The launches of a plan as values: which kernel, which arguments, which grid. Pure, no GPU.

Arguments name tensors instead of holding them: scratch memory, packed weights, or the caller's. `Program`
binds the names; `lancebill kernels build` needs only the sources.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from lancebill.backends.hopper import kernel_sources as src
from lancebill.backends.hopper import workspace
from lancebill.backends.hopper.plan import SINGLE, HopperPlan, experts_padded, list_capacity, make_plan, row_width
from lancebill.backends.hopper.row_steps import combine, dispatch_finished, dispatch_indexed, prepare
from lancebill.backends.hopper.step import CALL, COUNTERS, SCRATCH, Ref, Step, Value, scratch_ref
from lancebill.jit.compile import KernelSource
from lancebill.moe.problem import INDEXED, Problem


def steps(plan: HopperPlan) -> tuple[Step, ...]:
    """Everything one call launches, in order."""
    if plan.decode:
        return _decode(plan)
    problem = plan.problem
    indexed = plan.work == INDEXED
    found = dispatch_indexed(plan) if indexed else dispatch_finished(plan)
    x = Ref(SCRATCH if indexed or plan.first.prepared else CALL, "x", mapped=row_width(plan.first, problem.hidden))
    if plan.w2 is None:
        return (*found, *_products(plan, "w13", x, "x_scales", Ref(CALL, "out"), src.KEPT))
    kind = src.GATED if problem.activation.gated else src.UNGATED
    found += _products(plan, "w13", x, "x_scales", scratch_ref("h"), kind)
    rows, scales = "h", "x_scales"
    if plan.w2.prepared:
        rows, scales = ("h8", "h_scales") if plan.w2.narrow else ("h", "x_scales")
        found.append(prepare(plan, "w2", scratch_ref("h"), (rows, scales), problem.top_k if indexed else 1))
    h = Ref(SCRATCH, rows, mapped=row_width(plan.w2, problem.intermediate))
    if not indexed:
        return (*found, *_products(plan, "w2", h, scales, Ref(CALL, "out"), src.KEPT))
    return (*found, *_products(plan, "w2", h, scales, scratch_ref("y"), src.ROWS), combine(plan))


def kernels(problem: Problem, tokens: int) -> list[KernelSource]:
    """What a layer launches for so many tokens, in order."""
    return [step.source for step in steps(make_plan(problem, tokens))]


def _products(plan: HopperPlan, name: str, rows: Ref, scales: str, out: Ref, kind: str) -> list[Step]:
    """A launch for each class of tiles, each over its own list."""
    assert plan.rule is not None
    problem, activation, overlap, product = plan.problem, plan.problem.activation, plan.rule.overlap, plan.product(name)
    shape = problem.matrices[name]
    finished = kind in (src.ROWS, src.KEPT)
    found, first = [], 0
    for i, tile in enumerate(product.tiles):
        source = src.product(
            product.form, tile, problem.input.name, kind, "none" if finished else _title(plan), bias=shape.bias,
            depend=(src.FIRST if i == 0 else src.LATER) if overlap else src.ALONE,
            prefetch=overlap and i == 0 and name == "w2", promote=product.promote,
        )  # fmt: skip
        values: dict[str, Value] = {
            "x_desc": rows,
            "w_desc": Ref(name, "codes", mapped=32),
            "s_desc": Ref(name, "scales" if product.form.scale_words else "codes", mapped=0),
            "out": out,
            "slots": scratch_ref("slots" if kind == src.ROWS else "counts"),
            "factors": Ref(name, "factors"),
            "bias": Ref(name, "bias" if shape.bias else "factors"),
            "token_scales": scratch_ref(scales),
            "tiles": scratch_ref("tiles", 16 * first),
            "tile_count": scratch_ref("counts", 16 * i),
            "taken": scratch_ref("counts", 16 * i + (4 if name == "w13" else 8)),
            "units": product.units,
            "slices": product.slices,
            "scale_blocks": product.scale_blocks,
            "columns": shape.n if finished else problem.intermediate,
            "limit": math.inf if activation.limit is None else activation.limit,
            "alpha": activation.alpha,
            "beta": activation.beta,
        }
        most = (list_capacity(plan) if i == 0 else problem.experts) * product.units // tile.units
        found.append(Step(source, values, _fixed(most), tile.blocks))
        first = list_capacity(plan) + i * experts_padded(problem)
    return found


def _fixed(blocks: int) -> Callable[[int], tuple[int, int]]:
    return lambda tokens: (blocks, 1)


def _title(plan: HopperPlan) -> str:
    activation = plan.problem.activation
    limited = activation.name == "situ" and activation.limit is not None
    return "situ_limited" if limited else activation.name


def _decode(plan: HopperPlan) -> tuple[Step, ...]:
    """Few slots: both products take the ids as they are; the second sums over a token's experts."""
    if plan.w2 is None:
        return (_slotwise(plan, "w13", CALL, "x", Ref(CALL, "out")),)
    return (
        _slotwise(plan, "w13", CALL, "x", scratch_ref("h")),
        _slotwise(plan, "w2", SCRATCH, "h", Ref(CALL, "out")),
    )


def _slotwise(plan: HopperPlan, name: str, owner: str, rows: str, out: Ref) -> Step:
    """One product, a slot a tile."""
    assert plan.rule is not None
    product, single = plan.product(name), plan.work == SINGLE
    problem, activation, shape = plan.problem, plan.problem.activation, plan.problem.matrices[name]
    first, top_k, (tile,) = name == "w13" and not single, problem.top_k, product.tiles
    kind = src.ROWS if not first else src.GATED if activation.gated else src.UNGATED
    source = src.slotwise(
        product.form, tile, product.split, 1 if first else top_k, problem.input.name, kind,
        _title(plan) if first else "none", bias=shape.bias, weighted=not single and problem.weight_on_input == first,
        depend=plan.rule.overlap, promote=product.promote,
        # Weights may be fetched before the predecessor ends where that is a launch of ours: the ids are older.
        prefetch=name == "w2" and plan.rule.overlap,
    )  # fmt: skip
    codes = Ref(name, "codes", mapped=32)
    values: dict[str, Value] = {
        "x_desc": codes if product.narrow else Ref(owner, rows, mapped=shape.k),
        "w_desc": codes,
        "s_desc": Ref(name, "scales" if product.form.scale_words else "codes", mapped=0),
        "x": Ref(owner, rows) if product.narrow else scratch_ref("counts"),
        "out": out,
        "scales": scratch_ref("x_scales" if name == "w13" else "h_scales" if product.narrow else "counts"),
        "parts": scratch_ref("parts13" if name == "w13" else "parts2"),
        "counters": Ref(COUNTERS, "all", 4 * (workspace.FIRST if name == "w13" else workspace.SECOND)),
        "factors": Ref(name, "factors"),
        "bias": Ref(name, "bias" if shape.bias else "factors"),
        # The only expert's number is a zero among counters that nobody uses.
        "ids": Ref(COUNTERS, "all", 4 * workspace.SECOND) if single else Ref(CALL, "ids"),
        "weights": scratch_ref("counts") if single else Ref(CALL, "weights"),
        "experts": problem.experts,
        "total_slots": lambda m: m * top_k,
        "units": product.units,
        "slices": product.slices,
        "scale_blocks": product.scale_blocks,
        "width": shape.k,
        "columns": problem.intermediate if first else shape.n,
        "slots_per_row": top_k if first else 1,
        "limit": math.inf if activation.limit is None else activation.limit,
        "alpha": activation.alpha,
        "beta": activation.beta,
    }
    return Step(source, values, lambda m: (m * top_k * product.units * product.split, 1), tile.blocks)
