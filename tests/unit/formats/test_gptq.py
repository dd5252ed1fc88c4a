"""GPTQ against values from its definition and a slow reference packer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lancebill.checkpoint.resolve import manifest as manifests
from lancebill.checkpoint.resolve import naming as names
from lancebill.errors import BadValue, CannotEncode, UnsupportedFormat
from lancebill.formats import detect
from lancebill.formats._gptq_zeros import Zeros
from lancebill.formats.base import Config, Dense, Module, Stored
from lancebill.formats.gptq import FORMAT, GptqScheme, gptq_scheme
from lancebill.numbers.codec import dequantize, quantize
from lancebill.numbers.dtypes import BF16, F16, F32
from lancebill.numbers.spec import CHANNEL, group, int_spec
from lancebill.numbers.spec_names import parse_spec
from lancebill.numbers.weight import LogicalWeight
from lancebill.testing.checkpoints import Geometry, generate
from lancebill.testing.weights import random_weight

CODES = [3, 14, 8, 7, 0, 15, 9, 1]
NAME = "model.layers.0.mlp.experts.7.gate_proj"


def words(*values: int) -> Tensor:
    """32-bit patterns as int32."""
    return torch.from_numpy(np.array(values, dtype=np.uint32).view(np.int32).copy())


def config(**values: Any) -> Config:
    quant = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True, "desc_act": False, **values}
    return Config(quant=quant, method="gptq")


def resolve(module: Module | None = None, **values: Any) -> GptqScheme:
    scheme = FORMAT.scheme(config(**values), module or Module(NAME))
    assert isinstance(scheme, GptqScheme)
    return scheme


def pack_stream(codes: list[int], bits: int) -> list[int]:
    """Element i occupies bits [i*b, (i+1)*b) of one bit stream; bit j of the stream is bit j % 32 of word j // 32."""
    out = [0] * -(-len(codes) * bits // 32)
    for i, code in enumerate(codes):
        for bit in range(bits):
            position = i * bits + bit
            out[position // 32] |= ((code >> bit) & 1) << (position % 32)
    return out


def by_hand(codes: np.ndarray, zero: np.ndarray, bits: int, offset: int) -> tuple[Tensor, Tensor]:
    """qweight [K^, N] and qzeros [G, N^] of codes [N, K] and zero points [N, G], one bit at a time."""
    qweight = [pack_stream(row.tolist(), bits) for row in codes]
    qzeros = [pack_stream((zero[:, g] - offset).tolist(), bits) for g in range(zero.shape[1])]
    return torch.stack([words(*w) for w in qweight], dim=1), torch.stack([words(*w) for w in qzeros])


# ---- values of the definition


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("gptq", [-2.5, 3, 0, -0.5, -4, 3.5, 0.5, -3.5]),
        ("gptq_v2", [-2, 3.5, 0.5, 0, -3.5, 4, 1, -3]),  # the same file read as v2: all values off by one step
    ],
)
def test_values_of_both_versions(version: str, expected: list[float]) -> None:
    scheme = resolve(group_size=-1, sym=False, checkpoint_format=version)
    stored = {
        "codes": words(0x19F078E3).reshape(1, 1).repeat(1, 8),
        "zero": words(0x77777777).reshape(1, 1),
        "scale": torch.full((1, 8), 0.5, dtype=torch.float16),
    }
    assert dequantize(scheme.decode(stored, 8, 8)).tolist() == [expected] * 8


GPTQMODEL, AUTO_ROUND = {"meta": {"quantizer": ["optimum:2.1.0", "gptqmodel:7.6.0"]}}, {"autoround_version": "0.14.2"}
OLD = {"meta": {"quantizer": "gptqmodel:5.0.0"}}


