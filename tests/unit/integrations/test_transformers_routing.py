"""Routing and activations of every family compared with transformers' routers and experts.

We derive a Routing and an Activation from the config.json of a tiny model; transformers' router and experts get random
weights. Both must choose the same experts, with weights equal up to fp32 rounding.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lancebill.checkpoint.resolve import naming
from lancebill.checkpoint.resolve.routing_config import activation_for, routing_for
from lancebill.moe.routing import Routed, Routing, route

pytest.importorskip("transformers")

HIDDEN, INTER, EXPERTS, TOKENS, VOCABULARY = 32, 16, 16, 64, 50


@dataclass(frozen=True)
class Case:
    """`router` and `config` are class names in the family's modules of transformers."""

    family: str
    config: str
    router: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    layer: int = 0
    bias: str | None = None  # name of the router's buffer with the correction bias
    module: str = ""
    since: str = ""  # older releases of transformers have another router

    @property
    def package(self) -> str:
        return self.module or self.family


_GROUPS = {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 4, "norm_topk_prob": True}
_BIAS = "e_score_correction_bias"
_V4 = {"num_hidden_layers": 2, "num_experts_per_tok": 3, "vocab_size": VOCABULARY}

CASES = [
    Case("mixtral", "MixtralConfig", "MixtralTopKRouter"),
    Case("qwen2_moe", "Qwen2MoeConfig", "Qwen2MoeTopKRouter", {"norm_topk_prob": False}),
    Case("qwen3_moe", "Qwen3MoeConfig", "Qwen3MoeTopKRouter", {"norm_topk_prob": True}),
    Case("qwen3_moe", "Qwen3MoeConfig", "Qwen3MoeTopKRouter", {"norm_topk_prob": False, "num_experts_per_tok": 1}),
    Case("qwen3_vl_moe", "Qwen3VLMoeTextConfig", "Qwen3VLMoeTextTopKRouter"),
    Case("olmoe", "OlmoeConfig", "OlmoeTopKRouter"),
    Case("gpt_oss", "GptOssConfig", "GptOssTopKRouter"),
    Case("granitemoe", "GraniteMoeConfig", "GraniteMoeTopKRouter", since="5.23"),
    Case("jamba", "JambaConfig", "JambaTopKRouter", since="5.23"),
    Case("phimoe", "PhimoeConfig", "PhimoeTopKRouter"),
    Case("phimoe", "PhimoeConfig", "PhimoeTopKRouter", {"router_jitter_noise": 0.2}),
    Case("deepseek_v2", "DeepseekV2Config", "DeepseekV2TopkRouter", {"routed_scaling_factor": 16.0}),
    Case(
        "deepseek_v2",
        "DeepseekV2Config",
        "DeepseekV2TopkRouter",
        {**_GROUPS, "topk_method": "group_limited_greedy", "norm_topk_prob": False},
    ),
    Case("deepseek_v3", "DeepseekV3Config", "DeepseekV3TopkRouter", _GROUPS, bias=_BIAS),
    Case(
        "deepseek_v3",
        "DeepseekV3Config",
        "DeepseekV3TopkRouter",
        {**_GROUPS, "norm_topk_prob": False, "routed_scaling_factor": 1.0},
        bias=_BIAS,
    ),
    Case("deepseek_v3", "DeepseekV32Config", "DeepseekV32TopkRouter", _GROUPS, bias=_BIAS, module="deepseek_v32"),
    Case("glm4_moe", "Glm4MoeConfig", "Glm4MoeTopkRouter", {"routed_scaling_factor": 2.5}, bias=_BIAS),
    Case("nemotron_h", "NemotronHConfig", "NemotronHTopkRouter", {"routed_scaling_factor": 2.5}, bias=_BIAS),
    Case("deepseek_v4", "DeepseekV4Config", "DeepseekV4TopKRouter", {**_V4, "num_hash_layers": 1}, 1, bias=_BIAS),
]
OTHERS = [
    Case("minimax_m2", "MiniMaxM2Config", "MiniMaxM2TopKRouter"),
    Case("deepseek_v4", "DeepseekV4Config", "DeepseekV4HashRouter", {**_V4, "num_hash_layers": 1}),
    Case("llama4", "Llama4TextConfig", "Llama4Router", {"num_experts_per_tok": 1}),
    Case("dbrx", "DbrxConfig", "DbrxFFN"),
]


