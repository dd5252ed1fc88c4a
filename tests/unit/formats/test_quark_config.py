"""Quark configs: which section applies to a module, activations, and unsupported values."""

from __future__ import annotations

from typing import Any

import pytest
from quark_configs import config, section

from lancebill.errors import UnsupportedFormat
from lancebill.formats.base import Dense, Module, Stored
from lancebill.formats.quark import FORMAT
from lancebill.numbers.spec import DENSE_BF16
from lancebill.numbers.spec_names import parse_activation

NAME = "model.layers.0.mlp.experts.7.gate_proj"


def test_the_most_specific_section_wins() -> None:
    four, eight = section("int4", "per_group", symmetric=True), section("int8", "per_channel", symmetric=True)
    fp8 = section("fp8_e4m3", "per_tensor")
    cfg = config(
        four,
        exclude=["lm_head", "mlp.gate", "re:.*shared_expert.*", "model.layers.9.*"],
        layer_quant_config={"*down_proj": {"weight": eight}, "model.layers.5.mlp.up_proj": {"weight": fp8}},
    )

    def spec(name: str) -> str:
        return str(FORMAT.scheme(cfg, Module(name)).spec)

    assert spec(NAME) == "int4-g32:fp32"
    assert spec("model.layers.1.mlp.experts.0.down_proj") == "int8-channel:fp32"
    assert spec("model.layers.5.mlp.up_proj") == "fp8-tensor"
    assert spec("model.layers.5.mlp.gate_proj") == "int4-g32:fp32"  # not mlp.gate
    for left in ("lm_head", "model.layers.5.mlp.gate", "model.layers.5.shared_expert.up_proj", "model.layers.9.x"):
        assert spec(left) == "bf16", left
    assert spec("model.layers.90.x") == "int4-g32:fp32"


def test_sections_by_layer_type_and_unquantised_modules() -> None:
    cfg = config(section("int4", "per_tensor", symmetric=True), layer_type_quant_config={"Linear": {"weight": None}})
    assert FORMAT.scheme(cfg, Module(NAME)).spec == DENSE_BF16
    cfg = config(section("int4", "per_tensor", symmetric=True))
    assert isinstance(FORMAT.scheme(cfg, Module(NAME, {".weight": Stored("F16", (8, 8))})), Dense)
    both = {".weight": Stored("F16", (8, 8)), ".weight_scale": Stored("F32", ())}
    assert not isinstance(FORMAT.scheme(cfg, Module(NAME, both)), Dense)
    assert isinstance(FORMAT.scheme(config({"dtype": "bfloat16"}), Module(NAME)), Dense)


def test_activation_specs() -> None:
    weight = section("fp8_e4m3", "per_tensor")
    second = section("fp8_e4m3", "per_tensor", is_scale_quant=True)
    dynamic = {"is_dynamic": True}
    for inputs, name in (
        (section("fp8_e4m3", "per_tensor"), "fp8-static"),
        (section("fp8_e4m3", "per_channel", ch_axis=1, **dynamic), "fp8"),
        (section("fp8_e4m3", "per_group", group_size=128, **dynamic), "fp8-g128"),
        (section("int8", "per_channel", symmetric=True, **dynamic), "int8"),
        (section("int8", "per_tensor", symmetric=True), "int8-static"),
        (section("fp4", "per_group", scale_format="e8m0", **dynamic), "mxfp4"),
        ({"dtype": "mx", "mx_element_dtype": "fp4", "group_size": 32}, "mxfp4"),
        ([section("fp4", "per_group", group_size=16, **dynamic), second], "nvfp4"),
    ):
        assert FORMAT.activations(config(weight, inputs), Module(NAME)) == parse_activation(name)
    assert FORMAT.activations(config(weight), Module(NAME)) is None


