"""The naming table: every form of every row matches the names it generates, and loads those tensors."""

from __future__ import annotations

import time

import pytest
from covering import distinct_forms

from lancebill.checkpoint.load.layer_plan import plan_layer
from lancebill.checkpoint.load.load_experts import load_expert
from lancebill.checkpoint.resolve import manifest as manifests
from lancebill.checkpoint.resolve import naming as names
from lancebill.checkpoint.resolve.expert_sizes import expert_sizes
from lancebill.checkpoint.resolve.naming import DOWN, GATE, UP, NameForm, Naming
from lancebill.errors import DuplicateTensor, MissingTensor, UnexpectedTensor, UnsupportedFormat
from lancebill.formats import registry
from lancebill.formats.base import Example
from lancebill.formats.stored import Stored
from lancebill.moe.placement import Placement
from lancebill.numbers.codec import dequantize
from lancebill.numbers.weight import same_bits
from lancebill.testing.checkpoints import Geometry, generate, small_size
from lancebill.testing.conformance import whole_matrices

ROWS = [
    pytest.param(row, form, id=f"{row.family}-{row.forms.index(form)}")
    for row, forms in (*distinct_forms(), (names.TABLE[-1], names.TABLE[-1].forms))
    for form in forms
]
SIZE = Geometry(experts=3, hidden=32, intermediate=48, layers=2)


def _dense() -> Example:
    return next(e for e in registry()["dense"].examples() if e.name == "bf16")


def test_families_and_types_are_named_once() -> None:
    families = [row.family for row in names.TABLE]
    assert len(families) == len(set(families)) and families[-1] == "gguf"
    types = [t for row in names.TABLE for t in row.model_types]
    assert len(types) == len(set(types)), "a model_type belongs to one row"


@pytest.mark.parametrize(("row", "form"), ROWS)
def test_every_form_loads_the_tensors_it_names(row: Naming, form: NameForm) -> None:
    made = generate(_dense(), row, form, SIZE)
    manifest = manifests.build(made.config, made.headers, row)
    assert not manifest.problems, [p.render() for p in manifest.problems]
    assert sorted(manifest.layers) == [0, 1]
    assert manifest.expert_tensors == set(made.tensors)
    for index, layer in manifest.layers.items():
        plan = plan_layer(layer, Placement())
        for expert in range(SIZE.experts):
            weights = load_expert(made.read, plan, expert)
            gate, up, down = whole_matrices(made, form, index, expert)
            got = dequantize(weights.w13)
            assert same_bits(got[: gate.shape[0]].contiguous(), gate.contiguous())
            assert up is None or same_bits(got[gate.shape[0] :].contiguous(), up.contiguous())
            assert same_bits(dequantize(weights.w2), down.contiguous())


def test_parse_name_splits_names_and_ignores_lora_wrapping() -> None:
    form = names.find_family({"model_type": "qwen3_moe"}).forms[0]
    parsed = names.parse_name(form, "model.layers.3.mlp.experts.11.up_proj.base_layer.weight_packed")
    assert parsed is not None
    assert (parsed.layer, parsed.expert, parsed.projection, parsed.suffix) == (3, 11, UP, ".weight_packed")
    assert names.parse_name(form, "model.layers.3.mlp.experts.1.down_proj.weight").expert == 1  # type: ignore[union-attr]
    for other in (
        "model.layers.3.mlp.gate.weight",
        "model.layers.3.mlp.shared_experts.up_proj.weight",
        "mtp.layers.0.mlp.experts.0.up_proj.weight",
    ):
        assert names.parse_name(form, other) is None


def test_only_modules_of_the_language_model_have_the_familys_experts() -> None:
    dots = names.find_family({"model_type": "dots3_note"})
    for home in ("model.layers.1.mlp.experts", "model.language_model.layers.12.mlp.experts"):
        assert dots.has_experts_in(home)
    for other in (
        "model.vision_tower.blocks.1.mlp.experts",
        "model.vision_tower.layers.1.mlp.experts",
        "talker.model.layers.1.mlp.experts",
        "model.layers.1.mlp",
        "model.layers.01.mlp.experts",
        "model.layers.1.mlp.experts.0",
    ):
        assert not dots.has_experts_in(other)


def test_mixtral_projections_are_recognised() -> None:
    mixtral = names.find_family({"model_type": "mixtral"}).forms[0]
    parsed = [
        names.parse_name(mixtral, f"model.layers.0.block_sparse_moe.experts.2.{w}.weight") for w in ("w1", "w3", "w2")
    ]
    assert [c.projection for c in parsed if c is not None] == [GATE, UP, DOWN]


def test_an_unknown_family_is_an_error_and_a_custom_row_works() -> None:
    with pytest.raises(UnsupportedFormat, match="no family with experts has model_type"):
        names.find_family({"model_type": "brand_new"})
    row = Naming(
        "mine",
        ("brand_new",),
        (NameForm("blocks.{layer}.moe", {GATE: ".{expert}.a", UP: ".{expert}.b", DOWN: ".{expert}.c"}),),
    )
    made = generate(_dense(), row, row.forms[0], SIZE)
    assert not manifests.build(made.config, made.headers, row).problems


