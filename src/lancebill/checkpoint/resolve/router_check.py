"""What a layer needs to route: is it stored, and does it fit?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from lancebill.checkpoint.resolve.manifest import Manifest
from lancebill.checkpoint.resolve.naming import Naming
from lancebill.checkpoint.resolve.routing_config import routes_itself, routing_for
from lancebill.errors import LancebillError, MissingTensor, UnsupportedFormat, WrongShape
from lancebill.moe.routing import Routing


def router_problems(manifest: Manifest) -> Iterator[LancebillError]:
    """Router tensors that are missing or have another size, and configs whose routing is not known."""
    for one in manifest.mixtures:
        yield from _missing_gates(one)
        yield from _routing_problems(one)


def _missing_gates(manifest: Manifest) -> Iterator[LancebillError]:
    """Layers with other modules but without a gate matrix. A file of experts alone has neither."""
    router, whole, gated = manifest.naming.router, set[int | None](), set[int | None]()
    for name, stored in manifest.tensors.items():
        if name in manifest.expert_tensors or router.claim(name) is not None:
            continue
        gate = router.gate_part(name)
        if gate is None:
            whole.add(manifest.naming.layer_of(name))
        elif len(stored.shape) == 2:
            gated.add(gate)
    for index in manifest.layers:
        if index in whole - gated:
            yield _missing("gate", manifest.naming, index, router.gate_templates)


def needed_roles(naming: Naming, routing: Routing) -> list[str]:
    """The roles of the tensors without which this routing is another."""
    needed = {
        "bias": naming.biased,
        "correction": routing.correction,
        "table": routing.hashed,
        "scale": routing.expert_scale,
    }
    return [role for role, is_needed in needed.items() if is_needed]


def _missing(role: str, naming: Naming, index: int, templates: Iterable[str]) -> MissingTensor:
    return MissingTensor(
        f"the layer cannot route: the router's {role} is missing",
        where=f"{naming.where(index)}, router",
        expected=" or ".join(template.format(layer=index) for template in templates),
    )


def _routing_problems(manifest: Manifest) -> Iterator[LancebillError]:
    """Of layers that lancebill routes: missing and misshapen tensors, and a config that does not say how."""
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
    naming, router, where = manifest.naming, manifest.naming.router, f"{manifest.naming.where(index)}, router"
    stored = {role: name for name, role in router.names(index).items() if name in manifest.tensors}
    for role in (role for role in needed_roles(naming, routing) if role not in stored):
        yield _missing(role, naming, index, router.roles.get(role, ()))
    columns = experts + routing.zero_experts
    for gate in (name for name in router.gates(index) if name in manifest.tensors):
        shape = manifest.tensors[gate].shape
        if columns not in shape:
            expected = f"{columns} rows, one for each expert"
            yield WrongShape(f"the router {gate}", where=where, expected=expected, got=list(shape))
    for role in stored.keys() & {"bias", "correction", "scale"}:
        shape, what = manifest.tensors[stored[role]].shape, f"the router's {role} in {stored[role]}"
        if router.is_shared(stored[role]):
            if len(shape) != 2 or shape[0] <= router.row or shape[1] != columns:
                expected = f"[mixtures, {columns}]"
                yield WrongShape(what, where=where, expected=expected, got=list(shape))
        elif math.prod(shape) != columns:
            yield WrongShape(what, where=where, expected=[columns], got=list(shape))
