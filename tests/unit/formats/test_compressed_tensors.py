"""compressed-tensors against the library of that name, and details that are easy to get wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.mxfp6.helpers import pack_fp6_to_uint8
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from ct_configs import EXPERT, K, N, ct_config, with_args
from torch import Tensor

from lancebill.errors import BadValue, CannotEncode
from lancebill.formats import _ct_schemes as ct
from lancebill.formats._ct_config import INT, NAIVE, PACK, write_config
from lancebill.formats.base import Config, Module, Scheme, Stored
from lancebill.formats.compressed_tensors import FORMAT
from lancebill.formats.stored import DTYPE_NAMES
from lancebill.numbers.codec import dequantize
from lancebill.numbers.dtypes import BF16, E2M1, E2M3, F16, F32
from lancebill.numbers.spec import (
    CHANNEL,
    DENSE_BF16,
    FP8_BLOCK,
    FP8_CHANNEL,
    FP8_TENSOR,
    MXFP4,
    MXFP6_E2M3,
    MXFP8,
    NVFP4_DIV,
    TENSOR,
    QuantSpec,
    fp8_spec,
    group,
    int_spec,
)
from lancebill.numbers.weight import LogicalWeight, same_bits
from lancebill.testing.weights import random_weight

FP4_BYTES = torch.tensor([[0x21, 0x7F, 0x08, 0xC3]], dtype=torch.uint8)
FP4_VALUES = [0.1875, 0.375, -2.25, 2.25, -0.0, 0.0, 0.5625, -0.75]


def _module(stored: Mapping[str, Tensor], scheme: Scheme, name: str = EXPERT) -> Module:
    headers = {}
    for role, tensor in stored.items():
        held = scheme.part(role)
        assert held is not None
        headers[held.suffix[0]] = Stored(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))
    return Module(name, headers)


def _weight(scheme: Scheme, n: int = N, k: int = K, seed: int = 0) -> LogicalWeight:
    return random_weight(scheme, n, k, torch.Generator().manual_seed(seed))


def _theirs(config: Mapping[str, Any]) -> tuple[Any, QuantizationScheme]:
    """The library's compressor class and scheme for one of our configs."""
    read = QuantizationConfig.model_validate(config)
    return BaseCompressor.get_value_from_registry(read.format), read.config_groups["group_0"]


def _decompress(config: Mapping[str, Any], stored: Mapping[str, Tensor], scheme: Scheme) -> Tensor:
    compressor, args = _theirs(config)
    state = {}
    for role, tensor in stored.items():
        held = scheme.part(role)
        assert held is not None
        state[held.suffix[0].removeprefix(".")] = tensor.clone()
    decompressed: Tensor = compressor.decompress(state, args)["weight"]
    return decompressed


