"""Which group of a compressed-tensors config applies to a module, and which configs are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES, preset_name_to_scheme
from ct_configs import EXPERT, K, N, ct_config, with_args

from lancebill.errors import CannotEncode, UnsupportedFormat
from lancebill.formats import _ct_schemes as ct
from lancebill.formats._ct_config import FIXED, FLOAT, INT, ONE_LEVEL, PACK, write_config
from lancebill.formats._floats import FloatScheme
from lancebill.formats.base import Config, Module, Scheme, Stored
from lancebill.formats.compressed_tensors import FORMAT
from lancebill.numbers.dtypes import BF16
from lancebill.numbers.spec import (
    CHANNEL,
    DENSE_BF16,
    DENSE_F16,
    FP8_BLOCK,
    FP8_CHANNEL,
    MXFP4,
    NVFP4,
    NVFP4_DIV,
    TENSOR,
    QuantSpec,
    fp8_spec,
    group,
    int_spec,
)
from lancebill.numbers.spec_names import parse_activation, parse_spec


def test_activations_of_modules_that_are_stored_plain() -> None:
    config = ct_config(FLOAT, parse_spec("fp8-channel:bf16"), {"num_bits": 8, "type": "float", "dynamic": True})
    assert FORMAT.activations(config, Module(EXPERT, {".weight": Stored("BF16", (N, K))})) is None
    quantised = {".weight": Stored("F8_E4M3", (N, K)), ".weight_scale": Stored("BF16", (N, 1))}
    assert FORMAT.activations(config, Module(EXPERT, quantised)) is not None


def test_auto_rounds_fp4_has_inputs_like_its_weights() -> None:
    spec = FIXED[ONE_LEVEL][0]
    config = ct_config(ONE_LEVEL, spec, {"num_bits": 4, "type": "float", "dynamic": True})
    found = FORMAT.activations(config, Module(EXPERT, {}))
    assert found is not None and found.spec == spec and not found.static


def test_all_presets_of_the_library() -> None:
    weight_names = {
        "W4A16_ASYM": "int4-g128-zp", "W8A8": "int8", "INT8": "int8", "W4AFP8": "int4-g128", "FP8": "fp8-tensor:bf16",
        "FP8_DYNAMIC": "fp8-channel:bf16", "FP8_BLOCK": "fp8-block:bf16", "NVFP4": "nvfp4-div",
        "NVFP4A16": "nvfp4-div", "MXFP4": "mxfp4", "MXFP4A16": "mxfp4", "MXFP4XFP8": "mxfp4", "MXFP6A16": "mxfp6-e2m3",
        "MXFP6A8": "mxfp6-e2m3", "MXFP8": "mxfp8", "MXFP8A16": "mxfp8",
    }  # fmt: skip
    input_names = {
        "W8A8": "int8", "INT8": "int8", "W4AFP8": "fp8", "FP8": "fp8-static", "FP8_DYNAMIC": "fp8",
        "FP8_BLOCK": "fp8-g128", "NVFP4": "nvfp4", "MXFP4": "mxfp4", "MXFP4XFP8": "fp8-g128", "MXFP6A8": "mxfp8",
        "MXFP8": "mxfp8",
    }  # fmt: skip
    for name in PRESET_SCHEMES:
        if name == "UNQUANTIZED":
            continue
        preset = QuantizationConfig(config_groups={"g": preset_name_to_scheme(name, ["Linear"])}, format="x")
        quant = {**preset.model_dump(mode="json"), "format": PACK if name.startswith("W") else None}
        config = Config(quant=quant, method="compressed-tensors")
        module = Module(EXPERT, {".weight_scale": Stored("BF16", (1,)), ".weight": Stored("I8", (1, 1))})
        want = weight_names.get(name, f"int{name[1]}-g128")  # WxAy
        assert FORMAT.scheme(config, module).spec == parse_spec(want), name
        got = FORMAT.activations(config, module)
        if name in input_names:
            assert got == parse_activation(input_names[name]), name
        elif name.endswith("A8"):
            assert got == parse_activation("int8"), name
        else:
            assert (got is None) == (name.endswith(("A16", "ASYM"))), name


def test_the_most_specific_target_wins() -> None:
    base = write_config(PACK, int_spec(4, group(32)))
    groups = {
        "everything": base["config_groups"]["group_0"],
        "pattern": {
            **write_config(FLOAT, FP8_CHANNEL)["config_groups"]["group_0"],
            "targets": [r"re:.*\.3\.(down|gate)_proj"],
        },
        "name": {**write_config("mxfp4-pack-quantized", MXFP4)["config_groups"]["group_0"], "targets": [EXPERT]},
    }
    quant = {**base, "format": "mixed-precision", "config_groups": groups, "ignore": ["lm_head", r"re:.*mlp\.gate$"]}
    config = Config(quant=quant, method="compressed-tensors")

    def spec(name: str, **stored: Stored) -> QuantSpec:
        return FORMAT.scheme(config, Module(name, {f".{k}": v for k, v in stored.items()})).spec

    down = "model.layers.0.mlp.experts.3.down_proj"
    assert spec(EXPERT) == MXFP4
    assert spec(down) == fp8_spec(CHANNEL, scale=BF16)
    assert spec(down, weight_scale=Stored("F32", (1,))) == FP8_CHANNEL
    assert spec("model.layers.0.mlp.experts.4.up_proj") == int_spec(4, group(32))
    assert spec("model.layers.0.mlp.gate", weight=Stored("F16", (8, 8))) == DENSE_F16
    assert spec("model.layers.0.mlp.experts.4.up_proj", weight=Stored("BF16", (8, 8))) == DENSE_BF16
    assert spec("lm_head") == DENSE_BF16


def test_fused_projections_use_the_group_of_their_halves() -> None:
    def scheme(targets: list[str], ignore: tuple[str, ...] = ()) -> Scheme:
        config = ct_config(PACK, int_spec(4, group(32)))
        config.quant["config_groups"]["group_0"]["targets"] = targets
        config.quant["ignore"].extend(ignore)
        return FORMAT.scheme(config, Module("model.layers.0.mlp.experts.0.gate_up_proj", {}))

    assert scheme([r"re:.*\.gate_proj", r"re:.*\.up_proj"]).spec == int_spec(4, group(32))
    with pytest.raises(UnsupportedFormat, match="halves"):
        scheme([r"re:.*\.gate_proj"])
    assert scheme([r"re:.*gate_up_proj"]).spec == int_spec(4, group(32))
    halves = ("model.layers.0.mlp.experts.0.gate_proj", "model.layers.0.mlp.experts.0.up_proj")
    assert scheme(["Linear"], halves).spec == DENSE_BF16


@pytest.mark.parametrize(
    ("spec", "stored", "want"),
    [
        (int_spec(4, group(32)), {".weight_packed": "I32", ".weight_scale": "BF16"}, ct.PackedInts),
        (int_spec(8, CHANNEL), {".weight": "I8", ".weight_scale": "BF16"}, ct.PlainInts),
        (FP8_CHANNEL, {".weight": "F8_E4M3", ".weight_scale": "F32"}, FloatScheme),
        # The arguments of one are those of NVFP4: only its name tells it.
        *((spec, {}, FloatScheme) for name, (spec, _) in FIXED.items() if name != ONE_LEVEL),
    ],
    ids=str,
)
def test_an_omitted_format_follows_from_the_arguments(spec: QuantSpec, stored: Any, want: type) -> None:
    module = Module(EXPERT, {suffix: Stored(dtype, (N, K)) for suffix, dtype in stored.items()})
    scheme = FORMAT.scheme(ct_config(None, spec), module)
    assert type(scheme) is want and scheme.spec == spec


def test_integers_without_format_or_tensors_are_ambiguous() -> None:
    with pytest.raises(UnsupportedFormat, match="name a format"):
        FORMAT.scheme(ct_config(None, int_spec(4, group(32))), Module(EXPERT, {}))


def test_static_activations_need_their_scales() -> None:
    spec = fp8_spec(TENSOR, scale=BF16)
    static = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    asymmetric = {**static, "type": "int", "symmetric": False}
    local = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": "local"}
    cases = [
        (FLOAT, spec, None, set()),
        (FLOAT, spec, {**static, "dynamic": True}, set()),
        (FLOAT, spec, static, {"input_scale"}),
        (INT, int_spec(8, CHANNEL), asymmetric, {"input_scale", "input_zero_point"}),
        ("nvfp4-pack-quantized", NVFP4_DIV, local, {"input_global_scale"}),
    ]
    for fmt, weights, inputs, needed in cases:
        scheme = FORMAT.scheme(ct_config(fmt, weights, inputs), Module(EXPERT, {}))
        roles = {p.role: p.optional for p in scheme.parts if p.role.startswith("input_")}
        assert {role for role, optional in roles.items() if not optional} == needed
        assert len(roles) == 3


INT4 = ct_config(PACK, int_spec(4, group(32)))
ON_INPUTS = {"targets": ["Linear"], "location": "input"}


def _transformed(*groups: Mapping[str, Any]) -> Config:
    return ct_config(PACK, int_spec(4, group(32)), transform_config={"config_groups": dict(zip("uv", groups))})


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (ct_config("dense", int_spec(4, group(32))), "format"),
        (ct_config("marlin-24", int_spec(4, group(32))), "format"),
        (ct_config("sparse-24-bitmask", int_spec(4, group(32))), "format"),
        (ct_config(PACK, int_spec(4, group(32)), sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config"),
        (_transformed({"type": "hadamard", "apply": [{"targets": ["Linear"], "location": "output"}]}), "location"),
        (_transformed({"type": "random-hadamard", "apply": [ON_INPUTS]}), "type"),
        (_transformed({"type": "hadamard", "randomize": True, "apply": [ON_INPUTS]}), "randomize"),
        (_transformed({"type": "hadamard", "head_dim": 96, "apply": [ON_INPUTS]}), "head_dim"),
        (_transformed({"type": "hadamard", "head_dim": 32, "apply": [ON_INPUTS], "seed": 1}), "seed"),
        (
            _transformed(
                {"type": "hadamard", "apply": [ON_INPUTS, ON_INPUTS]}, {"type": "hadamard", "apply": [ON_INPUTS]}
            ),
            "more than one rotation",
        ),
        (ct_config(PACK, int_spec(4, group(32)), moe_sparsity_config={"method": "prune"}), "moe_sparsity_config"),
        (ct_config(PACK, int_spec(4, group(32)), config_groups=None), "config_groups"),
        (ct_config(PACK, int_spec(4, group(32)), config_groups={"W4A16": ["Linear"]}), "W4A16"),
        (ct_config(PACK, int_spec(4, group(32)), ignore=["re:("]), "not a supported regular expression"),
        (ct_config(PACK, int_spec(4, group(32)), ignore=[1]), "ignore"),
        (ct_config("nvfp4-pack-quantized", MXFP4), "nvfp4"),
        (ct_config(FLOAT, int_spec(8, CHANNEL)), "weights.type"),
        (ct_config(INT, FP8_CHANNEL), "weights.type"),
        (ct_config(PACK, int_spec(4, TENSOR, zero_point=True)), "weights.strategy"),
        (with_args(INT4, num_bits=9), "num_bits"),
        (with_args(INT4, num_bits=1), "num_bits"),
        (with_args(INT4, num_bits=True), "num_bits"),
        (with_args(INT4, strategy="attn_head"), "strategy"),
        (with_args(INT4, strategy="token"), "strategy"),
        (with_args(INT4, group_size=0), "group_size"),
        (with_args(INT4, group_size="32"), "group_size"),
        (with_args(INT4, dynamic=True), "dynamic"),
        (with_args(INT4, actorder="sideways"), "actorder"),
        (with_args(INT4, rotation="hadamard"), "rotation"),
        (with_args(INT4, strategy="block", block_structure=[128]), "block_structure"),
        (with_args(ct_config(FLOAT, FP8_CHANNEL), symmetric=False), "symmetric"),
        (with_args(ct_config(FLOAT, FP8_CHANNEL), num_bits=4), "num_bits"),
        (with_args(INT4, "output_activations", num_bits=8), "output_activations"),
    ],
)
def test_unsupported_configs_are_refused_by_name(config: Config, match: str) -> None:
    with pytest.raises(UnsupportedFormat, match=match):
        FORMAT.scheme(config, Module(EXPERT, {}))


def test_settings_that_do_not_affect_the_numbers_are_accepted() -> None:
    config = ct_config(
        PACK,
        int_spec(4, group(32)),
        sparsity_config={"format": "dense", "sparsity_structure": "2:4"},
        kv_cache_scheme={"num_bits": 8, "type": "float"},
        transform_config={"config_groups": {}},
    )
    assert FORMAT.scheme(with_args(config, observer="mse"), Module(EXPERT, {})).spec == int_spec(4, group(32))
    assert FORMAT.unknown_keys(config) == []
    old_block = with_args(ct_config(FLOAT, FP8_BLOCK), block_structure="128x128")
    assert FORMAT.scheme(old_block, Module(EXPERT, {".weight_scale": Stored("F32", (1, 1))})).spec == FP8_BLOCK


@pytest.mark.parametrize(
    "spec",
    [NVFP4, DENSE_BF16, int_spec(1), int_spec(4, TENSOR), parse_spec("nf4"), parse_spec("mxfp8-e5m2"),
     parse_spec("int4-g32-zp:fp16"), parse_spec("fp8-b128x128:e8m0")],
    ids=str,
)  # fmt: skip
def test_export_refuses_other_specs(spec: QuantSpec) -> None:
    with pytest.raises(CannotEncode) as caught:
        FORMAT.export(spec, [])
    assert spec != NVFP4 or caught.value.hint == "use nvfp4-div"
