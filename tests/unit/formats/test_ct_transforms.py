"""Rotated weights of compressed-tensors, against the library's own transforms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from compressed_tensors.transform import TransformConfig, apply_transform_config

from lancebill.errors import UnsupportedFormat
from lancebill.formats.base import Config, Module
from lancebill.formats.compressed_tensors import FORMAT
from lancebill.formats.stored import Stored
from lancebill.numbers.codec import dequantize, quantize
from lancebill.numbers.rotation import rotate
from lancebill.numbers.spec_names import parse_spec

NAMES = ("experts.0.gate_proj", "experts.0.down_proj", "lm_head")
K = 128


def transforms(block: int | None, *targets: str) -> dict[str, Any]:
    """What SpinQuant's R4 looks like: the weights are rotated in the file, the inputs when the model runs."""
    places = [{"targets": list(targets), "location": where, "inverse": where != "input"}
              for where in ("input", "weight_input")]  # fmt: skip
    config = TransformConfig(config_groups={"R4": {"type": "hadamard", "head_dim": block, "apply": places}})
    return config.model_dump(mode="json")


@pytest.mark.parametrize("block", [32, None])
def test_rotated_inputs_times_stored_weights_are_the_libraries_result(block: int | None) -> None:
    linear = torch.nn.ModuleDict({"down_proj": torch.nn.Linear(K, 64, bias=False)})
    section = transforms(block, "re:.*down_proj$")
    config = TransformConfig.model_validate(section)
    apply_transform_config(linear, config)
    stored = linear["down_proj"].weight.detach()
    quant = {**FORMAT.export(parse_spec("int4-g32"), ())[0], "transform_config": section}
    headers = {".weight_packed": Stored("I32", (64, K // 8)), ".weight_scale": Stored("BF16", (64, K // 32))}
    scheme = FORMAT.scheme(Config(quant=quant, method=FORMAT.name), Module(NAMES[1], headers))
    assert scheme.spec == replace(parse_spec("int4-g32"), rotation=block or K)
    assert scheme.unread == (".R4_input.weight",)
    assert {f"down_proj{suffix}" for suffix in scheme.unread} < linear.state_dict().keys()
    weight = quantize(stored, scheme.spec.unrotated)
    linear["down_proj"].weight.data = dequantize(weight)
    x = torch.randn(5, K)
    with torch.no_grad():
        expected = linear["down_proj"](x)
    rotated = replace(weight, spec=scheme.spec)
    torch.testing.assert_close(x @ dequantize(rotated).t(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(rotate(x, scheme.spec.rotation) @ dequantize(weight).t(), expected, rtol=1e-4, atol=1e-5)


def test_a_rotation_applies_to_its_targets_only() -> None:
    quant = {**FORMAT.export(parse_spec("int4-g32"), ())[0], "transform_config": transforms(32, "re:.*down_proj$")}
    config = Config(quant=quant, method=FORMAT.name)
    assert [FORMAT.scheme(config, Module(name)).spec.rotation for name in NAMES] == [0, 32, 0]


def test_what_we_write_is_what_the_library_reads() -> None:
    """The library rotates inputs as the config that we wrote says, and our weights undo it."""
    spec = parse_spec("int8-g32:fp32-h32")
    quant, scheme = FORMAT.export(spec, ["lm_head"])
    values = torch.randn(64, K)
    weight = quantize(values, spec)
    assert scheme.spec == spec
    model = torch.nn.ModuleDict({"down_proj": torch.nn.Linear(K, 64, bias=False), "lm_head": torch.nn.Linear(K, 64)})
    config = TransformConfig.model_validate(quant["transform_config"])
    places = config.config_groups["rotation"].apply
    config.config_groups["rotation"].apply = [place for place in places if place.is_online()]
    apply_transform_config(model, config)
    model["down_proj"].weight.data = dequantize(replace(weight, spec=spec.unrotated))
    x = torch.randn(5, K)
    with torch.no_grad():
        torch.testing.assert_close(model["down_proj"](x), x @ dequantize(weight).t(), rtol=1e-4, atol=1e-4)
    assert not [name for name in model.state_dict() if name.startswith("lm_head.rotation")]
    offline = [place for place in places if not place.is_online()]
    assert [(place.location, place.inverse) for place in offline] == [("weight_input", True)]


def test_a_rotated_matrix_with_an_act_order_is_refused() -> None:
    quant = {**FORMAT.export(parse_spec("int4-g32"), ())[0], "transform_config": transforms(32, "re:.*down_proj$")}
    quant["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    with pytest.raises(UnsupportedFormat, match="act-order"):
        FORMAT.scheme(Config(quant=quant, method=FORMAT.name), Module(NAMES[1]))


def test_columns_of_a_whole_rotation_follow_from_the_headers() -> None:
    section = transforms(None, "re:.*_proj$")
    section["config_groups"]["R4"]["apply"][0]["ignore"] = ["re:.*gate_proj$"]
    stored = {
        "int4-channel": (".weight_packed", Stored("I32", (64, K // 8))),
        "fp8-channel": (".weight", Stored("F8_E4M3", (64, K))),
    }
    for name, (suffix, header) in stored.items():
        quant = {**FORMAT.export(parse_spec(name), ())[0], "transform_config": section}
        config = Config(quant=quant, method=FORMAT.name)
        headers = {suffix: header, ".weight_scale": Stored("BF16", (64, 1))}
        rotations = [FORMAT.scheme(config, Module(module, headers)).spec.rotation for module in NAMES[:2]]
        assert rotations == [0, K], name
        with pytest.raises(UnsupportedFormat, match="columns of a whole rotation"):
            FORMAT.scheme(config, Module(NAMES[1]))