def test_static_inputs_without_scales_are_not_declared() -> None:
    """Quark writes such files: the weights can be read, with inputs that are not quantised."""
    weight, inputs = section("fp8_e4m3", "per_tensor"), section("fp8_e4m3", "per_tensor")
    second = section("fp8_e4m3", "per_tensor", is_scale_quant=True)
    for declared, suffix in (
        (inputs, ".input_scale"),
        ([section("fp4", "per_group", group_size=16, is_dynamic=True), second], ".input_scale_2"),
    ):
        stored = {".weight": Stored("F8_E4M3", (8, 32)), ".weight_scale": Stored("F32", ())}
        cfg = config(weight, declared)
        assert all(p.optional for p in FORMAT.scheme(cfg, Module(NAME, stored)).parts if p.role.startswith("input"))
        assert FORMAT.activations(cfg, Module(NAME, stored)) is None
        assert FORMAT.activations(cfg, Module(NAME, {**stored, suffix: Stored("F32", ())})) is not None


def test_stacked_floats_are_not_quantised() -> None:
    """Quark leaves fused experts as they are, beside quantised linear modules."""
    name, stored = "model.layers.0.mlp.experts.gate_up_proj", {"": Stored("BF16", (4, 64, 32))}
    assert str(FORMAT.scheme(config(section("fp8_e4m3", "per_tensor")), Module(name, stored)).spec) == "bf16"


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (section("int5", "per_tensor"), "weight.dtype"),
        (section("mx6", "per_tensor"), "weight.dtype"),
        (section("int4", "per_head"), "qscheme"),
        (section("int4", "per_block", block_size=[8, 8]), "qscheme"),
        (section("fp8_e4m3", "per_block"), "block_size"),
        (section("fp8_e4m3", "per_block", block_size=[128]), "block_size"),
        (section("fp8_e4m3", "per_block", block_size=[128, 0]), "block_size"),
        (section("int4", "per_channel", ch_axis=1), "ch_axis"),
        (section("int4", "per_group", ch_axis=0), "ch_axis"),
        (section("int4", "per_group", group_size=8), "power of two"),
        (section("int4", "per_group", group_size=96), "power of two"),
        (section("int4", "per_group", group_size=None), "group_size"),
        (section("int4", "per_group", is_dynamic=True), "dynamically quantised"),
        (section("fp8_e4m3", "per_tensor", symmetric=False), "no zero point"),
        (section("fp4", "per_group", scale_format="e4m3"), "scale_format"),
        ({"dtype": "mx", "mx_element_dtype": "int8", "group_size": 32}, "mx_element_dtype"),
        ({"dtype": "mx", "mx_element_dtype": "fp4", "group_size": 16}, "group_size"),
        ([section("fp4", "per_group")] * 3, "stages"),
        ([section("fp4", "per_group"), section("int8", "per_tensor", is_scale_quant=True)], "dtype"),
        ([section("fp4", "per_group"), section("fp8_e4m3", "per_group", is_scale_quant=True)], "second stage"),
        ("int4", "weight"),
        ([4, 5], "weight"),
    ],
)
def test_unsupported_sections_are_refused(weight: Any, message: str) -> None:
    with pytest.raises(UnsupportedFormat, match=message):
        FORMAT.scheme(config(weight), Module(NAME))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"exclude": ["re:("]}, "regular expression"),
        ({"exclude": [["x"]]}, "list of names"),
        ({"exclude": "lm_head"}, "exclude"),
        ({"layer_quant_config": []}, "layer_quant_config"),
        ({"layer_quant_config": {"*": 4}}, "'\\*'"),
        ({"global_quant_config": None}, "global_quant_config"),
        ({"export": {"pack_method": "shuffle"}}, "pack_method"),
        ({"export": {"weight_format": "fake_quantized"}}, "weight_format"),
        ({"global_quant_config": {"weight": section("int8", "per_tensor"), "bias": {}}}, "bias"),
    ],
)
def test_unsupported_configs_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedFormat, match=message):
        FORMAT.scheme(config(section("int8", "per_tensor"), **values), Module(NAME))
