"""The GEMM launches of the Hopper kernels, which read rows, codes and scales through tensor maps. Needs no GPU."""

from __future__ import annotations

from dataclasses import replace

from lancebill.backends.gpu import steps as shared
from lancebill.backends.gpu.plan import GpuPlan, row_width
from lancebill.backends.gpu.step import CALL, COUNTERS, Ref, Step, Value, scratch_ref
from lancebill.backends.gpu.tiles import SlotStrips, Strips
from lancebill.backends.hopper import kernel_sources as src
from lancebill.backends.hopper.plan import make_plan
from lancebill.jit.compile import KernelSource
from lancebill.moe.problem import Problem


def steps(plan: GpuPlan) -> tuple[Step, ...]:
    """All launches of one call, in order."""
    if plan.strips is not None:
        return (_strip_gemm(plan, plan.strips),)
    if plan.slot_strips is not None:
        return _slot_strips(plan, plan.slot_strips)
    return (_few_rows_gemm(plan),) if plan.few_rows else shared.layer_steps(plan, _grouped_gemms, _decode_gemm)


def kernels(problem: Problem, tokens: int) -> list[KernelSource]:
    """The kernels that a layer launches for this many tokens, in order."""
    return [step.source for step in steps(make_plan(problem, tokens))]


def _grouped_gemms(plan: GpuPlan, name: str, rows: Ref, scales: str, out: Ref, kind: str) -> list[Step]:
    """The launches of a GEMM, each over its own tile list."""
    assert plan.rule is not None
    problem, overlap, gemm = plan.problem, plan.rule.overlap, plan.gemm(name)
    shape, activation = problem.matrices[name], shared.activation_name(plan, kind)
    launches = []
    for i, tile in enumerate(gemm.tiles):
        source = src.grouped_gemm(
            gemm.form, tile, problem.input.name, kind, activation, bias=shape.bias,
            depend=(src.FIRST if i == 0 else src.LATER) if overlap else src.ALONE,
            prefetch=overlap and i == 0 and name == "w2", promote=gemm.promote,
        )  # fmt: skip
        values: dict[str, Value] = {
            "x_desc": replace(rows, mapped=row_width(gemm, shape.k)),
            "w_desc": Ref(name, "codes", mapped=32),
            "s_desc": Ref(name, "scales" if gemm.form.scale_words else "codes", mapped=0),
            **shared.grouped_values(plan, name, i, scales, out, kind),
        }
        launches.append(Step(source, values, shared.grouped_grid(plan, gemm, tile), tile.blocks))
    return launches


def _decode_gemm(plan: GpuPlan, name: str, rows: Ref, out: Ref) -> Step:
    """One GEMM with one tile per slot."""
    assert plan.rule is not None
    gemm, problem, kind, (tile,) = plan.gemm(name), plan.problem, shared.decode_kind(plan, name), plan.gemm(name).tiles
    shape, first = problem.matrices[name], shared.is_first_of_two(plan, name)
    source = src.decode_gemm(
        gemm.form, tile, gemm.pieces, 1 if first else problem.top_k, problem.input.name, kind,
        shared.activation_name(plan, kind), bias=shape.bias, weighted=shared.applies_weights(plan, name),
        depend=plan.rule.overlap, promote=gemm.promote,
        # Only if the predecessor is our own launch: the ids are then older than it, and weights may be prefetched.
        prefetch=name == "w2" and plan.rule.overlap,
    )  # fmt: skip
    codes = Ref(name, "codes", mapped=32)
    values: dict[str, Value] = {
        "x_desc": codes if gemm.byte_inputs else replace(rows, mapped=shape.k),
        "w_desc": codes,
        "s_desc": Ref(name, "scales" if gemm.form.scale_words else "codes", mapped=0),
        "x": rows if gemm.byte_inputs else scratch_ref("counts"),
        "scales": scratch_ref("x_scales" if name == "w13" else "h_scales" if gemm.byte_inputs else "counts"),
        **shared.decode_values(plan, name, out),
    }
    return Step(source, values, shared.decode_grid(plan, gemm, tile), tile.blocks)


