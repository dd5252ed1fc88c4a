"""Layers compute no gradients: a backward pass through one raises, instead of leaving its gradients out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lancebill.errors import LaunchError

_LIBRARY = torch.library.Library("lancebill", "FRAGMENT")


def without_gradient(out: Tensor, *inputs: Tensor) -> Tensor:
    """`out`; if an input requires a gradient, backward through it raises."""
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in inputs):
        return out
    made: Tensor
    if torch.compiler.is_compiling():
        made = torch.ops.lancebill.forward_only.default(out, inputs)
    else:
        made = _NoGradient.apply(out, *inputs)  # type: ignore[no-untyped-call]
    return made


def _error() -> LaunchError:
    hint = "detach their inputs, or compute under torch.no_grad()"
    return LaunchError("quantised layers compute no gradients", hint=hint)


class _NoGradient(torch.autograd.Function):
    """Makes `out` depend on the other arguments, with a backward that raises."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, *others: Tensor) -> Tensor:
        ctx.mark_dirty(out)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise _error()


# torch.compile always traces the backward pass together with the forward pass. So the backward is an operator that can
# be traced, and raises only when it runs.
def _copied(out: Tensor, inputs: Sequence[Tensor]) -> Tensor:
    return out.clone()


def _refuse(gradient: Tensor, shape: Sequence[int]) -> Tensor:
    raise _error()


def _keep_shapes(ctx: Any, inputs: tuple[Tensor, Sequence[Tensor]], output: Tensor) -> None:
    ctx.likes = [(tensor.shape, tensor.dtype) for tensor in inputs[1]]


def _backward(ctx: Any, gradient: Tensor) -> tuple[None, list[Tensor]]:
    no_gradient = torch.ops.lancebill.no_gradient.default
    return None, [no_gradient(gradient, shape).to(dtype) for shape, dtype in ctx.likes]


for _schema, _run, _fake in (
    ("forward_only(Tensor out, Tensor[] inputs) -> Tensor", _copied, lambda out, inputs: torch.empty_like(out)),
    ("no_gradient(Tensor gradient, SymInt[] shape) -> Tensor", _refuse, Tensor.new_empty),
):
    _name = _schema.partition("(")[0]
    _LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
    for _key in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, _run, _key)
    torch.library.register_fake(f"lancebill::{_name}", _fake, lib=_LIBRARY)
torch.library.register_autograd("lancebill::forward_only", _backward, setup_context=_keep_shapes, lib=_LIBRARY)
