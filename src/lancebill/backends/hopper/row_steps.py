"""Launches around the products: dispatch, rows as a product takes them, combine."""

from __future__ import annotations

from collections.abc import Mapping

from lancebill.backends.hopper import kernel_sources as src
from lancebill.backends.hopper.plan import (
    SMALL,
    HopperPlan,
    Product,
    chunk,
    chunks,
    experts_padded,
    list_capacity,
    row_width,
)
from lancebill.backends.hopper.step import CALL, Grid, Ref, Step, Value, scratch_ref
from lancebill.backends.hopper.tuning.policy import power_of_two

_FEW_IDS, _MOST_IDS = (256, 512), 4096  # that every program of the one launch for few tokens looks at
_OWNERS = 1024  # rows a program finds the owners of


def dispatch_indexed(plan: HopperPlan) -> list[Step]:
    """ids to tile lists, rows to their places: one launch for few tokens, three for many."""
    problem = plan.problem
    top_k, experts = problem.top_k, experts_padded(problem)
    row = {
        "H": power_of_two(row_width(plan.first, problem.hidden)), "TOP_K": top_k, **_treatment(plan.first),
        "OWNED": plan.owned, "WEIGHTED": problem.weight_on_input,
    }  # fmt: skip
    if plan.tokens <= SMALL and plan.slots <= _MOST_IDS:
        most = min(_MOST_IDS, max(1024, power_of_two(SMALL * top_k)))
        ids = next(count for count in (*_FEW_IDS, most) if plan.slots <= count)
        own = row["NARROW"] and (row["ORDERED"] or row["SCALED"] or row["STATIC"])
        # Programs on an SM: with two, none waits for another to end. They need half the registers.
        blocks = 2 if row["H"] <= 8192 and ids <= 2048 and not own else 1
        constants = {"R": ids, "P": max(16, power_of_two(top_k)), "E": experts, **row}
        names = ("ids x weights perm pre_scale given slots places owners out scales tiles counts tokens hidden "
                 "capacity experts")  # fmt: skip
        return [_rows(plan, "dispatch_small", names, {**constants, **_sizes(plan)}, 8, lambda m: (m + 1, 1), blocks)]
    width = chunk(plan)
    return [
        _rows(plan, "count_ids", "ids counted total_slots experts", {"CHUNK": width, "E": experts}, 4,
              lambda m: (chunks(plan, m * top_k), 1)),
        _rows(plan, "place_ids", "ids counted slots places tiles counts total_slots capacity experts",
              {"CHUNKS": 64, "CHUNK": width, "P": 128, "E": experts, **_sizes(plan)}, 8,
              lambda m: (chunks(plan, m * top_k) + 1, 1)),
        _rows(plan, "send_rows", "x weights perm pre_scale given ids places owners out scales hidden", row,
              _warps(row["H"]), lambda m: (m, 1)),
    ]  # fmt: skip


