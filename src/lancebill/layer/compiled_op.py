"""The layer as one opaque operator, used only while torch.compile traces.

The weights are arguments, so that the compiler knows what the operator reads. An integer handle identifies the layer in
a table of weak references.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Protocol

import torch
from torch import Tensor

from lancebill.errors import LaunchError


class Computes(Protocol):
    """A layer, as far as the operator needs it."""

    def compute(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, out: Tensor) -> Tensor: ...


_LAYERS: weakref.WeakValueDictionary[int, Computes] = weakref.WeakValueDictionary()
_NEXT = itertools.count()


def new_handle(layer: Computes) -> int:
    """A handle for this layer; it becomes invalid with the layer."""
    handle = next(_NEXT)
    _LAYERS[handle] = layer
    return handle


@torch.library.custom_op("lancebill::routed_experts", mutates_args=())
def routed_experts_op(x: Tensor, ids: Tensor, weights: Tensor, tensors: list[Tensor], handle: int) -> Tensor:
    layer = _LAYERS.get(handle)
    if layer is None:
        raise LaunchError("the layer of a compiled graph no longer exists")
    return layer.compute(x, ids, weights, torch.empty_like(x))


@routed_experts_op.register_fake
def _(x: Tensor, ids: Tensor, weights: Tensor, tensors: list[Tensor], handle: int) -> Tensor:
    return torch.empty_like(x)
