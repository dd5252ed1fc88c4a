"""What each family's code hard-wires about routing and activation, and the config keys that it reads."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lancebill.checkpoint.read.tensor_info import quoted
from lancebill.errors import UnsupportedFormat
from lancebill.moe.activation import Activation
from lancebill.moe.routing import NONE, SIGMOID, SOFTMAX, SQRTSOFTPLUS, SparseMixer

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
    per_layer: bool = False  # a list has one value for each layer

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
        raise unknown_value(self.name, " or ".join(listed), value)


def unknown_value(key: str, expected: str, value: Any) -> UnsupportedFormat:
    return UnsupportedFormat(f"unknown value of '{key}'", where=WHERE, expected=expected, got=quoted(value))


def _flag(name: str, target: str) -> Key:
    return Key(name, {True: {target: True}, False: {target: False}})


def _count(name: str, target: str) -> Key:
    return Key(name, {None: {target: 0}, 0: {target: 0}}, lambda value: {target: value}, whole=True)


def _scale(name: str) -> Key:
    return Key(name, {}, lambda value: {"routed_scaling_factor": float(value)})


NORM = _flag("norm_topk_prob", "renormalize")
SCALE = _scale("routed_scaling_factor")
SCORING = Key("scoring_func", {name: {"scoring": name} for name in (SOFTMAX, SIGMOID, SQRTSOFTPLUS)})
GROUPS = (_count("n_group", "n_group"), _count("topk_group", "topk_group"))
# Listed after the group keys, so that it overrides them: greedy selection has no groups.
BY_SCORE = Key("topk_method", {"greedy": {"n_group": 0, "topk_group": 0}, "group_limited_greedy": {}})
BY_BIASED_SCORE = Key("topk_method", {"noaux_tc": {}})
ROUTING_BIAS = _flag("use_routing_bias", "correction")
WEIGHT_NORM = Key("moe_normalize_expert_weights", {None: {"renormalize": False}, 1: {"renormalize": True}})
JITTER = Key("router_jitter_noise", {0: {"custom": SparseMixer(0.0)}}, lambda value: {"custom": SparseMixer(value)})
# Without a correction, these families would rank groups by their two largest scores.
ONE_GROUP = (Key("n_group", {None: {}, 1: {}}), Key("topk_group", {None: {}, 1: {}}))
ZERO_EXPERTS = _count("zero_expert_num", "zero_experts")
ZERO_KIND = Key("zero_expert_type", {"identity": {}})
EXPERT_NORM = _flag("norm_expert_weight", "renormalize")
STEP_DEFAULTS = (
    Key("norm_expert_weight", {True: {}}),
    Key("moe_router_activation", {SIGMOID: {}}),
    Key("use_moe_router_bias", {True: {}}),
)
# A single expert keeps its score.
HUNYUAN_TOP_K = Key(
    "moe_topk", {1: {"renormalize": False}}, lambda value: {"renormalize": True}, whole=True, per_layer=True
)
ROUTER_FUNCTION = Key("moe_router_activation_func", {name: {"scoring": name} for name in (SOFTMAX, SIGMOID)})
SELECTION = Key("expert_selection_fn", {SOFTMAX: {}, SIGMOID: {"scoring": SIGMOID, "renormalize": True}})
BAILING = (
    Key("score_function", {name: {"scoring": name} for name in (SOFTMAX, SIGMOID)}),
    _flag("moe_router_enable_expert_bias", "correction"),
    Key("moe_router_enable_routed_scaling", {True: {}}),
)
LAGUNA_DEFAULTS = (
    Key("moe_router_logit_softcapping", {None: {}, 0: {}}),
    Key("moe_apply_router_weight_on_input", {False: {}}),
)
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
# Kimi-K3's activation, whose two halves are squashed with tanh.
SITU = (
    Key("hidden_act", {"situ": {"name": "situ"}}),
    Key("activation_situ_beta", {}, lambda value: {"beta": float(value)}),
    Key("activation_situ_linear_beta", {}, lambda value: {"limit": float(value)}),
)
# Inkling-2 squashes both halves with tanh; its code reads no `hidden_act`.
SOFTCAPS = (
    Key("mlp_gate_softcap", {}, lambda value: {"beta": float(value)}),
    Key("mlp_up_softcap", {}, lambda value: {"limit": float(value)}),
)
# Step's limit on each layer's experts, applied after the activation.
STEP_LIMITS = Key(
    "swiglu_limits", {None: {}, 0: {}}, lambda value: {"name": "swiglustep", "limit": float(value)}, per_layer=True
)


@dataclass(frozen=True)
class FamilyRouting:
    """What a family's code hard-wires, and what it reads from the config.

    `own_router` says why this library does not route: the model or the engine does, and passes experts and weights.
    """

    routing: Fields = field(default_factory=dict)
    keys: tuple[Key, ...] = ()
    activation: Activation = field(default_factory=Activation)
    activation_keys: tuple[Key, ...] = (ACTIVATION,)
    top_k: int | None = None  # the only value that its code supports
    hash_layers: int | None = None  # default number; None if the family has no hash routing
    own_router: str | None = None


# Defaults for missing keys come from each family's published code.
_SIGMOID_BIASED: Fields = {"scoring": SIGMOID, "renormalize": True, "epsilon": 1e-20, "correction": True}
_BIASED_KEYS = (NORM, SCORING, SCALE, *GROUPS, BY_BIASED_SCORE)
_DEEPSEEK_V3 = FamilyRouting(
    {**_SIGMOID_BIASED, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5},
    _BIASED_KEYS,
)
_ONE_GROUP_BIASED = FamilyRouting({**_SIGMOID_BIASED, "n_group": 1, "topk_group": 1}, _BIASED_KEYS)
_SIGMOID_SCALED_AFTER: Fields = {**_SIGMOID_BIASED, "epsilon": 0.0, "apply_scale_to_output": True}
_LINEAR_ATTENTION_KEYS = (
    *_BIASED_KEYS, _flag("moe_renormalize", "renormalize"), _count("num_expert_group", "n_group")
)  # fmt: skip
_SOFTMAX_NORMED: Fields = {"scoring": SOFTMAX, "renormalize": True}
_SOFTMAX_AFTER: Fields = {"scoring": SOFTMAX, "after_top_k": True}
_LLAMA4: Fields = {"scoring": SIGMOID, "after_top_k": True, "weight_on_input": True}
_SWIGLUOAI = Activation("swigluoai", limit=7.0)
_RELU2 = Activation("relu2_no_mul")
_GEMMA4 = FamilyRouting(
    {**_SOFTMAX_NORMED, "expert_scale": True}, (), Activation("gelu_tanh"), (_named("hidden_activation"),)
)

ROWS: dict[str, FamilyRouting] = {
    # softmax over all experts
    "mixtral": FamilyRouting(_SOFTMAX_NORMED),
    "minimax": FamilyRouting(_SOFTMAX_NORMED),
    "qwen2_moe": FamilyRouting({"scoring": SOFTMAX}, (NORM,)),
    "qwen3_moe": FamilyRouting({"scoring": SOFTMAX}, (NORM,)),
    "qwen3_next": FamilyRouting(_SOFTMAX_NORMED, (NORM,)),
    "qwen3_5_moe": FamilyRouting(_SOFTMAX_NORMED),
    "qwen4_exp": FamilyRouting(_SOFTMAX_NORMED, (NORM,)),
    "qwen3_vl_moe": FamilyRouting(_SOFTMAX_NORMED, (NORM,)),
    "qwen3_omni_moe": FamilyRouting(_SOFTMAX_NORMED, (NORM,)),
    "olmoe": FamilyRouting({"scoring": SOFTMAX}, (NORM,)),
    "flex_olmo": FamilyRouting({"scoring": SOFTMAX}, (NORM,)),
    "mellum": FamilyRouting(_SOFTMAX_NORMED, (NORM,)),
    "hunyuan": FamilyRouting(_SOFTMAX_NORMED, (HUNYUAN_TOP_K,)),
    "step3": FamilyRouting({"scoring": SOFTMAX}, (EXPERT_NORM,)),
    "hunyuan_v1_moe": FamilyRouting(_SOFTMAX_NORMED),
    "jamba": FamilyRouting({"scoring": SOFTMAX}),
    "dbrx": FamilyRouting(_SOFTMAX_NORMED, (WEIGHT_NORM,), activation_keys=(_named("ffn_act_fn"),)),
    "deepseek_v2": FamilyRouting({"scoring": SOFTMAX}, (NORM, SCORING, SCALE, *GROUPS, BY_SCORE)),
    "deepseek_ocr": FamilyRouting({"scoring": SOFTMAX}, (NORM, SCORING, SCALE, *GROUPS, BY_SCORE)),
    "unlimited_ocr": FamilyRouting({"scoring": SOFTMAX}, (NORM, SCORING, SCALE, *GROUPS, BY_SCORE)),
    "mistral4": FamilyRouting({**_SOFTMAX_NORMED, "epsilon": 1e-20}, (NORM, SCALE, *ONE_GROUP)),
    "mistral_large4": FamilyRouting({**_SOFTMAX_NORMED, "epsilon": 1e-20}, (SCALE, *ONE_GROUP)),
    "gemma4": _GEMMA4,
    "diffusion_gemma": _GEMMA4,
    "ernie4_5_moe": FamilyRouting({**_SOFTMAX_NORMED, "correction": True}),
    "ernie4_5_vl_moe": FamilyRouting({**_SOFTMAX_NORMED, "correction": True}),
    "longcat_flash": FamilyRouting(
        {"scoring": SOFTMAX, "correction": True, "routed_scaling_factor": 6.0}, (SCALE, ZERO_EXPERTS, ZERO_KIND)
    ),
    # softmax over the chosen experts
    "gpt_oss": FamilyRouting(_SOFTMAX_AFTER, (), _SWIGLUOAI, (LIMIT, ALPHA)),
    "granitemoe": FamilyRouting(_SOFTMAX_AFTER),
    "jetmoe": FamilyRouting(_SOFTMAX_AFTER, activation_keys=(_named("activation_function"),)),
    "aria": FamilyRouting(_SOFTMAX_AFTER, activation_keys=()),
    "cohere2_moe": FamilyRouting(_SOFTMAX_AFTER, (SELECTION, NORM)),
    # sigmoid, the correction added for the selection
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3,
    "axk": _DEEPSEEK_V3,
    "glm4_moe": _ONE_GROUP_BIASED,
    "dots1": _ONE_GROUP_BIASED,
    "dots3_note": _ONE_GROUP_BIASED,
    "solar_open": _ONE_GROUP_BIASED,
    "mimo_v2_flash": _ONE_GROUP_BIASED,
    "exaone_moe": _ONE_GROUP_BIASED,
    "glm5_next": replace(_ONE_GROUP_BIASED, activation=Activation("silu", limit=10.0), activation_keys=(LIMIT,)),
    "hy_v4": replace(_ONE_GROUP_BIASED, activation=Activation("silu", limit=10.0), activation_keys=(LIMIT,)),
    "beam": replace(_ONE_GROUP_BIASED, routing={**_ONE_GROUP_BIASED.routing, "apply_scale_to_output": True}),
    "bailing_moe": FamilyRouting(
        {"scoring": SOFTMAX, "epsilon": 1e-20},
        (NORM, SCALE, *GROUPS, *BAILING),
    ),
    "bailing_hybrid": FamilyRouting(_DEEPSEEK_V3.routing, _LINEAR_ATTENTION_KEYS),
    "kimi_linear": FamilyRouting(
        {**_SIGMOID_BIASED, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.446}, _LINEAR_ATTENTION_KEYS
    ),
    "kimi_k3": FamilyRouting(
        {**_SIGMOID_BIASED, "n_group": 1, "topk_group": 1},
        (*_LINEAR_ATTENTION_KEYS, ROUTER_FUNCTION),
        Activation("situ"),
        SITU,
    ),
    "pangu_ultra_moe": FamilyRouting(
        {"scoring": SIGMOID, "renormalize": True, "epsilon": 1e-20},
        (NORM, SCALE, _flag("router_enable_expert_bias", "correction")),
    ),
    "afmoe": FamilyRouting(_SIGMOID_BIASED, (_scale("route_scale"), _flag("route_norm", "renormalize"))),
    "hy_v3": FamilyRouting({**_SIGMOID_BIASED, "routed_scaling_factor": 2.826}, (_scale("router_scaling_factor"),)),
    "lfm2_moe": FamilyRouting(
        {**_SIGMOID_BIASED, "epsilon": 1e-6},
        (NORM, SCALE, _flag("use_expert_bias", "correction")),
        activation_keys=(),
    ),
    "minimax_m2": FamilyRouting(_SIGMOID_BIASED, (SCORING, ROUTING_BIAS)),
    "minimax_m3": FamilyRouting(_SIGMOID_SCALED_AFTER, (SCALE,), _SWIGLUOAI, (LIMIT, ALPHA)),
    "inkling2": FamilyRouting(
        {**_SIGMOID_BIASED, "routed_scaling_factor": 8.0},
        (SCORING, _scale("route_scale")),
        Activation("situ", limit=25.0, beta=4.0),
        SOFTCAPS,
    ),
    "laguna": FamilyRouting(_SIGMOID_SCALED_AFTER, (_scale("moe_routed_scaling_factor"), *LAGUNA_DEFAULTS)),
    "step3p7": FamilyRouting(
        _SIGMOID_SCALED_AFTER,
        (_scale("moe_router_scaling_factor"), *STEP_DEFAULTS),
        activation_keys=(ACTIVATION, STEP_LIMITS),
    ),
    "nemotron_h": FamilyRouting(
        {**_SIGMOID_BIASED, "n_group": 1, "topk_group": 1},
        _BIASED_KEYS,
        _RELU2,
        (_named("mlp_hidden_act", _UNGATED),),
    ),
    # other scores
    "flint": FamilyRouting({"scoring": SIGMOID, "renormalize": True}, (NORM,)),
    "kolibri1": FamilyRouting(
        {"scoring": SIGMOID, "after_top_k": True, "correction": True, "renormalize": True}, (NORM,)
    ),
    "llama4": FamilyRouting(_LLAMA4, top_k=1),
    "phimoe": FamilyRouting({"scoring": NONE, "custom": SparseMixer()}, (JITTER,), top_k=2),
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
    # routers that this library does not compute
    "inkling": FamilyRouting(own_router="its routing weights are normalised together with those of the shared experts"),
    "grok1": FamilyRouting(
        activation=Activation("gelu"), own_router="its logits are squashed with tanh before the softmax"
    ),
    "pangu_pro_moe": FamilyRouting(own_router="published models of this type route in different ways"),
    "zaya": FamilyRouting(own_router="its router is a network with a state from layer to layer, and may skip a token"),
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
    "qwen3next": _gguf(_SOFTMAX_NORMED),
    "qwen35moe": _gguf(_SOFTMAX_NORMED),
    "qwen3vlmoe": _gguf(_SOFTMAX_NORMED),
    "olmoe": _gguf({"scoring": SOFTMAX}),
    "deepseek": _gguf({"scoring": SOFTMAX}),
    "deepseek2": _gguf({"scoring": SOFTMAX}),  # V2, V3 and Kimi-K2, which differ in metadata
    "deepseek32": _gguf(_GGUF_SIGMOID),
    "deepseek4": _gguf(
        {"scoring": SQRTSOFTPLUS, "correction": True}, None, replace(LIMIT, required=True), hash_layers=0
    ),
    "glm4moe": _gguf(_GGUF_SIGMOID),
    "bailingmoe2": _gguf(_GGUF_SIGMOID),
    "gpt-oss": _gguf(_SOFTMAX_AFTER, _SWIGLUOAI),
    "minimax-m2": _gguf({**_GGUF_SIGMOID, "renormalize": True}),
    "nemotron_h_moe": _gguf(_GGUF_SIGMOID, _RELU2),
    "jamba": _gguf({"scoring": SOFTMAX}),
    "phimoe": replace(ROWS["phimoe"], keys=()),  # as published: llama.cpp routes by a softmax
    "dbrx": _gguf(_SOFTMAX_NORMED),
    "granitemoe": _gguf(_SOFTMAX_NORMED),
    "granitehybrid": _gguf(_SOFTMAX_NORMED),
    "dots1": _gguf(_GGUF_SIGMOID),
    "exaone-moe": _gguf(_GGUF_SIGMOID),
    "afmoe": _gguf({**_GGUF_SIGMOID, "renormalize": True}),
    "lfm2moe": _gguf({**_GGUF_SIGMOID, "renormalize": True}),
    "ernie4_5-moe": _gguf({**_SOFTMAX_NORMED, "correction": True}),
    "hunyuan-moe": _gguf(_SOFTMAX_NORMED),
}
