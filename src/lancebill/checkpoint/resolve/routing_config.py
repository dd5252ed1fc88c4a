"""Derive a model's routing and activation from its config.

A family is a row: the routing that its code hard-wires, and the config keys that it reads. A key that a family does not
read but whose value would change results is an error: better no output than wrong output.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

from lancebill.checkpoint.read.tensor_info import quoted
from lancebill.checkpoint.resolve.expert_sizes import config_sections, expert_sizes
from lancebill.errors import SpecError, UnsupportedFormat
from lancebill.moe.activation import Activation
from lancebill.moe.routing import NONE, SIGMOID, SOFTMAX, SQRTSOFTPLUS, Routing, SparseMixer

WHERE = "the model's config"
Fields = Mapping[str, Any]  # fields of a Routing or an Activation


@dataclass(frozen=True)
class Key:
    """A config key, and the fields that each of its values sets.

    `choices` lists values; `number` accepts any positive number besides them. A null that is not a choice counts as
    an absent key.
    """

    name: str
    choices: Mapping[Any, Fields] = field(default_factory=dict)
    number: Callable[[Any], Fields] | None = None
    whole: bool = False
    required: bool = False

    def read(self, value: Any) -> Fields:
        """The fields that this value sets; raises for an unknown value."""
        plain = isinstance(value, str | int | float | None)
        if plain and value in self.choices:
            return self.choices[value]
        if value is None:
            return {}
        numbers = int if self.whole else (int, float)
        if self.number and isinstance(value, numbers) and not isinstance(value, bool) and 0 < value < math.inf:
            return self.number(value)
        listed = [quoted(choice) for choice in self.choices]
        if self.number:
            listed.append("a whole number > 0" if self.whole else "a number > 0")
        raise _unknown_value(self.name, " or ".join(listed), value)


def _flag(name: str, target: str) -> Key:
    return Key(name, {True: {target: True}, False: {target: False}})


def _count(name: str, target: str) -> Key:
    return Key(name, {None: {target: 0}, 0: {target: 0}}, lambda value: {target: value}, whole=True)


NORM = _flag("norm_topk_prob", "renormalize")
SCORING = Key("scoring_func", {name: {"scoring": name} for name in (SOFTMAX, SIGMOID, SQRTSOFTPLUS)})
SCALE = Key("routed_scaling_factor", {}, lambda value: {"routed_scaling_factor": float(value)})
GROUPS = (_count("n_group", "n_group"), _count("topk_group", "topk_group"))
# Listed after the group keys, so that it overrides them: greedy selection has no groups.
BY_SCORE = Key("topk_method", {"greedy": {"n_group": 0, "topk_group": 0}, "group_limited_greedy": {}})
BY_BIASED_SCORE = Key("topk_method", {"noaux_tc": {}})
ROUTING_BIAS = _flag("use_routing_bias", "correction")
WEIGHT_NORM = Key("moe_normalize_expert_weights", {None: {"renormalize": False}, 1: {"renormalize": True}})
JITTER = Key("router_jitter_noise", {0: {"custom": SparseMixer(0.0)}}, lambda value: {"custom": SparseMixer(value)})
# Even if a family does not read these keys, their values must not contradict its routing.
WATCHED = (NORM, SCORING, SCALE, *GROUPS)

LIMIT = Key("swiglu_limit", {None: {"limit": None}, 0: {"limit": None}}, lambda value: {"limit": float(value)})
ALPHA = Key("swiglu_alpha", {}, lambda value: {"alpha": float(value)})
_GATED = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
_UNGATED = {spelled: f"{name}_no_mul" for spelled, name in {**_GATED, "relu2": "relu2"}.items()}


def _named(key: str, names: Mapping[str, str] = _GATED) -> Key:
    return Key(key, {spelled: {"name": name} for spelled, name in names.items()})


ACTIVATION = _named("hidden_act")


@dataclass(frozen=True)
class FamilyRouting:
    """What a family's code hard-wires, and what it reads from the config."""

    routing: Fields = field(default_factory=dict)
    keys: tuple[Key, ...] = ()
    activation: Activation = field(default_factory=Activation)
    activation_keys: tuple[Key, ...] = (ACTIVATION,)
    top_k: int | None = None  # the only value that its code supports
    hash_layers: int | None = None  # default number; None if the family has no hash routing


