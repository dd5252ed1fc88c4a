"""The plan of a problem for a number of tokens: the ISA level and a time estimate.

Estimates are only used to rank backends. They assume two threads of the measured machines (see benchmarks/results).
With few tokens, reading the activated experts takes the time; with many, the GEMMs do.
"""

from __future__ import annotations

from dataclasses import dataclass

from lancebill.backends.base import Plan
from lancebill.backends.cpu.form import CpuForm, matrix_form
from lancebill.backends.cpu.native.abi import IsaLevel
from lancebill.moe.problem import FAST, Problem

_READ_GBS = 25.0
_CALL_US = 20.0
# Effective GFLOP/s with 16-bit and with 8-bit inputs.
_GFLOPS = {
    IsaLevel.PORTABLE: (1.5, 2.0),
    IsaLevel.NEON: (45.0, 65.0),
    IsaLevel.AVX2: (110.0, 200.0),
    IsaLevel.AVXVNNI: (150.0, 250.0),
    IsaLevel.AVX512BW: (190.0, 280.0),
    IsaLevel.AVX512VNNI: (270.0, 285.0),
    IsaLevel.AVX512: (330.0, 500.0),
    IsaLevel.AMX: (700.0, 700.0),
}


@dataclass(frozen=True)
class CpuPlan(Plan):
    """Serves any number of tokens: the library splits the work in each call."""

    level: IsaLevel = IsaLevel.PORTABLE
    forms: tuple[CpuForm, ...] = ()
    tiles: bool = False  # use bf16 tiles (AMX), if the CPU has them, for experts with enough rows


def make_plan(problem: Problem, tokens: int, level: IsaLevel) -> CpuPlan:
    inputs = {name: problem.inputs_of(name) for name in problem.matrices}
    forms = tuple(matrix_form(shape, inputs[name]) for name, shape in problem.matrices.items())
    slots = tokens * problem.top_k
    activated = min(problem.experts, slots)
    elements = sum(shape.n * shape.k for shape in problem.matrices.values())
    stored = sum(s.n * s.k * s.spec.bits_per_weight(s.n, s.k) / 8 for s in problem.matrices.values())
    inputs_of_8_bits = all(each.spec.quantized and each.spec.dtype.bits == 8 for each in inputs.values())
    # Tiles change the order of sums depending on the rows of an expert, so the batch-invariant order excludes them.
    tiles = problem.order == FAST and all(form.tiles for form in forms)
    rate = _GFLOPS[level if tiles else min(level, IsaLevel.AVX512)][inputs_of_8_bits]
    estimate = _CALL_US + max(activated * stored / _READ_GBS, 2 * slots * elements / rate) / 1e3
    notes = (f"{level}: decodes codes in registers; one call from ids to the sum of each token's experts",)
    return CpuPlan(problem, tokens, estimate, 0, notes, level, forms, tiles)