def dispatch_finished(plan: HopperPlan) -> list[Step]:
    """Tile lists of rows that lie by expert already; then those rows, unless they can be read as they are."""
    constants = {"P": _OWNERS, "E": experts_padded(plan.problem), "FORM": plan.work, **_sizes(plan)}
    names = "edges owners tiles counts rows each experts capacity"
    found = [_rows(plan, "list_tiles", names, constants, 8, lambda m: (1 + (-(-m // _OWNERS) if plan.owned else 0), 1))]
    if plan.first.prepared:
        found.append(prepare(plan, "w13", Ref(CALL, "x"), ("x", "x_scales")))
    return found


def _sizes(plan: HopperPlan) -> dict[str, int]:
    assert plan.rule is not None
    return {f"T{i}": size for i, size in enumerate((*plan.rule.sizes, 0, 0, 0)[:4])}


def _treatment(product: Product) -> dict[str, bool]:
    """What is done to a row on its way to a product."""
    return {
        "NARROW": product.narrow,
        "ORDERED": product.ordered,
        "SCALED": product.scaled,
        "STATIC": product.static,
    }


def _rows(
    plan: HopperPlan, kernel: str, names: str, constants: Mapping[str, object], warps: int, grid: Grid, blocks: int = 1
) -> Step:
    """A dispatch kernel; its arguments all come from one table."""
    problem, element = plan.problem, plan.problem.input.name
    table: dict[str, tuple[str, Value]] = {
        "ids": ("*i32", Ref(CALL, "ids")),
        "x": (f"*{element}", Ref(CALL, "x")),
        "weights": ("*fp32", Ref(CALL, "weights")),
        **_expert_facts(plan.first, "w13"),
        "slots": ("*i32", scratch_ref("slots")),
        "places": ("*i32", scratch_ref("places")),
        "owners": ("*i32", scratch_ref("owners" if plan.owned else "counts")),
        "out": ("*fp8e4nv" if plan.first.narrow else f"*{element}", scratch_ref("x")),
        "scales": ("*fp32", scratch_ref("x_scales")),
        "tiles": ("*i32", scratch_ref("tiles")),
        "counts": ("*i32", scratch_ref("counts")),
        "counted": ("*i32", scratch_ref("counted")),
        "edges": (_EDGES[plan.work], scratch_ref("counts") if plan.work == "single" else Ref(CALL, "edges")),
        "tokens": ("i32", lambda m: m),
        "rows": ("i32", lambda m: m),
        "each": ("i32", lambda m: m // problem.experts),
        "experts": ("i32", problem.experts),
        "total_slots": ("i32", lambda m: m * problem.top_k),
        "hidden": ("i32", problem.hidden),
        "capacity": ("i32", list_capacity(plan)),
    }
    picked = {name: table[name] for name in names.split()}
    source = src.rows_kernel(kernel, {name: kind for name, (kind, _) in picked.items()}, constants, warps, blocks)
    return Step(source, {name: value for name, (_, value) in picked.items()}, grid)


_EDGES = {"contiguous": "*i64", "batched": "*i32", "single": "*i32", "indexed": "*i32"}


def _expert_facts(product: Product, name: str) -> dict[str, tuple[str, Value]]:
    """What an expert says of its input, where it says so."""
    nothing = scratch_ref("counts")
    return {
        "perm": ("*i32", Ref(name, "perm") if product.ordered else nothing),
        "pre_scale": ("*fp32", Ref(name, "pre_scale") if product.scaled else nothing),
        "given": ("*fp32", Ref(name, "input_scale") if product.static else nothing),
    }


def prepare(plan: HopperPlan, name: str, rows: Ref, into: tuple[str, str], per_token: int = 1) -> Step:
    """Rows that stay where they are, as a product takes them."""
    product, problem = plan.product(name), plan.problem
    width = problem.matrices[name].k
    owned = plan.owned and (plan.work != "indexed" or product.scaled or product.static)
    element = f"*{problem.input.name}"
    table: dict[str, tuple[str, Value]] = {
        "x": (element, rows),
        "owners": ("*i32", scratch_ref("owners" if owned else "counts")),
        **_expert_facts(product, name),
        "out": ("*fp8e4nv" if product.narrow else element, scratch_ref(into[0])),
        "scales": ("*fp32", scratch_ref(into[1])),
        "width": ("i32", width),
    }
    constants = {"W": power_of_two(row_width(product, width)), **_treatment(product), "OWNED": owned}
    kinds = {name: kind for name, (kind, _) in table.items()}
    source = src.rows_kernel("prepare_rows", kinds, constants, _warps(constants["W"]))
    return Step(source, {name: value for name, (_, value) in table.items()}, lambda m: (m * per_token, 1))


def _warps(width: int) -> int:
    """Of a program that holds a row: 64 numbers a thread are as many as always fit its registers."""
    return max(4, width // 2048)


def combine(plan: HopperPlan) -> Step:
    """A token's rows, weighted and summed."""
    problem = plan.problem
    assert problem.w2 is not None
    width, element = problem.w2.n, problem.input.name
    block = min(power_of_two(width), 1024 if plan.tokens <= 64 else 4096)
    kinds = {"y": f"*{element}", "weights": "*fp32", "ids": "*i32", "out": f"*{element}"}
    values: dict[str, Value] = {
        "y": scratch_ref("y"),
        "weights": Ref(CALL, "weights"),
        "ids": Ref(CALL, "ids"),
        "out": Ref(CALL, "out"),
        "hidden": width,
        "experts": problem.experts,
    }
    kinds |= {"hidden": "i32", "experts": "i32"}
    constants = {"BLOCK": block, "TOP_K": problem.top_k, "WEIGHTED": not problem.weight_on_input}
    source = src.rows_kernel("combine_rows", kinds, constants, 4 if block <= 1024 else 8)
    return Step(source, values, lambda m: (m, -(-width // block)))