# Defaults for missing keys are those of each family's published code.
_SIGMOID_BIASED: Fields = {"scoring": SIGMOID, "renormalize": True, "epsilon": 1e-20, "correction": True}
_BIASED_KEYS = (NORM, SCORING, SCALE, *GROUPS, BY_BIASED_SCORE)
_DEEPSEEK_V3 = FamilyRouting(
    {**_SIGMOID_BIASED, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5},
    _BIASED_KEYS,
)
_SOFTMAX_NORMED: Fields = {"scoring": SOFTMAX, "renormalize": True}
_SOFTMAX_AFTER: Fields = {"scoring": SOFTMAX, "after_top_k": True}
_LLAMA4: Fields = {"scoring": SIGMOID, "after_top_k": True, "weight_on_input": True}
_SWIGLUOAI = Activation("swigluoai", limit=7.0)
_RELU2 = Activation("relu2_no_mul")

ROWS: dict[str, FamilyRouting] = {
    "mixtral": FamilyRouting(_SOFTMAX_NORMED),
    "qwen2_moe": FamilyRouting({"scoring": SOFTMAX}, (NORM,)),
    "qwen3_moe": FamilyRouting({"scoring": SOFTMAX}, (NORM,)),
    "qwen3_vl_moe": FamilyRouting(_SOFTMAX_NORMED, (NORM,)),
    "olmoe": FamilyRouting({"scoring": SOFTMAX}, (NORM,)),
    "deepseek_v2": FamilyRouting({"scoring": SOFTMAX}, (NORM, SCORING, SCALE, *GROUPS, BY_SCORE)),
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3,
    "glm4_moe": FamilyRouting({**_SIGMOID_BIASED, "n_group": 1, "topk_group": 1}, _BIASED_KEYS),
    "deepseek_v4": FamilyRouting(
        {
            "scoring": SQRTSOFTPLUS,
            "renormalize": True,
            "epsilon": 1e-20,
            "correction": True,
            "routed_scaling_factor": 1.5,
        },
        (NORM, SCORING, SCALE, BY_BIASED_SCORE),
        Activation("silu", limit=10.0),
        (ACTIVATION, LIMIT),
        hash_layers=3,
    ),
    "gpt_oss": FamilyRouting(_SOFTMAX_AFTER, (), _SWIGLUOAI, (LIMIT, ALPHA)),
    "llama4": FamilyRouting(_LLAMA4, top_k=1),
    "minimax_m2": FamilyRouting(_SIGMOID_BIASED, (SCORING, ROUTING_BIAS)),
    "nemotron_h": FamilyRouting(
        {**_SIGMOID_BIASED, "n_group": 1, "topk_group": 1},
        _BIASED_KEYS,
        _RELU2,
        (_named("mlp_hidden_act", _UNGATED),),
    ),
    "phimoe": FamilyRouting({"scoring": NONE, "custom": SparseMixer()}, (JITTER,), top_k=2),
    "jamba": FamilyRouting({"scoring": SOFTMAX}),
    "dbrx": FamilyRouting(_SOFTMAX_NORMED, (WEIGHT_NORM,), activation_keys=(_named("ffn_act_fn"),)),
    "granitemoe": FamilyRouting(_SOFTMAX_AFTER),
}

# GGUF: what llama.cpp hard-wires for each architecture; the metadata sets the other fields.
_GATING = {
    0: {},
    1: {"scoring": SOFTMAX},
    2: {"scoring": SIGMOID},
    3: {**_SOFTMAX_AFTER, "renormalize": False},
    4: {"scoring": SQRTSOFTPLUS},
}
GGUF_KEYS = (
    Key("expert_gating_func", _GATING),
    _flag("expert_weights_norm", "renormalize"),
    Key("expert_weights_scale", {0: {}}, lambda value: {"routed_scaling_factor": float(value)}),
    _count("expert_group_count", "n_group"),
    _count("expert_group_used_count", "topk_group"),
)
_GGUF_SIGMOID: Fields = {"scoring": SIGMOID, "correction": True}


