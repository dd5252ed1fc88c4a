"""The GEMM launches of the Ampere kernels, which read rows, codes and scales through plain pointers. Needs no GPU."""

from __future__ import annotations

from lancebill.backends.ampere import kernel_sources as src
from lancebill.backends.ampere.plan import make_plan
from lancebill.backends.gpu import steps as shared
from lancebill.backends.gpu.plan import GpuPlan, row_width
from lancebill.backends.gpu.step import Ref, Step, Value
from lancebill.jit.compile import KernelSource
from lancebill.moe.device import Device
from lancebill.moe.problem import Problem


def steps(plan: GpuPlan) -> tuple[Step, ...]:
    """All launches of one call, in order."""
    return tuple(step.compiled_for(plan.arch) for step in shared.layer_steps(plan, _grouped_gemms, _decode_gemm))


def kernels(problem: Problem, tokens: int, device: Device) -> list[KernelSource]:
    """The kernels that a layer launches for this many tokens, in order."""
    return [step.source for step in steps(make_plan(problem, tokens, device))]


def _grouped_gemms(plan: GpuPlan, name: str, rows: Ref, scales: str, out: Ref, kind: str) -> list[Step]:
    """The launches of a GEMM, each over its own tile list."""
    gemm, problem, shape = plan.gemm(name), plan.problem, plan.problem.matrices[name]
    activation, width = shared.activation_name(plan, kind), row_width(gemm, shape.k)
    launches = []
    for i, tile in enumerate(gemm.tiles):
        source = src.grouped_gemm(gemm.form, tile, problem.input.name, kind, activation, bias=shape.bias)
        values = {**_weights(plan, name), **shared.grouped_values(plan, name, i, scales, out, kind)}
        values |= {"x": rows, "width": width}
        launches.append(Step(source, values, shared.grouped_grid(plan, gemm, tile), tile.blocks))
    return launches


def _decode_gemm(plan: GpuPlan, name: str, rows: Ref, out: Ref) -> Step:
    """One GEMM with one tile per slot."""
    gemm, problem, kind, (tile,) = plan.gemm(name), plan.problem, shared.decode_kind(plan, name), plan.gemm(name).tiles
    source = src.decode_gemm(
        gemm.form, tile, gemm.pieces, 1 if shared.is_first_of_two(plan, name) else problem.top_k, problem.input.name,
        kind, shared.activation_name(plan, kind), bias=problem.matrices[name].bias,
        weighted=shared.applies_weights(plan, name),
    )  # fmt: skip
    values = {"x": rows, **_weights(plan, name), **shared.decode_values(plan, name, out)}
    return Step(source, values, shared.decode_grid(plan, gemm, tile), tile.blocks)


def _weights(plan: GpuPlan, name: str) -> dict[str, Value]:
    """Codes and scales; a form without scales passes a pointer that is never read."""
    return {"w": Ref(name, "codes"), "s": Ref(name, "scales" if plan.gemm(name).form.scale_words else "codes")}
