"""SGLang's int8 and w4afp8, torchao's int4 and HQQ, each by its definition. `nox -s tools` asks the tools."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lancebill.errors import BadValue, UnsupportedFormat
from lancebill.formats import detect, hqq, humming, int8, quanto, torchao, w4afp8
from lancebill.formats._plain import plain_scheme
from lancebill.formats.base import Config, Format, Module, Scheme
from lancebill.formats.stored import DTYPE_NAMES, Stored
from lancebill.numbers.codec import dequantize, quantize
from lancebill.numbers.spec_names import parse_activation, parse_spec

NAME = "model.layers.0.mlp.experts.3.up_proj"
N, K = 6, 256
F32 = Stored("F32", (8, 2))


def resolve(fmt: Format, quant: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[Scheme, Config, Module]:
    config = Config(quant=quant, method=quant["quant_method"])
    module = Module(NAME, {s: Stored(DTYPE_NAMES[t.dtype], tuple(t.shape)) for s, t in tensors.items()})
    return fmt.scheme(config, module), config, module


def decoded(fmt: Format, quant: dict[str, Any], tensors: dict[str, Tensor]) -> Tensor:
    scheme = resolve(fmt, quant, tensors)[0]
    stored = {p.role: tensors[s] for p in scheme.parts for s in p.suffix if s in tensors}
    assert len(stored) == len(tensors)
    return dequantize(scheme.decode(stored, N, K))


def values(bits: int) -> Tensor:
    half = 1 << (bits - 1)
    return torch.randint(-half, half, (N, K), dtype=torch.int8)


def test_int8_rows_and_blocks() -> None:
    codes, rows, blocks = values(8), torch.rand(N, 1), torch.rand(2, 3)
    by_row = {".weight": codes, ".weight_scale": rows}
    assert torch.equal(decoded(int8.FORMAT, {"quant_method": "w8a8_int8"}, by_row), codes.float() * rows)
    quant = {"quant_method": "blockwise_int8", "weight_block_size": [4, 100], "activation_scheme": "dynamic"}
    by_block = {".weight": codes, ".weight_scale_inv": blocks}
    spread = blocks.repeat_interleave(4, 0)[:N].repeat_interleave(100, 1)[:, :K]
    assert torch.equal(decoded(int8.FORMAT, quant, by_block), codes.float() * spread)
    for settings, tensors, name in (({"quant_method": "w8a8_int8"}, by_row, "int8"), (quant, by_block, "int8-g100")):
        _, config, module = resolve(int8.FORMAT, settings, tensors)
        assert int8.FORMAT.activations(config, module) == parse_activation(name)
    with pytest.raises(UnsupportedFormat, match="weight_block_size"):
        decoded(int8.FORMAT, {"quant_method": "blockwise_int8"}, by_block)


def test_int8_ignored_modules() -> None:
    for entry in (NAME, "re:.*up_proj"):
        config = Config(quant={"ignore": [entry]}, method="w8a8_int8")
        assert not int8.FORMAT.scheme(config, Module(NAME)).spec.quantized
        assert int8.FORMAT.scheme(config, Module(NAME.replace("up", "down"))).spec.quantized


def test_w4afp8_columns_share_bytes() -> None:
    """As SGLang packs them: columns 2i and 2i+1 in the low and high nibble."""
    codes, scale = values(4), torch.rand(N, K // 128)
    packed = (codes[:, 0::2] & 15) | (codes[:, 1::2] << 4)
    tensors = {".weight": packed, ".weight_scale_inv": scale, ".input_scale": torch.ones(())}
    got = decoded(w4afp8.FORMAT, {"quant_method": "w4afp8"}, tensors)
    assert torch.equal(got, codes.float() * scale.repeat_interleave(128, 1))
    _, config, module = resolve(w4afp8.FORMAT, {"quant_method": "w4afp8"}, tensors)
    assert w4afp8.FORMAT.activations(config, module) == parse_activation("fp8-static")


def test_w4afp8_modules_without_scales_are_dense() -> None:
    _, config, module = resolve(w4afp8.FORMAT, {"quant_method": "w4afp8"}, {".weight": torch.ones(N, K).bfloat16()})
    assert w4afp8.FORMAT.activations(config, module) is None


@pytest.mark.parametrize(
    ("stored", "spec"),
    [
        ({}, "bf16"),
        ({quanto.PACKED: Stored("U8", (64, 64)), quanto.SCALE: Stored("BF16", (128,))}, "uint4-g128"),
        ({quanto.PACKED: Stored("U8", (64, 60)), quanto.SCALE: Stored("BF16", (128, 1))}, "uint4-g128"),
        ({quanto.PACKED: Stored("U8", (64, 64)), quanto.SCALE: Stored("BF16", (128, 1))}, "uint4-g64"),
        ({quanto.PACKED: Stored("U8", (32, 64)), quanto.SCALE: Stored("BF16", (128, 1))}, "uint2-g64"),
    ],
)
def test_quanto_reads_bits_and_groups_from_the_headers(stored: dict[str, Stored], spec: str) -> None:
    """Headers that cannot be right get the usual group: the loader reports what is wrong with them."""
    config = Config(quant={"quant_method": "quanto"}, method="quanto")
    assert str(quanto.FORMAT.scheme(config, Module(NAME, stored)).spec).startswith(spec)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["int4-g32-zp", "mxfp4", "nvfp4", "int2-g64"])
def test_one_tensor_for_each_level(name: str, packed: bool) -> None:
    """As `from_tensors` takes them; written and read again."""
    scheme = plain_scheme(parse_spec(name), packed=packed)
    weight = quantize(torch.randn(N, 256), scheme.spec)
    assert scheme.decode(scheme.encode(weight), N, 256).equals(weight)


def test_torchao_int4_adds_its_zero_point() -> None:
    """As Int4Tensor documents it, which torchao makes and multiplies on GPUs only: scales are [K/g, N]."""
    codes, scale, zero = values(4), torch.rand(K // 32, N), torch.randn(K // 32, N)
    packed = (codes[:, 0::2] & 15) | (codes[:, 1::2] << 4)
    tensors = {"._weight_qdata": packed, "._weight_scale": scale, "._weight_zero_point": zero}
    got = decoded(torchao.FORMAT, _torchao("Int4WeightOnlyConfig", group_size=32), tensors)
    spread_scale, spread_zero = (t.t().repeat_interleave(32, 1) for t in (scale, zero))
    assert torch.equal(got, codes.float() * spread_scale + spread_zero)
    tiles = {"_type": "Int4PackingFormat", "_data": "TILE_PACKED_TO_4D"}
    with pytest.raises(UnsupportedFormat, match="int4_packing_format"):
        decoded(torchao.FORMAT, _torchao("Int4WeightOnlyConfig", int4_packing_format=tiles), tensors)


def test_torchao_settings_by_name() -> None:
    int8_rows, fp8 = ({"_type": f"{kind}WeightOnlyConfig", "_data": {}} for kind in ("Int8", "Float8"))
    table = {NAME: fp8, "re:.*experts.*": int8_rows, "_default": None}
    quant = _torchao("FqnToConfig", fqn_to_config=table)
    config = Config(quant=quant, method="torchao")
    names = (NAME, NAME.replace("up", "down"), "model.layers.0.self_attn.q_proj")
    assert [str(torchao.FORMAT.scheme(config, Module(name)).spec) for name in names] == [
        "fp8-channel:bf16", "int8", "bf16",
    ]  # fmt: skip
    with pytest.raises(UnsupportedFormat, match="_type"):
        decoded(torchao.FORMAT, _torchao("UIntXWeightOnlyConfig"), {"._weight_qdata": values(8)})


@pytest.mark.parametrize("change", [{"axis": 0}, {"nbits": 5}, {"group_size": 7}, {"view_as_float": True}])
def test_hqq_settings_that_are_refused(change: dict[str, Any]) -> None:
    weights = {"nbits": 4, "group_size": 64, "axis": 1, **change}
    quant = {"quant_method": "hqq", "quant_config": {"mlp.experts.up_proj": {"weight_quant_params": weights}}}
    with pytest.raises(UnsupportedFormat, match=next(iter(change))):
        resolve(hqq.FORMAT, quant, {})
    quant["quant_config"] = {"mlp.experts.down_proj": quant["quant_config"]["mlp.experts.up_proj"]}
    assert not resolve(hqq.FORMAT, quant, {})[0].spec.quantized


def test_hqq_settings_of_a_weight_must_be_those_of_the_config() -> None:
    scheme = hqq.hqq_scheme(4, 64, "F32")
    levels = torch.rand(N * K // 64, 1)
    stored = {"codes": torch.zeros(N * K // 128, 64, dtype=torch.uint8), "scale": levels, "zero": levels}
    scheme.decode(stored, N, K)
    with pytest.raises(BadValue, match="axis"):
        scheme.decode({**stored, "axis": torch.tensor(0)}, N, K)


def test_humming_packs_zero_points_along_rows() -> None:
    codes, zero = torch.randint(0, 16, (8, K)), torch.randint(0, 16, (8, 2))
    places = 16 ** torch.arange(8)
    words = (codes.reshape(8, -1, 8) * places).sum(-1).to(torch.int32)
    rows = (zero * places[:, None]).sum(0, keepdim=True).to(torch.int32)
    scale = torch.rand(8, 2)
    quant = {"dtype": "uint4", "group_size": K // 2, "has_zero_point": True}
    scheme = humming.FORMAT.scheme(Config(quant=quant, method="humming"), Module(NAME, {".weight_scale": F32}))
    got = dequantize(scheme.decode({"codes": words, "scale": scale, "zero": rows}, 8, K))
    spread_zero, spread_scale = (t.repeat_interleave(K // 2, 1) for t in (zero, scale))
    assert torch.equal(got, (codes - spread_zero).float() * spread_scale)
    with pytest.raises(UnsupportedFormat, match="hadamard_block_size"):
        humming.FORMAT.scheme(Config(quant={**quant, "hadamard_block_size": 96}, method="humming"), Module(NAME))


def test_exl3_is_refused_with_the_reason() -> None:
    with pytest.raises(UnsupportedFormat, match="trellis"):
        detect(Config(quant={"bits": 4.0}, method="exl3"))


def _torchao(kind: str, **arguments: Any) -> dict[str, Any]:
    return {"quant_method": "torchao", "quant_type": {"default": {"_type": kind, "_data": arguments}}}
