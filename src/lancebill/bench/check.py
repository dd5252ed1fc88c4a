"""Compares a result with the reference before it is timed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from lancebill.backends.reference import BACKEND as REFERENCE
from lancebill.bench.workload import Batch, Weights
from lancebill.errors import WrongResult
from lancebill.moe.device import Device
from lancebill.moe.dispatch import Indexed
from lancebill.moe.layout import Packed
from lancebill.moe.problem import Problem

ROWS = 4  # rows compared with the reference; the others only have to be finite
# |difference| / |row|. Quantised inputs may round to the neighbouring code: where few numbers dominate a hidden row,
# one such code changes the row by up to 6 %. Wrong tiles are found by the exact tests, not by this bound.
BOUND, BOUND_QUANTIZED = 1e-2, 8e-2


def check_output(name: str, problem: Problem, weights: Weights, batch: Batch, got: Tensor) -> float:
    """The relative error of the worst row; raises if it exceeds the bound or a row is not finite."""
    broken = ~torch.isfinite(got).all(dim=1)
    if bool(broken.any()):
        raise WrongResult(
            f"{int(broken.sum())} rows were not written or are not finite",
            where=f"{name}, {got.shape[0]} tokens",
            got=f"rows {broken.nonzero().flatten()[:8].tolist()}",
        )
    count = min(ROWS, got.shape[0])
    rows = torch.linspace(0, got.shape[0] - 1, count, dtype=torch.float32, device=got.device).round().long()
    want = expected_rows(problem, weights, batch, rows)
    errors = (got[rows].float() - want).norm(dim=1) / want.norm(dim=1).clamp(min=1e-30)
    worst, bound = float(errors.max()), error_bound(problem)
    if not worst <= bound:
        raise WrongResult(
            "the result differs from the reference",
            where=f"{name}, {got.shape[0]} tokens, row {int(rows[errors.argmax()])}",
            expected=f"a relative error up to {bound:.0e}",
            got=f"{worst:.1e}",
        )
    return worst


def error_bound(problem: Problem) -> float:
    quantized = problem.activations.spec.quantized or problem.second_activations.spec.quantized
    return BOUND_QUANTIZED if quantized else BOUND


def expected_rows(
    problem: Problem, weights: Weights, batch: Batch, rows: Tensor, packed: Mapping[str, Packed] | None = None
) -> Tensor:
    """The reference's result for these rows in fp32.

    `packed` are all different experts in the reference's layout; without it, only those needed here are packed.
    """
    device, routed = batch.x.device, batch.ids[rows]
    originals = torch.where(routed < 0, -1, routed % weights.distinct)  # the other experts repeat these
    needed = originals[originals >= 0].unique() if packed is None else torch.arange(weights.distinct, device=device)
    out = torch.zeros(rows.numel(), problem.hidden, dtype=torch.float32, device=device)
    if not needed.numel():
        return out
    ids = torch.where(originals < 0, -1, torch.searchsorted(needed, originals)).to(torch.int32)
    part = replace(problem, experts=needed.numel(), global_experts=needed.numel())
    tensors = weights.packed(REFERENCE.layout(part), needed.tolist()) if packed is None else packed
    plan = REFERENCE.plan(part, rows.numel(), Device(device.type))
    return REFERENCE.run(plan, batch.x[rows], Indexed(ids, batch.weights[rows]), tensors, out)
