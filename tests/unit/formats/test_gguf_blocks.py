"""GGUF block types against the `gguf` library, bit for bit, and against values of the definition."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from lancebill.checkpoint.load.padding import pad
from lancebill.checkpoint.load.projections import load_projection
from lancebill.checkpoint.read.files import Checkpoint
from lancebill.checkpoint.resolve.manifest import build
from lancebill.errors import BadValue, CannotEncode, UnsupportedFormat
from lancebill.formats import detect
from lancebill.formats._gguf_blocks import BLOCK_TYPES, BlockType
from lancebill.formats._gguf_grids import GRID_TYPES, TERNARY_TYPE
from lancebill.formats.base import Config, Module, Stored
from lancebill.formats.gguf import FORMAT, TYPES, gguf_scheme
from lancebill.numbers.bit_packing import Nibbles
from lancebill.numbers.codec import dequantize
from lancebill.numbers.dtypes import E2M1, F16
from lancebill.numbers.spec import NVFP4
from lancebill.numbers.weight import same_bits
from lancebill.testing.weights import random_weight

N, BLOCKS = 32, 16
NIBBLES = "f0e1d2c3b4a5968778695a4b3c2d1e0f"


def _random(size: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (N, BLOCKS, size), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def _legal(block: BlockType, seed: int = 0) -> Tensor:
    """Random bytes with finite scales, including both signs, subnormals and zeros."""
    data = _random(block.size, seed)
    for field in (*block.scales, *block.minimum):
        start = field.planes[0].start
        if field.dtype == F16:
            high = data[..., start + 1]
            high[(high & 0x7C) == 0x7C] ^= 0x40
        elif field.dtype.nan_code is not None:
            data[..., start : start + field.planes[0].size] %= field.dtype.nan_code
    return data


def _reference_values(block: BlockType, data: Tensor) -> Tensor:
    kind = gguf.GGMLQuantizationType[block.name]
    with np.errstate(over="ignore"):
        return torch.from_numpy(gguf.quants.dequantize(data.flatten(1).numpy(), kind))


def _decode(name: str, blocks: str | bytes | Tensor) -> list[float]:
    """The values of one row of blocks, given in hexadecimal."""
    if isinstance(blocks, str):
        blocks = bytes.fromhex(blocks)
    data = torch.frombuffer(bytearray(blocks), dtype=torch.uint8) if isinstance(blocks, bytes) else blocks
    block = BLOCK_TYPES[name]
    data = data.reshape(1, -1, block.size)
    values = dequantize(gguf_scheme(block).decode({"codes": data}, 1, data.shape[1] * block.columns))
    return [float(v) for v in values[0]]


@pytest.mark.parametrize("block", BLOCK_TYPES.values(), ids=BLOCK_TYPES)
@pytest.mark.parametrize("seed", range(3))
def test_values_equal_the_gguf_library(block: BlockType, seed: int) -> None:
    data = _legal(block, seed)
    values = dequantize(gguf_scheme(block).decode({"codes": data}, N, BLOCKS * block.columns))
    expected = _reference_values(block, data)
    if block.codes.dtype == E2M1:
        values = values + 0.0  # the library's fp4 table has no minus zero
        expected = expected + 0.0
    assert same_bits(values, expected)


@pytest.mark.parametrize("block", BLOCK_TYPES.values(), ids=BLOCK_TYPES)
def test_sizes_equal_the_gguf_library(block: BlockType) -> None:
    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[block.name]] == (block.columns, block.size)


@pytest.mark.parametrize("block", BLOCK_TYPES.values(), ids=BLOCK_TYPES)
def test_every_bit_of_a_block_belongs_to_one_number(block: BlockType) -> None:
    covered = torch.zeros(block.size, dtype=torch.int64)
    for field in block.fields:
        filled = torch.zeros(block.columns // field.columns * field.dtype.storage.itemsize, dtype=torch.int64)
        for plane in field.planes:
            mask = sum(((1 << plane.width) - 1) << (plane.bit + lane * plane.width) for lane in range(plane.lanes))
            assert not bool((covered[plane.start : plane.start + plane.size] & mask).any())
            covered[plane.start : plane.start + plane.size] |= mask
            filled[plane.numbers] |= ((1 << plane.width) - 1) << plane.shift
        width = field.dtype.bits if field.dtype.table else 8
        assert filled.tolist() == [(1 << width) - 1] * len(filled)
    assert covered.tolist() == [0xFF] * block.size


@pytest.mark.parametrize("block", BLOCK_TYPES.values(), ids=BLOCK_TYPES)
def test_join_undoes_split_and_does_not_modify_its_input(block: BlockType) -> None:
    data = _random(block.size)
    codes, levels = block.split(data)
    numbers = [codes.unpack() if isinstance(codes, Nibbles) else codes, *levels]
    before = [t.clone() for t in numbers]
    assert torch.equal(block.join(numbers), data)
    assert all(same_bits(a, b) for a, b in zip(numbers, before))


def test_q4_0_numbers() -> None:
    half = [v / 2 for v in range(-8, 8)]
    assert _decode("Q4_0", "0038" + NIBBLES) == half + half[::-1]


def test_mxfp4_numbers() -> None:
    up = [0, 0.25, 0.5, 0.75, 1, 1.5, 2, 3]
    first = up + [-v for v in up]
    assert _decode("MXFP4", "7e" + NIBBLES) == first + first[::-1]


def test_q4_k_scales() -> None:
    scales, minimums = [1, 2, 3, 4, 33, 34, 35, 63], [0, 1, 2, 3, 40, 41, 62, 63]
    halves = torch.tensor([0.25, 0.5], dtype=torch.float16).view(torch.uint8).tolist()
    packed = bytes.fromhex("818283c48081c2c38192e3ff")
    block = BLOCK_TYPES["Q4_K"]
    data = torch.tensor([*halves, *packed, *([0x71] * 128)], dtype=torch.uint8).view(1, 1, -1)
    weight = gguf_scheme(block).decode({"codes": data}, 1, 256)
    assert weight.scales[0].tolist() == [scales]
    assert weight.minimum[0].tolist() == [minimums]
    assert [float(weight.scales[1]), float(weight.minimum[1])] == [0.25, 0.5]
    values = dequantize(weight).view(8, 32)
    for j, (scale, minimum) in enumerate(zip(scales, minimums)):
        code = 7 if j % 2 else 1
        assert values[j].tolist() == [0.25 * scale * code - 0.5 * minimum] * 32
    assert torch.equal(gguf_scheme(block).encode(weight)["codes"], data)


def test_q4_1_stores_the_negated_minimum() -> None:
    data = torch.tensor([0x00, 0x3C, 0x00, 0xC2, *([0x00] * 16)], dtype=torch.uint8).view(1, 1, -1)  # d = 1, m = -3
    weight = gguf_scheme(BLOCK_TYPES["Q4_1"]).decode({"codes": data}, 1, 32)
    assert float(weight.minimum[0]) == 3.0
    assert set(dequantize(weight).view(-1).tolist()) == {-3.0}


def test_nvfp4_tensor_scale_multiplies_and_may_be_absent() -> None:
    block, data = BLOCK_TYPES["NVFP4"], _legal(BLOCK_TYPES["NVFP4"])
    scheme, k = gguf_scheme(block), BLOCKS * block.columns
    plain = scheme.decode({"codes": data}, N, k)
    stored = {"codes": data, "scale_2": torch.tensor(0.375), "input_scale": torch.tensor([2.0])}
    scaled = scheme.decode(stored, N, k)
    assert scheme.spec == NVFP4
    assert float(plain.scales[1]) == 1.0
    assert torch.equal(dequantize(scaled), dequantize(plain) * 0.375)
    assert scaled.inputs["input_scale"].tolist() == [2.0]
    assert scheme.decode(scheme.encode(scaled), N, k).equals(scaled)
    assert scheme.decode(scheme.encode(plain), N, k).equals(plain)


@pytest.mark.parametrize(("name", "code"), [("MXFP4", 0xFF), ("NVFP4", 0x7F), ("NVFP4", 0x80), ("NVFP4", 0xB8)])
def test_negative_and_nan_scales_are_refused(name: str, code: int) -> None:
    block = BLOCK_TYPES[name]
    scheme, k = gguf_scheme(block), BLOCKS * block.columns
    data = _legal(block)
    weight = scheme.decode({"codes": data}, N, k)
    data[3, 5, 0] = code
    message = "NaN" if code in (0xFF, 0x7F) else f"{code:#x}"
    with pytest.raises(BadValue, match=message):
        scheme.decode({"codes": data}, N, k)
    weight.scales[0][1, 2] = code
    with pytest.raises(CannotEncode, match=message):
        scheme.encode(weight)


def test_encode_refuses_rows_that_end_inside_a_block() -> None:
    block = BLOCK_TYPES["Q4_K"]
    weight = gguf_scheme(block).decode({"codes": _legal(block)}, N, BLOCKS * 256).cut((0, N), (0, 32))
    with pytest.raises(CannotEncode, match="256"):
        gguf_scheme(block).encode(weight)


def _config(types: object) -> Config:
    return Config({"model_type": "gguf"}, {"types": types}, "gguf", "m.gguf")


def test_the_type_is_looked_up_by_tensor_name() -> None:
    config = _config({"blk.0.ffn_gate_exps.weight": "Q4_K", "blk.0.ffn_down_exps.weight": "F16"})
    assert detect(config) is FORMAT
    gate = FORMAT.scheme(config, Module("blk.0.ffn_gate_exps", {".weight": Stored("U8", (4, 64, 1, 144))}))
    assert gate == gguf_scheme(BLOCK_TYPES["Q4_K"])
    down = FORMAT.scheme(config, Module("blk.0.ffn_down_exps", {".weight": Stored("F16", (4, 64, 64))}))
    assert str(down.spec) == "fp16"
    assert str(FORMAT.scheme(config, Module("blk.0.ffn_up_exps")).spec) == "bf16"


def test_the_error_for_an_unsupported_type_lists_the_supported_ones() -> None:
    config = _config({"m.weight": "Q1_0"})
    with pytest.raises(UnsupportedFormat, match=r"m\.gguf: m\.weight: .*Q4_K.*got Q1_0"):
        FORMAT.scheme(config, Module("m"))
    for types in ({"m.weight": 12}, ["Q4_K"], None):
        with pytest.raises(UnsupportedFormat, match="types"):
            FORMAT.scheme(_config(types), Module("m"))


def test_a_file_of_the_gguf_library_loads_expert_by_expert(tmp_path: Path) -> None:
    """Mixed types within a layer, as in real files; NVFP4 with one scale per expert."""
    experts, hidden, inter = 3, 512, 256
    kinds = {"gate": "Q4_K", "up": "Q4_K", "down": "NVFP4"}
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "mixtral")
    writer.add_expert_count(experts)
    writer.add_embedding_length(hidden)
    writer.add_expert_feed_forward_length(inter)
    expected: dict[str, Tensor] = {}
    scale = torch.tensor([0.5, 0.375, 3.0])
    for name, kind in kinds.items():
        block = BLOCK_TYPES[kind]
        n, k = (hidden, inter) if name == "down" else (inter, hidden)
        data = _legal(block).view(-1, block.size)
        data = data[torch.arange(experts * n * k // block.columns) % len(data)].view(experts, n, -1)
        judged = gguf.quants.dequantize(data.numpy(), gguf.GGMLQuantizationType[kind])
        expected[name] = torch.from_numpy(judged) * (scale.view(-1, 1, 1) if name == "down" else 1)
        kind_id = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(f"blk.0.ffn_{name}_exps.weight", data.numpy(), raw_dtype=kind_id)
    writer.add_tensor("blk.0.ffn_down_exps.scale", scale.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with Checkpoint.open(tmp_path) as checkpoint:
        manifest = build(checkpoint.config, {n: t.stored for n, t in checkpoint.tensors.items()})
        manifest.check("m.gguf")
        for (expert, name), projection in manifest.layers[0].projections.items():
            values = dequantize(load_projection(checkpoint.read, projection))
            assert torch.equal(values, expected[name][expert])


def test_padding_of_a_type_without_zero_is_zero() -> None:
    """IQ4 has no code for 0, so padding rows need a scale of 0."""
    weight = gguf_scheme(BLOCK_TYPES["IQ4_NL"]).decode({"codes": torch.full((4, 2, 18), 60, dtype=torch.uint8)}, 4, 64)
    padded = dequantize(pad(weight, 6, 96))
    assert torch.equal(padded[:4, :64], dequantize(weight))
    assert not padded[4:].any() and not padded[:, 64:].any()


@pytest.mark.parametrize("name", [*GRID_TYPES, TERNARY_TYPE.name])
def test_grids_equal_the_gguf_library(name: str) -> None:
    block, scheme = TYPES[name], gguf_scheme(TYPES[name])
    k, generator = 4 * block.columns, torch.Generator().manual_seed(1)
    weight = random_weight(scheme, 16, k, generator)
    stored = scheme.encode(weight)
    values = gguf.quants.dequantize(stored["codes"].flatten(1).numpy(), gguf.GGMLQuantizationType[name])
    assert same_bits(dequantize(scheme.decode(stored, 16, k)) + 0.0, torch.from_numpy(values) + 0.0)
    assert scheme.decode(stored, 16, k).equals(weight)
    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] == (block.columns, block.size)


@pytest.mark.parametrize("name", GRID_TYPES)
def test_codes_outside_the_grid_are_refused(name: str) -> None:
    scheme = gguf_scheme(GRID_TYPES[name])
    weight = random_weight(scheme, 2, 256, torch.Generator().manual_seed(0))
    flipped = weight.codes.clone()
    flipped[0, 0] ^= 1 << (scheme.spec.dtype.bits - 1)  # one sign: an odd number of them, or another side of IQ1
    with_side = replace(weight, stored=flipped)
    if name in ("IQ2_S", "IQ3_S"):  # every sign is stored
        assert scheme.decode(scheme.encode(with_side), 2, 256).equals(with_side)
    else:
        with pytest.raises(CannotEncode):
            scheme.encode(with_side)
    anything = torch.randint(1 << scheme.spec.dtype.bits, weight.codes.shape, dtype=torch.uint8)
    with pytest.raises(CannotEncode, match="in its grid"):
        scheme.encode(replace(weight, stored=anything))
