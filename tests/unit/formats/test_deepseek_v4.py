"""DeepSeek-V4: FP4 and FP8 experts, distinguished by their stored dtype, against transformers' dequantiser."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from lancebill.errors import BadValue, UnsupportedFormat
from lancebill.formats import detect
from lancebill.formats import fp8 as plain_fp8
from lancebill.formats.base import Config, Module, Stored
from lancebill.formats.deepseek_v4 import FORMAT
from lancebill.formats.stored import DTYPE_NAMES
from lancebill.numbers.codec import dequantize
from lancebill.numbers.spec import DENSE_BF16, FP8_BLOCK, MXFP4, NVFP4
from lancebill.numbers.spec_names import parse_activation
from lancebill.numbers.weight import same_bits

N, K = 256, 384
EXPERT, SHARED = "layers.3.ffn.experts.7.w1", "layers.3.ffn.shared_experts.w1"


def _config(method: str = "fp8", model: dict[str, Any] | None = None, **quant: Any) -> Config:
    quant = {"quant_method": method, "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128], **quant}
    return Config({"model_type": "deepseek_v4", **(model or {})}, quant, method)


def _module(name: str = EXPERT, **tensors: Tensor) -> Module:
    return Module(name, {f".{key}": Stored(DTYPE_NAMES[t.dtype], tuple(t.shape)) for key, t in tensors.items()})


def _bytes(*shape: int, low: int = 0, high: int = 256) -> Tensor:
    return torch.randint(low, high, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def _fp8() -> Tensor:
    return _bytes(N, K, high=0x7F).view(torch.float8_e4m3fn)


def _reference_values(weight: Tensor, scale: Tensor) -> Tensor:
    reference: Any = Fp8Dequantize(None)
    result: Tensor = reference._dequantize_one(weight, scale, output_dtype=torch.float32)
    return result


@pytest.mark.parametrize("stored", [torch.int8, torch.uint8])
@pytest.mark.parametrize("scale_dtype", [torch.float8_e8m0fnu, torch.uint8])
def test_fp4_experts_equal_transformers(stored: torch.dtype, scale_dtype: torch.dtype) -> None:
    weight = _bytes(N, K // 2).view(stored)
    scale = _bytes(N, K // 32, low=100, high=140).view(scale_dtype)
    scheme = FORMAT.scheme(_config(), _module(weight=weight, scale=scale))
    assert scheme.spec == MXFP4
    assert FORMAT.activations(_config(), _module(weight=weight, scale=scale)) is None
    decoded = scheme.decode({"codes": weight, "scale": scale}, N, K)
    assert same_bits(dequantize(decoded), _reference_values(weight.view(torch.int8), scale))
    packed = scheme.encode(decoded)
    assert same_bits(packed["codes"], weight) and same_bits(packed["scale"], scale)


@pytest.mark.parametrize("name", [EXPERT, SHARED])
@pytest.mark.parametrize("scale_dtype", [torch.float8_e8m0fnu, torch.float32])
def test_fp8_weights_equal_transformers(name: str, scale_dtype: torch.dtype) -> None:
    """Shared experts have power-of-two scales if the routed experts are FP4, and fp32 scales if they are FP8."""
    weight, exponents = _fp8(), _bytes(2, 3, low=100, high=140).view(torch.float8_e8m0fnu)
    scale = exponents if scale_dtype == torch.float8_e8m0fnu else exponents.float() * 1.3
    for model in ({"expert_dtype": "fp8"}, {"expert_dtype": "fp4"}, {}):
        scheme = FORMAT.scheme(_config(model=model), _module(name, weight=weight, scale=scale))
        decoded = scheme.decode({"codes": weight, "scale": scale}, N, K)
        assert same_bits(dequantize(decoded), _reference_values(weight, scale))
        assert same_bits(scheme.encode(decoded)["scale"], scale)


def test_exponents_are_viewed_as_bytes_never_converted() -> None:
    weight = torch.full((1, 16), 0x22, dtype=torch.int8)
    scale = torch.tensor([[0.125]]).to(torch.float8_e8m0fnu)
    scheme = FORMAT.scheme(_config(), _module(weight=weight, scale=scale))
    decoded = scheme.decode({"codes": weight, "scale": scale}, 1, 32)
    assert decoded.scales[0].tolist() == [[124]]
    assert dequantize(decoded).tolist() == [[0.125] * 32]
    with pytest.raises(BadValue, match="NaN"):
        scheme.decode({"codes": weight, "scale": torch.tensor([[0xFF]], dtype=torch.uint8)}, 1, 32)


@pytest.mark.parametrize("where", ["model", "quant"])
def test_nvfp4_experts_have_the_tensor_names_of_modelopt(where: str) -> None:
    said = {"moe_quant_algo": "NVFP4"}
    config = _config(model=said) if where == "model" else _config(**said)
    codes, scale = _bytes(N, K // 2), _bytes(N, K // 16, high=0x7F).view(torch.float8_e4m3fn)
    tensors = {"weight": codes, "weight_scale": scale, "weight_scale_2": torch.tensor(0.375)}
    scheme = FORMAT.scheme(config, _module(**tensors, input_scale=torch.tensor(0.5)))
    assert scheme.spec == NVFP4
    decoded = scheme.decode({"codes": codes, "scale": scale, "scale_2": torch.tensor(0.375)}, N, K)
    judged = _reference_values(codes.view(torch.int8), scale) * 0.375
    assert same_bits(dequantize(decoded), judged)
    shared = _module(SHARED, weight=_fp8(), scale=torch.ones(2, 3))
    assert FORMAT.scheme(config, shared).spec == FP8_BLOCK
    assert FORMAT.activations(config, shared) == parse_activation("fp8-g128")
    assert FORMAT.activations(config, _module(**tensors)) is None
    assert FORMAT.activations(config, _module(**tensors, input_scale=torch.tensor(0.5))) == parse_activation("nvfp4")


@pytest.mark.parametrize("method", ["fp8", "deepseek_v4_fp8"])
def test_only_this_format_matches(method: str) -> None:
    assert detect(_config(method)) is FORMAT
    assert not plain_fp8.FORMAT.matches(_config(method))
    other = Config({"model_type": "deepseek_v3"}, {"quant_method": "fp8"}, "fp8")
    assert detect(other) is plain_fp8.FORMAT


def test_bytes_are_fp4_unless_the_experts_are_fp8() -> None:
    module = _module(weight=_bytes(N, K // 2), scale=_bytes(N, K // 32))
    part = FORMAT.scheme(_config(model={"expert_dtype": "fp8"}), module).part("codes")
    assert part is not None and part.dtypes == ("F8_E4M3",)


def test_unquantised_modules_are_dense() -> None:
    gate = _module("layers.3.ffn.gate", weight=torch.ones(8, K, dtype=torch.bfloat16))
    assert FORMAT.scheme(_config(), gate).spec == DENSE_BF16
    skipped = _config(ignored_layers=["layers.3.ffn.experts"])
    assert FORMAT.scheme(skipped, Module(EXPERT)).spec == DENSE_BF16
    torn = _module(weight=torch.ones(N, K), scale=torch.ones(2, 3))
    assert FORMAT.scheme(_config(), torn).spec == FP8_BLOCK


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("expert_dtype", "int4"),
        ("moe_quant_algo", "MXFP8"),
        ("fmt", "e5m2"),
        ("activation_scheme", "static"),
        ("weight_block_size", [128]),
    ],
)
def test_unsupported_values_are_refused(key: str, value: object) -> None:
    with pytest.raises(UnsupportedFormat, match=key):
        FORMAT.scheme(_config(**{key: value}), _module(weight=_fp8(), scale=torch.ones(2, 3)))