@pytest.fixture(scope="module", autouse=True)
def _one_seed() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def class_of(case: Case, kind: str, name: str) -> Callable[..., Any]:
    if case.since:
        pytest.importorskip("transformers", minversion=case.since)
    module = importlib.import_module(f"transformers.models.{case.package}.{kind}_{case.package}")
    result: Callable[..., Any] = getattr(module, name)
    return result


def config_of(case: Case) -> Any:
    """A tiny config; sizes are given under all names that families use."""
    sizes = {
        "hidden_size": HIDDEN,
        "num_experts_per_tok": 3,
        "intermediate_size": INTER,
        "moe_intermediate_size": INTER,
    }
    counts = {"num_local_experts": EXPERTS} if case.family in ("mixtral", "gpt_oss", "granitemoe") else {}
    counts = counts or ({"n_routed_experts": EXPERTS} if case.bias or case.family == "deepseek_v2" else {})
    counts = counts or {"num_local_experts": EXPERTS, "num_experts": EXPERTS}
    if case.family == "phimoe":
        sizes["num_experts_per_tok"] = 2
    return class_of(case, "configuration", case.config)(**{**sizes, **counts, **case.settings})


def loaded(case: Case, config: Any, *arguments: Any) -> nn.Module:
    module: nn.Module = class_of(case, "modeling", case.router)(config, *arguments)
    for tensor in [*module.parameters(), *module.buffers()]:
        if tensor.is_floating_point():
            nn.init.normal_(tensor.data)
    return module.eval()


def routing_of(case: Case, config: Any) -> Routing:
    """Derived from config.json, as for a checkpoint."""
    model = config.to_dict()
    family = naming.find_family(model).family
    assert family == case.family
    return routing_for(model, family, case.layer)


def check(routed: Routed, ids: Tensor, weights: Tensor) -> None:
    """Each token must have the same experts with the same weights; the order of slots may differ."""
    ours, theirs = (torch.zeros(TOKENS, EXPERTS) for _ in range(2))
    ours.scatter_(1, routed.ids.long(), routed.weights)
    theirs.scatter_(1, ids.long(), weights.float())
    assert torch.equal(routed.ids.long().sort(dim=1).values, ids.long().sort(dim=1).values)
    torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.package}-{'-'.join(map(str, case.settings.values()))}")
@torch.no_grad()
def test_routers(case: Case) -> None:
    config = config_of(case)
    router = loaded(case, config)
    logits, weights, ids = router(torch.randn(TOKENS, HIDDEN))
    bias = dict(router.named_buffers())[case.bias] if case.bias else None
    check(route(routing_of(case, config), logits, correction_bias=bias), ids, weights)


@torch.no_grad()
def test_minimax_m2_gets_its_bias_from_the_block() -> None:
    case = OTHERS[0]
    config, bias = config_of(case), torch.randn(EXPERTS)
    logits, weights, ids = loaded(case, config)(torch.randn(TOKENS, HIDDEN), bias)
    check(route(routing_of(case, config), logits, correction_bias=bias), ids, weights)


@torch.no_grad()
def test_deepseek_v4_routes_its_first_layers_by_token_id() -> None:
    case = OTHERS[1]
    config = config_of(case)
    router = loaded(case, config)
    table = torch.rand(VOCABULARY, EXPERTS).argsort(dim=1)[:, :3]
    dict(router.named_buffers())["tid2eid"].copy_(table)
    tokens = torch.randint(VOCABULARY, (TOKENS,))
    logits, weights, ids = router(torch.randn(TOKENS, HIDDEN), tokens)
    routing = routing_of(case, config)
    assert routing.hashed
    check(route(routing, logits, table=table, input_ids=tokens), ids, weights)


