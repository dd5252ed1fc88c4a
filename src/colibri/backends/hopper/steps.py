"""The launches of a plan as values: which kernel, which arguments, which grid. Pure, no GPU.

Arguments name tensors instead of holding them: scratch memory, packed weights, or the caller's. `Program`
binds the names; `colibri kernels build` needs only the sources.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from colibri.backends.hopper import sources as src
from colibri.backends.hopper import workspace
from colibri.backends.hopper.plan import (
    SMALL,
    HopperPlan,
    Product,
    chunk,
    chunks,
    experts_padded,
    list_capacity,
)
from colibri.jit.compile import Source
from colibri.kernels.forms import E4M3

SCRATCH, CALL, COUNTERS = "scratch", "call", "counters"


@dataclass(frozen=True)
class Ref:
    """A tensor by name: in scratch memory, of the caller, or of a packed matrix ("w13", "w2").

    `mapped`: through a tensor map of this many columns (0: one-dimensional).
    """

    owner: str
    name: str
    offset: int = 0  # bytes
    mapped: int | None = None


Tokens = Callable[[int], int]
Value = int | float | Ref | Tokens


@dataclass(frozen=True)
class Step:
    """One launch. Arguments that are functions, and the grid, follow the number of tokens."""

    source: Source
    values: dict[str, Value]
    grid: Callable[[int], tuple[int, int]]
    persistent: int = 0  # blocks on an SM: the grid is then no larger than what is resident


def steps(plan: HopperPlan) -> tuple[Step, ...]:
    """Everything one call launches, in order."""
    assert plan.w13 is not None and plan.w2 is not None and plan.problem.w2 is not None
    problem = plan.problem
    if plan.decode:
        return _decode(plan)
    kind = src.GATED if problem.activation.gated else src.UNGATED
    found = _dispatch(plan)
    found += _products(plan, "w13", plan.w13, ("x", "x_scales", "h"), kind, problem.intermediate)
    rows, scales = "h", "x_scales"
    if plan.w2.form.activations == E4M3:
        rows, scales = "h8", "h_scales"
        found.append(_quantise(plan, _scratch("h"), ("h8", "h_scales"), problem.intermediate, problem.top_k))
    found += _products(plan, "w2", plan.w2, (rows, scales, "y"), src.ROWS, plan.problem.w2.n)
    found.append(_combine(plan))
    return tuple(found)


def _scratch(name: str, offset: int = 0) -> Ref:
    return Ref(SCRATCH, name, offset)


def _products(
    plan: HopperPlan, name: str, product: Product, tensors: tuple[str, str, str], kind: str, columns: int
) -> list[Step]:
    """A launch for each class of tiles, each over its own list."""
    assert plan.rule is not None
    problem, activation, overlap = plan.problem, plan.problem.activation, plan.rule.overlap
    shape = problem.matrices[name]
    rows, scales, out = tensors
    words = "scales" if product.form.scale_words else "codes"
    depth = problem.hidden if name == "w13" else problem.intermediate
    found, first = [], 0
    for i, tile in enumerate(product.tiles):
        source = src.product(
            product.form, tile, problem.input.name, kind, _title(plan) if kind != src.ROWS else "none", bias=shape.bias,
            tokens_inner=plan.rule.tokens_inner,
            depend=(src.FIRST if i == 0 else src.LATER) if overlap else src.ALONE,
            prefetch=overlap and i == 0 and kind == src.ROWS,
        )  # fmt: skip
        values: dict[str, Value] = {
            "x_desc": Ref(SCRATCH, rows, mapped=depth),
            "x2_desc": Ref(SCRATCH, rows, mapped=depth),
            "w_desc": Ref(name, "codes", mapped=32),
            "s_desc": Ref(name, words, mapped=0),
            "out": _scratch(out),
            "slots": _scratch("slots"),
            "factors": Ref(name, "factors"),
            "bias": Ref(name, "bias" if shape.bias else "factors"),
            "token_scales": _scratch(scales),
            "tiles": _scratch("tiles", 16 * first),
            "tile_count": _scratch("counts", 16 * i),
            "units": product.units,
            "slices": product.slices,
            "scale_blocks": product.scale_blocks,
            "columns": columns,
            "limit": math.inf if activation.limit is None else activation.limit,
            "alpha": activation.alpha,
            "beta": activation.beta,
        }
        most = (list_capacity(plan) if i == 0 else problem.experts) * product.units
        found.append(Step(source, values, _fixed(most), tile.blocks))
        first = list_capacity(plan) + i * experts_padded(problem)
    return found


def _fixed(blocks: int) -> Callable[[int], tuple[int, int]]:
    return lambda tokens: (blocks, 1)


def _title(plan: HopperPlan) -> str:
    activation = plan.problem.activation
    limited = activation.name == "situ" and activation.limit is not None
    return "situ_limited" if limited else activation.name


def _dispatch(plan: HopperPlan) -> list[Step]:
    """ids to tile lists, rows to their places: one launch for few tokens, three for many."""
    assert plan.rule is not None and plan.w13 is not None
    problem = plan.problem
    top_k, experts = problem.top_k, experts_padded(problem)
    lists = {f"T{i}": size for i, size in enumerate((*plan.rule.sizes, 0, 0, 0)[:4])}
    row = {
        "H": _power_of_two(problem.hidden),
        "TOP_K": top_k,
        "NARROW": plan.w13.form.activations == E4M3,
        "WEIGHTED": problem.weight_on_input,
        "ORDERED": problem.w13.act_order,
    }
    if plan.tokens <= SMALL:
        each = 1 if plan.tokens <= SMALL // 4 else 4
        ids = max(1024, _power_of_two((SMALL // 4 if each == 1 else SMALL) * top_k))
        constants = {"R": ids, "TOKENS": each, "P": max(16, _power_of_two(each * top_k)), "E": experts, **row, **lists}
        names = "ids x weights perm slots places out scales tiles counts tokens hidden capacity"
        return [_rows(plan, "dispatch_small", names, constants, 8, lambda m: (-(-m // each) + 1, 1))]
    width = chunk(plan)
    return [
        _rows(plan, "count_ids", "ids counted total_slots", {"CHUNK": width, "E": experts}, 4,
              lambda m: (chunks(plan, m * top_k), 1)),
        _rows(plan, "place_ids", "ids counted slots places tiles counts total_slots capacity",
              {"CHUNKS": 64, "CHUNK": width, "P": 128, "E": experts, **lists}, 8,
              lambda m: (chunks(plan, m * top_k) + 1, 1)),
        _rows(plan, "send_rows", "x weights perm ids places out scales hidden", row, 4, lambda m: (m, 1)),
    ]  # fmt: skip


def _rows(
    plan: HopperPlan, kernel: str, names: str, constants: Mapping[str, object], warps: int,
    grid: Callable[[int], tuple[int, int]],
) -> Step:  # fmt: skip
    """A dispatch kernel; its arguments all come from one table."""
    problem = plan.problem
    narrow = plan.w13 is not None and plan.w13.form.activations == E4M3
    element = problem.input.name
    perm = Ref("w13", "perm") if problem.w13.act_order else _scratch("slots")
    table: dict[str, tuple[str, Value]] = {
        "ids": ("*i32", Ref(CALL, "ids")),
        "x": (f"*{element}", Ref(CALL, "x")),
        "weights": ("*fp32", Ref(CALL, "weights")),
        "perm": ("*i32", perm),
        "slots": ("*i32", _scratch("slots")),
        "places": ("*i32", _scratch("places")),
        "out": ("*fp8e4nv" if narrow else f"*{element}", _scratch("x")),
        "scales": ("*fp32", _scratch("x_scales")),
        "tiles": ("*i32", _scratch("tiles")),
        "counts": ("*i32", _scratch("counts")),
        "counted": ("*i32", _scratch("counted")),
        "tokens": ("i32", lambda m: m),
        "total_slots": ("i32", lambda m: m * problem.top_k),
        "hidden": ("i32", problem.hidden),
        "capacity": ("i32", list_capacity(plan)),
    }
    picked = {name: table[name] for name in names.split()}
    source = src.rows_kernel(kernel, {name: kind for name, (kind, _) in picked.items()}, constants, warps)
    return Step(source, {name: value for name, (_, value) in picked.items()}, grid)


def _quantise(plan: HopperPlan, rows: Ref, into: tuple[str, str], width: int, per_token: int) -> Step:
    """Rows as fp8, one scale each."""
    kinds = {"x": f"*{plan.problem.input.name}", "out": "*fp8e4nv", "scales": "*fp32", "width": "i32"}
    values: dict[str, Value] = {"x": rows, "out": _scratch(into[0]), "scales": _scratch(into[1]), "width": width}
    source = src.rows_kernel("quantise_rows", kinds, {"W": _power_of_two(width)}, 4)
    return Step(source, values, lambda m: (m * per_token, 1))


def _decode(plan: HopperPlan) -> tuple[Step, ...]:
    """Few slots: both products take the ids as they are; the second sums over a token's experts."""
    assert plan.w13 is not None and plan.w2 is not None
    problem = plan.problem
    found: list[Step] = []
    x, h = Ref(CALL, "x", mapped=problem.hidden), Ref(SCRATCH, "h", mapped=problem.intermediate)
    h_scales = "x_scales"
    if plan.w13.form.activations == E4M3:
        found.append(_quantise(plan, Ref(CALL, "x"), ("x", "x_scales"), problem.hidden, 1))
        x = Ref(SCRATCH, "x", mapped=problem.hidden)
    if plan.w2.form.activations == E4M3:
        h, h_scales = Ref(SCRATCH, "h8", mapped=problem.intermediate), "h_scales"
    # Weights may be fetched before the predecessor ends where that is a launch of ours: the ids are older.
    found.append(_slotwise(plan, "w13", x, "x_scales", _scratch("h"), prefetch=bool(found)))
    found.append(_slotwise(plan, "w2", h, h_scales, Ref(CALL, "out"), prefetch=True))
    return tuple(found)


