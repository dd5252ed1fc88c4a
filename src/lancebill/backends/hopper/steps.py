"""The launches of a plan as values: kernel, arguments, grid. Needs no GPU.

Arguments refer to tensors by name: scratch memory, packed weights, or the caller's. `Bindings` resolves the names;
`lancebill kernels build` needs only the sources.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from lancebill.backends.gpu import workspace
from lancebill.backends.gpu.plan import SINGLE, GpuPlan, list_capacity, row_width
from lancebill.backends.gpu.row_kernels import ID_ARGUMENTS, WEIGHT_ARGUMENTS
from lancebill.backends.gpu.row_steps import combine, dispatch_finished, dispatch_indexed, prepare, routing_values
from lancebill.backends.gpu.step import CALL, COUNTERS, SCRATCH, Ref, Step, Value, scratch_ref
from lancebill.backends.hopper import kernel_sources as src
from lancebill.backends.hopper.plan import make_plan
from lancebill.jit.compile import KernelSource
from lancebill.moe.problem import INDEXED, Problem


def steps(plan: GpuPlan) -> tuple[Step, ...]:
    """All launches of one call, in order."""
    if plan.decode:
        return _decode_steps(plan)
    problem = plan.problem
    indexed = plan.work == INDEXED
    launches = dispatch_indexed(plan) if indexed else dispatch_finished(plan)
    x = Ref(
        SCRATCH if indexed or plan.first_gemm.converts_rows else CALL,
        "x",
        mapped=row_width(plan.first_gemm, problem.hidden),
    )
    if plan.w2 is None:
        return (*launches, *_grouped_gemms(plan, "w13", x, "x_scales", Ref(CALL, "out"), src.KEPT))
    kind = src.GATED if problem.activation.gated else src.UNGATED
    launches += _grouped_gemms(plan, "w13", x, "x_scales", scratch_ref("h"), kind)
    rows, scales = "h", "x_scales"
    if plan.w2.converts_rows:
        rows, scales = ("h8", "h_scales") if plan.w2.fp8 else ("h", "x_scales")
        launches.append(prepare(plan, "w2", scratch_ref("h"), (rows, scales), problem.top_k if indexed else 1))
    h = Ref(SCRATCH, rows, mapped=row_width(plan.w2, problem.intermediate))
    if not indexed:
        return (*launches, *_grouped_gemms(plan, "w2", h, scales, Ref(CALL, "out"), src.KEPT))
    return (*launches, *_grouped_gemms(plan, "w2", h, scales, scratch_ref("y"), src.ROWS), combine(plan))


def kernels(problem: Problem, tokens: int) -> list[KernelSource]:
    """The kernels that a layer launches for this many tokens, in order."""
    return [step.source for step in steps(make_plan(problem, tokens))]


def _grouped_gemms(plan: GpuPlan, name: str, rows: Ref, scales: str, out: Ref, kind: str) -> list[Step]:
    """The launches of a GEMM, each over its own tile list."""
    assert plan.rule is not None
    problem, activation, overlap, gemm = plan.problem, plan.problem.activation, plan.rule.overlap, plan.gemm(name)
    shape = problem.matrices[name]
    finished = kind in (src.ROWS, src.KEPT)
    launches = []
    for i, tile in enumerate(gemm.tiles):
        source = src.grouped_gemm(
            gemm.form, tile, problem.input.name, kind, "none" if finished else _activation_name(plan), bias=shape.bias,
            depend=(src.FIRST if i == 0 else src.LATER) if overlap else src.ALONE,
            prefetch=overlap and i == 0 and name == "w2", promote=gemm.promote,
        )  # fmt: skip
        values: dict[str, Value] = {
            "x_desc": rows,
            "w_desc": Ref(name, "codes", mapped=32),
            "s_desc": Ref(name, "scales" if gemm.form.scale_words else "codes", mapped=0),
            "out": out,
            "slots": scratch_ref("slots" if kind == src.ROWS else "counts"),
            "factors": Ref(name, "factors"),
            "bias": Ref(name, "bias" if shape.bias else "factors"),
            "token_scales": scratch_ref(scales),
            "tiles": scratch_ref("tiles", 16 * i * list_capacity(plan)),
            "tile_count": scratch_ref("counts", 16 * i),
            "taken": scratch_ref("counts", 16 * i + (4 if name == "w13" else 8)),
            "units": gemm.units,
            "slices": gemm.slices,
            "scale_blocks": gemm.scale_blocks,
            "columns": shape.n if finished else problem.intermediate,
            "limit": math.inf if activation.limit is None else activation.limit,
            "alpha": activation.alpha,
            "beta": activation.beta,
        }
        tiles = list_capacity(plan) if plan.rule.full_tile in tile.sizes else problem.experts
        launches.append(Step(source, values, _constant_grid(tiles * gemm.units // tile.units), tile.blocks))
    return launches


def _constant_grid(blocks: int) -> Callable[[int], tuple[int, int]]:
    return lambda tokens: (blocks, 1)


def _activation_name(plan: GpuPlan) -> str:
    activation = plan.problem.activation
    limited = activation.name == "situ" and activation.limit is not None
    return "situ_limited" if limited else activation.name


def _decode_steps(plan: GpuPlan) -> tuple[Step, ...]:
    """Few slots: both GEMMs read the ids directly; the second sums over a token's experts."""
    if plan.w2 is None:
        return (_decode_gemm(plan, "w13", CALL, "x", Ref(CALL, "out")),)
    return (
        _decode_gemm(plan, "w13", CALL, "x", scratch_ref("h")),
        _decode_gemm(plan, "w2", SCRATCH, "h", Ref(CALL, "out")),
    )


