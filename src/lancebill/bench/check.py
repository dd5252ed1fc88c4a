"""Right before fast: what is timed is first compared with the reference, at the worst row."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lancebill.backends.reference import BACKEND as REFERENCE
from lancebill.bench.workload import Batch, Weights
from lancebill.errors import WrongResult
from lancebill.moe.dispatch import Indexed
from lancebill.moe.problem import Device, Problem

ROWS = 4  # compared with the reference; of all others it is asked that they were written
BOUND, BOUND_QUANTIZED = 1e-2, 5e-2  # |difference| / |row|; quantised inputs may round the other way


def check(name: str, problem: Problem, weights: Weights, batch: Batch, got: Tensor) -> float:
    """The relative error of the worst row; raises where the output is not that of `problem`."""
    broken = ~torch.isfinite(got).all(dim=1)
    if bool(broken.any()):
        raise WrongResult(
            f"{int(broken.sum())} rows were not written or are not finite",
            where=f"{name}, {got.shape[0]} tokens",
            got=f"rows {broken.nonzero().flatten()[:8].tolist()}",
        )
    rows = torch.linspace(0, got.shape[0] - 1, min(ROWS, got.shape[0])).round().long().to(got.device)
    want = expected(problem, weights, batch, rows)
    errors = (got[rows].float() - want).norm(dim=1) / want.norm(dim=1).clamp(min=1e-30)
    worst, bound = float(errors.max()), bound_of(problem)
    if not worst <= bound:
        raise WrongResult(
            "the result is not the reference's",
            where=f"{name}, {got.shape[0]} tokens, row {int(rows[errors.argmax()])}",
            expected=f"a relative error up to {bound:.0e}",
            got=f"{worst:.1e}",
        )
    return worst


def bound_of(problem: Problem) -> float:
    quantized = problem.activations.spec.quantized or problem.second_activations.spec.quantized
    return BOUND_QUANTIZED if quantized else BOUND


def expected(problem: Problem, weights: Weights, batch: Batch, rows: Tensor) -> Tensor:
    """The reference on these rows alone, fp32, with only the experts they need."""
    ids = batch.ids[rows].long()
    needed, local = torch.unique(ids, return_inverse=True)
    part = replace(problem, experts=needed.numel(), global_experts=needed.numel())
    where = batch.x.device
    packed = weights.packed(REFERENCE.layout(part), needed.tolist())
    out = torch.empty(rows.numel(), problem.hidden, device=where)
    plan = REFERENCE.plan(part, rows.numel(), Device(where.type))
    return REFERENCE.run(plan, batch.x[rows], Indexed(local.to(torch.int32), batch.weights[rows]), packed, out)