def _slotwise(plan: HopperPlan, name: str, x: Ref, scales: str, out: Ref, *, prefetch: bool) -> Step:
    """One product, a slot a tile; the first also quantises the hidden rows where the second wants them narrow."""
    product = plan.w13 if name == "w13" else plan.w2
    assert product is not None and plan.w2 is not None and plan.rule is not None
    problem, activation, shape = plan.problem, plan.problem.activation, plan.problem.matrices[name]
    first, top_k, (tile,) = name == "w13", problem.top_k, product.tiles
    kind = src.ROWS if not first else src.GATED if activation.gated else src.UNGATED
    quantise = first and plan.w2.form.activations == E4M3
    source = src.slotwise(
        product.form, tile, product.split, problem.input.name, kind, _title(plan) if first else "none",
        bias=shape.bias, weighted=problem.weight_on_input == first, depend=plan.rule.overlap,
        prefetch=prefetch and plan.rule.overlap, quantise=quantise,
    )  # fmt: skip
    values: dict[str, Value] = {
        "x_desc": x,
        "w_desc": Ref(name, "codes", mapped=32),
        "s_desc": Ref(name, "scales" if product.form.scale_words else "codes", mapped=0),
        "out": out,
        "narrow": _scratch("h8" if quantise else "h"),
        "narrow_scales": _scratch("h_scales" if quantise else "x_scales"),
        "parts": _scratch("parts13" if first else "parts2"),
        "counters": Ref(COUNTERS, "all", 4 * (workspace.FIRST if first else workspace.SECOND)),
        "row_counters": Ref(COUNTERS, "all", 4 * workspace.OF_ROWS),
        "factors": Ref(name, "factors"),
        "bias": Ref(name, "bias" if shape.bias else "factors"),
        "token_scales": _scratch(scales),
        "ids": Ref(CALL, "ids"),
        "weights": Ref(CALL, "weights"),
        "total_slots": lambda m: m * top_k,
        "units": product.units,
        "slices": product.slices,
        "scale_blocks": product.scale_blocks,
        "columns": problem.intermediate if first else shape.n,
        "slots_per_row": top_k if first else 1,
        "slots_per_token": top_k,
        "limit": math.inf if activation.limit is None else activation.limit,
        "alpha": activation.alpha,
        "beta": activation.beta,
    }
    return Step(source, values, lambda m: (m * top_k * product.units * product.split, 1), tile.blocks)


def _combine(plan: HopperPlan) -> Step:
    problem = plan.problem
    assert problem.w2 is not None
    width, element = problem.w2.n, problem.input.name
    block = min(_power_of_two(width), 1024 if plan.tokens <= 64 else 4096)
    kinds = {"y": f"*{element}", "weights": "*fp32", "ids": "*i32", "out": f"*{element}", "hidden": "i32"}
    values: dict[str, Value] = {
        "y": _scratch("y"),
        "weights": Ref(CALL, "weights"),
        "ids": Ref(CALL, "ids"),
        "out": Ref(CALL, "out"),
        "hidden": width,
    }
    constants = {"BLOCK": block, "TOP_K": problem.top_k, "WEIGHTED": not problem.weight_on_input}
    source = src.rows_kernel("combine_rows", kinds, constants, 4 if block <= 1024 else 8)
    return Step(source, values, lambda m: (m, -(-width // block)))


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
