"""Derive a model's routing and activation from its config.

A family is a row (`family_routing.py`): the routing that its code hard-wires, and the config keys that it reads. A key
that a family does not read but whose value would change results is an error: better no output than wrong output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any, TypeVar

from lancebill.checkpoint.read.tensor_info import quoted
from lancebill.checkpoint.resolve.expert_sizes import config_sections, experts_per_token
from lancebill.checkpoint.resolve.family_routing import (
    GGUF_ROWS,
    GROUPS,
    LIMIT,
    ROWS,
    WATCHED,
    WHERE,
    FamilyRouting,
    Key,
    unknown_value,
)
from lancebill.errors import SpecError, UnsupportedFormat
from lancebill.moe.activation import Activation
from lancebill.moe.routing import Routing


def routing_for(model: Mapping[str, Any], family: str, layer: int) -> Routing:
    """The routing of `layer`. `model` is the config.json, `family` a row of the naming table."""
    row = _row(model, family)
    if row.own_router is not None:
        raise UnsupportedFormat(
            f"lancebill does not route for {family}: {row.own_router}", where=WHERE, hint="pass experts and weights"
        )
    top_k = experts_per_token(model)
    if top_k is None:
        raise UnsupportedFormat("the config does not state how many experts a token is routed to", where=WHERE)
    if row.top_k is not None and top_k != row.top_k:
        what = f"{family} supports only one number of experts per token"
        raise UnsupportedFormat(what, where=WHERE, expected=row.top_k, got=top_k)
    fields = {**row.routing, **_fields(model, row.keys, layer)}
    if row.hash_layers is not None and _hashes(model, row.hash_layers, layer):
        fields |= {"hashed": True, "correction": False}
    routing = _build(Routing, top_k=top_k, **fields)
    _check_unread(model, family, routing, row)
    return routing


def routes_itself(model: Mapping[str, Any], family: str) -> bool:
    """Whether the model's own router must be used: `routing_for` would say why."""
    return _row(model, family).own_router is not None


def activation_for(model: Mapping[str, Any], family: str, layer: int | None = None) -> Activation:
    """The activation between the two GEMMs of the experts of `layer`; None where the layer is not known."""
    row = _row(model, family)
    limit = _lookup(model, LIMIT.name, None)
    if limit and all(key.name != LIMIT.name for key in row.activation_keys):
        raise _unread_key_error(family, LIMIT.name, limit)
    return _build(replace, row.activation, **_fields(model, row.activation_keys, layer))


T = TypeVar("T", Routing, Activation)


def _build(make: Callable[..., T], *base: T, **fields: Any) -> T:
    """Build a value from config fields; an invalid combination is reported as an error of the config."""
    try:
        return make(*base, **fields)
    except SpecError as error:
        raise UnsupportedFormat(error.what, where=WHERE, expected=error.expected, got=error.got) from error


def _row(model: Mapping[str, Any], family: str) -> FamilyRouting:
    rows, name = (GGUF_ROWS, model.get("architecture")) if family == "gguf" else (ROWS, family)
    if isinstance(name, str) and name in rows:
        return rows[name]
    raise UnsupportedFormat(
        f"the routing of {quoted(name)} is not known",
        expected=f"one of {', '.join(sorted(rows))}",
        hint="pass a Routing",
    )


def _fields(model: Mapping[str, Any], keys: tuple[Key, ...], layer: int | None) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for key in keys:
        value = _lookup(model, key.name, _ABSENT)
        if key.per_layer and isinstance(value, list | tuple):
            if layer is None:
                raise unknown_value(key.name, "one value for all layers", value)
            value = value[layer] if layer < len(value) else _ABSENT
        if value is not _ABSENT:
            fields.update(key.read(value))
        elif key.required:
            raise UnsupportedFormat(f"the config has no '{key.name}'", where=WHERE)
    return fields


_ABSENT = object()


def _lookup(model: Mapping[str, Any], name: str, absent: Any) -> Any:
    """The value of a key in the config or a nested section; an activation may be an object with a name."""
    for section in config_sections(model):
        if name in section:
            value = section[name]
            return value["name"] if isinstance(value, Mapping) and "name" in value else value
    return absent


def _hashes(model: Mapping[str, Any], default: int, layer: int) -> bool:
    """Whether this layer routes by token id: listed per layer, or the first `num_hash_layers` layers.

    Layers beyond the list are multi-token prediction layers, which route by their scores.
    """
    listed = _lookup(model, "mlp_layer_types", None)
    if listed is None:
        count = _lookup(model, "num_hash_layers", default)
        if not isinstance(count, int) or count < 0:
            raise unknown_value("num_hash_layers", "a whole number >= 0", count)
        return layer < count
    kinds = list(listed) if isinstance(listed, list | tuple) else [listed]
    if any(kind not in ("hash_moe", "moe") for kind in kinds):
        raise unknown_value("mlp_layer_types", "a list of 'hash_moe' and 'moe'", listed)
    return layer < len(kinds) and bool(kinds[layer] == "hash_moe")


def _check_unread(model: Mapping[str, Any], family: str, routing: Routing, row: FamilyRouting) -> None:
    """Raise if a key that this family does not read contradicts its routing."""
    actual = asdict(routing)
    for key in WATCHED:
        value = _lookup(model, key.name, None)
        if key in row.keys or value is None:
            continue
        fields = key.read(value)
        if any(actual[name] != set_to for name, set_to in fields.items() if key not in GROUPS or set_to > 1):
            raise _unread_key_error(family, key.name, value)


def _unread_key_error(family: str, key: str, value: Any) -> UnsupportedFormat:
    return UnsupportedFormat(
        f"'{key}' would change the results, but {family} is not known to read it", where=WHERE, got=quoted(value)
    )
