"""The caller's tensors: checked, and copied where kernels cannot read them."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from lancebill.backends.call_signature import ID_WORDS, WEIGHT_KINDS
from lancebill.backends.gpu.plan import SINGLE, GpuPlan
from lancebill.backends.gpu.program import ALIGNMENT
from lancebill.errors import LaunchError
from lancebill.moe.device import require_on
from lancebill.moe.dispatch import Batched, Contiguous, Dispatch, Indexed
from lancebill.moe.problem import BATCHED, CONTIGUOUS, INDEXED


def is_dense(tensor: Tensor) -> bool:
    """Whether kernels can read it as it is: contiguous, and aligned for their widest loads."""
    return tensor.is_contiguous() and not tensor.data_ptr() % ALIGNMENT


def dense(tensor: Tensor) -> Tensor:
    """The tensor, or a copy that kernels can read."""
    return tensor if is_dense(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def readable(dispatch: Dispatch) -> Dispatch:
    """The same dispatch in tensors that kernels can read."""
    if isinstance(dispatch, Indexed):
        places = dispatch.expert_map
        places = None if places is None else dense(places.to(torch.int32))
        return Indexed(dense(dispatch.ids), dense(dispatch.weights), places)
    if isinstance(dispatch, Contiguous):
        return Contiguous(dispatch.offsets.contiguous())
    return Batched(dispatch.counts.contiguous())


def write_back(result: Tensor, dispatch: Dispatch, out: Tensor) -> Tensor:
    """Copy rows from a temporary into an output of any dtype and stride; rows of no expert stay untouched."""
    if isinstance(dispatch, Indexed):
        return out.copy_(result)
    places = torch.arange(out.shape[-2], device=out.device)
    if isinstance(dispatch, Contiguous):
        owned = (places >= dispatch.offsets[:1]) & (places < dispatch.offsets[-1:])
    else:
        owned = places < dispatch.counts.unsqueeze(1)
    return out.copy_(torch.where(owned.unsqueeze(-1), result.to(out.dtype), out))


def check_call(plan: GpuPlan, x: Tensor, dispatch: Dispatch, out: Tensor) -> None:
    """Raise where a tensor is not what the kernels on x's device assume."""
    problem, stored = plan.problem, plan.problem.input.storage
    columns = problem.w13.n if problem.w2 is None else problem.w2.n
    for name, tensor, shape in (("x", x, (*x.shape[:-1], problem.hidden)), ("out", out, (*x.shape[:-1], columns))):
        if tensor.shape != shape:
            raise LaunchError(f"{name} does not fit", expected=list(shape), got=list(tensor.shape))
    for name, tensor, dtypes in (("x", x, (stored,)), ("out", out, (stored,)), *_dispatched(plan, x, dispatch)):
        if tensor.dtype not in dtypes:
            raise LaunchError(f"{name} has another dtype", expected=" or ".join(map(str, dtypes)), got=tensor.dtype)
        require_on(x.device, **{name: tensor})


def _dispatched(plan: GpuPlan, x: Tensor, dispatch: Dispatch) -> list[tuple[str, Tensor, Collection[torch.dtype]]]:
    """The tensors that say which expert a row belongs to, and the dtypes each may have."""
    experts = plan.problem.experts
    if isinstance(dispatch, Indexed) and plan.work == INDEXED:
        ids, weights, expert_map = dispatch.ids, dispatch.weights, dispatch.expert_map
        if ids.shape != (x.shape[0], plan.problem.top_k) or weights.shape != ids.shape:
            raise LaunchError("ids and weights do not fit the rows", got=f"{list(ids.shape)}")
        given: list[Tensor | None] = [ids, weights, expert_map]
        allowed = ("ids", ID_WORDS), ("weights", WEIGHT_KINDS), ("expert_map", ID_WORDS)
        return [(name, t, dtypes) for t, (name, dtypes) in zip(given, allowed) if t is not None]
    if isinstance(dispatch, Contiguous) and plan.work in (CONTIGUOUS, SINGLE):
        if dispatch.offsets.shape != (experts + 1,):
            raise LaunchError("offsets do not fit", expected=f"{experts + 1} of them", got=list(dispatch.offsets.shape))
        return [("edges", dispatch.offsets, (torch.int64,))]
    if isinstance(dispatch, Batched) and plan.work == BATCHED:
        if dispatch.counts.shape != (experts,) or x.shape[0] != experts:
            raise LaunchError("counts do not fit", expected=f"{experts} of them", got=list(dispatch.counts.shape))
        return [("edges", dispatch.counts, (torch.int32,))]
    raise LaunchError(f"this plan is for {plan.work} work", got=type(dispatch))
