"""The parts of a split layer, and one of them in a call for all experts."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from lancebill.backends.base import Executor
from lancebill.moe.dispatch import Indexed, localize
from lancebill.split.host_calls import HostCalls


class HostPart(Protocol):
    """The experts in host memory. Their executor is looked up in every call: new parameters bring a new one."""

    expert_map: Tensor | None
    calls: HostCalls  # those that a GPU makes; kept by the layer, because graphs outlive executors

    @property
    def executor(self) -> Executor: ...


def run_part(
    part: Executor, x: Tensor, dispatch: Indexed, expert_map: Tensor | None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The weighted sum over a part's experts."""
    if part.problem.experts == 0:
        return torch.zeros_like(x, dtype=dtype)
    given = Indexed(dispatch.ids, dispatch.weights, expert_map)
    if not part.accepts_any_ids:
        ids = localize(given.ids, expert_map, part.problem.global_experts).contiguous()
        given = Indexed(ids, given.weights.float().contiguous())
    return part.run(x, given, torch.empty_like(x, dtype=dtype))