@pytest.mark.parametrize(
    ("bits", "tool", "zero", "stored"),
    [
        pytest.param(4, GPTQMODEL, [0] + [8] * 7, [0x7777776F], id="a zero borrows"),
        pytest.param(4, AUTO_ROUND, [0] + [8] * 7, [0x7777776F], id="AutoRound"),
        pytest.param(4, GPTQMODEL, [0] * 8, [0xEEEEEEEF], id="all positive"),
        pytest.param(4, GPTQMODEL, [9, 8, 8, 8, 8, 8, 8, 0], [0xF7777778], id="from nothing"),
        pytest.param(2, GPTQMODEL, [0] + [2] * 15, [0x55555553], id="2 bits"),
        pytest.param(8, GPTQMODEL, [0, 128, 128, 0], [0xFF7F7EFF], id="8 bits"),
        pytest.param(3, GPTQMODEL, [0] * 32, [0xFFFFFFFF] * 3, id="3 bits"),
        pytest.param(3, GPTQMODEL, [0] + [4] * 31, [0xDB6DB6DF, 0xB6DB6DB6, 0x6DB6DB6D], id="3 bits do not borrow"),
        pytest.param(3, OLD, [4] * 32, [0x00000000, 0xB6DB6DB7, 0x49249249], id="before 7.0"),
        pytest.param(3, OLD, [0] * 32, [0xDB6DB6DC, 0x6DB6DB6E, 0xB6DB6DB7], id="before 7.0, positive"),
    ],
)
def test_zero_points_of_0_in_version_1(bits: int, tool: dict[str, Any], zero: list[int], stored: list[int]) -> None:
    """As the named tool reads and writes them, by hand."""
    n = len(zero)
    scheme = resolve(bits=bits, group_size=-1, sym=False, **tool)
    given = {
        "codes": torch.zeros(bits, n, dtype=torch.int32),
        "zero": words(*stored).reshape(1, -1),
        "scale": torch.ones(1, n, dtype=torch.float16),
    }
    weight = scheme.decode(given, n, 32)
    assert weight.zero is not None and weight.zero.flatten().tolist() == zero
    assert torch.equal(scheme.encode(weight)["zero"], given["zero"])


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("tool", [{}, {"autoround_version": "0.12.3"}, {"meta": {"quantizer": ["gptqmodel:0.8.1"]}}])
def test_zero_points_of_0_need_the_tool(bits: int, tool: dict[str, Any]) -> None:
    """Without a known tool nobody can say whether a code of all ones has borrowed from the next one."""
    scheme = resolve(bits=bits, group_size=32, sym=False, **tool)
    weight = random_weight(scheme, 32, 64, torch.Generator().manual_seed(0))
    stored = scheme.encode(weight)
    assert scheme.decode(stored, 32, 64).equals(weight)
    stored["zero"][0, 0] |= (1 << bits) - 1
    with pytest.raises(BadValue, match="the config names no tool"):
        scheme.decode(stored, 32, 64)
    named = resolve(bits=bits, group_size=32, sym=False, **GPTQMODEL)
    assert named.decode(stored, 32, 64).zero[0, 0] == 0  # type: ignore[index]


@pytest.mark.parametrize(("version", "word"), [("gptq", 0x77777777), ("gptq_v2", 0x88888888)])
def test_symmetric_zero_points_are_written_and_checked(version: str, word: int) -> None:
    scheme = resolve(checkpoint_format=version)
    weight = random_weight(scheme, 8, 64, torch.Generator().manual_seed(0))
    stored = scheme.encode(weight)
    assert torch.equal(stored["zero"], words(word).reshape(1, 1))
    other = resolve(checkpoint_format="gptq_v2" if version == "gptq" else "gptq")
    with pytest.raises(BadValue, match="checkpoint_format"):
        other.decode(stored, 8, 64)
    del stored["zero"], stored["perm"]
    assert scheme.decode(stored, 8, 64).equals(weight)  # both may be missing


