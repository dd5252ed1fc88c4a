"""AutoRound: configs are translated to those of the format that stores the weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lancebill.errors import BadValue, UnsupportedFormat
from lancebill.formats import detect, registry
from lancebill.formats._gptq_zeros import Zeros
from lancebill.formats.auto_round import FORMAT
from lancebill.formats.awq import AwqScheme
from lancebill.formats.base import Config, Dense, Module, Scheme, Stored
from lancebill.formats.gptq import GptqScheme
from lancebill.numbers.codec import dequantize
from lancebill.numbers.dtypes import F16
from lancebill.numbers.spec import DENSE_BF16, group, int_spec
from lancebill.numbers.spec_names import parse_activation, parse_spec

NAME = "model.layers.0.mlp.experts.7.gate_proj"
FLOATS = {"packing_format": "auto_round:llm_compressor"}
MX4 = {**FLOATS, "bits": 4, "group_size": 32, "data_type": "mx_fp"}
NV4 = {**FLOATS, "bits": 4, "group_size": 16, "data_type": "nv_fp"}


def config(**values: Any) -> Config:
    quant = {"quant_method": "auto-round", "bits": 4, "group_size": 64, "sym": True, **values}
    return Config(quant={k: v for k, v in quant.items() if v is not None}, method="auto-round")


def resolve(name: str = NAME, **values: Any) -> Scheme:
    return FORMAT.scheme(config(**values), Module(name))


@pytest.mark.parametrize("method", ["auto-round", "auto_round", "intel/auto-round", "inc"])
def test_all_method_names_are_accepted(method: str) -> None:
    assert detect(Config(quant={}, method=method)) is FORMAT


@pytest.mark.parametrize(
    ("packing", "zeros"),
    [
        (None, Zeros.BORROWING),
        ("auto_round:auto_gptq", Zeros.BORROWING),
        ("auto_round:gptq", Zeros.BORROWING),
        ("auto_round:gptqmodel", Zeros.PLAIN),
        ("auto_round", Zeros.PLAIN),
    ],
)
def test_gptq_zero_points_depend_on_the_packing(packing: str | None, zeros: Zeros) -> None:
    scheme = resolve(packing_format=packing, sym=False, autoround_version="0.14.2")
    assert isinstance(scheme, GptqScheme) and scheme.zeros is zeros and not scheme.act_order
    word = np.array([0x19F078E3], dtype=np.uint32).view(np.int32)
    stored = {
        "codes": torch.from_numpy(word.copy()).reshape(1, 1).repeat(1, 8),
        "zero": torch.full((1, 1), 0x77777777, dtype=torch.int32),
        "scale": torch.full((1, 8), 0.5, dtype=torch.float16),
    }
    values = dequantize(scheme.decode(stored, 8, 8))[0].tolist()
    step = 0.5 if zeros is Zeros.PLAIN else 0.0
    assert values == [v + step for v in (-2.5, 3, 0, -0.5, -4, 3.5, 0.5, -3.5)]
    if zeros is Zeros.PLAIN:
        return
    stored["zero"] += 0x11111111
    with pytest.raises(BadValue, match="symmetric"):
        resolve(packing_format=packing).decode(stored, 8, 8)


@pytest.mark.parametrize("sym", [True, False])
def test_awq(sym: bool) -> None:
    scheme = resolve(packing_format="auto_round:auto_awq", sym=sym)
    assert isinstance(scheme, AwqScheme)
    assert scheme.spec == int_spec(4, group(64), zero_point=not sym, scale=F16)


@pytest.mark.parametrize(
    ("values", "spec", "suffix"),
    [
        (MX4, "mxfp4", ".weight_packed"),
        ({**MX4, "data_type": "mx_fp4e2m1"}, "mxfp4", ".weight_packed"),
        ({**MX4, "bits": 8}, "mxfp8", ".weight"),
        (NV4, "nvfp4-div", ".weight_packed"),
    ],
)
def test_floats_are_read_as_compressed_tensors(values: dict[str, Any], spec: str, suffix: str) -> None:
    scheme = resolve(**values)
    assert scheme.spec == parse_spec(spec)
    codes = scheme.part("codes")
    assert codes is not None and suffix in codes.suffix


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({**MX4, "act_bits": 4, "act_data_type": "mx_fp_rceil"}, "mxfp4"),
        ({**MX4, "act_bits": 8, "act_data_type": "mx_fp"}, "mxfp8"),
        ({**NV4, "act_bits": 4, "act_data_type": "nv_fp4_with_static_gs"}, "nvfp4"),
        ({**NV4, "act_bits": 16}, None),
        ({"act_bits": 16}, None),
    ],
)
def test_activation_specs(values: dict[str, Any], name: str | None) -> None:
    found = FORMAT.activations(config(**values), Module(NAME))
    assert found == (None if name is None else parse_activation(name))


def test_static_input_global_scales_are_required() -> None:
    scheme = resolve(**NV4, act_bits=4, act_data_type="nv_fp4_with_static_gs")
    part = scheme.part("input_global_scale")
    assert part is not None and not part.optional


def test_per_module_settings() -> None:
    extra = {
        "lm_head": {"bits": 8},
        "model.layers.0.mlp.gate": {"bits": 16, "data_type": "float"},
        NAME: {"bits": 8, "group_size": 32, "act_bits": None},
        r".*experts\.\d+\.up_proj.*": {"sym": False},
        r".*experts.*": {"bits": 2},
    }
    read = config(extra_config=extra)

    def scheme(name: str) -> Scheme:
        return FORMAT.scheme(read, Module(name))

    assert scheme("lm_head").spec == scheme("model.lm_head").spec == int_spec(8, group(64), scale=F16)
    assert isinstance(scheme("model.layers.0.mlp.gate"), Dense)
    assert scheme(NAME).spec == int_spec(8, group(32), scale=F16)
    assert scheme("model.layers.0.mlp.experts.3.up_proj").spec == int_spec(4, group(64), zero_point=True, scale=F16)
    assert scheme("model.layers.0.mlp.experts.3.down_proj").spec == int_spec(2, group(64), scale=F16)
    assert scheme("model.layers.0.mlp.gate_proj").spec == int_spec(4, group(64), scale=F16)  # matches no entry


def test_only_listed_blocks_are_quantised() -> None:
    for blocks in ("model.layers,visual.blocks", ["model.layers", "visual.blocks"]):
        read = config(block_name_to_quantize=blocks)
        assert FORMAT.scheme(read, Module("model.layers_norm")).spec == DENSE_BF16
        assert FORMAT.scheme(read, Module("visual.blocks.0.fc")).spec.quantized
        stored = {".qweight": Stored("I32", (8, 8)), ".scales": Stored("F16", (1, 8))}
        assert FORMAT.scheme(read, Module("other.layers.0.fc", stored)).spec.quantized  # stored tensors take precedence
    assert isinstance(FORMAT.scheme(config(), Module(NAME, {".weight": Stored("BF16", (8, 8))})), Dense)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"packing_format": "auto_round:marlin"}, "auto_round:auto_gptq, "),
        ({"packing_format": "itrex"}, "packing_format"),
        ({"packing_format": "auto_round:fp8_static"}, "cannot store data_type int"),
        ({"packing_format": "auto_round:llm_compressor"}, "cannot store data_type int"),
        ({**MX4, "packing_format": "auto_round:auto_awq"}, "cannot store data_type mx_fp"),
        ({"data_type": "fp8"}, "data_type"),
        ({"data_type": "int_sym", "act_bits": 8}, "act_bits"),
        ({**MX4, "group_size": 16}, "mx_fp 4 bits group 32"),
        ({**NV4, "bits": 8}, "nv_fp 8 bits group 16"),
        ({**NV4, "act_bits": 4, "act_data_type": "int"}, "int 4 bits"),
        ({"bits": 5}, "bits"),
        ({"bits": None}, "bits"),
        ({"group_size": None}, "group_size"),
        ({"bits": 8, "packing_format": "auto_round:auto_awq"}, "bits"),
        ({"rotation_config": {"kind": "hadamard"}}, "rotation_config"),
        ({"super_bits": 6}, "super_bits"),
        ({"extra_config": {"[": {"bits": 8}}}, "regular expression"),
        ({"extra_config": {NAME: {"super_bits": 6}}}, "super_bits"),
        ({"extra_config": {NAME: 8}}, "extra_config"),
        ({"extra_config": []}, "extra_config"),
    ],
)
def test_unsupported_configs_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedFormat, match=message):
        resolve(**values)


@pytest.mark.parametrize(
    ("values", "scale", "spec"),
    [
        ({"group_size": 0}, (".weight_scale", (1,)), "fp8-tensor"),
        ({"packing_format": "auto_round:fp8_static"}, (".weight_scale", (8,)), "fp8-channel"),
        ({"packing_format": "auto_round:fp8", "weight_block_size": [4, 4]}, (".weight_scale_inv", (2, 2)), "fp8-b4x4"),
    ],
)
def test_fp8_has_the_names_of_the_fp8_format(values: dict[str, Any], scale: tuple[str, Any], spec: str) -> None:
    stored = {".weight": Stored("F8_E4M3", (8, 8)), scale[0]: Stored("F32", scale[1])}
    read = config(**{"bits": 8, "data_type": "fp", **values})
    assert str(FORMAT.scheme(read, Module(NAME, stored)).spec) == spec


def test_rounded_floats_are_read_as_floats() -> None:
    read = config(packing_format="auto_round:fake", act_bits=8)
    assert isinstance(FORMAT.scheme(read, Module(NAME, {".weight": Stored("F32", (8, 8))})), Dense)


def test_keys_of_its_exports_as_fp8_and_compressed_tensors_are_known() -> None:
    own = {"provider": "auto-round", "act_bits": 8, "act_dynamic": True, "extra_config": {}, "bits": 8}
    assert not registry()["fp8"].unknown_keys(Config(quant=own, method="fp8"))
    assert not registry()["compressed-tensors"].unknown_keys(Config(quant={"provider": "auto-round"}))


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_keys_of_its_exports_as_gptq_and_awq_are_known(method: str) -> None:
    """What AutoRound writes into the configs of other formats."""
    own = {"data_type": "int", "enable_quanted_input": True, "provider": "auto-round", "amp": True, "sym": True}
    own |= {"autoround_version": "0.9.3", "to_quant_block_names": "model.layers", "iters": 200, "seqlen": 2048}
    quant = {"bits": 4, "group_size": 128, "quant_method": method, **own}
    fmt = registry()[method]
    assert fmt.unknown_keys(Config(quant=quant, method=method)) == []
    with pytest.raises(UnsupportedFormat, match="data_type"):
        fmt.scheme(Config(quant={**quant, "data_type": "mx_fp"}, method=method), Module("m"))
