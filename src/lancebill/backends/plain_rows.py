"""What the backends in plain torch share: rows sorted by expert, and inputs as an expert's matrix takes them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lancebill.moe.dispatch import Indexed, combine, group_slots
from lancebill.moe.layout import MatrixShape, Packed
from lancebill.moe.problem import Problem
from lancebill.numbers.activations import round_activations
from lancebill.numbers.rotation import rotate
from lancebill.numbers.spec import ActivationSpec

# Computes rows that are sorted by expert, between the edges of each expert, into the results.
RunGroups = Callable[[Tensor, list[int], Tensor], object]


def run_indexed(problem: Problem, x: Tensor, dispatch: Indexed, out: Tensor, run_groups: RunGroups) -> Tensor:
    """Sort the slots of a batch by expert, compute them, and sum the weighted results of each token."""
    groups = group_slots(dispatch.ids, problem.experts)
    rows = x[groups.rows(problem.top_k)].float()
    if problem.weight_on_input:
        rows = rows * dispatch.weights.reshape(-1)[groups.slots].unsqueeze(-1)
        dispatch = Indexed(dispatch.ids, torch.ones_like(dispatch.weights))
    results = torch.empty(rows.shape[0], out.shape[1], dtype=torch.float32, device=x.device)
    run_groups(rows, groups.offsets.tolist(), results)
    return combine(results, groups, dispatch, out)


def expert_inputs(rows: Tensor, shape: MatrixShape, activations: ActivationSpec, packed: Packed, expert: int) -> Tensor:
    """Rows in fp32, in natural column order: times the expert's own factors, rotated, quantised with its own scale."""
    rows = rows.float()
    if "pre_scale" in packed:
        rows = rows * packed["pre_scale"][expert].view(torch.float32)
    static = packed["input_scale"][expert].view(torch.float32) if "input_scale" in packed else None
    return round_activations(rotate(rows, shape.spec.rotation), activations, static)
