"""ModelOpt against the library that converts its NVFP4, torch's float8, and its configs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from compressed_tensors.entrypoints.convert.converters.modelopt_nvfp4 import ModelOptNvfp4Converter
from torch import Tensor

from lancebill.errors import CannotEncode, UnsupportedFormat
from lancebill.formats import compressed_tensors as ct
from lancebill.formats.base import Config, Module, Scheme, Stored
from lancebill.formats.modelopt import ALGORITHMS, FORMAT
from lancebill.formats.stored import DTYPE_NAMES
from lancebill.numbers.codec import dequantize
from lancebill.numbers.dtypes import BF16
from lancebill.numbers.spec import (
    DENSE_BF16,
    FP8_BLOCK,
    FP8_CHANNEL,
    FP8_TENSOR,
    MXFP8,
    NVFP4,
    NVFP4_DIV,
    QuantSpec,
    fp8_spec,
)
from lancebill.numbers.spec_names import parse_activation, parse_spec
from lancebill.numbers.weight import LogicalWeight, same_bits
from lancebill.testing.weights import random_weight

N, K = 32, 64
EXPERT = "model.layers.0.mlp.experts.3.gate_proj"
FP8_ARGS = {"num_bits": 8, "type": "float"}


def _config(algo: str | None = None, method: str = "modelopt", **quant: Any) -> Config:
    return Config(quant={"quant_algo": algo, **quant}, method=method)


def _headers(**tensors: Tensor | Stored) -> dict[str, Stored]:
    return {
        f".{name}": t if isinstance(t, Stored) else Stored(DTYPE_NAMES[t.dtype], tuple(t.shape))
        for name, t in tensors.items()
    }


def _weight(scheme: Scheme, n: int = N, k: int = K) -> LogicalWeight:
    return random_weight(scheme, n, k, torch.Generator().manual_seed(0))


def _spec(config: Config, name: str, **stored: Tensor | Stored) -> QuantSpec:
    return FORMAT.scheme(config, Module(name, _headers(**stored))).spec


# Numbers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algo", ["NVFP4", "W4A16_NVFP4", "NVFP4_AWQ"])
def test_nvfp4_multiplies_by_its_second_scale(algo: str) -> None:
    stored = {
        "codes": torch.tensor([[0x21, 0x7F, 0x08, 0xC3]], dtype=torch.uint8),
        "scale": torch.tensor([[0x3C]], dtype=torch.uint8).view(torch.float8_e4m3fn),
        "scale_2": torch.tensor(0.25),
    }
    scheme = FORMAT.scheme(_config(algo), Module(EXPERT, {}))
    want = torch.tensor([[0.1875, 0.375, -2.25, 2.25, -0.0, 0.0, 0.5625, -0.75]])
    assert same_bits(dequantize(scheme.decode(stored, 1, 8)), want)


def test_nvfp4_equals_its_conversion_to_compressed_tensors() -> None:
    """The library inverts the second scale; with a power of two the values must be equal."""
    scheme = FORMAT.scheme(_config("NVFP4"), Module(EXPERT, {}))
    random = _weight(scheme)
    inputs = {"input_scale": torch.tensor(0.125)}
    weight = LogicalWeight(random.spec, random.codes, (random.scales[0], torch.tensor([[2.0**-9]])), inputs=inputs)
    names = {"codes": "weight", "scale": "weight_scale", "scale_2": "weight_scale_2", "input_scale": "input_scale"}
    tensors = {f"{EXPERT}.{names[role]}": t for role, t in scheme.encode(weight).items()}
    converted = ModelOptNvfp4Converter(targets=["re:.*"]).process(tensors)
    roles = {"weight_packed": "codes", "weight_scale": "scale", "weight_global_scale": "scale_2"}
    other = ct.FORMAT.export(NVFP4_DIV, [])[1]
    theirs = other.decode({role: converted[f"{EXPERT}.{name}"] for name, role in roles.items()}, N, K)
    assert same_bits(dequantize(weight), dequantize(theirs))
    assert converted[f"{EXPERT}.input_global_scale"].item() == 1 / 0.125


def test_gate_and_up_keep_their_own_second_scales() -> None:
    scheme = FORMAT.scheme(_config("NVFP4"), Module(EXPERT, {}))
    weight = _weight(scheme)
    for factor in (1.0, 10.0):
        stored = {**scheme.encode(weight), "scale_2": torch.tensor(0.003 * factor)}
        assert scheme.decode(stored, N, K).scales[1].item() == torch.tensor(0.003 * factor).item()


def _fp8(n: int, k: int) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)


def test_fp8_per_tensor_channel_and_block() -> None:
    scale = torch.rand(3, 2, generator=torch.Generator().manual_seed(1)) + 0.5
    n, k = 300, 200  # the last blocks are partial
    weight = _fp8(n, k)
    spread = scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    rows = torch.rand(n, generator=torch.Generator().manual_seed(2))
    cases = [
        ("FP8", scale[0, 0], weight.float() * scale[0, 0]),
        ("FP8", scale[:1, 0], weight.float() * scale[0, 0]),
        ("FP8_PER_CHANNEL_PER_TOKEN", rows, weight.float() * rows[:, None]),
        ("FP8_PER_CHANNEL_PER_TOKEN", rows[:, None], weight.float() * rows[:, None]),
        ("FP8_PB_WO", scale, weight.float() * spread),
        ("FP8_PB_WO", scale.reshape(3, 1, 2, 1), weight.float() * spread),
        ("fp8_pb_wo", scale.reshape(3, 1, 2, 1).to(torch.bfloat16), weight.float() * spread.to(torch.bfloat16).float()),
    ]
    for algo, stored, want in cases:
        module = Module(EXPERT, _headers(weight=weight, weight_scale=stored))
        scheme = FORMAT.scheme(_config(algo), module)
        held = scheme.part("scale")
        assert held is not None and tuple(stored.shape) in held.shapes(n, k, held.dtypes[0])
        assert same_bits(dequantize(scheme.decode({"codes": weight, "scale": stored}, n, k)), want)


def test_mxfp8_scales_are_exponents() -> None:
    weight = _fp8(4, 64)
    scale = torch.tensor([[126, 127], [128, 120], [0, 254], [127, 127]], dtype=torch.uint8)
    scheme = FORMAT.scheme(_config("MXFP8"), Module(EXPERT, {}))
    got = dequantize(scheme.decode({"codes": weight, "scale": scale}, 4, 64))
    assert same_bits(got, weight.float() * torch.exp2(scale.double() - 127).float().repeat_interleave(32, 1))
    viewed = {"codes": weight, "scale": scale.view(torch.float8_e8m0fnu)}
    assert same_bits(got, dequantize(scheme.decode(viewed, 4, 64)))


def test_pre_quant_scales_are_kept() -> None:
    scheme = FORMAT.scheme(_config("NVFP4_AWQ", group_size=16), Module(EXPERT, {}))
    random, smooth = _weight(scheme), torch.rand(K).to(torch.bfloat16)
    weight = LogicalWeight(random.spec, random.codes, random.scales, inputs={"pre_quant_scale": smooth})
    again = scheme.decode(scheme.encode(weight), N, K)
    assert again.equals(weight) and same_bits(again.inputs["pre_quant_scale"], smooth)
    with pytest.raises(CannotEncode, match="pre_quant_scale"):
        FORMAT.scheme(_config("NVFP4"), Module(EXPERT, {})).encode(weight)


def test_stacked_experts_join_their_suffixes_with_an_underscore() -> None:
    flat = {
        "": Stored("F8_E4M3", (8, 64, 32)),
        "_weight_scale": Stored("BF16", (8,)),
        "_input_scale": Stored("F32", ()),
    }
    module = Module("language_model.model.layers.0.feed_forward.experts.gate_up_proj", flat)
    scheme = FORMAT.scheme(_config("FP8"), module)
    assert scheme.spec == fp8_spec((0, 0), scale=BF16)
    assert all(any(suffix in p.suffix for p in scheme.parts) for suffix in flat)
    assert FORMAT.activations(_config("FP8"), module) == parse_activation("fp8-static")
    plain = Module("x.gate_up_proj", {"": Stored("BF16", (8, 64, 32))})
    assert FORMAT.scheme(_config("FP8"), plain).spec == DENSE_BF16
    assert FORMAT.activations(_config("FP8_PER_CHANNEL_PER_TOKEN"), plain) is None


# Configs ----------------------------------------------------------------------------------------------


def test_exclusions_are_wildcards_that_include_child_modules() -> None:
    patterns = [
        "lm_head",
        "*.mlp.gate",
        "model.layers.1.mlp",
        "model.layers.7*",
        "model.layers.2.mlp.experts.?.up_proj",
    ]
    excluded = [
        "lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.experts.0.up_proj", "model.layers.70.x",
        "model.layers.7.mlp.experts.0.up_proj", "model.layers.2.mlp.experts.5.up_proj",
    ]  # fmt: skip
    kept = ["model.layers.0.mlp.gate_proj", "model.layers.11.mlp.up_proj", "model.layers.2.mlp.experts.15.up_proj"]
    for key in ("exclude_modules", "ignore"):
        config = Config(quant={"quant_algo": "FP8", key: patterns}, method="modelopt")
        assert all(_spec(config, name) == DENSE_BF16 for name in excluded)
        assert all(_spec(config, name) == FP8_TENSOR for name in kept)


def test_mixed_precision_names_each_layer() -> None:
    layers = {
        "model.layers.0.mlp.experts.0.gate_proj": {"quant_algo": "NVFP4", "group_size": 16},
        "model.layers.0.mlp.experts.0.up_proj": {"quant_algo": "NVFP4", "group_size": 16},
        "model.layers.0.mlp.experts.0.down_proj": {"quant_algo": "FP8"},
        "model.layers.1.feed_forward.experts": {"quant_algo": "MXFP8"},
        "model.layers.2.mlp.experts.0.gate_proj": {"quant_algo": "FP8"},
        "model.layers.2.mlp.experts.0.up_proj": {"quant_algo": "NVFP4"},
    }
    config = _config("MIXED_PRECISION", quantized_layers=layers, group_size=None)
    assert _spec(config, "model.layers.0.mlp.experts.0.gate_proj") == NVFP4
    assert _spec(config, "model.layers.0.mlp.experts.0.gate_up_proj") == NVFP4
    assert _spec(config, "model.layers.0.mlp.experts.0.down_proj") == FP8_TENSOR
    assert _spec(config, "model.layers.1.feed_forward.experts.gate_up_proj") == MXFP8
    assert _spec(config, "model.layers.1.feed_forward.router") == DENSE_BF16
    with pytest.raises(UnsupportedFormat, match="halves"):
        _spec(config, "model.layers.2.mlp.experts.0.gate_up_proj")


def test_halves_of_a_fused_name_are_excluded_together() -> None:
    both = ["*.experts.0.gate_proj", "*.experts.0.up_proj"]
    assert _spec(_config("FP8", ignore=both), "m.experts.0.gate_up_proj") == DENSE_BF16
    assert _spec(_config("FP8", ignore=["*gate_up_proj"]), "m.experts.0.gate_up_proj") == DENSE_BF16
    with pytest.raises(UnsupportedFormat, match="halves"):
        _spec(_config("FP8", ignore=both[:1]), "m.experts.0.gate_up_proj")


def test_config_groups() -> None:
    def weights(**args: Any) -> dict[str, Any]:
        return {"weights": {"type": "float", "dynamic": False, **args}}

    four = weights(num_bits=4, group_size=16)
    groups = {
        "group_0": {**four, "targets": ["Linear"], "input_activations": {"num_bits": 4}},
        "group_1": {**four, "targets": ["model.layers.0.*"]},
        "group_2": {**weights(num_bits=8), "targets": ["model.layers.1.mlp.experts"]},
        "group_3": {**weights(num_bits=8, strategy="channel"), "targets": ["model.layers.2.*"]},
        "group_4": {**weights(num_bits=8, group_size=32), "targets": ["model.layers.3.*"]},
        "group_5": {**weights(num_bits=3, type="int", group_size=128), "targets": ["model.layers.4.*"]},
    }
    for algo in (None, "MIXED_PRECISION"):
        config = _config(algo, config_groups=groups)
        specs = [_spec(config, f"model.layers.{i}.mlp.experts.0.up_proj") for i in (9, 0, 1, 2, 3)]
        assert specs == [NVFP4, NVFP4, FP8_TENSOR, FP8_CHANNEL, MXFP8]
        with pytest.raises(UnsupportedFormat, match="group_5"):
            _spec(config, "model.layers.4.mlp.experts.0.up_proj")
    scaled = _headers(input_scale=Stored("F32", ()))
    inputs = [
        FORMAT.activations(config, Module(f"model.layers.{i}.mlp.experts.0.up_proj", scaled)) for i in (9, 0, 1, 2, 3)
    ]
    assert inputs == [parse_activation(n) if n else None for n in ("nvfp4", None, "fp8-static", "fp8", "mxfp8")]


@pytest.mark.parametrize(
    ("weights", "inputs", "spec"),
    [
        ({"type": "int", "num_bits": 4, "group_size": 128}, None, "int4-g128"),
        ({"type": "int", "num_bits": 8}, None, "int8-channel"),
        ({"type": "int", "num_bits": 8}, {"num_bits": 8}, "int8-channel"),
    ],
)
def test_config_groups_of_integers(weights: dict[str, Any], inputs: dict[str, Any] | None, spec: str) -> None:
    groups = {"g": {"weights": weights, "input_activations": inputs, "targets": ["model.layers.0.*"]}}
    config = _config(None, config_groups=groups)
    assert str(_spec(config, "model.layers.0.mlp.experts.0.up_proj")).startswith(spec.removesuffix("-channel"))
    assert _spec(config, "model.layers.1.mlp.experts.0.up_proj") == DENSE_BF16  # no group names it


def test_static_activations_need_a_stored_scale() -> None:
    for algo, name in (("FP8", "fp8-static"), ("NVFP4", "nvfp4"), ("NVFP4_AWQ", "nvfp4")):
        measured = Module(EXPERT, _headers(input_scale=torch.tensor(1.0)))
        assert FORMAT.activations(_config(algo), measured) == parse_activation(name)
        assert FORMAT.activations(_config(algo), Module(EXPERT, {})) is None
    for algo in ("W4A16_NVFP4", "FP8_PB_WO"):
        assert FORMAT.activations(_config(algo), Module(EXPERT, {})) is None
    assert FORMAT.activations(_config("FP8", ignore=["*"]), Module(EXPERT, {})) is None


def test_a_checkpoint_with_only_a_quantised_kv_cache_is_dense() -> None:
    config = _config(None, kv_cache_quant_algo="FP8")
    assert _spec(config, EXPERT, weight=torch.zeros(2, 2, dtype=torch.float16)) == parse_spec("fp16")


@pytest.mark.parametrize(
    ("quant", "match"),
    [
        ({"quant_algo": "NVFP4_SVD"}, "quant_algo"),
        ({"quant_algo": 8}, "quant_algo"),
        ({"quant_algo": "NVFP4", "group_size": 32}, "group_size"),
        ({"quant_algo": "MXFP8", "group_size": 16}, "group_size"),
        ({"quant_algo": "FP8", "group_size": 128}, "group_size"),
        ({"quant_algo": "FP8", "exclude_modules": "lm_head"}, "exclude_modules"),
        ({"quant_algo": "FP8", "ignore": [None]}, "exclude_modules"),
        ({"quant_algo": "MIXED_PRECISION"}, "quant_algo"),
        ({"quant_algo": "MIXED_PRECISION", "quantized_layers": {EXPERT: {"quant_algo": "NVFP4_SVD"}}}, EXPERT),
        ({"quant_algo": "MIXED_PRECISION", "quantized_layers": {EXPERT: "FP8"}}, EXPERT),
        ({"quant_algo": None, "config_groups": {"g": {"targets": "Linear"}}}, "targets"),
        ({"quant_algo": None, "config_groups": {"g": {}}}, "weights"),
        ({"config_groups": {"g": {"weights": FP8_ARGS, "input_activations": {"dynamic": True}}}}, "input_activations"),
        ({}, "quant_algo"),
    ],
)
def test_unsupported_configs_are_refused_by_name(quant: Mapping[str, Any], match: str) -> None:
    with pytest.raises(UnsupportedFormat, match=match):
        FORMAT.scheme(Config(quant=quant, method="modelopt"), Module(EXPERT, {}))


def test_all_method_names_are_accepted() -> None:
    assert all(FORMAT.matches(_config("FP8", method)) for method in ("modelopt", "modelopt_fp4", "modelopt_mixed"))
    assert not any(FORMAT.matches(_config("FP8", method)) for method in ("fp8", "compressed-tensors"))


@pytest.mark.parametrize(
    "spec", [NVFP4, FP8_TENSOR, FP8_CHANNEL, FP8_BLOCK, fp8_spec((128, 128), scale=BF16), MXFP8], ids=str
)
def test_export(spec: QuantSpec) -> None:
    quant, scheme = FORMAT.export(spec, ["lm_head", "model.layers.0.mlp.gate"])
    config = Config(quant=quant, method="modelopt")
    assert quant["quant_algo"] in ALGORITHMS and FORMAT.unknown_keys(config) == []
    weight = _weight(scheme, 256, 256)
    stored = scheme.encode(weight)
    names = {role: held.suffix[0] for role in stored if (held := scheme.part(role))}
    module = Module(EXPERT, {names[r]: Stored(DTYPE_NAMES[t.dtype], tuple(t.shape)) for r, t in stored.items()})
    assert FORMAT.scheme(config, module) == scheme
    assert scheme.decode(stored, 256, 256).equals(weight)
    assert _spec(config, "lm_head") == DENSE_BF16


@pytest.mark.parametrize("name", ["nvfp4-div", "mxfp4", "int4-g128", "bf16", "fp8-b64x64"])
def test_export_refuses_other_specs(name: str) -> None:
    with pytest.raises(CannotEncode, match="cannot store"):
        FORMAT.export(parse_spec(name), [])


@pytest.mark.parametrize("size", [64, 128])
def test_rows_of_integers_share_bytes(size: int) -> None:
    """As ModelOpt's `pack_int4_in_uint8`: rows 2i and 2i+1 in the low and high nibble. The headers have the group."""
    values = torch.randint(-8, 8, (6, 256), dtype=torch.int8)
    packed = ((values[0::2] & 15) | (values[1::2] << 4)).view(torch.uint8)
    scale = torch.rand(6, 256 // size)
    headers = {".weight": Stored("U8", (3, 256)), ".weight_scale": Stored("F32", (6, 256 // size))}
    scheme = FORMAT.scheme(_config("W4A16_AWQ"), Module(EXPERT, headers))
    weight = scheme.decode({"codes": packed, "scale": scale}, 6, 256)
    assert torch.equal(dequantize(weight), values.float() * scale.repeat_interleave(size, 1))
    assert torch.equal(scheme.encode(weight)["codes"], packed)
