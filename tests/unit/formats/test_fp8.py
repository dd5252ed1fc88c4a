"""FP8 per tensor, channel and block, against torch's float8 and transformers' dequantiser."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from lancebill.errors import BadValue, CannotEncode, UnsupportedFormat
from lancebill.formats import detect
from lancebill.formats._floats import skip_list
from lancebill.formats.base import Config, Module, Stored
from lancebill.formats.fp8 import FORMAT
from lancebill.formats.stored import DTYPE_NAMES
from lancebill.numbers.codec import dequantize, quantize
from lancebill.numbers.dtypes import BF16, E4M3, E8M0
from lancebill.numbers.spec import (
    DENSE_BF16,
    FP8_BLOCK,
    FP8_BLOCK_SIDES,
    FP8_CHANNEL,
    FP8_TENSOR,
    MXFP4,
    MXFP8,
    NVFP4,
    QuantSpec,
    fp8_spec,
    group,
)
from lancebill.numbers.spec_names import parse_activation
from lancebill.numbers.weight import same_bits

N, K = 256, 384
BLOCK = {"weight_block_size": [128, 128]}
EXPONENTS = {**BLOCK, "scale_fmt": "ue8m0"}


def _config(quant: dict[str, Any], method: str = "fp8", model: str = "deepseek_v3") -> Config:
    quant = {"quant_method": method, "fmt": "e4m3", "activation_scheme": "dynamic", **quant}
    return Config({"model_type": model}, quant, method)


def _module(**tensors: Tensor) -> Module:
    return Module("m", {f".{name}": Stored(DTYPE_NAMES[t.dtype], tuple(t.shape)) for name, t in tensors.items()})


def _weight(n: int = N, k: int = K) -> Tensor:
    """A matrix with every e4m3 number."""
    legal = torch.tensor(E4M3.valid_codes, dtype=torch.uint8)
    codes = legal[torch.randint(len(legal), (n, k), generator=torch.Generator().manual_seed(0))]
    return codes.view(torch.float8_e4m3fn)


def _scales(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    if dtype in (torch.uint8, torch.float8_e8m0fnu):
        return torch.randint(100, 140, shape, generator=generator, dtype=torch.uint8).view(dtype)
    return torch.rand(shape, generator=generator).to(dtype)


def _reference_values(weight: Tensor, scale: Tensor) -> Tensor:
    reference: Any = Fp8Dequantize(None)
    result: Tensor = reference._dequantize_one(weight, scale, output_dtype=torch.float32)
    return result


@pytest.mark.parametrize(
    ("quant", "dtype"),
    [
        (BLOCK, torch.float32),
        (BLOCK, torch.bfloat16),
        (EXPONENTS, torch.float32),
        (EXPONENTS, torch.float8_e8m0fnu),
        (EXPONENTS, torch.uint8),
    ],
)
def test_block_scales_equal_transformers(quant: dict[str, Any], dtype: torch.dtype) -> None:
    weight, scale = _weight(), _scales((2, 3), dtype)
    scheme = FORMAT.scheme(_config(quant), _module(weight=weight, weight_scale_inv=scale))
    decoded = scheme.decode({"codes": weight, "scale": scale}, N, K)
    assert same_bits(dequantize(decoded), _reference_values(weight, scale))
    assert DTYPE_NAMES[scheme.encode(decoded)["scale"].dtype] == DTYPE_NAMES[dtype]


def test_partial_blocks() -> None:
    n, k = 320, 448
    weight, scale = _weight(n, k), _scales((3, 4), torch.float32)
    scheme = FORMAT.scheme(_config(BLOCK), _module(weight=weight, weight_scale_inv=scale))
    values = dequantize(scheme.decode({"codes": weight, "scale": scale}, n, k))
    whole = torch.zeros(384, 512)
    whole[:n, :k] = weight.float()
    assert same_bits(values, _reference_values(whole.to(torch.float8_e4m3fn), scale)[:n, :k].contiguous())


@pytest.mark.parametrize(
    ("shape", "spec"), [((), FP8_TENSOR), ((1,), FP8_TENSOR), ((N, 1), FP8_CHANNEL), ((N,), FP8_CHANNEL)]
)
def test_tensor_or_channel_follows_from_the_stored_shape(shape: tuple[int, ...], spec: QuantSpec) -> None:
    weight, scale = _weight(), _scales(shape, torch.float32)
    scheme = FORMAT.scheme(_config({}), _module(weight=weight, weight_scale=scale))
    assert scheme.spec == spec
    part = scheme.part("scale")
    assert part is not None and shape in part.shapes(N, K, "F32")
    values = dequantize(scheme.decode({"codes": weight, "scale": scale}, N, K))
    assert same_bits(values, weight.float() * (scale if not shape else scale.view(-1, 1)))


@pytest.mark.parametrize(
    ("shape", "spec"), [((8,), FP8_TENSOR), ((8, 1), FP8_TENSOR), ((8, N), FP8_CHANNEL), ((8, N, 1), FP8_CHANNEL)]
)
def test_the_first_axis_of_stacked_experts_is_the_expert(shape: tuple[int, ...], spec: QuantSpec) -> None:
    stored = {"": Stored("F8_E4M3", (8, N, K)), "_scale_inv": Stored("F32", shape)}
    assert FORMAT.scheme(_config({}), Module("experts.down_proj", stored)).spec == spec


def test_values_of_the_definition_and_scale_inv_multiplies() -> None:
    stored = {"codes": torch.full((1, 1), 0x48, dtype=torch.uint8), "scale": torch.tensor([[0.0125]])}
    stored["codes"] = stored["codes"].view(torch.float8_e4m3fn)
    value = dequantize(FORMAT.scheme(_config(BLOCK), Module("m")).decode(stored, 1, 1))
    assert value.item() == torch.tensor(0.05).item()


def test_tables() -> None:
    samples = {0x01: 2**-9, 0x08: 0.015625, 0x30: 0.5, 0x38: 1, 0x3C: 1.5, 0x48: 4, 0x7E: 448, 0xFE: -448}
    assert {code: E4M3.table[code] for code in samples} == samples


def test_exponents_are_viewed_as_bytes_never_converted() -> None:
    weight = torch.ones(1, 2).to(torch.float8_e4m3fn)
    scale = torch.tensor([[0.125]]).to(torch.float8_e8m0fnu)
    scheme = FORMAT.scheme(_config(EXPONENTS), _module(weight=weight, weight_scale_inv=scale))
    decoded = scheme.decode({"codes": weight, "scale": scale}, 1, 2)
    assert decoded.scales[0].tolist() == [[124]]
    assert dequantize(decoded).tolist() == [[0.125, 0.125]]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_a_nan_scale_is_refused_by_decode_and_encode(dtype: torch.dtype) -> None:
    weight, scale = _weight(), _scales((2, 3), torch.uint8)
    scheme = FORMAT.scheme(_config(EXPONENTS), _module(weight=weight, weight_scale_inv=scale.view(dtype)))
    decoded = scheme.decode({"codes": weight, "scale": scale.view(dtype)}, N, K)
    bad = scale.clone()
    bad[1, 1] = 0xFF
    with pytest.raises(BadValue, match="NaN"):
        scheme.decode({"codes": weight, "scale": bad.view(dtype)}, N, K)
    decoded.scales[0][1, 1] = 0xFF
    with pytest.raises(CannotEncode, match="NaN"):
        scheme.encode(decoded)


def test_bytes_are_exponents_only_if_the_config_says_so() -> None:
    module = _module(weight=_weight(), weight_scale_inv=_scales((2, 3), torch.uint8))
    part = FORMAT.scheme(_config(BLOCK), module).part("scale")
    assert part is not None and part.dtypes == ("F32",)


def test_static_activations_need_their_scale() -> None:
    module = _module(weight=_weight(), weight_scale=torch.ones(1), input_scale=torch.ones(1))
    for scheme, optional in (("static", False), ("dynamic", True)):
        part = FORMAT.scheme(_config({"activation_scheme": scheme}), module).part("input_scale")
        assert part is not None and part.optional is optional


@pytest.mark.parametrize(
    ("quant", "name"),
    [
        ({}, "fp8"),
        ({"activation_scheme": "static"}, "fp8-static"),
        (BLOCK, "fp8-g128"),
        ({**BLOCK, "ignored_layers": ["m"]}, None),
        ({"store_dtype": "mxfp4"}, "fp8"),
    ],
)
def test_activations(quant: dict[str, Any], name: str | None) -> None:
    assert FORMAT.activations(_config(quant), Module("m")) == (parse_activation(name) if name else None)


def test_fbgemm_has_channel_scales() -> None:
    config = _config({"activation_scale_ub": 1200.0}, "fbgemm_fp8")
    assert detect(config) is FORMAT
    assert FORMAT.scheme(config, Module("m")).spec == FP8_CHANNEL
    assert FORMAT.activations(config, Module("m")) == parse_activation("fp8")


@pytest.mark.parametrize(
    "said", [{"store_dtype": "mxfp4"}, {"routed_experts_quant_method": "mxfp4"}, {"expert_dtype": "fp4"}]
)
@pytest.mark.parametrize("scale_dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_experts_may_be_mxfp4(said: dict[str, Any], scale_dtype: torch.dtype) -> None:
    config = _config({**BLOCK, **said})
    weight = torch.randint(0, 256, (N, K // 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    scale = _scales((N, K // 32), scale_dtype)
    scheme = FORMAT.scheme(config, _module(weight=weight, weight_scale_inv=scale))
    assert scheme.spec == MXFP4
    assert FORMAT.activations(config, _module(weight=weight, weight_scale_inv=scale)) is None
    values = dequantize(scheme.decode({"codes": weight, "scale": scale}, N, K))
    assert same_bits(values, _reference_values(weight.view(torch.int8), scale))
    linear = _module(weight=_weight(), weight_scale_inv=_scales((2, 3), torch.float32))
    assert FORMAT.scheme(config, linear).spec == FP8_BLOCK
    without = FORMAT.scheme(_config(BLOCK), _module(weight=weight, weight_scale_inv=scale)).part("codes")
    assert without is not None and without.dtypes == ("F8_E4M3",)


@pytest.mark.parametrize("key", ["ignored_layers", "modules_to_not_convert"])
def test_skipped_modules_are_dense(key: str) -> None:
    config = _config({**BLOCK, key: ["lm_head", "model.layers.1.mlp.gate", "model.layers.0.mlp.experts"]})
    for name in ("lm_head", "model.layers.1.mlp.gate", "model.layers.0.mlp.experts.7.up_proj"):
        assert FORMAT.scheme(config, Module(name)).spec == DENSE_BF16
    for name in ("model.layers.1.mlp.gate_proj", "model.layers.10.mlp.experts.7.up_proj"):
        assert FORMAT.scheme(config, Module(name)).spec == FP8_BLOCK


def test_skip_lists_match_whole_components() -> None:
    def listed(name: str, entry: str) -> bool:
        return name in skip_list(Config(quant={"ignored_layers": [entry]}), "ignored_layers")

    assert listed("model.layers.1.mlp", "layers.1")
    assert not listed("model.layers.10.mlp", "layers.1")
    assert not listed("model.layers.1.mlp.gate_proj", "mlp.gate")
    assert listed("model.visual.blocks.0", "model.visual.")
    assert listed("model.layers.10.self_attn.q_proj", "model.layers.*.self_attn")
    assert not listed("model.layers.10.self_attn_norm", "model.layers.*.self_attn")
    assert not listed("model.layers.10.mlp", "model.[kl]ayers.*")
    assert not listed("a." * 60, "*a" * 40 + "b")  # must not take exponential time


def test_a_16_bit_weight_is_dense_only_without_a_scale() -> None:
    assert FORMAT.scheme(_config(BLOCK), _module(weight=torch.ones(2, 2, dtype=torch.bfloat16))).spec == DENSE_BF16
    torn = _module(weight=torch.ones(2, 2, dtype=torch.bfloat16), weight_scale_inv=torch.ones(1, 1))
    assert FORMAT.scheme(_config(BLOCK), torn).spec == FP8_BLOCK


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("fmt", "e5m2"),
        ("activation_scheme", "sometimes"),
        ("scale_fmt", "ue4m3"),
        ("store_dtype", "nvfp4"),
        ("weight_block_size", [128]),
        ("weight_block_size", [128, 0]),
        ("weight_block_size", [True, 128]),
        ("weight_block_size", 128),
        ("ignored_layers", [1]),
        ("modules_to_not_convert", "lm_head"),
    ],
)
def test_unsupported_values_are_refused(key: str, value: object) -> None:
    with pytest.raises(UnsupportedFormat, match=key):
        FORMAT.scheme(_config({**BLOCK, key: value}), _module(weight=_weight(), weight_scale_inv=torch.ones(2, 3)))


@pytest.mark.parametrize(
    "spec",
    [
        FP8_BLOCK,
        FP8_TENSOR,
        FP8_CHANNEL,
        fp8_spec(FP8_BLOCK_SIDES, scale=E8M0),
        fp8_spec((64, 32), scale=BF16),
    ],
    ids=str,
)
def test_export_reads_back(spec: QuantSpec) -> None:
    config, scheme = FORMAT.export(spec, ["lm_head"])
    read = Config({}, config, "fp8")
    weight = quantize(torch.randn(96, 160, generator=torch.Generator().manual_seed(0)), spec)
    stored = scheme.encode(weight)
    suffix = {role: part.suffix[0] for role in stored if (part := scheme.part(role))}
    module = Module("m", {suffix[r]: Stored(DTYPE_NAMES[t.dtype], tuple(t.shape)) for r, t in stored.items()})
    assert detect(read) is FORMAT and FORMAT.unknown_keys(read) == []
    assert FORMAT.scheme(read, module) == scheme
    assert FORMAT.scheme(read, module).decode(stored, 96, 160).equals(weight)
    assert FORMAT.scheme(read, Module("lm_head")).spec == DENSE_BF16


@pytest.mark.parametrize("spec", [MXFP4, MXFP8, NVFP4, fp8_spec(group(128)), DENSE_BF16], ids=str)
def test_export_refuses_other_specs(spec: QuantSpec) -> None:
    with pytest.raises(CannotEncode, match="FP8"):
        FORMAT.export(spec, [])
