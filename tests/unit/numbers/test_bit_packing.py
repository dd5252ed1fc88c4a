"""Every packing against arithmetic on one big integer, and against words from the formats' documentation."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lancebill.numbers.bit_packing import (
    AWQ_ORDER,
    as_bytes,
    pack_awq,
    pack_bits,
    pack_padded,
    unpack_awq,
    unpack_bits,
    unpack_padded,
)
from lancebill.numbers.codec import dequantize
from lancebill.numbers.dtypes import E2M1
from lancebill.numbers.spec import QuantSpec
from lancebill.numbers.weight import LogicalWeight

WORDS = [torch.int32, torch.uint8, torch.int16, torch.int64]


def codes_of(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.uint8)


def unsigned(words: Tensor) -> list[int]:
    width = 8 * words.dtype.itemsize
    return [int(w) & ((1 << width) - 1) for w in words.reshape(-1).tolist()]


def slow_stream(codes: list[int], bits: int, width: int) -> list[int]:
    """All codes in one integer, split into words."""
    stream = sum(code << (i * bits) for i, code in enumerate(codes))
    return [(stream >> (w * width)) & ((1 << width) - 1) for w in range(-(-len(codes) * bits // width))]


# --- documented words ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bits", "codes", "words"),
    [
        (4, [*range(8)], [0x76543210]),
        (4, [3, 14, 8, 7, 0, 15, 9, 1], [0x19F078E3]),
        (2, [0, 1, 2, 3] * 4, [0xE4E4E4E4]),
        (8, [1, 128, 255, 127], [0x7FFF8001]),
        (3, [i % 8 for i in range(32)], [0x88FAC688, 0xC688FAC6, 0xFAC688FA]),
        (5, [*range(32)], [0x8A418820, 0xC5A92839, 0xCA307B9A, 0x38BDAB49, 0xFFBBCDEB]),
        (6, [2 * i for i in range(16)], [0x88184080, 0x449038C2, 0x79C69859]),
    ],
)
def test_words_of_the_stream(bits: int, codes: list[int], words: list[int]) -> None:
    packed = pack_bits(codes_of(*codes), bits, torch.int32)
    assert unsigned(packed) == words
    assert unpack_bits(packed, bits, len(codes)).tolist() == codes
    in_bytes = pack_bits(codes_of(*codes), bits, torch.uint8)
    assert torch.equal(as_bytes(packed)[: len(in_bytes)], in_bytes)


def test_words_of_awq() -> None:
    assert unsigned(pack_awq(codes_of(*range(8)))) == [0x75316420]
    assert unsigned(pack_awq(codes_of(*[8] * 8))) == [0x88888888]
    assert AWQ_ORDER == (0, 2, 4, 6, 1, 3, 5, 7)
    nibbles = unpack_bits(torch.tensor([0x75316420], dtype=torch.int32), 4, 8)
    assert nibbles[[0, 4, 1, 5, 2, 6, 3, 7]].tolist() == [*range(8)]


def test_bytes_of_fp4() -> None:
    codes = unpack_bits(codes_of(0x21, 0x7F, 0x08, 0xC3), 4, 8).view(1, 8)
    values = dequantize(LogicalWeight(QuantSpec(E2M1), codes))
    assert values.tolist() == [[0.5, 1, -6, 6, -0.0, 0, 1.5, -2]]
    assert torch.signbit(values[0, 4])
    assert pack_bits(codes, 4, torch.uint8).tolist() == [[0x21, 0x7F, 0x08, 0xC3]]


def test_words_of_gptq_and_compressed_tensors() -> None:
    """GPTQ zero points and compressed-tensors codes."""
    assert unpack_bits(torch.tensor([0x7777777F], dtype=torch.int32), 4, 8).tolist() == [15, 7, 7, 7, 7, 7, 7, 7]
    assert unsigned(pack_bits(codes_of(*(q + 8 for q in (-8, -1, 0, 7, 3, -5, 2, 1))), 4, torch.int32)) == [0x9A3BF870]
    assert unsigned(pack_bits(codes_of(*(q + 8 for q in (-8, -1, 0, 3, 7, 2, -3, 1))), 4, torch.int32)) == [0x95AFB870]


# --- against the big integer -----------------------------------------------------------------------------

STREAMS = st.integers(1, 8).flatmap(
    lambda bits: st.tuples(st.just(bits), st.lists(st.integers(0, (1 << bits) - 1), max_size=100))
)


@settings(max_examples=300, deadline=None)
@given(STREAMS, st.sampled_from(WORDS))
def test_bit_streams(stream: tuple[int, list[int]], word: torch.dtype) -> None:
    bits, codes = stream
    packed = pack_bits(codes_of(*codes), bits, word)
    assert packed.dtype == word
    assert unsigned(packed) == slow_stream(codes, bits, 8 * word.itemsize)
    assert unpack_bits(packed, bits, len(codes)).tolist() == codes


@settings(max_examples=200, deadline=None)
@given(STREAMS)
def test_padded_words(stream: tuple[int, list[int]]) -> None:
    bits, codes = stream
    per = 32 // bits
    words = pack_padded(codes_of(*codes), bits)
    rows = [codes[i : i + per] for i in range(0, len(codes), per)]
    assert unsigned(words) == [sum(code << (i * bits) for i, code in enumerate(row)) for row in rows]
    assert unpack_padded(words, bits, len(codes)).tolist() == codes
    if bits in (1, 2, 4, 8):
        assert torch.equal(words, pack_bits(codes_of(*codes), bits, torch.int32))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 15), max_size=64))
def test_awq(codes: list[int]) -> None:
    words = pack_awq(codes_of(*codes))
    padded = codes + [0] * (-len(codes) % 8)
    slow = [sum(padded[i + column] << (4 * j) for j, column in enumerate(AWQ_ORDER)) for i in range(0, len(padded), 8)]
    assert unsigned(words) == slow
    assert unpack_awq(words).tolist() == padded


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5), (2, 3, 7), (1, 1), (4, 33)])
def test_the_last_axis_is_packed_for_any_shape(bits: int, word: torch.dtype, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 1 << bits, shape, generator=generator, dtype=torch.uint8)
    packed = pack_bits(codes, bits, word)
    assert packed.shape == (*shape[:-1], -(-shape[-1] * bits // (8 * word.itemsize)))
    assert torch.equal(unpack_bits(packed, bits, shape[-1]), codes)
    for row, own in zip(codes.flatten(0, -2), packed.flatten(0, -2)) if len(shape) > 1 else [(codes, packed)]:
        assert unsigned(own) == slow_stream(row.tolist(), bits, 8 * word.itemsize)


@pytest.mark.parametrize("bits", range(1, 9))
def test_non_contiguous_inputs(bits: int) -> None:
    codes = torch.randint(0, 1 << bits, (48, 40), dtype=torch.uint8)
    across = pack_bits(codes.t(), bits, torch.int32)
    assert torch.equal(across, pack_bits(codes.t().contiguous(), bits, torch.int32))
    stored = across.t().contiguous()  # as GPTQ stores it: packed along K, words along N
    assert torch.equal(unpack_bits(stored.t(), bits, 48), codes.t())
    every_other = torch.stack([across, across], -1)[..., 0]
    assert torch.equal(unpack_bits(every_other, bits, 48), codes.t())
    assert torch.equal(unpack_padded(pack_padded(codes.t(), bits), bits, 48), codes.t())


def test_inputs_are_not_modified() -> None:
    codes = torch.randint(0, 2, (4, 64), dtype=torch.uint8)
    before = codes.clone()
    for bits in range(1, 9):
        pack_bits(codes, bits, torch.int32)
        pack_padded(codes, bits)
    pack_awq(codes)
    assert torch.equal(codes, before)