def _signed(bits: int, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    half = 1 << (bits - 1)
    return torch.randint(-half, half, shape, generator=torch.Generator().manual_seed(seed)).to(torch.int8)


def _word(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value


# Values of the format's description -------------------------------------------------------------------


def test_eight_codes_and_their_word() -> None:
    q = torch.tensor([[-8, -1, 0, 7, 3, -5, 2, 1]])
    scheme = ct.packed_ints(int_spec(4, CHANNEL), ())
    weight = LogicalWeight(scheme.spec, (q + 8).to(torch.uint8), (torch.ones(1, 1, dtype=torch.bfloat16),))
    stored = scheme.encode(weight)
    assert stored["codes"].tolist() == [[_word(0x9A3BF870)]]
    assert dequantize(scheme.decode(stored, 1, 8)).tolist() == q.float().tolist()


def test_zero_points_are_packed_along_rows_and_subtracted() -> None:
    zeros = [-8, -1, 0, 3, 7, 2, -3, 1]
    q = [-8, -1, 0, 7, 3, -5, 2, 1]
    scheme = ct.packed_ints(int_spec(4, group(8), zero_point=True), ())
    weight = LogicalWeight(
        scheme.spec,
        (torch.tensor(q) + 8).to(torch.uint8).expand(8, 8),
        (torch.full((8, 1), 0.5, dtype=torch.bfloat16),),
        (torch.tensor(zeros) + 8).to(torch.int16).reshape(8, 1),
    )
    stored = scheme.encode(weight)
    assert stored["zero"].tolist() == [[_word(0x95AFB870)]]
    assert stored["codes"].tolist() == [[_word(0x9A3BF870)]] * 8
    row_of_zero_3 = dequantize(scheme.decode(stored, 8, 8))[3]
    assert row_of_zero_3.tolist() == [-5.5, -2, -1.5, 2, 0, -4, -0.5, -1]


def test_nvfp4_divides_by_its_global_scale() -> None:
    scheme = ct.floats(NVFP4_DIV, ())
    stored = {
        "codes": FP4_BYTES,
        "scale": torch.tensor([[0x3C]], dtype=torch.uint8).view(torch.float8_e4m3fn),
        "scale_2": torch.tensor([4.0]),
    }
    got = dequantize(scheme.decode(stored, 1, 8))
    assert same_bits(got, torch.tensor([FP4_VALUES]))


# Against the library ----------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [64, 40, 33])
@pytest.mark.parametrize("bits", range(2, 9))
def test_packed_words_equal_the_library(bits: int, k: int) -> None:
    q, zeros = _signed(bits, (N, k)), _signed(bits, (N, 1), seed=1)
    half = 1 << (bits - 1)
    scheme = ct.packed_ints(int_spec(bits, CHANNEL, zero_point=True), ())
    scale = torch.ones(N, 1, dtype=torch.bfloat16)
    codes = (q.to(torch.int16) + half).to(torch.uint8)
    stored = scheme.encode(LogicalWeight(scheme.spec, codes, (scale,), zeros.to(torch.int16) + half))
    assert same_bits(stored["codes"], pack_to_int32(q, bits))
    assert same_bits(stored["zero"], pack_to_int32(zeros, bits, packed_dim=0))
    assert stored["shape"].tolist() == [N, k]


@pytest.mark.parametrize("zero_point", [False, True])
@pytest.mark.parametrize("block", [group(32), CHANNEL])
@pytest.mark.parametrize("bits", range(2, 9))
def test_reads_what_the_library_compressed(bits: int, block: tuple[int, int], zero_point: bool) -> None:
    spec = int_spec(bits, block, zero_point=zero_point, scale=F32)
    config = write_config(PACK, spec)
    compressor, args = _theirs(config)
    generator = torch.Generator().manual_seed(bits)
    shape = spec.scales[0].shape(N, K)
    state = {
        "weight": torch.randn(N, K, generator=generator),
        "weight_scale": torch.rand(shape, generator=generator) / (1 << (bits - 1)) + 0.01,
    }
    if zero_point:
        state["weight_zero_point"] = _signed(bits, shape)
    packed = compressor.compress(state, args)
    module = Module(EXPERT, {f".{name}": Stored(DTYPE_NAMES[t.dtype], tuple(t.shape)) for name, t in packed.items()})
    scheme = FORMAT.scheme(Config(quant=config, method="compressed-tensors"), module)
    roles = {"weight_packed": "codes", "weight_scale": "scale", "weight_zero_point": "zero", "weight_shape": "shape"}
    stored = {roles[name]: tensor for name, tensor in packed.items()}
    weight = scheme.decode(stored, N, K)
    assert weight.spec == spec
    assert same_bits(dequantize(weight), compressor.decompress(packed, args)["weight"])
    again = scheme.encode(weight)
    assert again.keys() == stored.keys()
    assert all(same_bits(again[role], stored[role]) for role in stored)


EXPORTED = [
    *(int_spec(bits, group(32), zero_point=zp, scale=F32) for bits in range(2, 9) for zp in (False, True)),
    int_spec(4, CHANNEL, zero_point=True, scale=BF16),
    int_spec(8, CHANNEL, scale=F16),
    FP8_TENSOR, FP8_CHANNEL, FP8_BLOCK, fp8_spec((16, 32)), fp8_spec((24, 40), scale=BF16), fp8_spec(group(32)),
    NVFP4_DIV, MXFP4, MXFP6_E2M3, MXFP8,
]  # fmt: skip


def _powers_of_two(weight: LogicalWeight) -> LogicalWeight:
    """Global scales that are powers of two, so that no order of operations rounds."""
    scales = (weight.scales[0], torch.tensor([[4.0]])) if len(weight.scales) == 2 else weight.scales
    return LogicalWeight(weight.spec, weight.codes, scales, weight.zero)


@pytest.mark.parametrize("spec", EXPORTED, ids=str)
def test_the_library_reads_what_we_export(spec: QuantSpec) -> None:
    config, scheme = FORMAT.export(spec, ["lm_head", "model.layers.0.mlp.gate"])
    weight = _powers_of_two(_weight(scheme))
    stored = scheme.encode(weight)
    ours, theirs = dequantize(weight), _decompress(config, stored, scheme)
    assert same_bits(ours.to(theirs.dtype), theirs)
    if theirs.dtype == torch.bfloat16 and spec.scales[0].dtype != BF16:
        assert torch.equal(ours, theirs.float())  # nothing was rounded
    read = Config(quant=config, method="compressed-tensors")
    assert FORMAT.unknown_keys(read) == []
    again = FORMAT.scheme(read, _module(stored, scheme))
    assert again.spec == spec
    assert again.decode(stored, N, K).equals(weight)
    assert FORMAT.scheme(read, Module("lm_head", {})).spec == DENSE_BF16
    assert QuantizationConfig.model_validate(config).ignore == ["lm_head", "model.layers.0.mlp.gate"]


@pytest.mark.parametrize(("dtype", "pack"), [(E2M1, pack_fp4_to_uint8), (E2M3, pack_fp6_to_uint8)])
def test_float_bytes_equal_the_library(dtype: Any, pack: Any) -> None:
    codes = torch.arange(1 << dtype.bits, dtype=torch.uint8).repeat(2, 1)
    scheme = ct.floats(MXFP4 if dtype == E2M1 else MXFP6_E2M3, ())
    columns = codes.shape[1]
    weight = LogicalWeight(scheme.spec, codes, (torch.full((2, -(-columns // 32)), 127, dtype=torch.uint8),))
    assert same_bits(scheme.encode(weight)["codes"], pack(dtype.decode(codes).to(torch.bfloat16)))


@pytest.mark.parametrize("fmt", [INT, NAIVE])
@pytest.mark.parametrize("zero_point", [False, True])
@pytest.mark.parametrize(("bits", "block"), [(8, TENSOR), (8, CHANNEL), (8, group(32)), (4, group(32)), (3, CHANNEL)])
def test_integers_in_bytes(fmt: str, bits: int, block: tuple[int, int], zero_point: bool) -> None:
    """Both format names use the same offset."""
    spec = int_spec(bits, block, zero_point=zero_point, scale=F32)
    config = ct_config(fmt, spec)
    scheme = FORMAT.scheme(config, Module(EXPERT, {".weight_scale": Stored("F32", (1,))}))
    weight = _weight(scheme)
    stored = scheme.encode(weight)
    assert stored["codes"].dtype == torch.int8
    assert same_bits(dequantize(weight), _decompress(config.quant, stored, scheme))
    assert scheme.decode(stored, N, K).equals(weight)


# Details that are easy to get wrong -------------------------------------------------------------------


def test_zero_points_are_packed_along_the_other_axis() -> None:
    scheme = ct.packed_ints(int_spec(4, group(16), zero_point=True), ())
    weight = _weight(scheme, n=24, k=32)
    stored = scheme.encode(weight)
    assert stored["codes"].shape == (24, 4) and stored["zero"].shape == (3, 2)
    low_rows = {**stored, "codes": stored["codes"][8:16], "zero": stored["zero"][1:2], "scale": stored["scale"][8:16]}
    assert scheme.decode(low_rows, 8, 32).equals(weight.cut((8, 16), (0, 32)))


def _old_words(codes: Tensor, bits: int) -> Tensor:
    """The old writer's packing with Python integers: whole codes only, lowest first."""
    per = 32 // bits
    rows = [
        [sum(c << (bits * j) for j, c in enumerate(row[i : i + per])) for i in range(0, len(row), per)]
        for row in codes.tolist()
    ]
    return torch.tensor([[_word(w) for w in row] for row in rows], dtype=torch.int32)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("block", [group(32), CHANNEL])
@pytest.mark.parametrize("bits", [3, 5, 6, 7])
def test_old_padded_words(bits: int, block: tuple[int, int], stacked: bool) -> None:
    spec = int_spec(bits, block, zero_point=True)
    weight = _weight(ct.packed_ints(spec, ()))
    assert weight.zero is not None
    stored = {
        "codes": _old_words(weight.codes, bits),
        "scale": weight.scales[0],
        "zero": _old_words(weight.zero.t(), bits).t().contiguous(),
        "shape": torch.tensor([N, K]),
    }
    headers = _module(stored, ct.packed_ints(spec, ())).stored
    if stacked:
        headers = {suffix: Stored(s.dtype, (8, *s.shape)) for suffix, s in headers.items()}
    scheme = FORMAT.scheme(ct_config(PACK, spec), Module(EXPERT, headers))
    assert isinstance(scheme, ct.PackedInts)
    assert scheme.words == (ct.PADDED if block != CHANNEL else ct.UNKNOWN)
    assert scheme.decode(stored, N, K).equals(weight)
    if block != CHANNEL:
        assert same_bits(scheme.encode(weight)["codes"], stored["codes"])
    dense = ct.packed_ints(spec, ()).encode(weight)
    assert dense["codes"].shape[1] < stored["codes"].shape[1]
    dense_headers = _module(dense, ct.packed_ints(spec, ())).stored
    assert FORMAT.scheme(ct_config(PACK, spec), Module(EXPERT, dense_headers)).decode(dense, N, K).equals(weight)


def test_patterns_match_the_names_in_the_checkpoint() -> None:
    config = ct_config(PACK, int_spec(4, group(32)))
    config.quant["config_groups"]["group_0"]["targets"] = [r"re:.*block_sparse_moe\.experts\.\d+\.w[123]$"]
    for name, quantised in (("w1", True), ("w2", True), ("w3", True), ("gate_proj", False)):
        module = Module(f"model.layers.0.block_sparse_moe.experts.7.{name}", {})
        assert (FORMAT.scheme(config, module).spec != DENSE_BF16) == quantised


@pytest.mark.parametrize("order", ["weight", "static", None, False])
def test_columns_in_natural_order_need_no_g_idx(order: Any) -> None:
    spec = int_spec(4, group(16))
    config = with_args(ct_config(PACK, spec), actorder=order)
    scheme = FORMAT.scheme(config, Module(EXPERT, {}))
    weight = _weight(scheme)
    stored = scheme.encode(weight)
    assert "perm" not in stored and not scheme.act_order
    natural = torch.arange(K, dtype=torch.int32) // 16
    for harmless in (natural, torch.full_like(natural, -1)):
        assert scheme.decode({**stored, "perm": harmless}, N, K).equals(weight)
    right = {"codes": stored["codes"][:, 4:], "scale": stored["scale"][:, 2:], "perm": natural[32:]}
    assert scheme.decode(right, N, 32).equals(weight.cut((0, N), (32, K)))
    with pytest.raises(BadValue, match="actorder"):
        scheme.decode({**stored, "perm": natural.flip(0)}, N, K)


@pytest.mark.parametrize("order", ["group", "dynamic", True])
def test_columns_grouped_by_g_idx(order: Any) -> None:
    spec = int_spec(4, group(16), zero_point=True, scale=F32)
    config = with_args(ct_config(PACK, spec), actorder=order)
    scheme = FORMAT.scheme(config, Module(EXPERT, {".weight_scale": Stored("F32", (N, 4))}))
    assert scheme.act_order and scheme.units is None
    generator = torch.Generator().manual_seed(0)
    q, zeros, scale = _signed(4, (N, K)), _signed(4, (N, 4), seed=1), torch.rand(N, 4, generator=generator)
    g_idx = (torch.arange(K, dtype=torch.int32) // 16)[torch.randperm(K, generator=generator)]
    stored = {
        "codes": pack_to_int32(q, 4), "zero": pack_to_int32(zeros, 4, packed_dim=0), "scale": scale,
        "perm": g_idx, "shape": torch.tensor([N, K]),
    }  # fmt: skip
    weight = scheme.decode(stored, N, K)
    want = (q.float() - zeros.float()[:, g_idx.long()]) * scale[:, g_idx.long()]
    assert same_bits(dequantize(weight), want)
    assert all(same_bits(t, stored[role]) for role, t in scheme.encode(weight).items())
    natural = torch.arange(K, dtype=torch.int32) // 16
    assert scheme.decode({**stored, "perm": natural}, N, K).perm is None
    for bad in (torch.zeros_like(g_idx), g_idx + 1, natural + 1):
        with pytest.raises(BadValue, match="does not assign 16 columns"):
            scheme.decode({**stored, "perm": bad}, N, K)


@pytest.mark.parametrize("bits", range(2, 9))
def test_zero_points_of_every_number_of_bits(bits: int) -> None:
    scheme = ct.packed_ints(int_spec(bits, group(16), zero_point=True), ())
    random = _weight(scheme, n=64)
    every = (torch.arange(64 * 4) % (1 << bits)).to(torch.int16).reshape(64, 4)
    weight = LogicalWeight(random.spec, random.codes, random.scales, every)
    assert scheme.decode(scheme.encode(weight), 64, K).equals(weight)
    beyond = LogicalWeight(random.spec, random.codes, random.scales, every + 1)
    with pytest.raises(CannotEncode, match="zero points"):
        scheme.encode(beyond)


# Values that contradict their config ------------------------------------------------------------------


def test_zero_points_of_symmetric_weights_must_be_zero() -> None:
    for scheme in (ct.packed_ints(int_spec(4, group(16)), ()), ct.plain_ints(int_spec(8, CHANNEL), ())):
        weight = _weight(scheme)
        stored = scheme.encode(weight)
        zero = torch.zeros(stored["scale"].shape, dtype=torch.int8)
        assert scheme.decode({**stored, "zero": zero}, N, K).equals(weight)
        with pytest.raises(BadValue, match="symmetric"):
            scheme.decode({**stored, "zero": zero + 1}, N, K)


def test_integers_in_bytes_are_range_checked() -> None:
    scheme = ct.plain_ints(int_spec(4, CHANNEL, zero_point=True), ())
    stored = scheme.encode(_weight(scheme))
    for role in ("codes", "zero"):
        with pytest.raises(BadValue, match="4 bits"):
            scheme.decode({**stored, role: torch.full_like(stored[role], 8)}, N, K)


def test_weight_shape_may_be_larger_than_a_shard() -> None:
    scheme = ct.packed_ints(int_spec(4, CHANNEL), ())
    stored = scheme.encode(_weight(scheme))
    half = {**stored, "codes": stored["codes"][:16], "scale": stored["scale"][:16]}
    assert scheme.decode(half, 16, K).n == 16
    with pytest.raises(BadValue, match="weight_shape"):
        scheme.decode({**stored, "shape": torch.tensor([N, K - 1], dtype=torch.int32)}, N, K)