def test_the_type_of_the_whole_model_decides_if_it_is_known() -> None:
    text = {"model_type": "kimi_linear"}
    assert names.find_family({"model_type": "kimi_k3", "text_config": text}).family == "kimi_k3"
    assert names.find_family({"model_type": "a_wrapper", "text_config": text}).family == "kimi_linear"


@pytest.mark.parametrize("model_type", names.REFUSED)
def test_a_refused_family_says_why(model_type: str) -> None:
    for model in ({"model_type": model_type}, {"model_type": "a_wrapper", "text_config": {"model_type": model_type}}):
        with pytest.raises(UnsupportedFormat) as raised:
            names.find_family(model)
        assert names.REFUSED[model_type] in raised.value.what
    assert all(model_type not in row.model_types for row in names.TABLE)


def test_sizes_are_read_from_nested_configs() -> None:
    sizes = expert_sizes(
        {
            "model_type": "llama4",
            "text_config": {
                "num_local_experts": 16,
                "hidden_size": 8,
                "intermediate_size": 4,
                "num_experts_per_tok": 1,
            },
        }
    )
    assert (sizes.experts, sizes.hidden, sizes.intermediate, sizes.top_k) == (16, 8, 4, 1)
    latent = expert_sizes({"text_config": {"hidden_size": 64, "routed_expert_hidden_size": 32}})
    assert latent.hidden == 32


def test_longcat_saved_by_transformers_has_as_many_layers_as_its_tensors() -> None:
    """transformers writes two caches a layer as `num_hidden_layers`."""
    assert expert_sizes({"num_layers": 28, "num_hidden_layers": 56}).layers == 28
    assert expert_sizes({"num_hidden_layers": 48, "num_layers": 0}).layers == 48


def test_all_problems_are_reported_together() -> None:
    row = names.find_family({"model_type": "qwen3_moe"})
    made = generate(_dense(), row, row.forms[0], SIZE)
    headers = dict(made.headers)
    home = "model.layers.0.mlp.experts"
    del headers[f"{home}.0.gate_proj.weight"]
    del headers[f"{home}.2.down_proj.weight"]
    headers[f"{home}.1.up_proj.weight"] = Stored("BF16", (48, 33))
    headers[f"{home}.1.extra_proj.weight"] = Stored("BF16", (1,))
    headers[f"{home}.9.up_proj.weight"] = Stored("BF16", (48, 32))
    headers[f"{home}.1.down_proj.base_layer.weight"] = headers[f"{home}.1.down_proj.weight"]
    headers[f"{home}.1.gate_proj.odd"] = Stored("BF16", (1,))
    kinds = [type(p) for p in manifests.build(made.config, headers, row).problems]
    assert kinds.count(MissingTensor) == 2
    assert kinds.count(UnexpectedTensor) == 3
    assert DuplicateTensor in kinds
    texts = " ".join(p.render() for p in manifests.build(made.config, headers, row).problems)
    for fact in ("layer 0, expert 1, up", "[48, 32]", "[48, 33]", "expert 9", "extra_proj", "gate_proj.odd"):
        assert fact in texts


def test_sixty_thousand_names_resolve_in_seconds() -> None:
    row = names.find_family({"model_type": "deepseek_v3"})
    model = {"model_type": "deepseek_v3", "n_routed_experts": 256, "hidden_size": 64, "moe_intermediate_size": 32}
    shapes = {"gate_proj": (32, 64), "up_proj": (32, 64), "down_proj": (64, 32)}
    headers = {
        f"model.layers.{layer}.mlp.experts.{e}.{p}.weight": Stored("BF16", shape)
        for layer in range(80)
        for e in range(256)
        for p, shape in shapes.items()
    }
    from lancebill.formats.stored import Config

    start = time.process_time()
    manifest = manifests.build(Config(model), headers, row)
    assert not manifest.problems and len(manifest.layers) == 80
    assert time.process_time() - start < 20


@pytest.mark.parametrize(
    ("family", "form", "fmt", "lost"),
    [
        ("gguf", 1, "gguf", "blk.0.ffn_gate_up_exps.weight"),
        ("gguf", 0, "gguf", "blk.0.ffn_up_exps.weight"),
        ("gpt_oss", 0, "mxfp4", "model.layers.0.mlp.experts.gate_up_proj.bias"),
        ("gpt_oss", 0, "mxfp4", "model.layers.0.mlp.experts.down_proj.bias"),
        ("gpt_oss", 1, "dense", "model.layers.0.mlp.experts.1.up_proj.bias"),
    ],
)
def test_a_missing_tensor_is_named_as_it_was(family: str, form: int, fmt: str, lost: str) -> None:
    """Also where what is left of a layer fits fused and separate names, and where all biases of a kind are gone."""
    row, example = next(row for row in names.TABLE if row.family == family), next(iter(registry()[fmt].examples()))
    made = generate(example, row, row.forms[form], small_size(example))
    assert not manifests.build(made.config, made.headers, row).problems
    left = {name: stored for name, stored in made.headers.items() if name != lost}
    problems = manifests.build(made.config, left, row).problems
    assert len(left) < len(made.headers) and any(lost in problem.render() for problem in problems)
