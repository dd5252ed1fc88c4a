"""The launches around the GEMMs: dispatch, conversion of rows, combine."""

from __future__ import annotations

from collections.abc import Mapping

from lancebill.backends.gpu import row_kernels as src
from lancebill.backends.gpu.kernels.weight_form import E4M3, S8
from lancebill.backends.gpu.plan import (
    SMALL,
    GemmPlan,
    GpuPlan,
    chunk,
    chunks,
    experts_padded,
    list_capacity,
    row_width,
)
from lancebill.backends.gpu.step import CALL, Grid, Ref, Step, Value, scratch_ref
from lancebill.backends.gpu.tiles import power_of_two
from lancebill.jit.compile import HOPPER

_FEW_IDS, _MOST_IDS = (256, 512), 4096  # ids that every program of `dispatch_small` reads
_PLACED = 128  # slots that a program places at once, one for each thread: with more threads, all would load all ids
_OWNERS = 1024  # rows whose owners one program writes
# Starting a program takes as long as converting a narrow row. From so many rows on, one program converts several narrow
# ones, one after the other: there still are programs enough.
_NARROW, _MANY_ROWS, _ROWS_TOGETHER = 1024, 16384, 4
_ROW_ELEMENT = {E4M3: "fp8e4nv", S8: "i8"}
_IDS, _WEIGHTS = " ".join(src.ID_ARGUMENTS), " ".join(src.WEIGHT_ARGUMENTS)


def dispatch_indexed(plan: GpuPlan) -> list[Step]:
    """Make tile lists from ids and copy rows to their places: one launch for few tokens, three for many."""
    problem = plan.problem
    top_k, experts = problem.top_k, experts_padded(problem)
    row = {
        "H": power_of_two(row_width(plan.first_gemm, problem.hidden)), "TOP_K": top_k, **_conversion(plan.first_gemm),
        "WEIGHTED": problem.weight_on_input,
    }  # fmt: skip
    if plan.tokens <= SMALL and plan.slots <= _MOST_IDS:
        most = min(_MOST_IDS, max(1024, power_of_two(SMALL * top_k)))
        ids = next(count for count in (*_FEW_IDS, most) if plan.slots <= count)
        per_expert = row["QUANTISED"] and (row["ORDERED"] or row["SCALED"] or row["STATIC"])
        # Two programs per SM all run at once, but each has half the registers.
        blocks = 2 if row["H"] <= 8192 and ids <= 2048 and experts <= 512 and not per_expert else 1
        constants = {"R": ids, "P": max(16, power_of_two(top_k)), "E": experts, **row}
        names = (f"{_IDS} {_WEIGHTS} x perm pre_scale given slots places owners out scales tiles counts tokens hidden "
                 "capacity")  # fmt: skip
        return [
            _dispatch_step(
                plan, "dispatch_small", names, {**constants, **_sizes(plan)}, 8, lambda m: (m + 1, 1), blocks
            )
        ]
    width = chunk(plan)
    held = (1 << 13) // experts  # chunks whose counts a program holds in registers
    return [
        _dispatch_step(plan, "count_ids", f"{_IDS} counted top_k total_slots", {"CHUNK": width, "E": experts}, 4,
              lambda m: (chunks(plan, m * top_k), 1)),
        _dispatch_step(plan, "place_ids",
              f"{_IDS} counted slots places owners tiles counts top_k total_slots capacity",
              {"CHUNKS": held, "CHUNK": width, "P": _PLACED, "E": experts, **_sizes(plan)}, _PLACED // 32,
              lambda m: (chunks(plan, m * top_k) + 1, 1)),
        _dispatch_step(plan, "send_rows", f"{_WEIGHTS} x perm pre_scale given places owners out scales hidden", row,
              max(4, _warps(row["H"])), lambda m: (m, 1), _blocks(plan, plan.first_gemm, max(4, _warps(row["H"])))),
    ]  # fmt: skip


