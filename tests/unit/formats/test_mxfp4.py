"""gpt-oss MXFP4 against transformers' dequantiser, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from lancebill.errors import BadValue, CannotEncode, UnsupportedFormat
from lancebill.formats import detect
from lancebill.formats.base import Config, Module, Scheme, Stored
from lancebill.formats.mxfp4 import FORMAT
from lancebill.numbers.codec import dequantize
from lancebill.numbers.dtypes import E2M1, E8M0
from lancebill.numbers.spec import DENSE_BF16, FP8_BLOCK, MXFP4
from lancebill.numbers.weight import same_bits

N, K = 48, 160
GPT_OSS = Config(
    {"model_type": "gpt_oss"},
    {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
    "mxfp4",
)
EXPERTS = "model.layers.3.mlp.experts.gate_up_proj"
STORED = {
    "_blocks": Stored("U8", (4, N, K // 32, 16)),
    "_scales": Stored("U8", (4, N, K // 32)),
    "_bias": Stored("BF16", (4, N)),
}


def _scheme() -> Scheme:
    return FORMAT.scheme(GPT_OSS, Module(EXPERTS, STORED))


def _random(experts: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (experts, N, K // 32, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(0, 255, (experts, N, K // 32), generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize("seed", range(3))
def test_values_equal_transformers(seed: int) -> None:
    blocks, scales = _random(4, seed)
    judged = convert_moe_packed_tensors(blocks, scales)  # bf16, transposed to [E, K, N]
    for expert in range(4):
        weight = _scheme().decode({"codes": blocks[expert], "scale": scales[expert]}, N, K)
        assert same_bits(dequantize(weight).bfloat16(), judged[expert].t().contiguous())


def test_every_code_with_every_scale_equals_transformers() -> None:
    """From 2**-128 to infinity; bf16 represents every finite value exactly."""
    scales = torch.arange(255, dtype=torch.uint8).view(1, 255, 1)
    blocks = (torch.arange(16) % 8 * 34 + 16).to(torch.uint8).expand(1, 255, 1, 16).contiguous()  # nibbles 0 1 2 ... 15
    weight = _scheme().decode({"codes": blocks[0], "scale": scales[0]}, 255, 32)
    assert sorted(set(weight.codes.view(-1).tolist())) == list(range(16))
    judged = convert_moe_packed_tensors(blocks, scales)[0].t()
    assert same_bits(dequantize(weight), judged.float().contiguous())


def test_values_of_the_definition() -> None:
    row = [0x21, 0x7F, 0x08, 0xC3, *([0] * 12)]
    stored = {
        "codes": torch.tensor(row, dtype=torch.uint8).view(1, 1, 16),
        "scale": torch.tensor([[0x7E]], dtype=torch.uint8),
    }
    values = dequantize(_scheme().decode(stored, 1, 32))[0, :8]
    assert values.tolist() == [0.25, 0.5, -3, 3, 0, 0, 0.75, -1]
    assert values.signbit().tolist() == [False, False, True, False, True, False, False, True]
    assert (values * 2).tolist() == [0.5, 1, -6, 6, 0, 0, 1.5, -2]


def test_tables() -> None:
    assert [E2M1.table[c] for c in range(8)] == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert [E8M0.table[b] for b in (0x7F, 0x7E, 0x80, 0, 254)] == [1, 0.5, 2, 2.0**-127, 2.0**127]


def test_a_nan_scale_is_refused_by_decode_and_encode() -> None:
    blocks, scales = _random(1, 0)
    stored = {"codes": blocks[0], "scale": scales[0]}
    weight = _scheme().decode(stored, N, K)
    assert _scheme().decode(_scheme().encode(weight), N, K).equals(weight)
    stored["scale"][7, 2] = 0xFF
    with pytest.raises(BadValue, match="NaN"):
        _scheme().decode(stored, N, K)
    weight.scales[0][7, 2] = 0xFF
    with pytest.raises(CannotEncode, match="NaN"):
        _scheme().encode(weight)


def test_partial_blocks_cannot_be_written() -> None:
    blocks, scales = _random(1, 0)
    weight = _scheme().decode({"codes": blocks[0], "scale": scales[0]}, N, K).cut((0, N), (0, 48))
    with pytest.raises(CannotEncode, match="multiple of the block"):
        _scheme().encode(weight)


@pytest.mark.parametrize(
    ("name", "left_alone"),
    [
        (EXPERTS, False),
        ("model.layers.3.mlp.experts.down_proj", False),
        ("model.layers.3.self_attn.q_proj", True),
        ("model.layers.12.mlp.router", True),
        ("lm_head", True),
    ],
)
def test_the_skip_list_matches_whole_components(name: str, left_alone: bool) -> None:
    scheme = FORMAT.scheme(GPT_OSS, Module(name, STORED))
    assert scheme.spec == (DENSE_BF16 if left_alone else MXFP4)


def test_only_experts_without_blocks_and_scales_are_dense() -> None:
    assert FORMAT.scheme(GPT_OSS, Module(EXPERTS, {"": Stored("BF16", (4, K, N))})).spec == DENSE_BF16
    for left_out in STORED:
        stored = {suffix: s for suffix, s in STORED.items() if suffix != left_out}
        assert FORMAT.scheme(GPT_OSS, Module(EXPERTS, stored)).spec == MXFP4
    assert FORMAT.scheme(GPT_OSS, Module(EXPERTS)).spec == MXFP4


def test_export() -> None:
    config, scheme = FORMAT.export(MXFP4, ["lm_head", "model.layers.0.mlp.gate"])
    read = Config({}, config, "mxfp4")
    assert detect(read) is FORMAT
    assert FORMAT.scheme(read, Module(EXPERTS, STORED)) == scheme
    assert FORMAT.scheme(read, Module("model.layers.0.mlp.gate")).spec == DENSE_BF16
    assert FORMAT.unknown_keys(read) == []
    with pytest.raises(CannotEncode, match="MXFP4"):
        FORMAT.export(FP8_BLOCK, [])


@pytest.mark.parametrize("value", ["lm_head", [3]])
def test_an_invalid_skip_list_is_refused(value: object) -> None:
    with pytest.raises(UnsupportedFormat, match="modules_to_not_convert"):
        FORMAT.scheme(Config({}, {"modules_to_not_convert": value}, "mxfp4"), Module("m"))
