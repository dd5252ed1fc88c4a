"""Files and configs that lie: the right error, at once, without allocating what they claim.

Each row of a table is one kind of corruption. `test_the_twins_are_sound` opens the same files
without it, so that a row cannot pass for a reason of its own.
"""

from __future__ import annotations

import json
import os
import random
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch

from colibri import errors as e
from colibri.checkpoint.config import read_config
from colibri.checkpoint.files import INDEX, Checkpoint
from colibri.checkpoint.gguf import ARRAY, STRING
from colibri.checkpoint.strict_json import parse_object
from colibri.testing.gguf import info_bytes, string_bytes, value_bytes

Row = tuple[Any, type[e.ColibriError], str]
HUGE = 1 << 62
SLACK = 1 << 20


def assert_refused(path: Path, kind: type[e.ColibriError], fragment: str) -> None:
    """The error, of exactly this kind, saying where; in time; in no more memory than the files have."""
    size = sum(f.stat().st_size for f in path.rglob("*") if f.is_file()) if path.is_dir() else path.stat().st_size
    tracemalloc.start()
    started = time.perf_counter()
    try:
        with pytest.raises(e.ColibriError) as caught:
            Checkpoint.open(path)
        elapsed, peak = time.perf_counter() - started, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert type(caught.value) is kind, caught.value
    assert fragment in str(caught.value)
    assert caught.value.where is not None and len(str(caught.value)) < 2000
    str(caught.value).encode("utf-8")
    assert elapsed < 2
    assert peak <= size + SLACK


# safetensors headers


