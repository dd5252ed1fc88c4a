"""What a layer needs to route, besides the gate's logits: is it stored, and does it fit?"""

from __future__ import annotations

import math
from collections.abc import Iterator

from lancebill.checkpoint.resolve.manifest import Manifest
from lancebill.checkpoint.resolve.routing_config import routes_itself, routing_for
from lancebill.errors import LancebillError, MissingTensor, UnsupportedFormat, WrongShape
from lancebill.moe.routing import Routing


def router_problems(manifest: Manifest) -> Iterator[LancebillError]:
    """Router tensors that are missing or have another size, and configs whose routing is not known."""
    model, naming = manifest.config.model, manifest.naming
    for index, layer in manifest.layers.items():
        try:
            if routes_itself(model, naming.family):
                return
            routing = routing_for(model, naming.family, index)
        except UnsupportedFormat as error:
            yield error
            return  # the other layers have the same config
        yield from _layer_problems(manifest, index, layer.experts, routing)


def _layer_problems(manifest: Manifest, index: int, experts: int, routing: Routing) -> Iterator[LancebillError]:
    names = manifest.naming.router.names(index)
    stored = {role: name for name, role in names.items() if name in manifest.tensors}
    needed = {"correction": routing.correction, "table": routing.hashed, "scale": routing.expert_scale}
    for role in (role for role, is_needed in needed.items() if is_needed and role not in stored):
        spelled = manifest.naming.router.roles.get(role, ())
        yield MissingTensor(
            f"the layer cannot route: the router's {role} is missing",
            where=f"layer {index}, router",
            expected=" or ".join(template.format(layer=index) for template in spelled),
        )
    columns = experts + routing.zero_experts
    for gate in (name for name in manifest.naming.router.gates(index) if name in manifest.tensors):
        shape = manifest.tensors[gate].shape
        if columns not in shape:
            expected = f"{columns} rows, one for each expert"
            yield WrongShape(f"the router {gate}", where=f"layer {index}, router", expected=expected, got=list(shape))
    for role in stored.keys() & {"bias", "correction", "scale"}:
        shape = manifest.tensors[stored[role]].shape
        if math.prod(shape) != columns:
            where = f"layer {index}, router"
            yield WrongShape(f"the router's {role} in {stored[role]}", where=where, expected=[columns], got=list(shape))