# ---- against the slow packer and the formula


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("desc_act", [False, True])
def test_agrees_with_a_bit_by_bit_packer(bits: int, version: str, desc_act: bool) -> None:
    rng = np.random.default_rng(bits)
    n, k, size, offset = 40, 96, 32, int(version == "gptq")  # zero points of 0: see above
    codes = rng.integers(0, 1 << bits, (n, k))
    zero = rng.integers(offset, 1 << bits, (n, k // size))
    scale = rng.standard_normal((n, k // size)).astype(np.float16)
    g_idx = np.arange(k) // size
    if desc_act:
        rng.shuffle(g_idx)
    qweight, qzeros = by_hand(codes, zero, bits, offset)
    stored = {
        "codes": qweight,
        "zero": qzeros,
        "scale": torch.from_numpy(scale.T.copy()),
        "perm": torch.from_numpy(g_idx.astype(np.int32)),
    }
    expected = np.empty((n, k), dtype=np.float32)
    for row in range(n):
        for column in range(k):
            g = g_idx[column]
            expected[row, column] = np.float32(codes[row, column] - zero[row, g]) * np.float32(scale[row, g])
    scheme = resolve(bits=bits, group_size=size, sym=False, desc_act=desc_act, checkpoint_format=version)
    weight = scheme.decode(stored, n, k)
    assert np.array_equal(dequantize(weight).numpy(), expected)
    again = scheme.encode(weight)
    assert again.keys() == stored.keys() and all(torch.equal(again[role], stored[role]) for role in stored)


# ---- act-order


def ordered() -> tuple[GptqScheme, dict[str, Tensor]]:
    scheme = resolve(group_size=32, desc_act=True)
    stored = scheme.encode(random_weight(scheme, 8, 64, torch.Generator().manual_seed(1)))
    return scheme, stored


def test_natural_order_has_no_permutation() -> None:
    scheme, stored = ordered()
    assert scheme.act_order and scheme.decode(stored, 8, 64).perm is None


@pytest.mark.parametrize(
    "g_idx",
    [
        pytest.param([0] * 32 + [2] * 32, id="beyond the groups"),
        pytest.param([-1] * 32 + [0] * 32, id="negative"),
        pytest.param([0] * 31 + [1] * 33, id="uneven"),
        pytest.param([0] * 64, id="all zeros with desc_act"),
    ],
)
def test_impossible_group_indices_are_refused(g_idx: list[int]) -> None:
    scheme, stored = ordered()
    stored["perm"] = torch.tensor(g_idx, dtype=torch.int32)
    with pytest.raises(BadValue, match="g_idx"):
        scheme.decode(stored, 8, 64)


def test_reordered_columns_need_desc_act() -> None:
    scheme = resolve(group_size=32)
    weight = random_weight(scheme, 8, 64, torch.Generator().manual_seed(1))
    stored = scheme.encode(weight)
    for harmless in (torch.zeros(64, dtype=torch.int32), stored["perm"] + 3):  # a shard starts at any group
        assert scheme.decode({**stored, "perm": harmless}, 8, 64).equals(weight)
    for wrong in (stored["perm"].flip(0), stored["perm"] - 5):
        with pytest.raises(BadValue, match="desc_act is false"):
            scheme.decode({**stored, "perm": wrong}, 8, 64)


def test_a_single_group_has_no_act_order() -> None:
    scheme = resolve(group_size=-1, desc_act=True)
    assert not scheme.act_order and scheme.spec.scales[0].block == CHANNEL
    stored = scheme.encode(random_weight(scheme, 8, 64, torch.Generator().manual_seed(1)))
    assert not stored["perm"].any() and stored["scale"].shape == (1, 8)
    stored["perm"][5] = 1
    with pytest.raises(BadValue, match="g_idx"):
        scheme.decode(stored, 8, 64)


# ---- what cannot be stored


@pytest.mark.parametrize(("version", "zero"), [("gptq", 0), ("gptq_v2", 16)])
def test_zero_points_out_of_range_are_refused(version: str, zero: int) -> None:
    scheme = resolve(sym=False, checkpoint_format=version)
    weight = random_weight(scheme, 8, 64, torch.Generator().manual_seed(2))
    assert weight.zero is not None
    weight.zero[0, 0] = zero
    with pytest.raises(CannotEncode, match="zero points"):
        scheme.encode(weight)


@pytest.mark.parametrize("name", ["int4-g128:fp16", "int4-g32-zp", "int8", "int3-g64:fp16", "int2-g32:fp16-zp"])
def test_export_reads_back(name: str) -> None:
    spec = parse_spec(name)
    quant, scheme = FORMAT.export(spec, ["lm_head", "model.layers.0.mlp.gate"])
    read = Config(quant=quant, method=quant["quant_method"])
    headers = {".scales": Stored("BF16" if spec.scales[0].dtype == BF16 else "F16", ())}
    assert detect(read) is FORMAT and FORMAT.scheme(read, Module(NAME, headers)) == scheme
    assert isinstance(FORMAT.scheme(read, Module("model.layers.0.mlp.gate")), Dense)
    assert not isinstance(FORMAT.scheme(read, Module("model.layers.0.mlp.gate_proj", headers)), Dense)
    weight = quantize(torch.randn(32, 256, generator=torch.Generator().manual_seed(3)), spec)
    assert scheme.decode(scheme.encode(weight), 32, 256).equals(weight)


@pytest.mark.parametrize(
    "name", ["ternary", "uint4-g32", "int5-g32", "fp8-block", "int4-tensor", "int4-g32:fp32", "nf4"]
)
def test_export_refuses_other_specs(name: str) -> None:
    with pytest.raises(CannotEncode, match="GPTQ stores"):
        FORMAT.export(parse_spec(name), [])


# ---- configs


def test_dynamic_rules() -> None:
    rules = {
        r"-:.*\.gate$": {},
        r"+:model\.layers\.0\..*down_proj": {"bits": 8, "group_size": 32},
        r"model\.layers\.0\.": {"sym": False},
        r"layers": {"bits": 2},  # matches from the start of the name only
    }
    read = config(dynamic=rules)

    def scheme(name: str) -> Any:
        return FORMAT.scheme(read, Module(name))

    assert isinstance(scheme("model.layers.0.mlp.gate"), Dense)
    assert scheme("model.layers.0.mlp.experts.0.down_proj").spec == int_spec(8, group(32), scale=F16)
    assert scheme(NAME).spec == int_spec(4, group(64), zero_point=True, scale=F16)  # the first that matches wins
    assert scheme("model.layers.1.mlp.experts.0.down_proj").spec == int_spec(4, group(64), scale=F16)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dynamic": {"-:(": {}}}, "not a supported regular expression"),
        ({"dynamic": {"+:.*": {"adapter": {}}}}, "adapter"),
        ({"dynamic": {"+:.*": 8}}, "dynamic"),
        ({"dynamic": [1]}, "dynamic"),
        ({"checkpoint_format": "marlin"}, "a specific kernel"),
        ({"checkpoint_format": "bitblas"}, "a specific kernel"),
        ({"format": "bitblas"}, "a specific kernel"),
        ({"is_marlin_format": True}, "a specific kernel"),
        ({"pack_dtype": "int64"}, "pack_dtype"),
        ({"bits": 5}, "2, 3, 4, 8"),
        ({"bits": True}, "bits"),
        ({"bits": None}, "bits"),
        ({"group_size": 0}, "group_size"),
        ({"group_size": "128"}, "group_size"),
        ({"sym": "yes"}, "sym"),
    ],
)
def test_unsupported_configs_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedFormat, match=message):
        resolve(**values)


def test_config_keys_of_the_version() -> None:
    assert resolve().zeros is Zeros.UNNAMED
    assert resolve(format="gptq_v2").zeros is Zeros.PLAIN
    assert resolve(checkpoint_format="gptq", format="gptq_v2").zeros is Zeros.UNNAMED
    old = FORMAT.scheme(Config(quant=dict(config().quant), method="gptq_v2"), Module(NAME))
    assert isinstance(old, GptqScheme) and old.zeros is Zeros.PLAIN


@pytest.mark.parametrize(
    "meta", [None, [], "gptqmodel:7.6.0", {}, {"quantizer": 7}, {"quantizer": [None, "gptqmodel"]}]
)
def test_a_tool_that_is_not_named_as_tools_are_is_unknown(meta: Any) -> None:
    assert resolve(meta=meta).zeros is Zeros.UNNAMED


def test_scales_keep_their_dtype_and_float_modules_are_dense() -> None:
    for name, dtype in (("F16", F16), ("BF16", BF16), ("F32", F32)):
        module = Module(NAME, {".qweight": Stored("I32", (8, 8)), ".scales": Stored(name, (1, 8))})
        assert resolve(module).spec.scales[0].dtype == dtype
    plain = FORMAT.scheme(config(), Module("lm_head", {".weight": Stored("F16", (8, 8))}))
    assert isinstance(plain, Dense) and plain.spec.dtype == F16


def test_bias_is_kept() -> None:
    scheme = gptq_scheme(int_spec(4, group(32), scale=F16), zeros=Zeros.UNNAMED, desc_act=False)
    weight = random_weight(scheme, 8, 64, torch.Generator().manual_seed(4))
    biased = LogicalWeight(weight.spec, weight.codes, weight.scales, bias=torch.randn(8).half())
    assert scheme.decode(scheme.encode(biased), 8, 64).equals(biased)


def test_experts_of_a_layer_are_all_reordered_or_none() -> None:
    """A layer with a single reordered expert is refused: its layout stores no permutation."""
    row = names.find_family({"model_type": "qwen3_moe"})
    example = next(e for e in FORMAT.examples() if e.scheme.act_order)
    made = generate(example, row, row.forms[0], Geometry(experts=3, hidden=128, intermediate=128))
    rules = {r"+:.*experts\.1\.(gate|up)_proj": {"desc_act": True}}
    config = replace(made.config, quant={**made.config.quant, "desc_act": False, "dynamic": rules})
    problems = manifests.build(config, made.headers, row).problems
    assert [p.where for p in problems] == ["layer 0, expert 1, gate", "layer 0, expert 1, up"]
    assert all("with act-order" in p.render() for p in problems)
