"""The launches of a layer as values: kernel, arguments, grid. Needs no GPU.

Arguments refer to tensors by name: scratch memory, packed weights, or the caller's. `Bindings` resolves the names;
`lancebill kernels build` needs only the sources. What a backend adds is how its GEMMs read rows and weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from lancebill.backends.gpu import workspace
from lancebill.backends.gpu.plan import SINGLE, GemmPlan, GpuPlan, list_capacity
from lancebill.backends.gpu.row_kernels import ID_ARGUMENTS, WEIGHT_ARGUMENTS
from lancebill.backends.gpu.row_steps import combine, dispatch_finished, dispatch_indexed, prepare, routing_values
from lancebill.backends.gpu.step import CALL, COUNTERS, SCRATCH, Grid, Ref, Step, Value, scratch_ref
from lancebill.backends.gpu.tiles import Tile
from lancebill.moe.problem import INDEXED

GATED, UNGATED, ROWS, KEPT = "gated", "ungated", "rows", "kept"  # what the epilogue writes

# The launches of a GEMM over lists of tiles: plan, matrix, input rows, name of the rows' scales, output, epilogue.
GroupedGemms = Callable[[GpuPlan, str, Ref, str, Ref, str], list[Step]]
# The launch of a GEMM with one tile per slot: plan, matrix, input rows, output.
DecodeGemm = Callable[[GpuPlan, str, Ref, Ref], Step]


def layer_steps(plan: GpuPlan, gemms: GroupedGemms, decode_gemm: DecodeGemm) -> tuple[Step, ...]:
    """All launches of one call, in order."""
    if plan.decode:
        return _decode_steps(plan, decode_gemm)
    problem = plan.problem
    indexed = plan.work == INDEXED
    launches = dispatch_indexed(plan) if indexed else dispatch_finished(plan)
    x = Ref(SCRATCH if indexed or plan.first_gemm.converts_rows else CALL, "x")
    if plan.w2 is None:
        return (*launches, *gemms(plan, "w13", x, "x_scales", Ref(CALL, "out"), KEPT))
    kind = GATED if problem.activation.gated else UNGATED
    launches += gemms(plan, "w13", x, "x_scales", scratch_ref("h"), kind)
    rows, scales = "h", "x_scales"
    if plan.w2.converts_rows:
        rows, scales = ("h8", "h_scales") if plan.w2.byte_inputs else ("h", "x_scales")
        launches.append(prepare(plan, "w2", scratch_ref("h"), (rows, scales), problem.top_k if indexed else 1))
    if not indexed:
        return (*launches, *gemms(plan, "w2", scratch_ref(rows), scales, Ref(CALL, "out"), KEPT))
    return (*launches, *gemms(plan, "w2", scratch_ref(rows), scales, scratch_ref("y"), ROWS), combine(plan))


def _decode_steps(plan: GpuPlan, decode_gemm: DecodeGemm) -> tuple[Step, ...]:
    """Few slots: both GEMMs read the ids directly; the second sums over a token's experts."""
    if plan.w2 is None:
        return (decode_gemm(plan, "w13", Ref(CALL, "x"), Ref(CALL, "out")),)
    return (
        decode_gemm(plan, "w13", Ref(CALL, "x"), scratch_ref("h")),
        decode_gemm(plan, "w2", scratch_ref("h"), Ref(CALL, "out")),
    )


def grouped_values(plan: GpuPlan, name: str, number: int, scales: str, out: Ref, kind: str) -> dict[str, Value]:
    """The arguments of launch `number` of a GEMM, all but its input rows, codes and scales."""
    gemm, shape, activation = plan.gemm(name), plan.problem.matrices[name], plan.problem.activation
    return {
        "out": out,
        "slots": scratch_ref("slots" if kind == ROWS else "counts"),
        "factors": Ref(name, "factors"),
        "bias": Ref(name, "bias" if shape.bias else "factors"),
        "token_scales": scratch_ref(scales),
        "tiles": scratch_ref("tiles", 16 * number * list_capacity(plan)),
        "tile_count": scratch_ref("counts", 16 * number),
        "taken": scratch_ref("counts", 16 * number + (4 if name == "w13" else 8)),
        "units": gemm.units,
        "slices": gemm.slices,
        "scale_blocks": gemm.scale_blocks,
        "columns": shape.n if kind in (ROWS, KEPT) else plan.problem.intermediate,
        "limit": math.inf if activation.limit is None else activation.limit,
        "alpha": activation.alpha,
        "beta": activation.beta,
    }


def grouped_grid(plan: GpuPlan, gemm: GemmPlan, tile: Tile) -> Grid:
    """One block for each tile that there may be."""
    assert plan.rule is not None
    tiles = list_capacity(plan) if plan.rule.full_tile in tile.sizes else plan.problem.experts
    return lambda tokens: (tiles * gemm.units // tile.units, 1)


def decode_values(plan: GpuPlan, name: str, out: Ref) -> dict[str, Value]:
    """The arguments of a GEMM with one tile per slot, all but its input rows, codes and scales."""
    gemm, single, first = plan.gemm(name), plan.work == SINGLE, is_first_of_two(plan, name)
    problem, activation, shape = plan.problem, plan.problem.activation, plan.problem.matrices[name]
    top_k = problem.top_k
    return {
        "out": out,
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


def decode_grid(plan: GpuPlan, gemm: GemmPlan, tile: Tile) -> Grid:
    """One block for each chunk."""
    stages = gemm.units * -(-gemm.slices // tile.slices)
    return lambda m: (-(-m * plan.problem.top_k * stages // gemm.each), 1)


def decode_kind(plan: GpuPlan, name: str) -> str:
    """What the epilogue of a decode GEMM writes."""
    if not is_first_of_two(plan, name):
        return ROWS
    return GATED if plan.problem.activation.gated else UNGATED


def is_first_of_two(plan: GpuPlan, name: str) -> bool:
    """Whether the GEMM's output is the hidden row of experts."""
    return name == "w13" and plan.work != SINGLE


def applies_weights(plan: GpuPlan, name: str) -> bool:
    """Whether a decode GEMM multiplies its results by the routing weights."""
    return plan.work != SINGLE and plan.problem.weight_on_input == is_first_of_two(plan, name)


def activation_name(plan: GpuPlan, kind: str) -> str:
    """The activation that an epilogue applies."""
    activation = plan.problem.activation
    if kind in (ROWS, KEPT):
        return "none"
    limited = activation.name == "situ" and activation.limit is not None
    return "situ_limited" if limited else activation.name


def _only_expert() -> dict[str, Value]:
    """Ids and weights of a linear: the id of the only expert is 0, read from an unused counter; no weights."""
    unused = Ref(COUNTERS, "all", 4 * workspace.SECOND)
    values: dict[str, Value] = dict.fromkeys((*ID_ARGUMENTS, *WEIGHT_ARGUMENTS), 0)
    return {**values, "ids": unused, "expert_map": unused, "weights": unused, "id_words": 1, "experts": 1}
