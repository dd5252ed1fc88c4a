"""What a layer needs to route is part of `verify`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lancebill.checkpoint.resolve import manifest as manifests
from lancebill.checkpoint.resolve import naming as names
from lancebill.checkpoint.resolve.router_check import router_problems
from lancebill.errors import MissingTensor, UnsupportedFormat, WrongShape
from lancebill.formats import registry
from lancebill.formats.stored import Stored
from lancebill.testing.checkpoints import Geometry, generate

SIZE = Geometry(experts=4, hidden=32, intermediate=48, layers=1)
# Every row, and every mixture of one with several as a row of its own.
ROWS = {
    " ".join(filter(None, (one.family, one.mixture))): replace(one, beside=())
    for row in names.TABLE
    for one in row.mixtures
}


def problems(family: str, router: dict[str, tuple[int, ...]], form: int = 0, **config: object) -> list[type]:
    row = ROWS[family]
    made = generate(next(iter(registry()["dense"].examples())), row, row.forms[form], SIZE)
    headers = made.headers | {name: Stored("F32", shape) for name, shape in router.items()}
    found = manifests.build(replace(made.config, model={**made.config.model, **config}), headers, row)
    assert not found.problems
    return [type(problem) for problem in router_problems(found)]


@pytest.mark.parametrize(
    ("family", "name", "form"),
    [
        ("minimax_m2", "model.layers.0.block_sparse_moe.e_score_correction_bias", 0),
        ("minimax_m2", "model.layers.0.mlp.e_score_correction_bias", 1),
        ("gemma4", "model.layers.0.router.per_expert_scale", 0),
        ("laguna", "model.layers.0.mlp.experts.e_score_correction_bias", 0),
    ],
)
def test_missing_and_misshapen_router_tensors(family: str, name: str, form: int) -> None:
    assert problems(family, {}, form) == [MissingTensor]
    assert problems(family, {name: (3,)}, form) == [WrongShape]
    assert problems(family, {name: (4,)}, form) == []


def test_hash_tables_zero_experts_and_routers_of_their_own() -> None:
    table = {"layers.0.ffn.gate.tid2eid": (16, 2)}
    assert problems("deepseek_v4", {}, num_hash_layers=1) == [MissingTensor]
    assert problems("deepseek_v4", table, num_hash_layers=1) == []
    correction = "model.layers.0.mlp.router.e_score_correction_bias"
    assert problems("longcat_flash", {correction: (4,)}, zero_expert_num=2) == [WrongShape]
    assert problems("longcat_flash", {correction: (6,)}, zero_expert_num=2) == []
    assert problems("inkling", {}) == []
    assert problems("mixtral", {}, norm_topk_prob=False) == [UnsupportedFormat]


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_a_layer_of_a_whole_model_has_a_gate(row: names.Naming) -> None:
    """In every spelling. A file of experts alone needs none; a quantised gate has other tensors."""
    prefixes = row.forms[0].prefixes
    prefix = "model." if "model." in prefixes else prefixes[0]
    for template in row.router.gate_templates:
        name = prefix + template.format(layer=0)
        norm = name.partition(".0.")[0] + ".0.norm.weight"
        assert missing_gates(row, {norm: (32,)}) == [template.format(layer=0) for template in row.router.gate_templates]
        assert not missing_gates(row, {norm: (32,), name: (4, 32)})
        quantised = {norm: (32,), name.rpartition(".")[0] + ".qweight": (4, 4)}
        assert bool(missing_gates(row, quantised)) == (not row.router.quantizable)
        assert missing_gates(row, {norm: (32,), name.removesuffix("weight") + "global_scale": (1,)})
        assert not missing_gates(row, {})


def missing_gates(row: names.Naming, others: dict[str, tuple[int, ...]]) -> list[str]:
    made = generate(next(iter(registry()["dense"].examples())), row, row.forms[0], SIZE)
    headers = made.headers | {name: Stored("F32", shape) for name, shape in others.items()}
    found = [p for p in router_problems(manifests.build(made.config, headers, row)) if "router's gate" in p.what]
    assert all(type(problem) is MissingTensor for problem in found)
    return [name for problem in found for name in str(problem.expected).split(" or ")]


# Settings with which a family needs every tensor that its router may have.
NEEDS_ALL = {
    "bailing_moe": {"moe_router_enable_expert_bias": True},
    "deepseek_v4": {"num_hash_layers": 0},
    "llama4": {"num_experts_per_tok": 1},
    "pangu_ultra_moe": {"router_enable_expert_bias": True},
}
OPTIONAL = {("deepseek_v4", "table")}  # of layers that route by hash
WITH_ROLES = [name for name, row in ROWS.items() if row.router.roles and name != "gguf"]  # which does not state them


@pytest.mark.parametrize("name", WITH_ROLES)
def test_every_tensor_of_a_router_is_missed_in_every_spelling(name: str) -> None:
    row = ROWS[name]
    config = NEEDS_ALL.get(row.family, {})
    prefix = "model." if "model." in row.forms[0].prefixes else row.forms[0].prefixes[0]
    for number in range(max(len(templates) for templates in row.router.roles.values())):
        spelled = {
            role: prefix + templates[min(number, len(templates) - 1)].format(layer=0)
            for role, templates in row.router.roles.items()
            if (row.family, role) not in OPTIONAL
        }
        stored = {tensor: (2, 4) if row.router.is_shared(tensor) else (4,) for tensor in spelled.values()}
        assert problems(name, stored, **config) == []
        for role, tensor in spelled.items():
            left = {other: shape for other, shape in stored.items() if other != tensor}
            assert problems(name, left, **config) == [MissingTensor], f"without the {role} {tensor}"