def _gguf(routing: Fields, activation: Activation | None = None, *keys: Key, **more: Any) -> FamilyRouting:
    return FamilyRouting(routing, GGUF_KEYS, activation or Activation(), keys, **more)


GGUF_ROWS: dict[str, FamilyRouting] = {
    "llama": _gguf(_SOFTMAX_NORMED),
    "mistral3": _gguf(_SOFTMAX_NORMED),
    "llama4": _gguf(_LLAMA4, top_k=1),
    "qwen2moe": _gguf({"scoring": SOFTMAX}),
    "qwen3moe": _gguf(_SOFTMAX_NORMED),
    "qwen3vlmoe": _gguf(_SOFTMAX_NORMED),
    "olmoe": _gguf({"scoring": SOFTMAX}),
    "deepseek": _gguf({"scoring": SOFTMAX}),
    "deepseek2": _gguf({"scoring": SOFTMAX}),  # V2, V3 and Kimi-K2, which differ in metadata
    "deepseek32": _gguf(_GGUF_SIGMOID),
    "deepseek4": _gguf(
        {"scoring": SQRTSOFTPLUS, "correction": True}, None, replace(LIMIT, required=True), hash_layers=0
    ),
    "glm4moe": _gguf(_GGUF_SIGMOID),
    "gpt-oss": _gguf(_SOFTMAX_AFTER, _SWIGLUOAI),
    "minimax-m2": _gguf({**_GGUF_SIGMOID, "renormalize": True}),
    "nemotron_h_moe": _gguf(_GGUF_SIGMOID, _RELU2),
    "jamba": _gguf({"scoring": SOFTMAX}),
    "dbrx": _gguf(_SOFTMAX_NORMED),
    "granitemoe": _gguf(_SOFTMAX_NORMED),
    "granitehybrid": _gguf(_SOFTMAX_NORMED),
}


def routing_for(model: Mapping[str, Any], family: str, layer: int) -> Routing:
    """The routing of `layer`. `model` is the config.json, `family` a row of the naming table."""
    row = _row(model, family)
    top_k = expert_sizes(model).top_k
    if top_k is None:
        raise UnsupportedFormat("the config does not state how many experts a token is routed to", where=WHERE)
    if row.top_k is not None and top_k != row.top_k:
        what = f"{family} supports only one number of experts per token"
        raise UnsupportedFormat(what, where=WHERE, expected=row.top_k, got=top_k)
    fields = {**row.routing, **_fields(model, row.keys)}
    if row.hash_layers is not None and _hashes(model, row.hash_layers, layer):
        fields |= {"hashed": True, "correction": False}
    routing = _build(Routing, top_k=top_k, **fields)
    _check_unread(model, family, routing, row)
    return routing


def activation_for(model: Mapping[str, Any], family: str) -> Activation:
    """The activation between the two GEMMs of this model's experts."""
    row = _row(model, family)
    limit = _lookup(model, LIMIT.name, None)
    if limit and all(key.name != LIMIT.name for key in row.activation_keys):
        raise _unread_key_error(family, LIMIT.name, limit)
    return _build(replace, row.activation, **_fields(model, row.activation_keys))


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


def _fields(model: Mapping[str, Any], keys: tuple[Key, ...]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for key in keys:
        value = _lookup(model, key.name, _ABSENT)
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
            raise _unknown_value("num_hash_layers", "a whole number >= 0", count)
        return layer < count
    kinds = list(listed) if isinstance(listed, list | tuple) else [listed]
    if any(kind not in ("hash_moe", "moe") for kind in kinds):
        raise _unknown_value("mlp_layer_types", "a list of 'hash_moe' and 'moe'", listed)
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


def _unknown_value(key: str, expected: str, value: Any) -> UnsupportedFormat:
    return UnsupportedFormat(f"unknown value of '{key}'", where=WHERE, expected=expected, got=quoted(value))
