"""The routing and the activation of a layer: what the config states, checked against what the engine says."""

from __future__ import annotations

from lancebill.checkpoint.resolve.manifest import Manifest
from lancebill.checkpoint.resolve.routing_config import activation_for, routes_itself, routing_for
from lancebill.errors import SpecError
from lancebill.moe.activation import Activation
from lancebill.moe.routing import Routing


def agreed_routing(manifest: Manifest, layer: int, given: Routing | None, top_k: int | None) -> Routing | None:
    """The routing that the caller gave, else the config's; None if neither exists, because the engine routes."""
    model, naming = manifest.config.model, manifest.naming
    known = naming.described and not routes_itself(model, naming.family)
    routing = given or (routing_for(model, naming.family, layer) if known else None)
    if top_k is not None and routing is not None and top_k != routing.top_k:
        raise SpecError(
            "the engine routes each token to another number of experts",
            where=f"layer {layer}, top_k",
            expected=f"{routing.top_k}, as {_source(manifest, given is not None)} states",
            got=top_k,
        )
    return routing


def agreed_top_k(routing: Routing | None, top_k: int | None, layer: int) -> int:
    """How many experts each token is routed to."""
    if routing is not None:
        return routing.top_k
    if top_k is None:
        raise SpecError(
            "how many experts a token is routed to is not known", where=f"layer {layer}", hint="pass top_k="
        )
    return top_k


def agreed_activation(manifest: Manifest, layer: int, given: Activation | str | None) -> Activation:
    """The config's activation. A name given by the engine must be its name; an `Activation` must equal it."""
    naming = manifest.naming
    if not naming.described:
        if given is None:
            raise SpecError("the activation is not known", where=f"layer {layer}", hint="pass activation=")
        return Activation(given) if isinstance(given, str) else given
    stated = activation_for(manifest.config.model, naming.family, layer)
    if given is not None and given != (stated.name if isinstance(given, str) else stated):
        raise SpecError(
            "the engine computes another activation",
            where=f"layer {layer}, activation",
            expected=f"{stated}, as {_source(manifest)} states",
            got=given,
        )
    return stated


def _source(manifest: Manifest, given: bool = False) -> str:
    return "routing=" if given else manifest.config.source
