"""Routing from published configs of every family, and configs that are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lancebill.checkpoint.read.gguf import read_gguf
from lancebill.checkpoint.resolve import naming
from lancebill.checkpoint.resolve.routing_config import GGUF_ROWS, ROWS, activation_for, routing_for
from lancebill.errors import UnsupportedFormat
from lancebill.moe.activation import Activation
from lancebill.moe.routing import NONE, SIGMOID, SOFTMAX, SQRTSOFTPLUS, Method, Routing, SparseMixer
from lancebill.testing.gguf import write_gguf

_V3 = Routing(
    8,
    SIGMOID,
    renormalize=True,
    epsilon=1e-20,
    correction=True,
    n_group=8,
    topk_group=4,
    routed_scaling_factor=2.5,
)
_ONE_GROUP = replace(_V3, n_group=1, topk_group=1)
_V4 = Routing(6, SQRTSOFTPLUS, renormalize=True, epsilon=1e-20, correction=True, routed_scaling_factor=1.5)

# The keys about experts in each family's published config.json.
PUBLISHED: list[tuple[dict[str, Any], Routing, Activation]] = [
    (
        {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "hidden_act": "silu"},
        Routing(2, renormalize=True),
        Activation(),
    ),
    (
        {"model_type": "qwen2_moe", "num_experts_per_tok": 4, "norm_topk_prob": False, "hidden_act": "silu"},
        Routing(4),
        Activation(),
    ),
    (
        {"model_type": "qwen3_moe", "num_experts_per_tok": 8, "norm_topk_prob": True},
        Routing(8, renormalize=True),
        Activation(),
    ),
    (
        {"model_type": "qwen3_vl_moe", "text_config": {"num_experts_per_tok": 8, "hidden_act": "silu"}},
        Routing(8, renormalize=True),
        Activation(),
    ),
    ({"model_type": "olmoe", "num_experts_per_tok": 8, "norm_topk_prob": False}, Routing(8), Activation()),
    (
        {
            "model_type": "deepseek_v2",
            "num_experts_per_tok": 6,
            "n_group": 8,
            "topk_group": 3,
            "topk_method": "group_limited_greedy",
            "scoring_func": "softmax",
            "norm_topk_prob": False,
            "routed_scaling_factor": 16.0,
        },
        Routing(6, n_group=8, topk_group=3, routed_scaling_factor=16.0),
        Activation(),
    ),
    (
        {
            "model_type": "deepseek_v2",
            "num_experts_per_tok": 6,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "greedy",
            "routed_scaling_factor": 1.0,
        },
        Routing(6),
        Activation(),
    ),
    (
        {
            "model_type": "deepseek_v3",
            "num_experts_per_tok": 8,
            "n_group": 8,
            "topk_group": 4,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
        },
        _V3,
        Activation(),
    ),
    (
        {
            "model_type": "kimi_k2",
            "num_experts_per_tok": 8,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.827,
        },
        replace(_ONE_GROUP, routed_scaling_factor=2.827),
        Activation(),
    ),
    (
        {
            "model_type": "bailing_moe",
            "num_experts_per_tok": 8,
            "n_group": 8,
            "topk_group": 4,
            "score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
        },
        _V3,
        Activation(),
    ),
    (
        {"model_type": "deepseek", "num_experts_per_tok": 6, "norm_topk_prob": False, "scoring_func": "softmax"},
        Routing(6),
        Activation(),
    ),
    (
        {"model_type": "glm4_moe", "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
         "routed_scaling_factor": 2.5},
        _ONE_GROUP,
        Activation(),
    ),
    (
        {
            "model_type": "deepseek_v4",
            "num_experts_per_tok": 6,
            "num_hash_layers": 3,
            "scoring_func": "sqrtsoftplus",
            "topk_method": "noaux_tc",
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.5,
            "swiglu_limit": 10.0,
        },
        _V4,
        Activation("silu", limit=10.0),
    ),
    (
        {"model_type": "gpt_oss", "num_experts_per_tok": 4, "hidden_act": "silu", "swiglu_limit": 7.0},
        Routing(4, after_top_k=True),
        Activation("swigluoai", limit=7.0),
    ),
    (
        {"model_type": "llama4", "text_config": {"num_experts_per_tok": 1, "num_local_experts": 16}},
        Routing(1, SIGMOID, after_top_k=True, weight_on_input=True),
        Activation(),
    ),
    (
        {"model_type": "minimax_m2", "num_experts_per_tok": 8, "scoring_func": "sigmoid", "use_routing_bias": True},
        replace(_V3, n_group=0, topk_group=0, routed_scaling_factor=1.0),
        Activation(),
    ),
    (
        {
            "model_type": "nemotron_h",
            "num_experts_per_tok": 6,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "mlp_hidden_act": "relu2",
        },
        replace(_ONE_GROUP, top_k=6),
        Activation("relu2_no_mul"),
    ),
    (
        {"model_type": "phimoe", "num_experts_per_tok": 2, "router_jitter_noise": 0.01},
        Routing(2, NONE, custom=SparseMixer(0.01)),
        Activation(),
    ),
    (
        {"model_type": "dots3_note", "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
         "vision_config": {"num_experts_per_tok": 2, "router_scaling_factor": 3.0}},
        replace(_ONE_GROUP, routed_scaling_factor=1.0),
        Activation(),
    ),
    (
        {"model_type": "inkling2", "text_config": {"num_experts_per_tok": 8, "route_scale": 8.0,
         "scoring_func": "sigmoid", "mlp_gate_softcap": 4.0, "mlp_up_softcap": 25.0, "hidden_act": "silu"}},
        Routing(8, SIGMOID, renormalize=True, epsilon=1e-20, correction=True, routed_scaling_factor=8.0),
        Activation("situ", limit=25.0, beta=4.0),
    ),
    # Families whose code is not in transformers.
    (
        {"model_type": "kimi_k3", "text_config": {"model_type": "kimi_linear", "num_experts_per_token": 16,
         "num_expert_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "moe_router_activation_func": "sigmoid",
         "moe_renormalize": True, "routed_scaling_factor": 1.0, "hidden_act": "situ", "activation_situ_beta": 4.0,
         "activation_situ_linear_beta": 25.0}},
        Routing(16, SIGMOID, renormalize=True, epsilon=1e-20, correction=True, n_group=1, topk_group=1),
        Activation("situ", limit=25.0, beta=4.0),
    ),
    ({"model_type": "minimax_m1", "num_experts_per_tok": 2}, Routing(2, renormalize=True), Activation()),
    ({"model_type": "arctic", "num_experts_per_tok": 2}, Routing(2, renormalize=True), Activation()),
    ({"model_type": "hunyuan", "moe_topk": 1, "hidden_act": "silu"}, Routing(1), Activation()),
    (
        {"model_type": "hunyuan", "num_hidden_layers": 8, "moe_topk": [8] * 8},
        Routing(8, renormalize=True),
        Activation(),
    ),
    (
        {"model_type": "step3_vl", "text_config": {"model_type": "step3_text", "moe_top_k": 3,
         "norm_expert_weight": False}},
        Routing(3),
        Activation(),
    ),
    (
        {"model_type": "step3p5", "num_hidden_layers": 6, "moe_top_k": 8, "norm_expert_weight": True,
         "moe_router_activation": "sigmoid", "moe_router_scaling_factor": 3.0, "use_moe_router_bias": True,
         "swiglu_limits": [0, 0, 0, 0, 0, 7.0]},
        Routing(8, SIGMOID, renormalize=True, correction=True, routed_scaling_factor=3.0, apply_scale_to_output=True),
        Activation("swiglustep", limit=7.0),
    ),
    (
        {"model_type": "pangu_ultra_moe", "num_experts_per_tok": 8, "norm_topk_prob": True,
         "routed_scaling_factor": 2.5, "router_enable_expert_bias": True},
        replace(_V3, n_group=0, topk_group=0),
        Activation(),
    ),
    ({"model_type": "jamba", "num_experts_per_tok": 2, "num_experts": 16}, Routing(2), Activation()),
    (
        {"model_type": "dbrx", "ffn_config": {"moe_top_k": 4, "ffn_act_fn": {"name": "gelu"}}},
        Routing(4, renormalize=True),
        Activation("gelu"),
    ),
    ({"model_type": "granitemoe", "num_experts_per_tok": 8}, Routing(8, after_top_k=True), Activation()),
]  # fmt: skip


@pytest.mark.parametrize(("model", "routing", "activation"), PUBLISHED, ids=lambda value: "")
def test_published_configs(model: dict[str, Any], routing: Routing, activation: Activation) -> None:
    family = naming.find_family(model).family
    assert routing_for(model, family, layer=5) == routing
    assert activation_for(model, family, layer=5) == activation


@pytest.mark.parametrize("model_type", ["grok-1", "PanguProMoE"])
def test_routers_that_are_left_to_the_model(model_type: str) -> None:
    family = naming.find_family({"model_type": model_type}).family
    with pytest.raises(UnsupportedFormat, match=f"does not route for {family}"):
        routing_for({"num_experts_per_tok": 2}, family, 0)


def test_every_family_has_a_row() -> None:
    assert {row.family for row in naming.TABLE} == {*ROWS, "gguf"}
    assert {naming.find_family(model).family for model, _, _ in PUBLISHED} <= set(ROWS)


METHODS = {
    "mixtral": Method.RENORMALIZE_NAIVE,
    "olmoe": Method.DEFAULT,
    "deepseek_v3": Method.DEEPSEEK_V3,
    "kimi_k2": Method.DEEPSEEK_V3,
    "deepseek_v4": Method.DEEPSEEK_V4,
    "gpt_oss": Method.RENORMALIZE,
    "llama4": Method.LLAMA4,
    "minimax_m2": Method.MINIMAX2,
    "phimoe": Method.CUSTOM,
}


def test_families_map_to_the_routing_methods_of_kernels() -> None:
    found = {naming.find_family(model).family: routing.method for model, routing, _ in PUBLISHED}
    assert {family: found[family] for family in METHODS} == METHODS


def test_the_first_layers_of_deepseek_v4_route_by_hash() -> None:
    model = {"num_experts_per_tok": 6, "num_hash_layers": 2}
    hashed = [routing_for(model, "deepseek_v4", layer).hashed for layer in range(4)]
    assert hashed == [True, True, False, False]
    assert not routing_for(model, "deepseek_v4", 0).correction
    assert routing_for(model, "deepseek_v4", 2).correction
    listed = {"num_experts_per_tok": 6, "mlp_layer_types": ["hash_moe", "moe"]}
    assert [routing_for(listed, "deepseek_v4", layer).hashed for layer in range(3)] == [True, False, False]


def test_limits_come_from_the_config() -> None:
    assert activation_for({}, "gpt_oss") == Activation("swigluoai", limit=7.0)
    config = {"swiglu_limit": 5.0, "swiglu_alpha": 1.5}
    assert activation_for(config, "gpt_oss") == Activation("swigluoai", limit=5.0, alpha=1.5)
    assert activation_for({}, "deepseek_v4").limit == 10.0
    softcaps = {"mlp_gate_softcap": 2.0, "mlp_up_softcap": 3.0}
    assert activation_for(softcaps, "inkling2") == Activation("situ", limit=3.0, beta=2.0)
    for none in (None, 0, 0.0):
        assert activation_for({"swiglu_limit": none}, "deepseek_v4") == Activation("silu")


def test_null_counts_as_absent() -> None:
    model = {"num_experts_per_tok": 2, "norm_topk_prob": None, "routed_scaling_factor": None, "n_group": None}
    assert routing_for(model, "deepseek_v2", 0) == Routing(2)
    assert routing_for(model, "mixtral", 0) == Routing(2, renormalize=True)
    unnormalised = {"moe_top_k": 4, "moe_normalize_expert_weights": None}
    assert not routing_for({"ffn_config": unnormalised}, "dbrx", 0).renormalize


REFUSED = [
    ("deepseek_v3", {"topk_method": "greedy"}, "topk_method"),
    ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method"),
    ("deepseek_v3", {"scoring_func": "tanh"}, "scoring_func"),
    ("deepseek_v3", {"routed_scaling_factor": "2.5"}, "routed_scaling_factor"),
    ("deepseek_v3", {"routed_scaling_factor": -1.0}, "routed_scaling_factor"),
    ("deepseek_v3", {"routed_scaling_factor": float("nan")}, "routed_scaling_factor"),
    ("deepseek_v3", {"n_group": 2.5}, "n_group"),
    ("deepseek_v3", {"n_group": [8]}, "n_group"),
    ("deepseek_v3", {"n_group": 2, "topk_group": 3}, "groups"),
    ("qwen3_moe", {"norm_topk_prob": "yes"}, "norm_topk_prob"),
    ("deepseek_v4", {"num_hash_layers": -1}, "num_hash_layers"),
    ("deepseek_v4", {"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
    ("llama4", {}, "llama4"),
    ("phimoe", {"num_experts_per_tok": 4}, "phimoe"),
    ("dbrx", {"moe_normalize_expert_weights": 2.0}, "moe_normalize_expert_weights"),
    # Keys that the family's code does not read, with values that would change results.
    ("mixtral", {"norm_topk_prob": False}, "norm_topk_prob"),
    ("step3p7", {"norm_expert_weight": False}, "norm_expert_weight"),
    ("step3p7", {"moe_router_activation": "softmax"}, "moe_router_activation"),
    ("mixtral", {"routed_scaling_factor": 2.0}, "routed_scaling_factor"),
    ("qwen3_moe", {"scoring_func": "sigmoid"}, "scoring_func"),
    ("qwen3_moe", {"n_group": 8, "topk_group": 4}, "n_group"),
    ("deepseek_v4", {"n_group": 8}, "n_group"),
    ("unheard_of", {}, "unheard_of"),
]


@pytest.mark.parametrize(("family", "settings", "text"), REFUSED)
def test_unknown_values_are_refused(family: str, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(UnsupportedFormat, match=text):
        routing_for({"num_experts_per_tok": 2, **settings}, family, 0)


def test_keys_of_other_families_are_accepted_if_they_change_nothing() -> None:
    harmless = {"scoring_func": "softmax", "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1}
    model = {"num_experts_per_tok": 2, "norm_topk_prob": True, **harmless}
    assert routing_for(model, "mixtral", 0) == Routing(2, renormalize=True)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("mixtral", {"hidden_act": "tanh"}),
        ("mixtral", {"hidden_act": "relu2"}),
        ("nemotron_h", {"mlp_hidden_act": "tanh"}),
        ("qwen3_moe", {"swiglu_limit": 7.0}),
        ("gpt_oss", {"swiglu_limit": None}),
        ("gpt_oss", {"swiglu_limit": -1.0}),
        ("inkling2", {"mlp_up_softcap": 0.0}),
        ("kimi_k3", {"hidden_act": "silu"}),
        ("dbrx", {"ffn_config": {"ffn_act_fn": {"name": "elu"}}}),
    ],
)
def test_unknown_activations_are_refused(family: str, settings: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedFormat):
        activation_for(settings, family)


def test_limits_of_layers_need_the_layer() -> None:
    model = {"hidden_act": "silu", "swiglu_limits": [7.0, 0.0]}
    assert activation_for(model, "step3p7", 0).limit == 7.0
    with pytest.raises(UnsupportedFormat, match="one value for all layers"):
        activation_for(model, "step3p7")


def test_a_config_without_top_k_is_refused() -> None:
    with pytest.raises(UnsupportedFormat, match="how many experts"):
        routing_for({}, "mixtral", 0)


def gguf(architecture: str, **metadata: Any) -> dict[str, Any]:
    return {"model_type": "gguf", "architecture": architecture, "num_experts_per_tok": 8, **metadata}


@pytest.mark.parametrize(
    ("model", "routing"),
    [
        (gguf("llama"), Routing(8, renormalize=True)),
        (gguf("qwen2moe", expert_gating_func=1), Routing(8)),
        (gguf("qwen3moe", expert_weights_scale=0.0), Routing(8, renormalize=True)),
        (gguf("gpt-oss"), Routing(8, after_top_k=True)),
        (gguf("gpt-oss", expert_gating_func=3), Routing(8, after_top_k=True)),
        (
            gguf("deepseek2", expert_gating_func=2, expert_weights_norm=1, expert_weights_scale=2.5,
                 expert_group_count=8, expert_group_used_count=4),
            replace(_V3, epsilon=0.0, correction=False),  # the loader sets it if the file has the tensor
        ),
        (gguf("deepseek2", expert_weights_norm=0), Routing(8)),
        (gguf("minimax-m2", expert_gating_func=2), Routing(8, SIGMOID, renormalize=True, correction=True)),
        (
            gguf("deepseek4", expert_gating_func=4, expert_weights_norm=1, expert_weights_scale=1.5,
                 num_hash_layers=3),
            replace(_V4, top_k=8, epsilon=0.0),
        ),
    ],
    ids=lambda value: "",
)  # fmt: skip
def test_gguf_metadata(model: dict[str, Any], routing: Routing) -> None:
    assert routing_for(model, "gguf", 5) == routing


def test_gguf_hash_layers_and_limits() -> None:
    model = gguf("deepseek4", num_hash_layers=3, swiglu_limit=10.0)
    assert [routing_for(model, "gguf", layer).hashed for layer in (2, 3)] == [True, False]
    assert activation_for(model, "gguf") == Activation("silu", limit=10.0)
    assert activation_for(gguf("gpt-oss"), "gguf") == Activation("swigluoai", limit=7.0)
    assert activation_for(gguf("nemotron_h_moe"), "gguf") == Activation("relu2_no_mul")
    with pytest.raises(UnsupportedFormat, match="swiglu_limit"):
        activation_for(gguf("deepseek4"), "gguf")


def test_per_layer_gguf_values_are_used_only_if_all_are_equal(tmp_path: Path) -> None:
    listed = {"deepseek4.hash_layer_count": 3}
    for limits, found in (([10.0, 10.0], 10.0), ([10.0, 7.0], None)):
        file = tmp_path / "model.gguf"
        metadata = {**listed, "general.architecture": "deepseek4", "deepseek4.swiglu_clamp_exp": limits}
        write_gguf(file, metadata, {"norm": ("F32", torch.zeros(4))})
        config, _ = read_gguf([file])
        assert (config.model.get("swiglu_limit"), config.model["num_hash_layers"]) == (found, 3)


@pytest.mark.parametrize("architecture", sorted(GGUF_ROWS))
def test_every_architecture_makes_a_routing(architecture: str) -> None:
    model = gguf(architecture, num_experts_per_tok=GGUF_ROWS[architecture].top_k or 4)
    assert routing_for(model, "gguf", 0).scoring in (SOFTMAX, SIGMOID, SQRTSOFTPLUS, NONE)


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (gguf("arctic"), "arctic"),
        (gguf("llama") | {"architecture": ["llama"]}, r"\['llama'\] is not known"),
        (gguf("llama", expert_gating_func=7), "expert_gating_func"),
        (gguf("llama4"), "only one number of experts"),
    ],
)
def test_unknown_gguf_metadata_is_refused(model: dict[str, Any], text: str) -> None:
    with pytest.raises(UnsupportedFormat, match=text):
        routing_for(model, "gguf", 0)
