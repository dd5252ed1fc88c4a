"""The layer as one opaque operator, used only while torch.compile traces.

The live tensors are arguments, so that a graph sees what it reads; which layer they belong to
travels as a number into a table of weak references.
"""

from __future__ import annotations

import itertools
import weakref

import torch
from torch import Tensor

from lancebill.errors import LaunchError
from lancebill.layer.routed_experts import RoutedExperts

_LAYERS: weakref.WeakValueDictionary[int, RoutedExperts] = weakref.WeakValueDictionary()
_HANDLES: weakref.WeakKeyDictionary[RoutedExperts, int] = weakref.WeakKeyDictionary()
_NEXT = itertools.count()


def handle_of(layer: RoutedExperts) -> int:
    """The number a layer goes by, the same for its whole life."""
    if layer not in _HANDLES:
        _HANDLES[layer] = next(_NEXT)
        _LAYERS[_HANDLES[layer]] = layer
    return _HANDLES[layer]


@torch.library.custom_op("lancebill::routed_experts", mutates_args=())
def routed_experts_op(x: Tensor, ids: Tensor, weights: Tensor, tensors: list[Tensor], handle: int) -> Tensor:
    layer = _LAYERS.get(handle)
    if layer is None:
        raise LaunchError("the layer of a compiled graph no longer exists")
    return layer.compute(x, ids, weights, torch.empty_like(x))


@routed_experts_op.register_fake
def _(x: Tensor, ids: Tensor, weights: Tensor, tensors: list[Tensor], handle: int) -> Tensor:
    return torch.empty_like(x)