@torch.no_grad()
def test_llama4_weights_its_expert_by_a_sigmoid() -> None:
    case = OTHERS[2]
    config = config_of(case)
    scores, logits = loaded(case, config)(torch.randn(TOKENS, HIDDEN))
    routing = routing_of(case, config)
    assert routing.weight_on_input
    weights, ids = scores.max(dim=1, keepdim=True)
    check(route(routing, logits), ids, weights)


@pytest.mark.parametrize("norm", [1.0, None])
@torch.no_grad()
def test_dbrx_with_and_without_normalisation(norm: float | None) -> None:
    case = OTHERS[3]
    ffn = {
        "hidden_size": HIDDEN,
        "ffn_hidden_size": INTER,
        "moe_num_experts": EXPERTS,
        "moe_top_k": 4,
        "moe_normalize_expert_weights": norm,
        "ffn_act_fn": {"name": "silu"},
    }
    config = class_of(case, "configuration", case.config)(d_model=HIDDEN, ffn_config=ffn)
    block = loaded(case, config)
    logits = torch.randn(TOKENS, EXPERTS)
    weights, ids = block.route_tokens_to_experts(logits)  # type: ignore[operator]
    check(route(routing_of(case, config), logits), ids, weights)


@torch.no_grad()
def test_longcat_sums_the_weights_of_zero_experts() -> None:
    """Not a family of the naming table, but its router is a reference for zero experts."""
    case = Case("longcat_flash", "LongcatFlashConfig", "LongcatFlashTopkRouter", since="5.23")
    config = class_of(case, "configuration", case.config)(
        hidden_size=HIDDEN, n_routed_experts=EXPERTS - 6, zero_expert_num=6, moe_topk=3, routed_scaling_factor=6.0
    )
    router = loaded(case, config)
    logits, weights, ids = router(torch.randn(TOKENS, HIDDEN))
    routing = Routing(3, zero_experts=6, routed_scaling_factor=6.0)
    routed = route(routing, logits, correction_bias=dict(router.named_buffers())[_BIAS])
    real = ids < EXPERTS - 6
    assert real.any()
    assert not real.all()
    assert torch.equal(routed.ids.long().sort(1).values, torch.where(real, ids, -1).sort(1).values)
    torch.testing.assert_close(routed.identity_weight, torch.where(real, 0.0, weights).sum(1), rtol=2e-6, atol=1e-7)
    torch.testing.assert_close(routed.weights.sum(1), torch.where(real, weights, 0.0).sum(1), rtol=2e-6, atol=1e-7)


EXPERT_CLASSES = {
    "mixtral": "MixtralExperts",
    "qwen3_moe": "Qwen3MoeExperts",
    "gpt_oss": "GptOssExperts",
    "deepseek_v3": "DeepseekV3Experts",
    "deepseek_v4": "DeepseekV4Experts",
    "glm4_moe": "Glm4MoeExperts",
    "minimax_m2": "MiniMaxM2Experts",
    "nemotron_h": "NemotronHExperts",
}


@pytest.mark.parametrize("family", EXPERT_CLASSES)
@torch.no_grad()
def test_activations_equal_transformers(family: str) -> None:
    """Compares only the activation, computed by the code of the family's experts."""
    case = next(c for c in (*CASES, *OTHERS) if c.family == family)
    config = config_of(case)
    activation = activation_for(config.to_dict(), family)
    experts = class_of(case, "modeling", EXPERT_CLASSES[family])(config)
    projected = torch.randn(TOKENS, 2 * INTER if activation.gated else INTER) * 6
    gate, up = projected.chunk(2, dim=-1)
    if family == "gpt_oss":
        theirs = experts._apply_gate(torch.stack([gate, up], dim=-1).flatten(1))
    elif family == "deepseek_v4":
        theirs = experts._apply_gate(projected)
    else:
        theirs = experts.act_fn(gate) * up if activation.gated else experts.act_fn(projected)
    torch.testing.assert_close(activation(projected), theirs, rtol=1e-6, atol=1e-6)