def dispatch_finished(plan: GpuPlan) -> list[Step]:
    """Make tile lists for rows that are grouped by expert already, and convert the rows if necessary."""
    constants = {"P": _OWNERS, "E": experts_padded(plan.problem), "FORM": plan.work, **_sizes(plan)}
    names = "edges owners tiles counts rows each experts capacity"
    launches = [
        _dispatch_step(
            plan, "list_tiles", names, constants, 8, lambda m: (1 + (-(-m // _OWNERS) if plan.needs_owners else 0), 1)
        )
    ]
    if plan.first_gemm.converts_rows:
        launches.append(prepare(plan, "w13", Ref(CALL, "x"), ("x", "x_scales")))
    return launches


def _sizes(plan: GpuPlan) -> dict[str, int]:
    """The full tile, all sizes in decreasing order, and the launch of each."""
    assert plan.rule is not None
    launch_of = {size: number for number, sizes in enumerate(plan.rule.launches) for size in sizes}
    sizes = sorted(launch_of, reverse=True)
    launches = src.packed_bytes([launch_of[size] for size in sizes])
    return {"FULL": plan.rule.full_tile, "SIZES": src.packed_bytes(sizes), "LAUNCHES": launches}


def _conversion(gemm: GemmPlan) -> dict[str, int]:
    """How the rows of a GEMM's input are converted."""
    return {
        "QUANTISED": gemm.byte_inputs,
        "ORDERED": gemm.ordered,
        "SCALED": gemm.scaled,
        "STATIC": gemm.static,
        "ROTATION": gemm.rotation,
    }


def _row_pointer(gemm: GemmPlan, element: str) -> str:
    """The pointer type of a GEMM's input rows, which are of type `element` unless they are quantised."""
    return f"*{_ROW_ELEMENT.get(gemm.form.activations, element)}"


def _dispatch_step(
    plan: GpuPlan, kernel: str, names: str, constants: Mapping[str, object], warps: int, grid: Grid, blocks: int = 1
) -> Step:
    """The launch of a dispatch kernel with the named arguments."""
    problem, element = plan.problem, plan.problem.input.name
    table: dict[str, tuple[str, Value]] = {
        "x": (f"*{element}", Ref(CALL, "x")),
        **_expert_inputs(plan.first_gemm, "w13"),
        "slots": ("*i32", scratch_ref("slots")),
        "places": ("*i32", scratch_ref("places")),
        "owners": ("*i32", scratch_ref("owners" if plan.needs_owners else "counts")),
        "out": (_row_pointer(plan.first_gemm, element), scratch_ref("x")),
        "scales": ("*fp32", scratch_ref("x_scales")),
        "tiles": ("*i32", scratch_ref("tiles")),
        "counts": ("*i32", scratch_ref("counts")),
        "counted": ("*i32", scratch_ref("counted")),
        "edges": (_EDGES[plan.work], scratch_ref("counts") if plan.work == "single" else Ref(CALL, "edges")),
        "tokens": ("i32", lambda m: m),
        "rows": ("i32", lambda m: m),
        "each": ("i32", lambda m: m // problem.experts),
        "experts": ("i32", problem.experts),
        "top_k": ("i32", problem.top_k),
        "total_slots": ("i32", lambda m: m * problem.top_k),
        "hidden": ("i32", problem.hidden),
        "capacity": ("i32", list_capacity(plan)),
    }
    kinds = {**src.ID_ARGUMENTS, **src.WEIGHT_ARGUMENTS}
    table |= {name: (kinds[name], value) for name, value in routing_values(plan).items()}
    chosen = {name: table[name] for name in names.split()}
    source = src.rows_kernel(kernel, {name: kind for name, (kind, _) in chosen.items()}, constants, warps, blocks)
    return Step(source, {name: value for name, (_, value) in chosen.items()}, grid)


def routing_values(plan: GpuPlan) -> dict[str, Value]:
    """The arguments by which kernels read the caller's ids and weights, and the number of experts."""
    names = (*src.ID_ARGUMENTS, *src.WEIGHT_ARGUMENTS)
    return {**{name: Ref(CALL, name) for name in names}, "experts": plan.problem.experts}


_EDGES = {"contiguous": "*i64", "batched": "*i32", "single": "*i32", "indexed": "*i32"}


def _expert_inputs(gemm: GemmPlan, name: str) -> dict[str, tuple[str, Value]]:
    """Input conversion tensors of the experts; a placeholder where the GEMM has none."""
    placeholder = scratch_ref("counts")
    return {
        "perm": ("*i32", Ref(name, "perm") if gemm.ordered else placeholder),
        "pre_scale": ("*fp32", Ref(name, "pre_scale") if gemm.scaled else placeholder),
        "given": ("*fp32", Ref(name, "input_scale") if gemm.static else placeholder),
    }


def prepare(plan: GpuPlan, name: str, rows: Ref, into: tuple[str, str], per_token: int = 1) -> Step:
    """Convert rows in `rows` to the input of a GEMM; the row order stays."""
    gemm, problem = plan.gemm(name), plan.problem
    width, placed = problem.matrices[name].k, plan.work == "indexed"
    owned = plan.needs_owners and (not placed or gemm.scaled or gemm.static)
    element = f"*{problem.input.name}"
    table: dict[str, tuple[str, Value]] = {
        "x": (element, rows),
        "places": ("*i32", scratch_ref("places" if placed else "counts")),
        "owners": ("*i32", scratch_ref("owners" if owned else "counts")),
        **_expert_inputs(gemm, name),
        "out": (_row_pointer(gemm, problem.input.name), scratch_ref(into[0])),
        "scales": ("*fp32", scratch_ref(into[1])),
        "rows": ("i32", lambda m: m * per_token),
        "width": ("i32", width),
    }
    padded = power_of_two(row_width(gemm, width))
    each = _ROWS_TOGETHER if padded <= _NARROW and plan.tokens * per_token >= _MANY_ROWS else 1
    constants = {"R": each, "W": padded, **_conversion(gemm), "PLACED": placed, "OWNED": owned}
    kinds = {name: kind for name, (kind, _) in table.items()}
    warps = _warps(padded)
    source = src.rows_kernel("prepare_rows", kinds, constants, warps, _blocks(plan, gemm, warps))
    return Step(source, {name: value for name, (_, value) in table.items()}, lambda m: (-(-m * per_token // each), 1))


def _warps(width: int) -> int:
    """Warps of a program that holds a row in registers: 64 numbers per thread always fit."""
    return max(1, width // 2048)


def _blocks(plan: GpuPlan, gemm: GemmPlan, warps: int) -> int:
    """Programs per SM that hold a row each: one reads while others compute. 24 warps leave 80 registers per thread,
    enough on Hopper if rows are only divided by their scale."""
    if plan.arch != HOPPER or gemm.ordered or gemm.scaled or gemm.static or gemm.rotation:
        return 1
    return max(1, 24 // warps)


def combine(plan: GpuPlan) -> Step:
    """The weighted sum of each token's rows."""
    problem = plan.problem
    assert problem.w2 is not None
    width, element = problem.w2.n, problem.input.name
    block = min(power_of_two(width), 1024 if plan.tokens <= 64 else 4096)
    kinds = {"y": f"*{element}", **src.WEIGHT_ARGUMENTS, "places": "*i32", "out": f"*{element}", "hidden": "i32"}
    values: dict[str, Value] = {
        "y": scratch_ref("y"),
        **{name: Ref(CALL, name) for name in src.WEIGHT_ARGUMENTS},
        "places": scratch_ref("places"),
        "out": Ref(CALL, "out"),
        "hidden": width,
    }
    constants = {"BLOCK": block, "TOP_K": problem.top_k, "WEIGHTED": not problem.weight_on_input}
    source = src.rows_kernel("combine_rows", kinds, constants, 4 if block <= 1024 else 8)
    return Step(source, values, lambda m: (m, -(-width // block)))