def _few_rows_gemm(plan: GpuPlan) -> Step:
    """The GEMM of one matrix with all rows in one tile."""
    assert plan.rule is not None
    gemm, shape, (tile,) = plan.first_gemm, plan.problem.w13, plan.first_gemm.tiles
    source = src.few_rows_gemm(
        gemm.form, tile, gemm.pieces, plan.problem.input.name, bias=shape.bias, depend=plan.rule.overlap,
        promote=gemm.promote,
    )  # fmt: skip
    values: dict[str, Value] = {
        "x_desc": Ref(CALL, "x", mapped=shape.k),
        "w_desc": Ref("w13", "codes", mapped=32),
        "s_desc": Ref("w13", "scales" if gemm.form.scale_words else "codes", mapped=0),
        "out": Ref(CALL, "out"),
        "parts": scratch_ref("parts13" if gemm.pieces > 1 else "counts"),
        "counters": Ref(COUNTERS, "all"),
        "factors": Ref("w13", "factors"),
        "bias": Ref("w13", "bias" if shape.bias else "factors"),
        "rows": lambda m: m,
        "units": gemm.units,
        "slices": gemm.slices,
        "scale_blocks": gemm.scale_blocks,
        "columns": shape.n,
        "each": gemm.each,
    }
    chunks = -(-gemm.units * -(-gemm.slices // tile.slices) // gemm.each)
    return Step(source, values, lambda m: (chunks, 1))


def _strip_gemm(plan: GpuPlan, strips: Strips) -> Step:
    """The GEMM of one matrix by strips of features."""
    assert plan.rule is not None
    gemm, shape = plan.first_gemm, plan.problem.w13
    source = src.strip_gemm(
        gemm.form, strips, gemm.slices, plan.problem.input.name, bias=shape.bias, depend=plan.rule.overlap
    )
    values: dict[str, Value] = {
        "x": Ref(CALL, "x"),
        "codes": Ref("w13", "codes"),
        "scales": Ref("w13", "scales" if gemm.form.scale_words else "codes"),
        "out": Ref(CALL, "out"),
        "factors": Ref("w13", "factors"),
        "bias": Ref("w13", "bias" if shape.bias else "factors"),
        "rows": lambda m: m,
        "slices": gemm.slices,
        "scale_blocks": gemm.scale_blocks,
        "width": shape.k,
        "columns": shape.n,
    }
    return Step(source, values, lambda m: (-(-shape.n // strips.features), 1))


def _slot_strips(plan: GpuPlan, strips: SlotStrips) -> tuple[Step, ...]:
    """Both GEMMs of a layer for one token, by strips of features."""
    assert plan.rule is not None and plan.w13 is not None and plan.w2 is not None
    problem, overlap, out = plan.problem, plan.rule.overlap, plan.problem.input.name
    gated, (w13, w2) = problem.activation.gated, problem.matrices.values()
    first = src.slot_strips(
        plan.w13.form, strips, plan.w13.slices, out, gated=gated, bias=w13.bias, depend=overlap,
        activation=shared.activation_name(plan, shared.decode_kind(plan, "w13")),
        weighted=shared.applies_weights(plan, "w13"),
    )  # fmt: skip
    second = src.token_strips(
        plan.w2.form, strips, plan.w2.slices, out, bias=w2.bias, weighted=shared.applies_weights(plan, "w2"),
        depend=overlap,
    )  # fmt: skip
    blocks, rows = -(-problem.intermediate // (16 if gated else 32)), -(-w2.n // 16)
    return (
        Step(first, _strip_values(plan, first, "w13", Ref(CALL, "x"), scratch_ref("h")),
             lambda _: (blocks, problem.top_k)),
        Step(second, _strip_values(plan, second, "w2", scratch_ref("h"), Ref(CALL, "out")), lambda _: (rows, 1)),
    )  # fmt: skip


def _strip_values(plan: GpuPlan, source: KernelSource, name: str, rows: Ref, out: Ref) -> dict[str, Value]:
    """The arguments of a GEMM of one token by strips."""
    values: dict[str, Value] = {
        **shared.decode_values(plan, name, out),
        "x": rows,
        "codes": Ref(name, "codes"),
        "scales": Ref(name, "scales" if plan.gemm(name).form.scale_words else "codes"),
    }
    return {argument: values[argument] for argument, _ in source.arguments}