def _only_expert() -> dict[str, Value]:
    """Ids and weights of a linear: the id of the only expert is 0, read from an unused counter; no weights."""
    unused = Ref(COUNTERS, "all", 4 * workspace.SECOND)
    values: dict[str, Value] = dict.fromkeys((*ID_ARGUMENTS, *WEIGHT_ARGUMENTS), 0)
    return {**values, "ids": unused, "expert_map": unused, "weights": unused, "id_words": 1, "experts": 1}


def _decode_gemm(plan: GpuPlan, name: str, owner: str, rows: str, out: Ref) -> Step:
    """One GEMM with one tile per slot."""
    assert plan.rule is not None
    gemm, single = plan.gemm(name), plan.work == SINGLE
    problem, activation, shape = plan.problem, plan.problem.activation, plan.problem.matrices[name]
    first, top_k, (tile,) = name == "w13" and not single, problem.top_k, gemm.tiles
    kind = src.ROWS if not first else src.GATED if activation.gated else src.UNGATED
    source = src.decode_gemm(
        gemm.form, tile, gemm.pieces, 1 if first else top_k, problem.input.name, kind,
        _activation_name(plan) if first else "none", bias=shape.bias,
        weighted=not single and problem.weight_on_input == first,
        depend=plan.rule.overlap, promote=gemm.promote,
        # Only if the predecessor is our own launch: the ids are then older than it, and weights may be prefetched.
        prefetch=name == "w2" and plan.rule.overlap,
    )  # fmt: skip
    codes = Ref(name, "codes", mapped=32)
    values: dict[str, Value] = {
        "x_desc": codes if gemm.fp8 else Ref(owner, rows, mapped=shape.k),
        "w_desc": codes,
        "s_desc": Ref(name, "scales" if gemm.form.scale_words else "codes", mapped=0),
        "x": Ref(owner, rows) if gemm.fp8 else scratch_ref("counts"),
        "out": out,
        "scales": scratch_ref("x_scales" if name == "w13" else "h_scales" if gemm.fp8 else "counts"),
        "parts": scratch_ref("parts13" if name == "w13" else "parts2"),
        "counters": Ref(COUNTERS, "all", 4 * (workspace.FIRST if name == "w13" else workspace.SECOND)),
        "factors": Ref(name, "factors"),
        "bias": Ref(name, "bias" if shape.bias else "factors"),
        **(_only_expert() if single else routing_values(plan)),
        "top_k": top_k,
        "total_slots": lambda m: m * top_k,
        "units": gemm.units,
        "slices": gemm.slices,
        "scale_blocks": gemm.scale_blocks,
        "width": shape.k,
        "columns": problem.intermediate if first else shape.n,
        "slots_per_row": top_k if first else 1,
        "least": gemm.each,
        "shares": gemm.shares,
        "limit": math.inf if activation.limit is None else activation.limit,
        "alpha": activation.alpha,
        "beta": activation.beta,
    }
    stages = gemm.units * -(-gemm.slices // tile.slices)
    return Step(source, values, lambda m: (-(-m * top_k * stages // gemm.each), 1), tile.blocks)
