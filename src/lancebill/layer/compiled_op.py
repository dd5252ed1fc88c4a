"""Our layers as opaque operators, called only while torch.compile traces. They exist once this module is imported.

A graph is told which layer it means by a tensor of the layer, its `tag`: as an input of the graph, so that equal layers
share one graph. Only the address of the tag is read, never its value, so the host does not wait for the device. The
operators take no weights: they only read them, and nothing in a compiled graph writes to them.

`torch.library.custom_op` would be shorter and takes the host several times as long to call.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor, nn

from lancebill.errors import LaunchError

_LIBRARY = torch.library.Library("lancebill", "DEF")
_LAYERS: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_FOUND: dict[int, weakref.ref[nn.Module]] = {}  # by address of the tag; compared with the layer's in every call
_MOST_FOUND = 4096


def add_layer(layer: nn.Module) -> None:
    """Make the layer known to the operators."""
    _LAYERS.add(layer)


def find_layer(tag: Tensor) -> nn.Module:
    """The layer that has this tag now. Moving a layer moves its tag."""
    address = tag.data_ptr()
    held = _FOUND.get(address)
    layer = None if held is None else held()
    if layer is None or _address(layer) != address:
        layer = next((known for known in list(_LAYERS) if _address(known) == address), None)
        if layer is None:
            raise LaunchError("the layer of a compiled graph no longer exists, or its `tag` was copied")
        if len(_FOUND) >= _MOST_FOUND:
            _FOUND.clear()
        _FOUND[address] = weakref.ref(layer)
    return layer


def _address(layer: nn.Module) -> int:
    tag = layer._buffers.get("tag")
    return 0 if tag is None else tag.data_ptr()


def _experts(x: Tensor, ids: Tensor, weights: Tensor, tag: Tensor) -> Tensor:
    out: Tensor = find_layer(tag).forward(x, topk_ids=ids, topk_weights=weights)
    return out


def _routed(x: Tensor, logits: Tensor, input_ids: Tensor | None, tag: Tensor) -> Tensor:
    out: Tensor = find_layer(tag).route_and_run(x, logits, input_ids)  # type: ignore[operator]
    return out


def _linear(x: Tensor, columns: int, tag: Tensor) -> Tensor:
    out: Tensor = find_layer(tag).forward(x)
    return out


def _like_rows(x: Tensor, *others: object) -> Tensor:
    return torch.empty_like(x)


def _like_columns(x: Tensor, columns: int, tag: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], columns)


for _schema, _run, _fake in (
    ("routed_experts(Tensor x, Tensor ids, Tensor weights, Tensor tag) -> Tensor", _experts, _like_rows),
    ("routed_forward(Tensor x, Tensor logits, Tensor? input_ids, Tensor tag) -> Tensor", _routed, _like_rows),
    ("quantized_linear(Tensor x, SymInt columns, Tensor tag) -> Tensor", _linear, _like_columns),
):
    _name = _schema.partition("(")[0]
    _LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
    for _key in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, _run, _key)
    torch.library.register_fake(f"lancebill::{_name}", _fake, lib=_LIBRARY)
    # With a backward pass the host would take several microseconds more: `without_gradient` has the one that raises.
    _LIBRARY.impl(_name, torch.library.fallthrough_kernel, "Autograd")

routed_experts = torch.ops.lancebill.routed_experts.default
routed_forward = torch.ops.lancebill.routed_forward.default
quantized_linear = torch.ops.lancebill.quantized_linear.default