def entry(dtype: Any = "F32", shape: Any = (2, 3), offsets: Any = (0, 24), **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


def file_bytes(header: Any, data: int = 24, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + bytes(data)


GOOD = {
    "__metadata__": {"format": "pt"},
    "a": entry(),
    "b": entry("U8", [4], [24, 28]),
    "c": entry("F16", [0], [28, 28]),
}
SOUND = file_bytes(GOOD, 28)
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n"

SAFETENSORS: dict[str, Row] = {
    "empty file": (b"", e.MalformedFile, "too short"),
    "seven bytes": (b"\x01" * 7, e.MalformedFile, "too short"),
    "header length of 2**63": (file_bytes(GOOD, 28, 1 << 63), e.MalformedFile, "header is too large"),
    "header length over the limit": (file_bytes(GOOD, 28, 100_000_001), e.MalformedFile, "header is too large"),
    "header length past the file": (file_bytes(GOOD, 28, 99_999_999), e.MalformedFile, "does not fit"),
    "header length of zero": (file_bytes(b"", 24), e.MalformedFile, "not a JSON object"),
    "git lfs pointer": (LFS, e.MalformedFile, "git lfs pull"),
    "html page": (b"<!DOCTYPE html><html>404</html>", e.MalformedFile, "header is too large"),
    "not JSON": (file_bytes(b"{'a': 1}"), e.MalformedFile, "line 1 column 2"),
    "not UTF-8": (file_bytes(b'{"\xff": 1}'), e.MalformedFile, "UTF-8"),
    "a JSON list": (file_bytes([1]), e.MalformedFile, "not a JSON object"),
    "space before the header": (file_bytes(b" {}", 0), e.MalformedFile, "'{' at byte 8"),
    "cut header": (file_bytes(json.dumps(GOOD).encode()[:-5], 28), e.MalformedFile, "not valid JSON"),
    "two documents": (file_bytes(b"{}{}", 0), e.MalformedFile, "Extra data"),
    "nesting bomb": (file_bytes(b'{"a":' * 100_000), e.MalformedFile, "nested too deeply"),
    "list bomb": (file_bytes(b'{"a":' + b"[" * 200_000), e.MalformedFile, "nested too deeply"),
    "the same name twice": (
        file_bytes(b'{"a":%b,"a":%b}' % ((json.dumps(entry()).encode(),) * 2)), e.MalformedFile, "'a' occurs twice",
    ),
    "the same field twice": (file_bytes(b'{"a":{"dtype":"F32","dtype":"U8"}}'), e.MalformedFile, "'dtype' occurs"),
    "NaN": (file_bytes(b'{"a":NaN}'), e.MalformedFile, "literal NaN"),
    "infinite number": (file_bytes(b'{"a":1e999}'), e.MalformedFile, "not finite"),
    "a number of a million digits": (file_bytes(b'{"a":' + b"9" * 100_000 + b"}"), e.MalformedFile, "100000 digits"),
    "lone surrogate": (file_bytes({"\ud800": entry()}), e.MalformedFile, "UTF-8"),
    "empty name": (file_bytes({"": entry()}), e.MalformedFile, "empty or not printable"),
    "escape codes in a name": (file_bytes({"a\x1b[2J": entry()}), e.MalformedFile, "not printable"),
    "a name of 100 KB": (file_bytes({"a" * 100_000: entry("F9")}), e.WrongDtype, "aaa..."),
    "metadata that is no map": (file_bytes({"__metadata__": [], "a": entry()}), e.MalformedFile, "__metadata__"),
    "metadata that is no text": (file_bytes({"__metadata__": {"a": 1}, "a": entry()}), e.MalformedFile, "__metadata__"),
    "an entry that is a list": (file_bytes({"a": [1]}), e.MalformedFile, "tensor 'a'"),
    "an entry without offsets": (file_bytes({"a": {"dtype": "F32", "shape": [6]}}), e.MalformedFile, "tensor 'a'"),
    "an entry with strides": (file_bytes({"a": entry(strides=[1])}), e.MalformedFile, "'strides'"),
    "unknown dtype": (file_bytes({"a": entry("F12")}), e.WrongDtype, "tensor 'a'"),
    "dtype below a byte": (file_bytes({"a": entry("F4", [6, 8])}), e.WrongDtype, "'F4'"),
    "dtype that is a number": (file_bytes({"a": entry(4)}), e.WrongDtype, "tensor 'a'"),
    "dtype that is a list": (file_bytes({"a": entry(["F32"])}), e.WrongDtype, "tensor 'a'"),
    "shape that is a number": (file_bytes({"a": entry(shape=6)}), e.MalformedFile, "shape is not a list"),
    "negative size": (file_bytes({"a": entry(shape=[-2, -3])}), e.MalformedFile, "shape is not a list"),
    "fractional size": (file_bytes({"a": entry(shape=[2.0, 3])}), e.MalformedFile, "shape is not a list"),
    "size that is true": (file_bytes({"a": entry(shape=[6, True])}), e.MalformedFile, "shape is not a list"),
    "a hundred axes": (file_bytes({"a": entry(shape=[6] + [1] * 100)}), e.MalformedFile, "at most 64"),
    "sizes that wrap to 24 bytes": (file_bytes({"a": entry(shape=[HUGE, 16, 6])}), e.MalformedFile, "beyond any file"),
    "huge and empty": (file_bytes({"a": entry("U8", [0, HUGE], [0, 0])}, 0), e.MalformedFile, "beyond any file"),
    "shape against offsets": (file_bytes({"a": entry(shape=[2, 4])}), e.MalformedFile, "expected 32 bytes; got 24"),
    "offsets that are text": (file_bytes({"a": entry(offsets="0")}), e.MalformedFile, "[start, end]"),
    "three offsets": (file_bytes({"a": entry(offsets=[0, 24, 24])}), e.MalformedFile, "[start, end]"),
    "offsets backwards": (file_bytes({"a": entry(offsets=[24, 0])}), e.MalformedFile, "[start, end]"),
    "negative offset": (file_bytes({"a": entry(offsets=[-24, 0])}), e.MalformedFile, "[start, end]"),
    "tensor past the end": (file_bytes({"a": entry(offsets=[24, 48])}), e.MalformedFile, "past the end"),
    "a petabyte claimed": (
        file_bytes({"a": entry(shape=[1 << 50], offsets=[0, 1 << 52])}), e.MalformedFile, "past the end",
    ),
    "truncated data": (SOUND[:-1], e.MalformedFile, "tensor 'b'"),
    "hole at the start": (file_bytes({"a": entry(offsets=[8, 32])}, 32), e.MalformedFile, "hole"),
    "hole in the middle": (
        file_bytes({"a": entry(), "b": entry("U8", [4], [28, 32])}, 32), e.MalformedFile, "'b': the tensor leaves",
    ),
    "overlap": (file_bytes({"a": entry(), "b": entry("U8", [4], [20, 24])}), e.MalformedFile, "overlaps"),
    "the same bytes twice": (file_bytes({"a": entry(), "b": entry()}), e.MalformedFile, "overlaps"),
    "bytes after the last tensor": (SOUND + b"PK", e.MalformedFile, "after the last tensor"),
    "a hidden archive and no tensors": (file_bytes({}, 100), e.MalformedFile, "after the last tensor"),
}  # fmt: skip


@pytest.mark.parametrize("name", SAFETENSORS)
def test_safetensors(tmp_path: Path, name: str) -> None:
    content, kind, fragment = SAFETENSORS[name]
    (tmp_path / "model.safetensors").write_bytes(content)
    assert_refused(tmp_path, kind, fragment)
    assert_refused(tmp_path / "model.safetensors", kind, "model.safetensors")


# Index files

PLACES = {"a": "x.safetensors", "b": "x.safetensors", "c": "x.safetensors", "d": "y.safetensors"}


def index(**changes: Any) -> dict[str, Any]:
    return {"metadata": {}, "weight_map": PLACES | changes}


INDEXES: dict[str, Row] = {
    "not JSON": (b"weights", e.MalformedFile, "index.json"),
    "no weight_map": ({"metadata": {}}, e.MalformedFile, "'weight_map'"),
    "empty weight_map": ({"weight_map": {}}, e.MalformedFile, "'weight_map'"),
    "weight_map that is a list": ({"weight_map": ["a"]}, e.MalformedFile, "'weight_map'"),
    "a name twice": (b'{"weight_map":{"a":"x.safetensors","a":"y.safetensors"}}', e.MalformedFile, "occurs twice"),
    "a file that is a number": (index(a=1), e.MalformedFile, "tensor 'a'"),
    "a path upwards": (index(a="../x.safetensors"), e.MalformedFile, "plain name"),
    "an absolute path": (index(a="/tmp/x.safetensors"), e.MalformedFile, "plain name"),
    "a path in a subfolder": (index(a="sub/x.safetensors"), e.MalformedFile, "plain name"),
    "a backslash": (index(a="..\\x.safetensors"), e.MalformedFile, "plain name"),
    "a NUL": (index(a="x\0.safetensors"), e.MalformedFile, "plain name"),
    "another kind of file": (index(a="config.json"), e.MalformedFile, "plain name"),
    "a file name no disk takes": (index(a="x" * 5000 + ".safetensors"), e.CheckpointError, "too long"),
    "a file that is not there": (index(a="z.safetensors"), e.MalformedFile, "z.safetensors"),
    "a link out of the folder": (index(a="out.safetensors"), e.MalformedFile, "leads out"),
    "a link that dangles": (index(a="dangling.safetensors"), e.MalformedFile, "not there"),
    "a tensor no file has": (index(e="y.safetensors"), e.MissingTensor, "'e'"),
    "a tensor in the other file": (
        index(a="y.safetensors"),
        e.MissingTensor,
        "expected y.safetensors; got x.safetensors",
    ),
    "two tensors no file has": (index(e="y.safetensors", f="y.safetensors"), e.CheckpointProblems, "2 problems"),
    "a tensor in two files": (index(q="w.safetensors"), e.DuplicateTensor, "w.safetensors and x.safetensors"),
    "a broken shard": (index(a="broken.safetensors"), e.MalformedFile, "broken.safetensors"),
    "a pipe for a shard": (index(a="pipe.safetensors"), e.CheckpointError, "not a regular file"),
    "a folder for a shard": (index(a="folder.safetensors"), e.CheckpointError, "not a regular file"),
}


def make_folder(root: Path) -> Path:
    folder = root / "a" / "b" / "checkpoint"
    folder.mkdir(parents=True)
    (folder / "x.safetensors").write_bytes(SOUND)
    (folder / "y.safetensors").write_bytes(file_bytes({"d": entry()}))
    (folder / "w.safetensors").write_bytes(file_bytes({"q": entry(), "a": entry(offsets=[24, 48])}, 48))
    (folder / "broken.safetensors").write_bytes(SOUND[:-1])
    (root / "outside").write_bytes(SOUND)
    (folder / "out.safetensors").symlink_to(root / "outside")
    (folder / "dangling.safetensors").symlink_to(root / "nowhere")
    os.mkfifo(folder / "pipe.safetensors")
    (folder / "folder.safetensors").mkdir()
    return folder


@pytest.mark.parametrize("name", INDEXES)
def test_index(tmp_path: Path, name: str) -> None:
    content, kind, fragment = INDEXES[name]
    folder = make_folder(tmp_path)
    (folder / INDEX).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    assert_refused(folder, kind, fragment)


# JSON configs

CONFIGS: dict[str, tuple[str, bytes, type[e.ColibriError], str]] = {
    "empty": ("config.json", b"", e.MalformedFile, "config.json"),
    "a list": ("config.json", b"[]", e.MalformedFile, "not an object"),
    "null": ("config.json", b"null", e.MalformedFile, "not an object"),
    "UTF-16": ("config.json", "{}".encode("utf-16"), e.MalformedFile, "UTF-8"),
    "byte order mark": ("config.json", b"\xef\xbb\xbf{}", e.MalformedFile, "BOM"),
    "a key twice": ("config.json", b'{"a":1,"a":2}', e.MalformedFile, "'a' occurs twice"),
    "a nested key twice": ("config.json", b'{"q":{"bits":4,"bits":8}}', e.MalformedFile, "'bits' occurs twice"),
    "NaN": ("config.json", b'{"a":NaN}', e.MalformedFile, "NaN"),
    "minus infinity": ("config.json", b'{"a":-Infinity}', e.MalformedFile, "-Infinity"),
    "nesting bomb": ("config.json", b'{"a":' * 50_000 + b"1" + b"}" * 50_000, e.MalformedFile, "nested too deeply"),
    "huge number": ("config.json", b'{"a":' + b"1" * 5000 + b"}", e.MalformedFile, "5000 digits"),
    "lone surrogate": ("config.json", b'{"a":"\\udc80"}', e.MalformedFile, "UTF-8"),
    "trailing comma": ("config.json", b'{"a":1,}', e.MalformedFile, "not valid JSON"),
    "section that is a list": ("config.json", b'{"quantization_config":[1]}', e.MalformedFile, "'quantization_config'"),
    "text_config that is text": ("config.json", b'{"text_config":"x"}', e.MalformedFile, "'text_config'"),
    "method that is a number": (
        "config.json", b'{"quantization_config":{"quant_method":4}}', e.UnsupportedFormat, "'quant_method'",
    ),
    "method that is empty": (
        "config.json", b'{"quantization_config":{"quant_method":" "}}', e.UnsupportedFormat, "'quant_method'",
    ),
    "no method and no known keys": (
        "config.json", b'{"quantization_config":{"colour":4}}', e.UnsupportedFormat, "keys ['colour']",
    ),
    "modelopt section that is text": (
        "hf_quant_config.json", b'{"quantization":"FP8"}', e.MalformedFile, "'quantization'",
    ),
    "broken hf_quant_config": ("hf_quant_config.json", b"{", e.MalformedFile, "hf_quant_config.json"),
    "broken quantize_config": ("quantize_config.json", b"{", e.MalformedFile, "quantize_config.json"),
    "broken quant_config": ("quant_config.json", b"\0", e.MalformedFile, "quant_config.json"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_config(tmp_path: Path, name: str) -> None:
    file, content, kind, fragment = CONFIGS[name]
    (tmp_path / "model.safetensors").write_bytes(SOUND)
    (tmp_path / file).write_bytes(content)
    assert_refused(tmp_path, kind, fragment)


def test_a_config_too_large_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(SOUND)
    (tmp_path / "config.json").touch()
    os.truncate(tmp_path / "config.json", 1 << 40)  # a hole: takes no space
    tracemalloc.start()
    with pytest.raises(e.MalformedFile, match="too large"):
        Checkpoint.open(tmp_path)
    assert tracemalloc.get_traced_memory()[1] < SLACK
    tracemalloc.stop()


# GGUF headers

U32, U64 = struct.Struct("<I").pack, struct.Struct("<Q").pack
ARCH = string_bytes("general.architecture") + value_bytes("llama")
PAIR = string_bytes("llama.block_count") + value_bytes(3)


def info(
    name: bytes = b"t", dims: tuple[int, ...] = (4, 2), kind: int = 0, offset: int = 0, rank: int | None = None
) -> bytes:
    head = U64(len(name)) + name + U32(len(dims) if rank is None else rank)
    return head + b"".join(map(U64, dims)) + U32(kind) + U64(offset)


def gguf_bytes(
    pairs: tuple[bytes, ...] = (ARCH, PAIR),
    infos: tuple[bytes, ...] = (info(),),
    data: int = 32,
    *,
    magic: bytes = b"GGUF",
    version: bytes = U32(3),
    counts: tuple[int | None, int | None] = (None, None),
    alignment: int = 32,
) -> bytes:
    tensors, keys = (len(infos) if counts[0] is None else counts[0]), (len(pairs) if counts[1] is None else counts[1])
    header = magic + version + U64(tensors) + U64(keys) + b"".join(pairs) + b"".join(infos)
    return header + bytes(-len(header) % alignment) + bytes(data)


def pair(key: str, value: bytes) -> tuple[bytes, ...]:
    return (ARCH, string_bytes(key) + value)


def array(kind: int, count: int, body: bytes = b"") -> bytes:
    return U32(ARRAY) + U32(kind) + U64(count) + body


def nested(depth: int) -> bytes:
    return U32(ARRAY) + (U32(ARRAY) + U64(1)) * depth + U32(4) + U64(0)


ALIGNED = string_bytes("general.alignment")
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
    "unknown ggml type": (gguf_bytes(infos=(info(kind=99),)), e.MalformedFile, "got 99"),
    "removed ggml type": (gguf_bytes(infos=(info(kind=4),)), e.MalformedFile, "got 4"),
    "a row of part of a block": (gguf_bytes(infos=(info(dims=(100, 2), kind=12),)), e.MalformedFile, "whole blocks"),
    "offset off the alignment": (gguf_bytes(infos=(info(offset=8),)), e.MalformedFile, "not aligned"),
    "offset past the file": (gguf_bytes(infos=(info(offset=1 << 40),)), e.MalformedFile, "hole"),
    "truncated data": (gguf_bytes(data=31), e.MalformedFile, "past the end"),
    "overlapping tensors": (gguf_bytes(infos=(info(b"s"), info(b"t"))), e.MalformedFile, "overlaps"),
    "a hole between tensors": (
        gguf_bytes(infos=(info(b"s"), info(b"t", offset=64)), data=96), e.MalformedFile, "hole",
    ),
    "a tensor twice": (
        gguf_bytes(infos=(info(b"t"), info(b"t", offset=32)), data=64), e.DuplicateTensor, "'t' is stored twice",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GGUF)
def test_gguf(tmp_path: Path, name: str) -> None:
    content, kind, fragment = GGUF[name]
    (tmp_path / "x.gguf").write_bytes(content)
    assert_refused(tmp_path / "x.gguf", kind, fragment)
    if kind is e.MalformedFile:
        assert_refused(tmp_path, kind, "x.gguf")


# Folders


def _write(*names: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        for name in names:
            (folder / name).write_bytes(gguf_bytes() if name.endswith(".gguf") else SOUND)

    return make


def _split_count(folder: Path) -> None:
    for i in (1, 2):
        pairs = (ARCH, string_bytes("split.count") + value_bytes(3))
        (folder / f"m-{i:05d}-of-00002.gguf").write_bytes(gguf_bytes(pairs, (info(b"t%d" % i),)))


FOLDERS: dict[str, Row] = {
    "nothing": (_write(), e.CheckpointError, "no tensors here"),
    "pickles only": (_write("pytorch_model.bin"), e.CheckpointError, "never read"),
    "two models": (_write("a.gguf", "b.gguf"), e.CheckpointError, "a.gguf, b.gguf"),
    "a split without its sibling": (_write("m-00001-of-00002.gguf"), e.CheckpointError, "m-00002-of-00002.gguf"),
    "split 3 of 2": (_write("m-00003-of-00002.gguf"), e.CheckpointError, "out of range"),
    "splits of another count": (_split_count, e.MalformedFile, "split.count"),
    "the same tensors in two files": (_write("a.safetensors", "b.safetensors"), e.CheckpointProblems, "3 problems"),
    "a link to itself": (
        lambda folder: (folder / "a.safetensors").symlink_to("a.safetensors"), e.MalformedFile, "in a circle",
    ),
    "a config that is a dangling link": (
        lambda folder: (_write("a.safetensors")(folder), (folder / "config.json").symlink_to("absent")),
        e.CheckpointError, "config.json",
    ),
    "a link to outside": (
        lambda folder: (folder / "a.safetensors").symlink_to("/dev/zero"), e.MalformedFile, "leads out",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FOLDERS)
def test_folder(tmp_path: Path, name: str) -> None:
    make, kind, fragment = FOLDERS[name]
    folder = tmp_path / "a" / "b" / "c"
    folder.mkdir(parents=True)
    make(folder)
    assert_refused(folder, kind, fragment)


@pytest.mark.parametrize("name", ["absent", "absent\0", "x" * 5000])
def test_a_path_that_is_not_there(tmp_path: Path, name: str) -> None:
    with pytest.raises(e.CheckpointError):
        Checkpoint.open(tmp_path / name)


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(SOUND)
    with pytest.raises(e.CheckpointError, match=r"\.safetensors file"):
        Checkpoint.open(tmp_path / "model.bin")


def test_the_twins_are_sound(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    (folder / INDEX).write_text(json.dumps(index()))
    assert set(Checkpoint.open(folder).tensors) == set(PLACES)
    (tmp_path / "model.safetensors").write_bytes(SOUND)
    assert len(Checkpoint.open(tmp_path / "model.safetensors").tensors) == 3
    (tmp_path / "x.gguf").write_bytes(gguf_bytes())
    assert Checkpoint.open(tmp_path / "x.gguf").read("t").shape == (2, 4)
    assert info() == info_bytes("t", "F32", torch.zeros(2, 4), 0)
    for twin in (pair("k", nested(3)), pair("k", array(STRING, 2, string_bytes("a") * 2)), pair("k", U32(7) + b"\1")):
        (tmp_path / "x.gguf").write_bytes(gguf_bytes(twin))
        Checkpoint.open(tmp_path / "x.gguf")


# Mutations of parsed headers: the bytes stay well-formed, so that the checks behind the parser are reached

NUMBERS = (
    0,
    1,
    2,
    3,
    4,
    7,
    8,
    16,
    24,
    28,
    255,
    1 << 16,
    1 << 31,
    1 << 32,
    1 << 53,
    HUGE,
    1 << 63,
    (1 << 64) - 1,
    1 << 70,
)
ODD = (None, True, -1, 1.5, "", "F32", "U8", "F4", "BOOL", "I64", [], {}, [0], [2, 3], [0, 24], {"dtype": "U8"})


def mutated(value: Any, rng: random.Random) -> Any:
    """The same document with one place changed: a value, a key, an entry more or less."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        copy = dict(value)
        action = rng.random()
        if action < 0.1:
            del copy[key]
        elif action < 0.2:
            copy[rng.choice(["a", "z", "", "__metadata__", "shape"])] = copy[key]
        else:
            copy[key] = mutated(value[key], rng)
        return copy
    if isinstance(value, list) and value and rng.random() < 0.85:
        copy = list(value)
        at = rng.randrange(len(copy))
        action = rng.random()
        if action < 0.15:
            del copy[at]
        elif action < 0.3:
            copy.insert(at, rng.choice(NUMBERS))
        else:
            copy[at] = mutated(copy[at], rng)
        return copy
    if isinstance(value, int) and rng.random() < 0.5:
        return value + rng.choice((-24, -4, -1, 1, 4, 24))
    return rng.choice(NUMBERS + ODD)


def read_everything(path: Path) -> bool:
    """Whether the file opens; nothing but our own errors may come out, and what opens can be read."""
    try:
        with Checkpoint.open(path) as checkpoint:
            for name, tensor in checkpoint.tensors.items():
                assert checkpoint.read(name).nbytes == tensor.nbytes
    except e.ColibriError as error:
        str(error).encode("utf-8")
        return False
    return True


def rewrite(path: Path, content: bytes) -> None:
    """Overwrite in place: emptying a file first makes some file systems wait for the disk."""
    with path.open("r+b" if path.exists() else "wb") as file:
        file.write(content)
        file.truncate()


def test_mutated_safetensors_headers(tmp_path: Path) -> None:
    rng = random.Random(1)
    path = tmp_path / "model.safetensors"
    accepted = 0
    for _ in range(3000):
        header: Any = json.loads(json.dumps(GOOD))
        for _ in range(rng.choice((1, 1, 2, 3))):
            header = mutated(header, rng)
        content = file_bytes(header, 28)
        rewrite(path, content)
        if read_everything(path):
            accepted += 1
            safetensors.deserialize(content)  # what we take, the library takes too
    assert 20 < accepted < 2000


def test_mutated_gguf_headers(tmp_path: Path) -> None:
    """Any field of the header replaced by a number that was chosen to hurt, or any byte changed."""
    rng = random.Random(2)
    path = tmp_path / "x.gguf"
    pairs = (ARCH, PAIR, *pair("k", array(STRING, 2, string_bytes("ab") * 2))[1:], *pair("n", nested(2))[1:])
    good = gguf_bytes(pairs, (info(b"s"), info(b"t", offset=32)), 64)
    accepted = 0
    for _ in range(3000):
        content = bytearray(good)
        for _ in range(rng.choice((1, 1, 2))):
            at = rng.randrange(len(good) - 64)
            if rng.random() < 0.5:
                content[at] = rng.randrange(256)
            else:
                width = rng.choice((4, 8))
                content[at : at + width] = (rng.choice(NUMBERS) % (1 << 8 * width)).to_bytes(width, "little")
        rewrite(path, bytes(content[: rng.randrange(len(content))] if rng.random() < 0.1 else content))
        accepted += read_everything(path)
    assert 20 < accepted < 2000


def test_mutated_configs_and_indexes(tmp_path: Path) -> None:
    rng = random.Random(3)
    folder = make_folder(tmp_path)
    config = {"model_type": "x", "text_config": {"quantization_config": {"bits": 4, "desc_act": True}}}
    for _ in range(1500):
        rewrite(folder / "config.json", json.dumps(mutated(mutated(config, rng), rng)).encode())
        try:
            read_config(folder)
        except e.ColibriError as error:
            str(error).encode("utf-8")
    (folder / "config.json").unlink()
    for _ in range(1500):
        rewrite(folder / INDEX, json.dumps(mutated(index(), rng)).encode())
        read_everything(folder)


def test_mutated_json_text() -> None:
    rng = random.Random(4)
    good = json.dumps(GOOD).encode()
    for _ in range(5000):
        text = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(text))
            text[at : at + rng.randint(0, 2)] = bytes(rng.choice(b'{}[]",:\\u0019eE.-+ndNaI\xff\x00') for _ in range(2))
        try:
            parse_object(bytes(text), "here")
        except e.MalformedFile as error:
            assert error.where == "here"
