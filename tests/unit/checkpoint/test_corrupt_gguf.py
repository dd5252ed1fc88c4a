"""Corrupt GGUF headers, one kind of corruption per row."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hostile import ALIGNED, ARCH, HUGE, PAIR, U32, U64, Row, array, assert_refused, gguf_bytes, info, nested, pair

from lancebill import errors as e
from lancebill.checkpoint.read.gguf import ARRAY, STRING
from lancebill.testing.gguf import string_bytes, value_bytes

MANY = (1 << 19) + 1  # fits the file in each of four arrays in arrays

GGUF: dict[str, Row] = {
    "empty file": (b"", e.MalformedFile, "magic"),
    "another magic": (gguf_bytes(magic=b"GGML"), e.MalformedFile, "not a GGUF file"),
    "version 1": (gguf_bytes(version=U32(1)), e.MalformedFile, "got 1"),
    "version 0": (gguf_bytes(version=U32(0)), e.MalformedFile, "got 0"),
    "version 4": (gguf_bytes(version=U32(4)), e.MalformedFile, "expected 2 or 3"),
    "big-endian": (gguf_bytes(version=struct.pack(">I", 3)), e.MalformedFile, "big-endian"),
    "cut after the version": (gguf_bytes()[:8], e.MalformedFile, "number of tensors"),
    "2**62 tensors": (gguf_bytes(counts=(HUGE, None)), e.MalformedFile, "number of tensors"),
    "2**62 pairs": (gguf_bytes(counts=(None, HUGE)), e.MalformedFile, "number of metadata pairs"),
    "one pair too few": (gguf_bytes(counts=(None, 1)), e.MalformedFile, "past the end"),
    "one tensor too many": (gguf_bytes(counts=(2, None)), e.MalformedFile, "header, byte"),
    "a key of 2**62 bytes": (gguf_bytes((U64(HUGE) + b"x",)), e.MalformedFile, "length of a metadata key"),
    "a key of no bytes": (gguf_bytes((U64(0) + value_bytes(1),)), e.MalformedFile, "length of a metadata key"),
    "a key past the file": (gguf_bytes((U64(60_000) + b"x",)), e.MalformedFile, "does not fit"),
    "a key that is not UTF-8": (gguf_bytes((U64(1) + b"\xff" + value_bytes(1),)), e.MalformedFile, "UTF-8"),
    "a key with a line break": (gguf_bytes((U64(1) + b"\n" + value_bytes(1),)), e.MalformedFile, "not printable"),
    "a key twice": (gguf_bytes((ARCH, PAIR, PAIR)), e.MalformedFile, "'llama.block_count' occurs twice"),
    "a value of type 13": (gguf_bytes(pair("k", U32(13) + U32(0))), e.MalformedFile, "unknown type"),
    "a bool of 2": (gguf_bytes(pair("k", U32(7) + b"\2")), e.MalformedFile, "not a bool"),
    "a string of 2**62 bytes": (gguf_bytes(pair("k", U32(STRING) + U64(HUGE))), e.MalformedFile, "too long"),
    "a string past the file": (gguf_bytes(pair("k", U32(STRING) + U64(90_000_000))), e.MalformedFile, "does not fit"),
    "an array of 2**62 numbers": (gguf_bytes(pair("k", array(4, HUGE))), e.MalformedFile, "array length"),
    "an array whose bytes wrap": (gguf_bytes(pair("k", array(10, 1 << 61))), e.MalformedFile, "array length"),
    "an array of 2**62 strings": (gguf_bytes(pair("k", array(STRING, HUGE))), e.MalformedFile, "array length"),
    "an array of 2**62 arrays": (gguf_bytes(pair("k", array(ARRAY, HUGE))), e.MalformedFile, "array length"),
    "an array of type 13": (gguf_bytes(pair("k", array(13, 1))), e.MalformedFile, "array of an unknown type"),
    "arrays a hundred deep": (gguf_bytes(pair("k", nested(100))), e.MalformedFile, "too deeply"),
    "arrays that claim 2**21 elements": (
        gguf_bytes(pair("k", array(ARRAY, MANY, (U32(ARRAY) + U64(MANY)) * 3)), data=13 * MANY),
        e.MalformedFile, "too many elements",
    ),
    "a string of an array past the file": (
        gguf_bytes(pair("k", array(STRING, 1, U64(HUGE)))), e.MalformedFile, "does not fit",
    ),
    "no architecture": (gguf_bytes((PAIR,)), e.MalformedFile, "general.architecture"),
    "architecture that is a number": (
        gguf_bytes((string_bytes("general.architecture") + value_bytes(3),)), e.MalformedFile, "general.architecture",
    ),
    "layer count that is text": (
        gguf_bytes(pair("llama.block_count", value_bytes("3"))), e.MalformedFile, "llama.block_count",
    ),
    "scale that is NaN": (
        gguf_bytes(pair("llama.expert_weights_scale", U32(6) + struct.pack("<f", float("nan")))),
        e.MalformedFile, "expert_weights_scale",
    ),
    "alignment of 0": (gguf_bytes((ARCH, ALIGNED + value_bytes(0))), e.MalformedFile, "power of two"),
    "alignment of 24": (gguf_bytes((ARCH, ALIGNED + value_bytes(24))), e.MalformedFile, "power of two"),
    "alignment that is text": (gguf_bytes((ARCH, ALIGNED + value_bytes("32"))), e.MalformedFile, "power of two"),
    "alignment that is true": (gguf_bytes((ARCH, ALIGNED + value_bytes(True))), e.MalformedFile, "power of two"),
    "alignment the data does not have": (
        gguf_bytes((ARCH, ALIGNED + value_bytes(1 << 30))), e.MalformedFile, "past the end",
    ),
    "a tensor's name of 2**62 bytes": (gguf_bytes(infos=(U64(HUGE) + bytes(40),)), e.MalformedFile, "tensor's name"),
    "no dimensions": (gguf_bytes(infos=(info(dims=()) + bytes(16),)), e.MalformedFile, "tensor 't'"),
    "five dimensions": (gguf_bytes(infos=(info(dims=(1,) * 5),)), e.MalformedFile, "tensor 't'"),
    "2**31 dimensions": (gguf_bytes(infos=(info(rank=1 << 31),)), e.MalformedFile, "tensor 't'"),
    "a dimension of 0": (gguf_bytes(infos=(info(dims=(4, 0)),)), e.MalformedFile, "dimension of 0"),
    "elements that wrap": (gguf_bytes(infos=(info(dims=(1 << 32, 1 << 32, 4)),)), e.MalformedFile, "past the end"),
    "a dimension of 2**64 - 1": (gguf_bytes(infos=(info(dims=((1 << 64) - 1,)),)), e.MalformedFile, "past the end"),
    "unknown ggml type": (gguf_bytes(infos=(info(kind=95),)), e.MalformedFile, "got type 95"),
    "another program's type": (gguf_bytes(infos=(info(kind=144),)), e.MalformedFile, "got IQ4_KS, of ik_llama.cpp"),
    "removed ggml type": (gguf_bytes(infos=(info(kind=4),)), e.MalformedFile, "got Q4_2"),
    "a row of part of a block": (gguf_bytes(infos=(info(dims=(100, 2), kind=12),)), e.MalformedFile, "whole blocks"),
    "offset off the alignment": (gguf_bytes(infos=(info(offset=8),)), e.MalformedFile, "not aligned"),
    "offset past the file": (gguf_bytes(infos=(info(offset=1 << 40),)), e.MalformedFile, "gap"),
    "truncated data": (gguf_bytes(data=31), e.MalformedFile, "past the end"),
    "overlapping tensors": (gguf_bytes(infos=(info(b"s"), info(b"t"))), e.MalformedFile, "overlaps"),
    "a gap between tensors": (
        gguf_bytes(infos=(info(b"s"), info(b"t", offset=64)), data=96), e.MalformedFile, "gap",
    ),
    "a tensor twice": (
        gguf_bytes(infos=(info(b"t"), info(b"t", offset=32)), data=64), e.DuplicateTensor, "'t' is stored twice",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GGUF)
def test_corrupt_gguf(tmp_path: Path, name: str) -> None:
    content, kind, fragment = GGUF[name]
    (tmp_path / "x.gguf").write_bytes(content)
    assert_refused(tmp_path / "x.gguf", kind, fragment)
    if kind is e.MalformedFile:
        assert_refused(tmp_path, kind, "x.gguf")
